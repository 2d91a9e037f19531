"""A process that adds events to a state and says which are acknowledged, until it is killed."""

import random
import signal

import numpy as np

from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.state.events import EventReader
from jfi.state.layout import Log, layout_of, user_key
from jfi.state.state import UserState
from jfi.state.stores import open_store

#: The names that the events of the tests have.
LOG = Log("user", "item", "time", event_id="event_id")
SCHEMA = Schema(
    user=[],
    candidate=[],
    event=[Field("item", "category", ["history_item"]), Field("tags", "slots", ["history_tags_0", "history_tags_1"])],
    vocabularies={"item": ["1", "2", "3"], "tags": ["a"]},
    user_id="user",
    item_id="item",
)
LAYOUT, READER = layout_of(SCHEMA, 5000, LOG), RequestReader(SCHEMA, Limits(1, 5000))
READ = EventReader(LAYOUT)


def records_of(state: UserState, users: list[str]) -> list[np.ndarray]:
    """The records of users, none for one without state."""
    return list(map(state.layout.records, state.store.get([*map(user_key, users)]), users))


def body(number: int) -> list[dict]:
    """One to four events of few users: ties, late events, and items that the vocabulary lacks."""
    draw, rows = random.Random(number), []
    for row in range(draw.randrange(1, 5)):
        item, tags = draw.randrange(1, 40), draw.choice([None, ["a"], ["b", f"t{draw.randrange(30)}"]])
        event = {"user": f"u{draw.randrange(5)}", "time": 1000.0 + number // 3 - draw.choice([0, 0, 2]), "item": item}
        rows.append(event | {"tags": tags, "event_id": f"{number}-{row}"})
    return rows


def add(path: str, begin: int, pipe) -> None:
    """Adds 60 bodies from one on, sends the number of each after it was acknowledged, and waits for its end."""
    state = UserState(open_store(path), READER)
    for number in range(begin, begin + 60):
        state.add([READ(body(number))])
        pipe.send(number)
    signal.pause()
