"""Runs `jfi policy`."""

import argparse
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.cli.options import given_tables
from jfi.data import DataError, LabelConfig
from jfi.data.io.blocks import read_table
from jfi.data.io.table import Table
from jfi.data.prepared.event_logs import training_log
from jfi.data.schema.labels import read_labels
from jfi.data.schema.rules import label_columns
from jfi.history_policies import EventLog, fit
from jfi.history_policies.describe import describe, draw_policy
from jfi.training import ConfigError
from jfi.training.config_parser import parse_config
from jfi.training.run.scores import check_place, check_results
from jfi.utils.exit_codes import raise_on_sigterm

SECONDS = {"s": 1.0, "ms": 1e-3}
#: The surface of a log without surfaces, and of events whose surface is missing.
ONLY, MISSING = "all", "unknown"
#: Options that a table needs, and those that are not for a config, which names the columns itself.
_NEEDED, _COLUMNS = ("dwell", "conversion"), ("dwell", "surface", "session", "until")


def read_log(options: argparse.Namespace) -> tuple[EventLog, np.ndarray]:
    """The events until --until, or of the config's training rows, and whether each is a conversion."""
    if options.config is not None:
        config = parse_config(["--config", options.config], "")[0].data
        return training_log(replace(config, **given_tables(options)), options.conversion)
    single = [options.user, options.time, options.dwell, options.surface, options.session]
    wanted = [name for name in [*single, *label_columns(options.conversion)] if name is not None]
    table = read_table(options.interactions, wanted, setting="--interactions")
    time = table.times(options.time, options.time_unit)
    conversion = read_labels(table, LabelConfig("conversion", options.conversion))
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
    """The index of each text among the distinct ones, which are sorted."""
    encoded = column.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary)
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    return rank[encoded.indices.to_numpy()], encoded.dictionary.take(order).to_pylist()


def main(options: argparse.Namespace) -> None:
    """Fits a policy, prints it and draws it."""
    if options.config is None and (missing := next((one for one in _NEEDED if getattr(options, one) is None), None)):
        raise ConfigError(f"--{missing} is missing")
    if options.config is not None and (
        wrong := next((one for one in _COLUMNS if getattr(options, one) is not None), None)
    ):
        raise ConfigError(f"--{wrong} is not for --config")
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
