"""A table with a column of each kind, a config of it, and a training that is cut off."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from data_configs import data_config

from jfi.training import Config, ModelConfig, OptimizerConfig, OptimizerGroup, TrainingConfig
from jfi.training.loop.trainer import Trainer

HEADER = "user_id,item_id,timestamp,clicked,genre,price,tags,seconds"


def row(i: int) -> list[object]:
    item = i * 7 % 11
    return [f"u{i % 6}", f"i{item}", 60 * i, (i + item) % 3 % 2, f"g{item % 3}", item / 2, "a;b"[: 1 + i % 3], i % 50]


def new_row(i: int) -> list[object]:
    """A later row of a user and an item that are in no other, and sort before the others."""
    return ["new", "a", 90_000 + i, i % 2, "g9", 99, "z", 70]


@contextmanager
def ends_after_the_first_checkpoint() -> Iterator[None]:
    """A training within ends by KeyboardInterrupt once its state has been saved."""
    saved = Trainer.save

    def save_and_stop(self, *arguments):
        saved(self, *arguments)
        raise KeyboardInterrupt

    with mock.patch.object(Trainer, "save", save_and_stop), pytest.raises(KeyboardInterrupt):
        yield


def write_table(path: Path, rows: list[list[object]]) -> None:
    path.write_text("\n".join([HEADER, *(",".join(map(str, line)) for line in rows)]) + "\n")


def config_of(table: Path, run: Path, **training: object) -> Config:
    return Config(
        data=data_config(
            interactions=str(table),
            label="clicked",
            user_categorical=["user_id"],
            item_categorical=["genre"],
            item_dense=["price"],
            event_categorical=["tags"],
            event_dense=["seconds"],
            separators={"tags": ";"},
        ),
        model=ModelConfig(
            embedding_dim=8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0
        ),
        optimizer=OptimizerConfig(dense=OptimizerGroup(), ema_decay=None),
        training=TrainingConfig(
            **{"run_dir": str(run), "epochs": 2, "batch_size": 32, "device": "cpu", "patience": None, **training}
        ),
    )
