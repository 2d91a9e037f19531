r"""Fits a policy of which events of a history are worth computing to a log with dwell times, and shows it.

python examples/fit_policy.py --interactions log.parquet --user user --time timestamp --surface tab --dwell seconds \
    --conversion purchase --remove 0.3 --out policy.json

python examples/fit_policy.py --config configs/dwell.yaml --remove 0.5 --out policy.json

Writes the policy as JSON, and a picture of relevance by surface and dwell for each segment of users beside it. Fit it
to the training span alone: --until leaves out what comes later. With the config of a run, which names the columns
(data.dwell, data.surface, data.session, data.conversion), the events are those of its training rows.
"""

from jfi.utils.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataError
from jfi.data.io.blocks import read_table
from jfi.data.io.table import Table
from jfi.data.prepared.training_log import training_log
from jfi.data.schema.labels import read_labels
from jfi.data.schema.rules import label_columns
from jfi.history import EventLog, fit
from jfi.history.describe import describe
from jfi.history.plots import draw_policy
from jfi.training import ConfigError
from jfi.training.cli import parse_config, run_cli
from jfi.training.scores import check_place, check_results
from jfi.utils.exit_codes import EXIT_CODES, raise_on_sigterm
from jfi.utils.options import OptionParser, at_least_one

SECONDS = {"s": 1.0, "ms": 1e-3}
#: The surface of a log without surfaces, and of events whose surface is missing.
ONLY, MISSING = "all", "unknown"


def by_segment(kind: type) -> object:
    """A type of options: a number for all segments, or `name=number` with commas between them."""

    def parse(text: str) -> object:
        try:
            if "=" not in text:
                return kind(text)
            parts = [part.split("=") for part in text.split(",")]
            return {name.strip(): kind(number) for name, number in parts}
        except ValueError:
            what = "must be a number for all segments, or such as passive=0.5,active=0.2"
            raise argparse.ArgumentTypeError(f"got {text!r}, {what}") from None

    return parse


def segments(text: str) -> int | None:
    return None if text == "auto" else at_least_one(text)


def arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, epilog=EXIT_CODES)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--interactions", help="table of the events: a file, a folder or a glob")
    source.add_argument("--config", metavar="FILE", help="config of a run; the options up to --until are not for it")
    parser.add_argument("--user", default="user", metavar="COLUMN", help="column of the user (default: user)")
    parser.add_argument("--time", default="timestamp", metavar="COLUMN", help="column of the time (default: timestamp)")
    units = {"choices": ["s", "ms"], "default": "s"}
    parser.add_argument("--time-unit", **units, help="of times that are numbers (default: s)")
    parser.add_argument("--surface", metavar="COLUMN", help="column of where an event happened (default: one surface)")
    parser.add_argument("--dwell", metavar="COLUMN", help="column of how long the user stayed")
    parser.add_argument("--dwell-unit", **units, help="of the dwell (default: s)")
    help_session = "column of the session (default: a session ends after 30 minutes without an event)"
    parser.add_argument("--session", metavar="COLUMN", help=help_session)
    help_rule = "column of 0 and 1, or a rule such as 'is_like == 1 or is_forward == 1'"
    parser.add_argument("--conversion", metavar="RULE", help=help_rule)
    parser.add_argument("--until", type=float, metavar="SECONDS", help="leave out events from this time on")
    parser.add_argument("--segments", type=segments, default=2, help="1 to 8, or auto by silhouette (default: 2)")
    help_remove = "largest share of events to remove, such as 0.3 or passive=0.5,active=0.2 (default: 0)"
    parser.add_argument("--remove", type=by_segment(float), default=0.0, metavar="SHARE", help=help_remove)
    help_threshold = "in place of --remove: remove what has smaller log-odds"
    parser.add_argument("--threshold", type=float, metavar="LOG-ODDS", help=help_threshold)
    parser.add_argument("--boost", type=lambda text: text.split(","), default=[], help="segments to weight, by name")
    parser.add_argument("--caps", type=by_segment(int), metavar="EVENTS", help="longest history, such as active=500")
    parser.add_argument("--newest", type=int, default=10, help="events of a history that always stay (default: 10)")
    parser.add_argument("--bins", type=at_least_one, default=10, help="bins of dwell on each surface (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of k-means (default: 0)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON file of the policy")
    options = parser.parse_args()
    of_table = ("dwell", "conversion", "surface", "session", "until")
    for name in of_table[:2] if options.config is None else of_table:
        if (getattr(options, name) is None) == (options.config is None):
            parser.error(f"--{name} {'is missing' if options.config is None else 'is not for --config'}")
    return options


def read_log(options: argparse.Namespace) -> tuple[EventLog, np.ndarray]:
    """The events until --until, or of the config's training rows, and whether each is a conversion."""
    if options.config is not None:
        return training_log(parse_config(["--config", options.config], "")[0].data)
    single = [options.user, options.time, options.dwell, options.surface, options.session]
    wanted = [name for name in [*single, *label_columns(options.conversion)] if name is not None]
    table = read_table(options.interactions, wanted, setting="--interactions")
    time = table.times(options.time, options.time_unit)
    conversion = read_labels(table, options.conversion)
    if np.isnan(conversion).any():
        row = int(np.isnan(conversion).argmax())
        raise table.fault(row, f"--conversion '{options.conversion}' has no value")
    surface, names = np.zeros(len(table), np.int64), [ONLY]
    if options.surface is not None:
        surface, names = codes(pc.fill_null(table.strings(options.surface), MISSING))
    session = None if options.session is None else codes(table.ids(options.session))[0]
    dwell = table.numbers(options.dwell) * SECONDS[options.dwell_unit]
    arrays = {"user": codes(table.ids(options.user))[0], "time": time, "surface": surface, "dwell": dwell}
    if session is not None:
        arrays["session"] = session
    if options.until is not None:
        before = time < options.until
        if not before.any():
            raise DataError(f"--until {options.until:g}: no event of {table.name} is older")
        arrays, conversion = {name: array[before] for name, array in arrays.items()}, conversion[before]
    return EventLog(**arrays, surfaces=names), check_some(table, conversion, options)


def check_some(table: Table, conversion: np.ndarray, options: argparse.Namespace) -> np.ndarray:
    if not len(conversion):
        raise DataError(f"{table.name}: no event")
    if conversion.min() == conversion.max():
        every = "every event has" if conversion[0] else "no event has"
        raise DataError(f"{table.name}: --conversion '{options.conversion}': {every} one")
    return conversion == 1


def codes(column: pa.Array) -> tuple[np.ndarray, list[str]]:
    """The place of each text among the distinct ones, which are sorted."""
    encoded = column.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary)
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    return rank[encoded.indices.to_numpy()], encoded.dictionary.take(order).to_pylist()


def main() -> None:
    options = arguments()
    if options.out.suffix != ".json":
        raise ConfigError(f"--out {options.out}: the name must end in .json")
    picture = options.out.with_suffix(".png")
    check_place("--out", options.out)
    check_place("--out", picture)
    read = {} if options.interactions is None else {"--interactions": options.interactions}
    check_results({"--out": options.out, "--out's picture": picture}, read)
    with raise_on_sigterm():
        events, conversion = read_log(options)
        try:
            policy = fit(
                events,
                conversion,
                num_segments=options.segments,
                remove=options.remove,
                threshold=options.threshold,
                boost=options.boost,
                caps=options.caps,
                newest=options.newest,
                num_bins=options.bins,
                seed=options.seed,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        print(describe(policy))
        draw_policy(policy, options.out.stem, picture)
        policy.save(options.out)
        print(f"\nwrote {options.out} and {picture}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
