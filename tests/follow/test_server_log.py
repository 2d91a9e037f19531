"""Parts that a server has written of rows that were sent are trained on as the rows themselves."""

import dataclasses
import random
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfi.data import load_dataset
from jfi.data.prepared.event_logs import training_log
from jfi.history_policies import fit
from jfi.serving.dataset_schema import schema_of, statistics_settings
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Limits
from jfi.state.events import EventReader
from jfi.state.load import fill
from jfi.state.outbox import PartWriter
from jfi.state.state import UserState, read_layout
from jfi.state.stores import LmdbStore

from .followed_log import config_of, make_rows, write
from .test_exact import BEGIN, CASES, assert_same, batches_of_parts


@pytest.mark.parametrize("case", ["plain", "statistics", "history", "labels", "session", "policy", "items", "capacity"])
def test_parts_of_a_server_have_the_batches_of_the_rows_that_were_sent(case, tmp_path):
    """Rows of shuffled bodies, without the columns that the state has; of the same parts."""
    rows, draw = make_rows(600), random.Random(case)
    known = sum(row["timestamp"] < BEGIN for row in rows)
    write(tmp_path / "log.parquet", rows[:known])
    config = dataclasses.replace(config_of(tmp_path / "log.parquet", tmp_path).data, **CASES[case]).resolved()
    if config.items is not None:
        items = {row["item_id"]: {name: row[name] for name in ("item_id", "tags", "brand")} for row in rows}
        config = dataclasses.replace(config, items=str(tmp_path / config.items))
        pq.write_table(pa.Table.from_pylist(list(items.values())), config.items)
    schema = load_dataset(config).schema
    policy = fit(*training_log(config), remove=0.3, newest=2) if case == "policy" else None
    fields = schema_of(dataclasses.replace(config, policy="p") if policy else config, schema, True, True)
    if config.statistics_groups():
        fields = dataclasses.replace(fields, statistics=statistics_settings(config, schema))
    (folder := tmp_path / "server" / "parts").mkdir(parents=True)
    with closing(LmdbStore(tmp_path / "users", create=True)) as store:
        fill(store, fields, config, schema, None)
        reader = RequestReader(dataclasses.replace(fields, policy=None), Limits(100, 5), state=read_layout(store).info)
        state = UserState(store, reader, max_late=np.inf, is_logged=True)
        events, writer = EventReader(state.layout), PartWriter(store, state.layout, folder, rows=40)
        names = {*events.required, *events.optional}
        for begin in range(known, len(rows), 40):
            own = [{name: one for name, one in row.items() if name in names} for row in rows[begin : begin + 40]]
            for row in own if "age" not in events.required else ():
                row.pop("age", None)  # of a user that the state knows
            draw.shuffle(own)
            for part in (own[:25], own[25:]):
                added = state.add([events(part)]) if part else []
                assert all(one.added == len(part) for one in added)
            writer.step()
            write(tmp_path / "plain" / "parts" / f"{begin}.parquet", rows[begin : begin + 40])
        writer.flush()
    found = []
    for name in ("server", "plain"):
        found.append(list(batches_of_parts(config, schema, policy, tmp_path / name)))
    assert [count for _, count in found[0]] == [count for _, count in found[1]] and len(found[0]) > 3
    for (one, _), (other, _) in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
