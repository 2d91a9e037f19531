"""Runs `jfi state`."""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfi.cli.options import given_tables
from jfi.state.state import is_empty, read_layout
from jfi.state.stores import (
    StateError,
    Store,
    StoreUnavailableError,
    is_url,
    open_store,
    without_password,
)
from jfi.utils.errors import InputError
from jfi.utils.files import writing_folder

if TYPE_CHECKING:
    from jfi.data import DataConfig, DataSchema
    from jfi.serving.schema import Schema
    from jfi.training.run.saved_run import SavedRun

#: Seconds for an answer of a server, which gives many users at a time here.
_TIMEOUT = 60.0


def main(options: argparse.Namespace) -> None:
    """Fills a state of users, exports it, or removes old rows."""
    try:
        {"load": _load, "export": _export, "expire": _expire}[options.action](options)
    except StoreUnavailableError as error:
        raise OSError(f"the state of users: {error}") from None  # full or out of reach, and no fault of the input


def own_state(artifact: Path | None, versions: Path | None) -> Path:
    """Returns the folder of the state that `jfi export` makes and `jfi serve` uses for an artifact or for versions."""
    return artifact.with_name(f"{artifact.name}.state") if versions is None else versions / "state"


def make_state(name: str, run: "SavedRun", run_dir: Path) -> None:
    """Makes the state of an exported run, unless it is there; says why if the run's log cannot be read."""
    shown = without_password(name)
    if _is_there(name):
        print(f"state {shown}: is there, and stays as it is")
        return
    try:
        with _new_store(name, "--state", 256) as store:
            users, events = _fill(store, run, run.config.data, None)
        print(f"state {shown}: {events:,} events of {users:,} users")
    except StateError as fault:  # which says what can be done
        print(f"no state was made: {fault}")
    except InputError as fault:  # such as tables that are gone
        print(f"no state was made: {fault}; make one by `jfi state load --run {run_dir} --state {shown}`")


def schema_of_run(run: "SavedRun") -> "Schema":
    """Returns the schema of the requests to a run's model."""
    from jfi.serving.dataset_schema import schema_of_model

    own = run.config.model
    return schema_of_model(run.config.data, run.schema, run.model, own.pooling != "none", own.item_id)


def _fill(store: Store, run: "SavedRun", config: "DataConfig", interactions: str | None) -> tuple[int, int]:
    from jfi.state.load import fill

    return fill(store, schema_of_run(run), config, run.schema, interactions)


def _load(options: argparse.Namespace) -> None:
    from jfi.data import DataError
    from jfi.training.run.saved_run import load_run

    run = load_run(_required(options, "run"), setting="--run")
    tables = {name: path for name in ("items", "users") if (path := getattr(options, name)) is not None}
    config = replace(run.config.data, **given_tables(options), **tables)
    if tables and _is_there(options.state):
        if options.interactions is not None:
            raise StateError("--interactions: a state that is there gets events by POST /events; load a new one")
        return _load_tables(options.state, config, run.schema, {name.removesuffix("s") for name in tables})
    with _new_store(options.state, "--state", options.state_gb) as store:
        try:
            users, events = _fill(store, run, config, options.interactions)
        except StateError as error:
            raise StateError(f"--run {options.run}: {error}") from None
        except DataError as fault:
            if options.interactions is not None:
                raise
            advice = "name a log by --interactions FILE, or none for a state without events"
            raise StateError(f"--run {options.run}: its log cannot be read: {fault}; {advice}") from fault
    print(f"wrote {without_password(options.state)}: {events:,} events of {users:,} users")


def _load_tables(name: str, config: "DataConfig", schema: "DataSchema", of: set[str]) -> None:
    from jfi.state.tables import write_tables

    with closing(open_store(name, timeout=_TIMEOUT)) as store:
        info = read_layout(store).info
        for one in sorted(of):
            if not (info.items if one == "item" else info.users):
                raise StateError(f"--{one}s: the state {without_password(name)} has no columns of {one}s")
        written = write_tables(store, info, config, schema, of)
    counts = " and ".join(f"{count:,} {one}s" for one, count in written.items())
    print(f"wrote {without_password(name)}: columns of {counts}")


def _is_there(name: str) -> bool:
    """Returns whether a state has been made."""
    if not is_url(name):
        return Path(name).exists()
    with closing(open_store(name, timeout=_TIMEOUT)) as store:
        return not is_empty(store)


def _export(options: argparse.Namespace) -> None:
    from jfi.state.export import export_events

    out = Path(_required(options, "out"))
    if out.suffix != ".parquet":
        raise StateError(f"--out {out}: the name must end in .parquet")
    with closing(open_store(options.state, timeout=_TIMEOUT)) as store:
        users, events = export_events(store, out)
    print(f"wrote {out}: {events:,} events of {users:,} users")


def _expire(options: argparse.Namespace) -> None:
    from jfi.state.retention import DAY, Retention, expire

    days = _required(options, "keep_days")
    with closing(open_store(options.state, max_gb=options.state_gb, timeout=_TIMEOUT)) as store:
        removed = sum(expire(store, read_layout(store), Retention(days * DAY)))
    print(f"removed {removed:,} rows of {without_password(options.state)} that are older than {days} days")


def _required(options: argparse.Namespace, name: str) -> Any:
    if (given := getattr(options, name)) is None:
        raise StateError(f"jfi state {options.action} needs --{name.replace('_', '-')}")
    return given


@contextmanager
def _new_store(name: str, option: str, max_gb: int) -> Iterator[Store]:
    """An empty store to fill; a folder gets its name when it is whole, and a server's store has its layout last."""
    if is_url(name):
        with closing(open_store(name, timeout=_TIMEOUT)) as store:
            if not is_empty(store):
                why = "has a state already, or what is left of one; choose another prefix"
                raise StateError(f"{option} {without_password(name)}: {why}")
            yield store
        return
    if Path(name).exists():
        raise StateError(f"{option} {name}: exists already; name a new folder")
    with writing_folder(Path(name)) as folder, closing(open_store(str(folder), create=True, max_gb=max_gb)) as store:
        yield store
