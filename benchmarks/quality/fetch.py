"""Downloads the public tables and writes them as jfi reads them: ``python -m benchmarks.quality.fetch --out FOLDER``.

Each file comes from a repository at a fixed commit, and its SHA-256 is checked (`sources.py`). A table that is in the
folder already is left as it is. MovieLens-100K is not downloaded: get it yourself, as RecBole's atomic files, and name
its folder with --movielens. The tables `impressions` and `shop` are generated.
"""

from jfi.utils.errors import InputError
from jfi.utils.exit_codes import EXIT_CODES, begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import hashlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from benchmarks.quality import convert, impressions
from benchmarks.quality.sources import SOURCES, Source
from jfi.cli.options import OptionError, OptionParser
from jfi.utils.errors import suggest
from jfi.utils.exit_codes import run_command
from jfi.utils.files import writing_folder

MOVIELENS = "ml-100k"
#: The files of MovieLens-100K that the config reads.
MOVIELENS_FILES = ("ml-100k.inter", "ml-100k.item")


class FetchError(InputError):
    """A file cannot be had, as one line that names it."""


def download(url: str) -> bytes:
    """The contents of a public address.

    Raises:
        FetchError: no network, or no such file.
    """
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        message = f"{url}: cannot be downloaded ({reason}); a folder with copies can be named with --mirror"
        raise FetchError(message) from None


def read(source: Source, path: str, mirror: Path | None) -> bytes:
    """A file of a source: downloaded, or from `mirror`/owner/name/path; its SHA-256 is checked.

    Raises:
        FetchError: it cannot be had, or has other contents.
    """
    if mirror is None:
        place = source.url(path)
        content = download(place)
    else:
        place = mirror / source.repository / path
        if not place.is_file():
            raise FetchError(f"{place}: no such file; --mirror needs the path of the repository below owner/name")
        content = place.read_bytes()
    found, expected = hashlib.sha256(content).hexdigest(), source.files[path]
    if found != expected:
        raise FetchError(f"{place}: has the SHA-256 {found}, must be {expected}")
    return content


def small_movielens(source: Source, get: Callable[[str], bytes]) -> dict[str, bytes]:
    return {Path(path).name: get(path) for path in source.files}


def assistments(source: Source, get: Callable[[str], bytes]) -> dict[str, bytes]:
    files = {Path(path).stem.removeprefix("assist2009_updated_"): get(path).decode() for path in source.files}
    return {name: text.encode() for name, text in convert.assistments(files).items()}


def office(source: Source, get: Callable[[str], bytes]) -> dict[str, bytes]:
    items, codes, validation, test = (get(path).decode() for path in source.files)
    tables = {
        "interactions.csv": convert.next_items(validation, test),
        "items.csv": convert.office_items(items, codes),
    }
    return {name: text.encode() for name, text in tables.items()}


def code(source: Source, get: Callable[[str], bytes]) -> dict[str, bytes]:
    return {path: get(path) for path in source.files}


#: By name of the table, what makes its files of those of the source.
CONVERSIONS = {
    "ml-latest-small": small_movielens,
    "assistments2009": assistments,
    "amazon_office": office,
    "fuxictr": code,
}
#: By name of a table that is no download, what makes its files.
GENERATED = {
    "impressions": impressions.files,
    "shop": lambda: impressions.files(impressions.SHOP_USERS, by_hand=True),
}
NAMES = (*SOURCES, *GENERATED)


def fetch(name: str, out: Path, mirror: Path | None = None) -> bool:
    """Writes the folder `out`/`name`, whole or not at all; False if it is there already.

    Raises:
        FetchError, DataError: a file cannot be had or is malformed; nothing is written.
    """
    folder = out / name
    if folder.exists():
        return False
    if name in GENERATED:
        _write(folder, GENERATED[name]())
        return True
    source = SOURCES[name]
    files = CONVERSIONS[name](source, lambda path: read(source, path, mirror))
    _write(folder, files)
    return True


def copy_movielens(given: Path, out: Path) -> bool:
    """Copies MovieLens-100K from the user's folder to `out`/ml-100k; False if it is there already."""
    folder = out / MOVIELENS
    if folder.exists():
        return False
    missing = [name for name in MOVIELENS_FILES if not (given / name).is_file()]
    if missing:
        raise FetchError(f"--movielens {given}: has no {' and no '.join(missing)}")
    _write(folder, {name: (given / name).read_bytes() for name in MOVIELENS_FILES})
    return True


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with writing_folder(folder) as unfinished:
        for name, content in files.items():
            path = unfinished / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def main(arguments: list[str] | None = None) -> None:
    parser = OptionParser(prog="python -m benchmarks.quality.fetch", description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("names", nargs="*", help=f"tables, all by default: {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables; each gets a folder in it")
    parser.add_argument("--mirror", type=Path, help="folder with copies, as owner/name/path; nothing is downloaded")
    parser.add_argument("--movielens", type=Path, help="your folder with ml-100k.inter and ml-100k.item")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in NAMES:
            raise OptionError(f"unknown table {name}; {suggest(name, NAMES)}")
    if options.movielens is not None:
        _say(MOVIELENS, options.out, copy_movielens(options.movielens, options.out), "")
    for name in options.names or NAMES:
        terms = SOURCES[name].terms if name in SOURCES else "generated"
        _say(name, options.out, fetch(name, options.out, options.mirror), terms)


def _say(name: str, out: Path, written: bool, terms: str) -> None:
    print(f"{out / name}: {'written' if written else 'there already'}{f' ({terms})' if terms else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
