"""The options of the commands that take no config."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jfi.serving import MAX_CANDIDATES
from jfi.utils.errors import InputError, suggest
from jfi.utils.exit_codes import EXIT_CODES

_PREDICT = """Scores every row of a table with a trained run.

jfi predict --run runs/20250101-120000 --interactions new.parquet --out scores.parquet
jfi predict --run runs/20250101-120000 --interactions today.csv --history log.parquet --out scores.csv

A row's history is what its user did before it, in --history and in --interactions. The table may lack the label, and it
may have users and items that training has not seen. Rows without a user or an item are refused, or left out and counted
if the run's config has data.null_ids: drop.
"""
_EVALUATE = """Scores rows that have labels or are positives, and prints their metrics.

jfi evaluate --run runs/20250101-120000 --interactions test.parquet --history log.parquet --by device

A row's history is what its user did before it, in --history and in --interactions.
"""
_EXPORT = """Exports a trained run as an artifact, which `jfi serve` serves.

jfi export --run runs/20250101-120000
jfi export --run runs/20250101-120000 --out artifacts/clicks --tables int8 --device cuda
jfi export --run runs/20250101-120000 --publish versions  # which `jfi serve --follow versions` serves from then on
"""
_SERVE = """Serves an artifact over HTTP, or the newest of the versions that `jfi export --publish` or a trainer writes.

jfi serve --artifact ARTIFACT --port 8000
jfi serve --follow RUN/published --port 8000

An artifact holds machine code, which runs when it is loaded: serve only artifacts that you made. Where others can write
to the folder, --sha256 refuses any that does not have the SHA-256 that `jfi export` has printed.
"""
_AUDIT = """Rebuilds requests that a server has logged by the training code, scores them again, and compares both.

jfi audit --run RUN --requests requests                  # of jfi serve --log-requests requests
jfi audit --run RUN --requests requests --log parts      # events after the run's own interactions

It prints the features that differ by name, their causes as far as it can tell, and the largest difference of scores.
The history is the run's own interactions and the log, at the position that the server's state had.
"""
_STATE = """Fills or exports a state: users' newest events, and columns of items and users, which `jfi serve` reads.

jfi state load --run RUN --state users                             # of the run's own interactions
jfi state load --run RUN --interactions log.parquet --state redis://localhost:6379/0?prefix=clicks
jfi state load --run RUN --interactions none --state users         # without events
jfi state load --run RUN --items items.parquet --state users       # a state that is there: its items' columns
jfi state export --state users --out events.parquet

A state is a folder, or a store of a Redis or Valkey server. It has the columns of the run's events as the log has them:
artifacts with other vocabularies, quantiles or hash buckets read the same state.
"""
_SEMANTIC_IDS = r"""Turns the content of a catalogue's items into semantic IDs, one int64 an item, and writes them once.

jfi semantic-ids --items items.parquet --text title,description --categorical brand --out sids.parquet
jfi semantic-ids --items items.parquet --embeddings image,text --out sids.parquet --codec rq

The first run fits a codec, writes it to the folder sids.codec next to the IDs, and prints and draws how good the IDs
are. The same command on a grown catalogue adds the items that are new; no ID that was written changes. An item without
content gets the ID -1, and an ID of its own once the table has content of it.
"""
_CONFIG = """Lists the bundled configs, or copies one to start from.

jfi config list
jfi config copy movielens_100k
jfi config copy quickstart my.yaml
"""

_STATE_GB = "GiB that a state in a folder may take"
#: The option `--memory` of the commands that prepare tables.
MEMORY = {"metavar": "SIZE", "help": "most that sorting holds in memory, such as 4GB (default: half of what is free)"}


class OptionError(InputError):
    """A wrong option of a command, as one line that names it."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default of an option to its help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, [], argparse.SUPPRESS) or isinstance(default, bool):
            return action.help
        values = default if isinstance(default, list) else [default]
        shown = (f"{one:g}" if isinstance(one, float) else str(one) for one in values)
        return f"{action.help} (default: {' '.join(shown)})"


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser that raises OptionError instead of printing the usage, and takes no abbreviations.

    Example:
        >>> parser = OptionParser()
        >>> _ = parser.add_argument("--rows", type=at_least_one)
        >>> parser.parse_args(["--rows", "0"])
        Traceback (most recent call last):
        jfi.cli.options.OptionError: --rows: got '0', must be a whole number of at least 1
        >>> parser.parse_args(["--row", "1"])
        Traceback (most recent call last):
        jfi.cli.options.OptionError: unknown option --row; did you mean '--rows'?
    """

    def __init__(self, **settings: object):
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """The options; `--help` prints them and exits.

        Raises:
            OptionError: an option is unknown, missing or wrong.
        """
        found, unknown = self.parse_known_args(args)
        if unknown:
            name = unknown[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            kind = f"option {name}; {suggest(name, known, cutoff=0.0)}" if name.startswith("-") else f"argument {name}"
            raise OptionError(f"unknown {kind}")
        return found

    def error(self, message: str) -> None:
        raise OptionError(re.sub(r"^argument (?:-\w/)?(--\S+):", r"\1:", message))


def at_least_one(text: str) -> int:
    """A type of options: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number of at least 1")
    return number


