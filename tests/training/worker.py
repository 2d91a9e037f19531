"""One process of a launched run, as torchrun would start it: `work`.

Its jobs are a JSON list of {"port": ..., "config": FILE} or {"port": ..., "resume": FOLDER}, done one after another;
with "constants" later ones have the test module's `LOG_EVERY` and `REPLICATE_BELOW` too, with
"stop_at": n the last rank sends itself SIGTERM in step n, with "differ": {...} it has other fields of `training`, with
"stand_in" its captured steps run on buffers in a CPU's memory. Outcomes are written as a JSON list.
"""

import faulthandler
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from attention_worker import as_on_a_gpu, use_stand_ins
from interpreter import make_faster

from jfi.data.prepared.prepare import prepare_into
from jfi.distributed import CapturedShardedStep
from jfi.training import ConfigError, Interrupted, ShardingConfig, TrainingConfig, resume, train
from jfi.training.config_parser import load_config
from jfi.training.loop.trainer import Trainer
from jfi.training.model.build_model import shards_of


def without_pictures():
    """Nothing is drawn within: that would take most of the time."""
    return mock.patch.multiple("jfi.training.run.plots", draw_curves=lambda *_: None, draw_attention=lambda *_: None)


def do(job: dict) -> dict:
    """How `job` ended, the steps done before its first one, by table the type of the sharding, and its reads.

    "sums" are those of this process' part of each table after the first epoch. "mapped" says whether the dataset's
    arrays belong to something else, such as the map of a file.
    """
    outcome, reads = {}, []
    forward, end = Trainer._forward, Trainer._end_evaluation

    def summing_end(trainer: Trainer, *arguments) -> None:
        state = trainer.model.state_dict()
        parts = {name: shards_of(state[name]) for name in state if "embedding" in name}
        outcome.setdefault("sums", {name: sum(part[0].sum().item() for part in parts[name]) for name in parts})
        end(trainer, *arguments)

    def stopping_forward(trainer: Trainer, batch):
        if not outcome:
            plan = trainer.model.plan.plan
            types = {name: table.sharding_type for tables in plan.values() for name, table in tables.items()}
            outcome.update(begun_at=trainer.progress.step, types=types, reads=len(reads))
            outcome["mapped"] = not trainer.dataset.arrays().events.time.flags.owndata
        is_last = trainer.world.rank == trainer.world.size - 1
        if is_last and trainer.model.training and trainer.progress.step + 1 == job.get("stop_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(trainer, batch)

    os.environ["MASTER_PORT"] = str(job["port"])
    if "constants" in job:
        TrainingConfig.log_every, ShardingConfig.replicate_below = job["constants"]

    def read(*arguments):
        reads.append(arguments)
        return prepare_into(*arguments)

    counted = mock.patch("jfi.training.run.run_data.prepare_into", read)
    stand_in = stand_in_graphs(outcome) if job.get("stand_in") else nullcontext()
    hooks = mock.patch.multiple(Trainer, _forward=stopping_forward, _end_evaluation=summing_end)
    with hooks, counted, stand_in, without_pictures():
        try:
            if "config" in job:
                config = load_config(job["config"])
                differ = job.get("differ", {}) if os.environ["RANK"] == "1" else {}
                train(config.with_training(**differ))
            elif "change" in job:
                change(Path(job["resume"]) / "config.yaml", *job["change"])
                resume(job["resume"], config_changed="accept")
            else:
                resume(job["resume"])
            return {"end": "done", **outcome}
        except (ConfigError, Interrupted) as stop:
            dist.destroy_process_group()
            return {"end": str(stop), **outcome}


@contextmanager
def stand_in_graphs(outcome: dict) -> Iterator[None]:
    """Captured steps run on buffers; "captured" is what the last of them says."""

    def make(*arguments, **options) -> CapturedShardedStep:
        made = CapturedShardedStep(*arguments, **options)
        use_stand_ins(made)
        summary = made.summary
        made.summary = lambda: outcome.setdefault("captured", summary())
        return made

    patches = mock.patch("jfi.training.start.check_graphs", lambda *_: None)
    # On a CPU no optimizer can be captured.
    optimizers = mock.patch("jfi.training.loop.captured_steps.KeyedOptimizerWrapper", ())
    with patches, optimizers, mock.patch("jfi.training.loop.captured_steps.CapturedShardedStep", make), as_on_a_gpu():
        yield


def change(config: Path, old: str, new: str) -> None:
    """Writes another config, as every process does."""
    own = config.with_suffix(f".{os.environ['RANK']}")
    own.write_text(config.read_text().replace(old, new))
    own.rename(config)


def work(environment: dict[str, str], jobs: Path, outcomes: Path, errors: Path) -> None:
    """Does the jobs in this process, whose stderr goes to a file."""
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the environment
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    make_faster()
    torch.set_num_threads(1)
    outcomes.write_text(json.dumps([do(job) for job in json.loads(jobs.read_text())]))
