"""Runs `jfi config`."""

import argparse
import re
from pathlib import Path

from jfi.utils.errors import InputError, suggest

#: The bundled configs.
FOLDER = Path(__file__).parents[1] / "configs"


def main(options: argparse.Namespace) -> None:
    """Lists the bundled configs, or copies one."""
    known = {path.relative_to(FOLDER).as_posix().removesuffix(".yaml"): path for path in sorted(FOLDER.rglob("*.yaml"))}
    if options.action == "list" and options.name is not None:
        raise InputError(f"jfi config list: takes no {options.name}")
    if options.action == "copy" and options.name is None:
        raise InputError(f"jfi config copy: name a config; {suggest('', known)}")
    if options.action == "list":
        width = max(map(len, known)) + 2
        for name, path in known.items():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:{width}s}{re.split(r'[.;:] ', first.lstrip('# '))[0]}")
        return
    if options.name not in known:
        raise InputError(f"jfi config copy: got {options.name!r}; {suggest(str(options.name), known)}")
    out = options.out or Path(known[options.name].name)
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(known[options.name].read_text(encoding="utf-8"))
    except FileExistsError:
        raise InputError(f"{out}: exists already; name a new file") from None
    print(f"wrote {out}; train with: jfi train --config {out}")
