"""Values of items that a server keeps in memory: whatever others write, a request is as one that reads the store."""

import random

import msgspec
import numpy as np
import pytest

from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.state import columns as state_columns
from jfi.state.columns import KNOWN, VERSION, KeptItems, write_columns
from jfi.state.dictionaries import Cache
from jfi.state.events import EventReader
from jfi.state.layout import Column, EventLayout, layout_of
from jfi.state.state import UserState, write_layout

from .adding import LOG
from .test_requests_by_id import assert_same

BRANDS, TAGS = [f"b{number}" for number in range(9)], [f"t{number}" for number in range(5)]
SID = {"num_digits": 25, "codebook_size": 0}
FIELDS = {
    "brand": Field("brand", "category", ["brand"]),
    "price": Field("price", "number"),
    "sid": Field("sid", "sid", ["sid"], layout=SID),
    "tags": Field("tags", "categories", ["tags"]),
}


#: A log whose rows have columns of their items, which have no table.
ROWS = msgspec.structs.replace(
    LOG, others=[Column("brand", "text"), Column("price", "number"), Column("tags", "texts", 3)]
)


def made(store, reader: RequestReader) -> UserState:
    write_layout(store, EventLayout(reader._state))
    return UserState(store, reader)


def reader_of(names: list[str]) -> RequestReader:
    """A reader of requests of a model that reads the item's id and these columns of it."""
    schema = Schema(
        user=[],
        candidate=[Field("item", "category", ["item"]), *(FIELDS[name] for name in names)],
        event=[Field("item", "category", ["history_item"])],
        vocabularies={"item": [f"i{number}" for number in range(20)], "brand": BRANDS, "tags": TAGS},
        user_id="user",
        item_id="item",
        item_columns=names,
        codec="c" if "sid" in names else None,
    )
    return RequestReader(schema, Limits(100, 10), state=layout_of(schema, 10, ROWS).info)


class Others:
    """Other processes that write to a store.

    Args:
        store: of a state.
        reader: of requests to a model.
        draw: gives random numbers.
    """

    def __init__(self, store, reader: RequestReader, draw: random.Random) -> None:
        self._store, self._draw, self._time = store, draw, 1000.0
        self._state = UserState(store, reader, max_late=np.inf)
        self._layout, self._read = self._state.tables["item"], EventReader(self._state.layout)

    def item(self) -> str:
        return f"i{self._draw.randrange(30)}"

    def _columns(self, count: int) -> dict:
        draw = self._draw
        counts = np.array([draw.choice([0, 1, 3, 60]) for _ in range(count)])
        found = {
            "brand": [draw.choice([*BRANDS, "other", None]) for _ in range(count)],
            "price": np.array([draw.choice([np.nan, 1.5, -7.0]) for _ in range(count)]),
            "sid": np.array([draw.choice([-1, 5, 77]) for _ in range(count)]),
            "tags": ([draw.choice(TAGS) for _ in range(counts.sum())], counts),
        }
        return {name: own for name, own in found.items() if name in self._layout.columns and draw.random() < 0.9}

    def put(self) -> None:
        self._state.put("item", self.item(), self._columns(1))

    def delete(self) -> None:
        self._state.delete("item", self.item())

    def load(self) -> None:
        """As `jfi state load --items`, at times of semantic IDs alone."""
        ids = sorted({self.item() for _ in range(5)})
        columns = self._columns(len(ids))
        if self._layout.sids and self._draw.random() < 0.5:
            columns = {"sid": np.array([self._draw.choice([5, 77]) for _ in ids]), KNOWN: np.zeros(len(ids))}
        write_columns(self._store, self._layout, ids, columns, Cache())

    def events(self) -> None:
        """Of known and of new items, whose first rows have their columns."""
        self._time += 1
        row = {"brand": self._draw.choice(BRANDS), "price": 3.0, "tags": ["t1"], "event_id": str(self._time)}
        row |= {"user": "u", "time": self._time, "item": self.item()}
        assert self._state.add([self._read([row])])[0].added == 1


@pytest.mark.parametrize("most", [16, 2**12])
@pytest.mark.parametrize("names", [["brand", "price"], ["brand", "sid"], ["brand", "price", "sid", "tags"]])
def test_requests_are_as_if_nothing_was_kept(new_store, monkeypatch, names, most):
    """Random writes of every kind between requests; also of a memory that is too small for the items."""
    monkeypatch.setattr(state_columns, "_MAX_KEPT", most)
    store, reader, draw = new_store(), reader_of(names), random.Random(most)
    state, others = made(store, reader), Others(store, reader, draw)
    for _ in range(300):
        for _ in range(draw.choice([0, 0, 1, 3])):
            draw.choice([others.put, others.delete, others.load, others.events])()
        asked = [[others.item() for _ in range(draw.randrange(1, 20))] for _ in range(draw.randrange(1, 3))]
        requests = [reader({"user": "u", "candidates": ids, "time": 5000.0}) for ids in asked]
        fresh = UserState(store, reader).fill(requests)
        wanted = [one.stored.unknown_items for one in fresh]
        for one, other, unknown in zip(state.fill(requests), fresh, wanted, strict=True):
            assert_same(one, other)
            assert one.stored.unknown_items == unknown
        (lost,) = state.fill(requests[:1], is_available=False)
        assert lost.stored.unknown_items == lost.num_candidates and not lost.ids["brand"].any()


@pytest.mark.parametrize("names", [["brand", "price"], ["brand", "tags"]])
def test_what_is_kept_is_read_no_more(new_store, names):
    """Also after new items have come; a write of the same columns changes nothing."""
    store, reader = new_store(), reader_of(names)
    layout, read = made(store, reader).tables["item"], []
    kept = KeptItems(layout)
    # One in each set of slots: by chance two of 500 would share a slot, and Python's hash differs from run to run.
    ids = [*{hash(name) & int(kept._first): name for name in (f"i{number}" for number in range(500))}.values()]

    def get(keys):
        read.append(keys)
        return store.get(keys)

    def written(name: str, brand: str) -> None:
        write_columns(store, layout, [name], {"brand": [brand]}, Cache())

    for name in ids:
        written(name, "b1")
    kept.read(get, [], ids)
    written("new", "b1")
    written(ids[0], "b1")
    read.clear()
    assert kept.read(get, [b"m"], ids)[0] == store.get([b"m"])
    assert read == [[VERSION, b"m"]]
    written(ids[0], "b2")
    _, values, absent = kept.read(get, [], [*ids, "none"])
    np.testing.assert_array_equal(values[:-1], layout.pack(store.get(list(map(layout.key, ids)))))
    assert absent.nonzero()[0].tolist() == [len(ids)]
