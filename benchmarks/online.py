"""AUC of following a log, against training anew each hour and each day.

python -m benchmarks.online

The log is that of `examples/online_log.py`: 48 hours of 4,000 rows. Every way starts with the first 24 hours and
predicts each later hour before it learns of it, with the histories of all rows before that hour. "daily" keeps the model
of the first day, "hourly" is trained anew each hour on the 24 hours before, and "follow" goes on by `jfi train --follow`,
with an embedding table that grows. "truth" is the probability that the labels were drawn with, so no model can be better.
Results go to `benchmarks/results/cpu/online.json`.
"""

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import torch
from sklearn.metrics import roc_auc_score

import jfi
from benchmarks import report
from benchmarks.run import Rates
from benchmarks.serving import ROOT
from examples.online_log import hours
from jfi.data import DataConfig, FeatureConfig
from jfi.training import Config, ModelConfig, TrainingConfig, train

DAY = 24


def settings(log: object, run: Path, statistics: list[str] | str, capacity: int | None = None) -> Config:
    features = [FeatureConfig("clicked", of="event")]
    if capacity is not None:
        features.append(FeatureConfig("item", of="item", capacity=capacity))
    data = DataConfig(
        interactions=log,
        user="user",
        item="item",
        timestamp="time",
        label="clicked",
        features=features,
        statistics=statistics,
        max_history=50,
    )
    return Config(data=data, model=ModelConfig(embedding_dim=16), training=TrainingConfig(epochs=6, run_dir=str(run)))


def retrained(tables: list[pa.Table], every: int, folder: Path, statistics: list[str] | str) -> list[float]:
    """The AUC of each hour after the first day, of models trained every so many hours on the day before."""
    found, run = [], None
    for hour in range(DAY, len(tables)):
        if run is None or (hour - DAY) % every == 0:
            path = folder / f"every-{every}-{hour}"
            train(settings(pa.concat_tables(tables[hour - DAY : hour]), path, statistics))
            run = jfi.load_run(path)
        scores = run.predict(tables[hour], history=pa.concat_tables(tables[:hour]))
        found.append(roc_auc_score(tables[hour]["clicked"], scores["probability"]))
        print(every, hour, round(found[-1], 4), flush=True)
    return found
