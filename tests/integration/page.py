"""The Python blocks of a page of the documentation."""

import re
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs/integration.md"


def run(before: str | None = None, path: Path = PATH) -> SimpleNamespace:
    """What the blocks define that come before a heading; without one, all of them."""
    text = path.read_text()
    if before is not None:
        text = text[: text.index(f"\n## {before}\n")]
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, str(path), "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)