def at_least_zero(text: str) -> float:
    """A type of options: a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number of at least 0")
    return number


def _share(text: str) -> float:
    """A type of options: a number above 0 and at most 1."""
    if not 0 < at_least_zero(text) <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number above 0 and at most 1")
    return float(text)


def _parser(command: str, description: str) -> OptionParser:
    return OptionParser(prog=f"jfi {command}", description=description, epilog=EXIT_CODES)


def _tables(parser: OptionParser, source: str) -> None:
    """Adds options for tables of a run: their URLs are opened only if the command line names them too."""
    shown = f"{source} whose data.interactions is a URL: that URL again; so too --data.items and other tables"
    for name in ("interactions", "users", "items", "validation", "test"):
        text = shown if name == "interactions" else argparse.SUPPRESS
        parser.add_argument(f"--data.{name}", type=_paths, metavar="URL", help=text)


def given_tables(options: argparse.Namespace) -> dict[str, str | list[str]]:
    """Returns the tables that options `--data.NAME` name, by NAME."""
    given = {name.removeprefix("data."): path for name, path in vars(options).items() if name.startswith("data.")}
    return {name: path for name, path in given.items() if path is not None}


def _paths(text: str) -> str | list[str]:
    return [path.strip() for path in text[1:-1].split(",")] if text.startswith("[") and text.endswith("]") else text


def _scoring(parser: OptionParser) -> None:
    parser.add_argument("--run", required=True, help="folder of a run of `jfi train`")
    parser.add_argument("--interactions", required=True, help="the rows to score, with the columns of training")
    history = "log of earlier events; with data.statistics of all users (default: the training log)"
    parser.add_argument("--history", help=history)
    for name in ("users", "items"):
        parser.add_argument(f"--{name}", help=f"table of {name} (default: the run's data.{name})")
    parser.add_argument("--semantic-ids", metavar="FILE", help="file of the run's codec (default: data.semantic_ids)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the model")
    parser.add_argument("--batch-size", type=at_least_one, default=4096, help="rows per call of the model")
    output = "probability column: sigmoid of the logit, or Platt-calibrated"
    parser.add_argument("--output", choices=["probabilities", "calibrated"], default="probabilities", help=output)
    parser.add_argument("--memory", **MEMORY)


def predict() -> OptionParser:
    """Returns the options of `jfi predict`."""
    parser = _parser("predict", _PREDICT)
    _scoring(parser)
    columns = "ids, time, score (logit) and probability, or prediction of a regression"
    parser.add_argument("--out", required=True, help=f"file to write, .parquet or .csv: {columns}")
    return parser


def evaluate() -> OptionParser:
    """Returns the options of `jfi evaluate`."""
    parser = _parser("evaluate", _EVALUATE)
    _scoring(parser)
    by = "also report metrics by value of these columns"
    parser.add_argument("--by", nargs="+", default=[], metavar="COLUMN", help=by)
    important = "also print permutation importance (drop in AUC per input)"
    parser.add_argument("--importance", action="store_true", help=important)
    parser.add_argument("--out", metavar="FILE", help="JSON file of the metrics (default: only print them)")
    parser.add_argument("--scores", metavar="FILE", help="write the scores too, as `jfi predict --out` does")
    return parser


def export() -> OptionParser:
    """Returns the options of `jfi export`."""
    parser = _parser("export", _EXPORT)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of `jfi train`")
    out = parser.add_mutually_exclusive_group()
    out.add_argument("--out", type=Path, help="folder to write, must not exist (default: RUN/artifact)")
    versions = "folder of versions to add the artifact to, for `jfi serve --follow`"
    out.add_argument("--publish", type=Path, metavar="FOLDER", help=versions)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device to serve on")
    formats = ["float32", "int8"]
    parser.add_argument("--tables", choices=formats, default="float32", help="format of the embedding tables")
    parser.add_argument("--impl", choices=["triton", "torch"], help="kind of attention (default: triton on a GPU)")
    parser.add_argument("--max-candidates", type=at_least_one, default=MAX_CANDIDATES, help="limit per request")
    state = "state of users to make of the run's log and tables, if it is not there, or none"
    default = "(default: OUT.state, or the folder `state` of the versions, which `jfi serve` uses)"
    parser.add_argument("--state", metavar="FOLDER|URL|none", help=f"{state} {default}")
    return parser


def serve() -> OptionParser:
    """Returns the options of `jfi serve`."""
    parser = _parser("serve", _SERVE)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--artifact", type=Path, help="folder written by `jfi export`")
    follow = "folder of published versions; newer ones are served as they appear, without a restart"
    model.add_argument("--follow", type=Path, metavar="FOLDER", help=follow)
    at = "with --follow: serve this version and no later one, to roll back (default: the newest)"
    parser.add_argument("--at", type=at_least_one, metavar="VERSION", help=at)
    sums = "SHA-256 that `jfi export` has printed, or a file of them, one a line; artifacts with another are refused"
    parser.add_argument("--sha256", metavar="HEX|FILE", help=sums)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one")
    tables = "device of the embedding tables (default: the model's)"
    parser.add_argument("--tables-device", choices=["cpu", "cuda"], help=tables)
    counts = {"type": at_least_one}
    parser.add_argument("--max-candidates", **counts, help="limit per request (default: the artifact's)")
    parser.add_argument("--max-history", **counts, help="newest events to keep (default: the artifact's)")
    parser.add_argument("--max-body-mb", **counts, default=2, help="limit of a request's body")
    parser.add_argument("--queue", **counts, default=64, help="concurrent requests, more get a 503")
    parser.add_argument("--deadline-ms", **counts, default=5000, help="wait for the model, then a 503")
    parser.add_argument("--bodies", **counts, default=256, help="bodies that are arriving")
    connections = "most connections, further ones replace idle ones"
    parser.add_argument("--connections", **counts, default=1024, help=connections)
    parser.add_argument("--body-seconds", **counts, default=10, help="for headers or a body to arrive")
    parser.add_argument("--max-batch", **counts, default=4096, help="candidates per batch")
    waits = "time that a batch waits for more requests"
    parser.add_argument("--max-wait-ms", type=at_least_zero, default=0.0, help=waits)
    drain = "after SIGTERM, to accept requests while /health/ready is 503, so that callers leave"
    parser.add_argument("--drain-seconds", type=at_least_zero, default=10.0, help=drain)
    _state_options(parser)
    output = "of a score: the logit, its sigmoid, or the probability by the run's calibration"
    parser.add_argument("--output", choices=["logits", "probabilities", "calibrated"], default="logits", help=output)
    parser.add_argument("--access-log", action="store_true", help="a line on stderr for each request")
    log = "folder to log a share of the requests to, with digests of what the model read, for `jfi audit`"
    parser.add_argument("--log-requests", type=Path, metavar="FOLDER", help=log)
    parser.add_argument("--share", type=_share, help="with --log-requests: share of the requests (default: 0.01)")
    most = "size of the log of requests, whose oldest files are removed"
    parser.add_argument("--log-requests-mb", **counts, default=1024, help=most)
    return parser


def _state_options(parser: OptionParser) -> None:
    state = "events of users and columns of items for requests by id, and POST /events; or none"
    default = "(default: what `jfi export` has made, if it is there)"
    parser.add_argument("--state", metavar="FOLDER|URL|none", help=f"{state} {default}")
    down = "where the state does not answer: a 503, or a score without events"
    parser.add_argument("--if-state-fails", choices=["refuse", "cold"], default="refuse", help=down)
    answer = "for an answer of a state on a server"
    parser.add_argument("--state-timeout-ms", type=at_least_one, default=200, help=answer)
    late = "an event may be older than its user's newest one"
    parser.add_argument("--late-seconds", type=at_least_zero, default=86400.0, help=late)
    parser.add_argument("--max-events", type=at_least_one, default=10_000, help="events of a body of POST /events")
    parser.add_argument("--state-gb", type=at_least_one, default=256, help=_STATE_GB)
    log = parser.add_mutually_exclusive_group()
    parts = "folder of Parquet parts that events are written to, for `jfi train --follow`"
    log.add_argument("--log", type=Path, metavar="FOLDER", help=parts)
    feed = "folder of Parquet parts that others write, which the state is fed from in place of POST /events"
    log.add_argument("--feed", type=Path, metavar="FOLDER", help=feed)
    parser.add_argument("--log-rows", type=at_least_one, default=100_000, help="rows after which a part is written")
    parser.add_argument("--log-seconds", type=at_least_zero, default=10.0, help="that a row waits for its part")


def audit() -> OptionParser:
    """Returns the options of `jfi audit`."""
    parser = _parser("audit", _AUDIT)
    parser.add_argument("--run", required=True, help="folder of a run of `jfi train`")
    requests = "folder that `jfi serve --log-requests` writes, or one of its files"
    parser.add_argument("--requests", type=Path, required=True, metavar="FOLDER", help=requests)
    log = "the log of events behind the run's own interactions: the parts that the state has had"
    parser.add_argument("--log", nargs="+", metavar="FOLDER|FILE", help=log)
    for name in ("items", "users"):
        parser.add_argument(f"--{name}", help=f"table of {name} (default: the run's data.{name})")
    tolerance = "most that two scores may differ, relative to a score above 1"
    parser.add_argument("--tolerance", type=at_least_zero, default=1e-5, help=tolerance)
    examples = "most requests for which statistics at a position and time zones are tried"
    parser.add_argument("--examples", type=at_least_one, default=20, help=examples)
    parser.add_argument("--report", type=Path, metavar="FILE", help="JSON file of what was found")
    return parser


def state() -> OptionParser:
    """Returns the options of `jfi state`."""
    parser = _parser("state", _STATE)
    parser.add_argument("action", choices=["load", "export"], help="what to do")
    parser.add_argument("--state", required=True, metavar="FOLDER|URL", help="the state, new for load without tables")
    parser.add_argument("--run", help="load: folder of a run of `jfi train`")
    log = "load: events, with the columns of training (default: the run's own interactions); or none"
    parser.add_argument("--interactions", help=log)
    for name in ("items", "users"):
        text = f"load: table of {name}, whose columns a state that is there gets in place of its own of these ids"
        parser.add_argument(f"--{name}", metavar="FILE", help=text)
    _tables(parser, "load: a run")
    parser.add_argument("--out", help="export: .parquet file to write")
    parser.add_argument("--state-gb", type=at_least_one, default=256, help=_STATE_GB)
    return parser


def semantic_ids() -> OptionParser:
    """Returns the options of `jfi semantic-ids`."""
    parser = _parser("semantic-ids", _SEMANTIC_IDS)
    parser.add_argument("--items", required=True, help="table of the items: a file, a folder or a glob")
    parser.add_argument("--item", default="item", metavar="COLUMN", help="column of the item")
    columns = {"type": _names, "default": [], "metavar": "COLUMNS"}
    parser.add_argument("--text", **columns, help="columns of text, each embedded by TF-IDF and SVD")
    parser.add_argument("--embeddings", **columns, help="columns of lists of numbers, all of a column equally long")
    parser.add_argument("--categorical", **columns, help="columns whose values the IDs of VQ fusion learn to tell")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="Parquet file of the IDs")
    codecs = "VQ fusion by discrete PCA, discrete PCA, or residual k-means"
    parser.add_argument("--codec", choices=["vq", "dpca", "rq"], default="vq", help=codecs)
    parser.add_argument("--digits", type=at_least_one, default=25, help="ternary digits, but for rq")
    parser.add_argument("--levels", type=at_least_one, default=3, help="codebooks of rq")
    parser.add_argument("--codebook-size", type=at_least_one, default=256, help="codes of each")
    parser.add_argument("--steps", type=at_least_one, default=2000, help="of the training of vq")
    parser.add_argument("--text-width", type=at_least_one, default=64, help="of a text's embedding")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute")
    return parser


def config() -> OptionParser:
    """Returns the options of `jfi config`."""
    parser = _parser("config", _CONFIG)
    parser.add_argument("action", choices=["list", "copy"], help="what to do")
    parser.add_argument("name", nargs="?", help="config to copy, of `jfi config list`")
    parser.add_argument("out", nargs="?", type=Path, help="file to write, must not exist (default: NAME.yaml)")
    return parser


#: By command what returns its options.
PARSERS: dict[str, Callable[[], OptionParser]] = {
    "predict": predict,
    "evaluate": evaluate,
    "export": export,
    "serve": serve,
    "audit": audit,
    "state": state,
    "semantic-ids": semantic_ids,
    "config": config,
}


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    if not all(found) or len({*found}) < len(found):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be different names with commas between them")
    return found
