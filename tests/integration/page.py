"""The Python blocks of docs/integration.md."""

import re
from pathlib import Path
from types import SimpleNamespace

PATH = Path(__file__).parents[2] / "docs/integration.md"


def run(before: str | None = None) -> SimpleNamespace:
    """What the blocks define that come before a heading; without one, all of them."""
    text = PATH.read_text()
    if before is not None:
        text = text[: text.index(f"\n## {before}\n")]
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, str(PATH), "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)
