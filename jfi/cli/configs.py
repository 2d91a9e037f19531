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
    if options.action == "list":
        for name, path in known.items():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:{max(map(len, known)) + 2}s}{re.split(r'[.;:] ', first.lstrip('# '))[0]}")
        return
    if options.name not in known:
        what = "name a config" if options.name is None else f"got {options.name!r}"
        raise InputError(f"jfi config copy: {what}; {suggest(options.name or '', known)}")
    out, text = options.out or Path(known[options.name].name), known[options.name].read_text(encoding="utf-8")
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{out}: exists already; name a new file") from None
    makes = re.search("^#   (python -m .*)$", text, re.MULTILINE)
    first = f"make its table with: {makes[1]}; " if makes else ""
    print(f"wrote {out}; {first}train with: jfi train --config {out}")
