"""A process that adds events to a state and says which are acknowledged, until it is killed."""

import random

from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.user_state.events import EventReader
from jfi.serving.user_state.layout import EventLayout
from jfi.serving.user_state.state import UserState
from jfi.serving.user_state.stores import open_store

SCHEMA = Schema(
    user=[],
    candidate=[],
    event=[Field("item", "category", ["history_item"]), Field("tags", "slots", ["history_tags_0", "history_tags_1"])],
    vocabularies={"item": ["1", "2", "3"], "tags": ["a"]},
    user_id="user",
    item_id="item",
)
LAYOUT = EventLayout(SCHEMA, max_history=5000)
READ = EventReader(LAYOUT, RequestReader(SCHEMA, Limits(1, 5000)), max_future=float("inf"))


def bodies(count: int) -> list[list[dict]]:
    """Bodies of one to four events of few users: ties, late events, and items that the vocabulary lacks."""
    draw, found, number = random.Random(0), [], 0
    for time in range(count):
        rows = []
        for _ in range(draw.randrange(1, 5)):
            item, tags = draw.randrange(1, 40), draw.choice([None, ["a"], ["b", f"t{draw.randrange(30)}"]])
            row = {"user": f"u{draw.randrange(5)}", "time": 1000.0 + time // 3 - draw.choice([0, 0, 2]), "item": item}
            rows.append(row | {"tags": tags, "event_id": f"e{number}"})
            number += 1
        found.append(rows)
    return found


def add(path: str, begin: int, count: int, pipe) -> None:
    """Adds bodies from one on, and sends the number of each after it was acknowledged."""
    state = UserState(open_store(path), LAYOUT)
    for number, rows in enumerate(bodies(count)[begin:], begin):
        state.add([READ(rows)])
        pipe.send(number)
    pipe.close()
