"""Comparison of runs that follow a log, and requests to servers of such a run."""

import json
from contextlib import closing
from pathlib import Path

from jfi.state.stores import LmdbStore
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.run.recorder import SPEED

from .followed_log import USERS

#: Of a checkpoint's progress, what differs between repetitions.
OTHER = ("train_seconds", "config")


def content(run: Path) -> dict[str, object]:
    """All that a run that follows a log goes on from, but for times."""
    checkpoint = latest_checkpoint(run / "checkpoints")  # a kill may have left the one before
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix == ".safetensors"}
    progress = json.loads((checkpoint / "progress.json").read_text())
    del progress["follow"]["log_sha256"], progress["follow"]["log_length"]
    found["progress"] = {name: value for name, value in progress.items() if name not in OTHER}
    lines = [json.loads(line) for line in (run / "follow" / "metrics.jsonl").read_text().splitlines()]
    found["lines"] = [{name: value for name, value in line.items() if name != SPEED} for line in lines]
    with closing(LmdbStore(run / "follow" / "state")) as store:
        found["state"] = {key: value for key, value in store.scan(b"") if key != b"m"}  # but for its random id
    assert len(found["state"]) > USERS and len(found["lines"]) > 6
    return found


def assert_same(run: Path, whole: Path) -> None:
    one, other = content(run), content(whole)
    for name in other:
        assert one[name] == other[name], name


def bodies(known: dict) -> list[dict]:
    """Requests with items of the log and some that it has not."""
    event = {"item_id": 0, "rating": 4, "price": 0.5, "device": "phone", "age": 60.0}
    candidate = {"item_id": 0, "device": "phone", "position": 2}
    user = {"user_id": "u0", "age": "a1"}

    def of(part: str, fields: dict, **values: object) -> dict:
        return {name: one for name, one in (fields | values).items() if name in known[part]}

    return [
        {
            "user": of("user", user, user_id=f"u{i}"),
            "history": [of("history", event, item_id=7 * i + j) for j in range(i % 5)],
            "candidates": [of("candidates", candidate, item_id=11 * i + j) for j in range(5)],
        }
        for i in range(32)
    ]
