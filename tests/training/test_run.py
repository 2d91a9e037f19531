"""Whole runs on a tiny synthetic table: what a run leaves behind, stopping, and continuing to the same bits."""

import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from data_configs import data_config
from pictures import drawn
from synthetic_data import synthetic_data

from jfi.data import DataConfig, load_dataset
from jfi.events.groups import GROUPS
from jfi.training import (
    Config,
    ConfigError,
    EncoderConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerGroup,
    TrainingConfig,
    resume,
    train,
)
from jfi.training.checkpoints.checkpoint import latest_checkpoint, load_checkpoint, read_progress, save_checkpoint
from jfi.training.checkpoints.tensor_files import TensorReader
from jfi.training.config_parser import load_config, save_config
from jfi.training.defaults import with_bias
from jfi.training.distributed.processes import World, stop_on_signals
from jfi.training.loop.trainer import Trainer
from jfi.training.model.build_model import build_model, build_optimizer
from jfi.training.run.recorder import SPEED, read_metrics
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import config_changes

LOG_EVERY = 4
#: `jfi` with that constant.
COMMAND = (
    f"import sys; from jfi import cli, training; training.TrainingConfig.log_every = {LOG_EVERY}; sys.exit(cli.main())"
)

ROOT = Path(__file__).parents[2]


def read_results(path: Path) -> list[dict]:
    """The lines of a `metrics.jsonl` without their speeds: equal in every repetition of a run."""
    return [{name: value for name, value in line.items() if name != SPEED} for line in read_metrics(path)]


def tiny_data(num_users: int = 60) -> DataConfig:
    return synthetic_data(num_users=num_users, num_items=40, mean_length=20.0)


def tiny(run_dir: Path | None, **training: object) -> Config:
    return Config(
        data=tiny_data(),
        model=ModelConfig(embedding_dim=8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], dropout=0.1),
        optimizer=OptimizerConfig(
            dense=OptimizerGroup(learning_rate=3e-3),
            embeddings=OptimizerGroup("adagrad", 0.05, weight_decay=0.02),
            ema_decay=0.9,
        ),
        training=TrainingConfig(
            run_dir=None if run_dir is None else str(run_dir),
            **{"epochs": 3, "batch_size": 64, "device": "cpu", "checkpoint_every": 3, **training},
        ),
    )


def saved_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint."""
    path = latest_checkpoint(run_dir / "checkpoints")
    keys = TensorReader(path).metadata.state_dict_metadata
    tensors = {key: torch.empty(meta.size, dtype=meta.properties.dtype) for key, meta in keys.items()}
    load_checkpoint(path, tensors)
    return tensors


def assert_same_run(run: Path, other: Path) -> None:
    assert read_results(run / "metrics.jsonl") == read_results(other / "metrics.jsonl")
    a, b = saved_tensors(run), saved_tensors(other)
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing disturbed, with its pictures, and its result."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    with drawn():
        return path, train(tiny(path))


def test_the_optimizer_state_of_another_version_is_refused(finished, tmp_path):
    """Its names are those of the parameters, and what is not found must not start from zero."""
    run = Path(shutil.copytree(finished[0], tmp_path / "old"))
    path, tensors = latest_checkpoint(run / "checkpoints"), saved_tensors(run)
    progress, before = read_progress(path), "optimizer.state.sequence_arch.pooling.attention.history."
    assert any(name.startswith(before) for name in tensors)
    old = {name.replace(before, before.replace("history.", "0.")): x for name, x in tensors.items()}
    shutil.rmtree(path)
    save_checkpoint(path.parent, path.name, old, progress)
    with pytest.raises(ConfigError, match=r"--resume .*: .* has no tensor optimizer\..*training\.warm_start"):
        resume(run)


def test_run_folder(finished):
    path, result = finished
    assert load_config(path / "config.yaml") == tiny(path)
    log = read_metrics(path / "metrics.jsonl")
    assert [r["epoch"] for r in log if r["split"] == "validation"] == [1, 2, 3]
    assert log[-1]["split"] == "test" and log[-1]["auc"] == result.test["auc"]
    assert {"loss", "ne", "auc", "user_auc"} <= log[-1].keys()
    assert json.loads((path / "summary.json").read_text())["users"] == 60
    assert any(r["split"] == "train" for r in log)
    assert all(r["step"] % 4 == 0 or r["step"] % (log[-1]["step"] // 3) == 0 for r in log)
    for picture in ("curves.png", "attention.png"):
        data = (path / picture).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 20_000
    assert any((path / "tensorboard").iterdir())
    assert 1 <= len(list((path / "checkpoints").iterdir())) <= 2


def test_the_test_part_sees_the_best_epoch(finished):
    path, result = finished
    log = [r for r in read_metrics(path / "metrics.jsonl") if r["split"] == "validation"]
    assert result.best_epoch == max(log, key=lambda r: r["auc"])["epoch"]
    assert result.validation["auc"] == max(r["auc"] for r in log)


def test_the_test_part_has_the_parameters_of_the_best_epoch(tmp_path, monkeypatch):
    """Where the first epoch of three is best, the test metrics are those of a run that ended after it."""
    areas = iter([0.9, 0.6, 0.5, 0.7, 0.9, 0.7])
    monkeypatch.setattr("jfi.training.metrics.label_metrics.auc", lambda *_: next(areas))
    longer, first = train(tiny(tmp_path / "longer")), train(tiny(tmp_path / "first", epochs=1))
    assert (longer.epochs, longer.best_epoch) == (3, 1)
    assert longer.test == first.test


def test_same_seed_same_run_and_another_seed_another(finished, tmp_path):
    train(tiny(tmp_path / "again"))
    assert_same_run(finished[0], tmp_path / "again")
    train(tiny(tmp_path / "other", seed=1, epochs=1))
    assert read_results(finished[0] / "metrics.jsonl")[0] != read_results(tmp_path / "other" / "metrics.jsonl")[0]


@pytest.mark.parametrize("step", [1, 5, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 14))])
def test_resume_after_an_interruption_is_bit_exact(finished, tmp_path, monkeypatch, step):
    """The loop dies after `step` steps; what it has saved is continued."""
    killed_after(step, tiny(tmp_path / "run"), monkeypatch)
    resume(tmp_path / "run")
    assert_same_run(finished[0], tmp_path / "run")


def by_user(config: Config) -> Config:
    data = dataclasses.replace(config.data, batching="user", max_history=5)
    return dataclasses.replace(config, data=data)


def test_a_run_by_user_resumes_to_the_same_bits(tmp_path, monkeypatch):
    train(by_user(tiny(tmp_path / "whole", epochs=2)))
    killed_after(8, by_user(tiny(tmp_path / "killed", epochs=2)), monkeypatch)
    resume(tmp_path / "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_run_is_evaluated_alike_by_user_and_by_sample(tmp_path):
    """The first epoch's weights, evaluated both ways."""
    config = by_user(tiny(tmp_path / "run", epochs=1))
    result = train(config)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, batching="sample"))
    trainer = Trainer(other, load_dataset(other.data), World())
    run = RunFolder.open(tmp_path / "run")[0]
    trainer.restore(run)
    with stop_on_signals(run.path, trainer.world) as check:
        metrics, _ = trainer._evaluate("test", check)
    assert metrics == pytest.approx(result.test, abs=1e-6)


def killed_after(step: int, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains and dies behind so many steps."""
    with killing_after(step, monkeypatch):
        train(config)


@contextmanager
def killing_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Training within the block dies behind so many steps."""
    optimizer_steps = 0
    build = build_optimizer

    def counting(*arguments):
        optimizer = build(*arguments)
        plain_step = optimizer.step

        def dying_step(*a, **k):
            nonlocal optimizer_steps
            optimizer_steps += 1
            if optimizer_steps > step:
                raise RuntimeError("killed")
            plain_step(*a, **k)

        optimizer.step = dying_step
        return optimizer

    with monkeypatch.context() as patched:
        patched.setattr("jfi.training.run.state.build_optimizer", counting)
        with pytest.raises(RuntimeError, match="killed"):
            yield


def test_an_encoder_learns_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    def encoded(name: str) -> Config:
        encoder = EncoderConfig(num_layers=2, dropout=0.1, causal=True, relative_bias="distance")
        config = tiny(tmp_path / name, epochs=2, batch_size=32, checkpoint_every=10)
        config = dataclasses.replace(config, encoder=encoder)
        config.data = tiny_data(num_users=30)
        return config

    train(encoded("whole"))
    losses = [r["loss"] for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["split"] == "train"]
    assert losses[-1] < losses[0] - 0.02, losses
    names = saved_tensors(tmp_path / "whole")
    tables = {f"blocks.{i}.relative_bias" for i in range(2)}
    assert {f"model.sequence_arch.encoder.stacks.history.{table}" for table in tables} <= names.keys()
    killed_after(14, encoded("run"), monkeypatch)
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def start(arguments: list[object], cwd: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "train", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)


def killed(arguments: list[object], run: Path, lines: int, cwd: Path) -> None:
    """Starts a run and kills it at a random moment after so many lines of its log."""
    process = start(arguments, cwd)
    wait_for_lines(run / "metrics.jsonl", lines, process)
    time.sleep(random.uniform(0, 0.25))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0)  # 0 if this process has been kept waiting until the run's end


def test_kill_9_at_any_moment(finished, tmp_path):
    """Killed at a random moment and continued, a run ends with the same bits as one left alone."""
    path = tmp_path / "killed"
    save_config(tiny(path), tmp_path / "config.yaml")
    killed(["--config", tmp_path / "config.yaml"], path, 2, tmp_path)
    resume(path)
    assert_same_run(finished[0], path)


@pytest.mark.slow
def test_kill_9_twice(tmp_path):
    """The same, killed a second time after it was continued, by the commands."""
    path, whole = tmp_path / "killed", tmp_path / "whole"
    config = tiny(path, epochs=12, patience=None, checkpoint_every=2)
    train(config.with_training(run_dir=str(whole)))
    save_config(config, tmp_path / "config.yaml")
    arguments: list[object] = ["--config", tmp_path / "config.yaml"]
    for lines in (2, 12):
        killed(arguments, path, lines, tmp_path)
        arguments = ["--resume", path]
    process = start(arguments, tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert_same_run(whole, path)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_exits(tmp_path, signum, code):
    path = tmp_path / "run"
    save_config(tiny(path, epochs=100, patience=None, checkpoint_every=0), tmp_path / "config.yaml")
    process = start(["--config", tmp_path / "config.yaml"], tmp_path)
    wait_for_lines(path / "metrics.jsonl", 3, process)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    assert errors.strip().splitlines()[-1] == f"stopped by {signum.name}; continue with --resume {path}"
    assert "Traceback" not in errors
    progress = json.loads((latest_checkpoint(path / "checkpoints") / "progress.json").read_text())
    assert progress["step"] > 0
    assert len((path / "metrics.jsonl").read_bytes()) == progress["log_length"]


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    first = train(tiny(tmp_path / "run", epochs=1))
    before = read_results(tmp_path / "run" / "metrics.jsonl")
    assert resume(tmp_path / "run").test == first.test
    assert read_results(tmp_path / "run" / "metrics.jsonl") == before


def test_early_stopping(tmp_path, monkeypatch):
    areas = iter([0.6, 0.7, 0.65, 0.69, 0.9, 0.7])
    monkeypatch.setattr("jfi.training.metrics.label_metrics.auc", lambda *_: next(areas))
    result = train(tiny(tmp_path / "run", epochs=10, patience=2))
    assert (result.epochs, result.best_epoch, result.validation["auc"], result.test["auc"]) == (4, 2, 0.7, 0.9)


def test_monitor_ne_takes_the_lowest(tmp_path, monkeypatch):
    values = iter([0.9, 0.8, 0.85, 0.5])
    monkeypatch.setattr("jfi.training.metrics.label_metrics.normalized_entropy", lambda *_: next(values))
    assert train(tiny(tmp_path / "run", epochs=3, monitor="ne")).best_epoch == 2


def test_divergence_is_reported(tmp_path):
    config = tiny(tmp_path / "run")
    config.optimizer.dense.learning_rate = 1e20
    with pytest.raises(FloatingPointError, match="learning_rate"):
        train(config)


def test_the_backward_has_no_thread_of_its_own(tmp_path, monkeypatch):
    """A thread is woken for a backward on a GPU alone; what says so can be read anywhere."""
    threads, forward = torch._C._is_multithreading_enabled, Trainer._forward
    seen = set()

    def failing_forward(trainer, batch):
        seen.add(threads())
        if trainer.progress.step == 3:
            raise RuntimeError("a fault")
        return forward(trainer, batch)

    monkeypatch.setattr(Trainer, "_forward", failing_forward)
    with pytest.raises(RuntimeError, match="a fault"):
        train(tiny(tmp_path / "run"))
    assert seen == {False} and threads()


def test_an_unknown_bias_key_writes_nothing(tmp_path):
    config = tiny(tmp_path / "run")
    config.model.bias = "history_agee"
    with pytest.raises(ConfigError, match=r"model\.bias: got 'history_agee', must be .* history_age"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        resume(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), r"metrics\.jsonl is missing or shorter than the \d+ bytes"),
        (
            lambda run: os.truncate(run / "metrics.jsonl", 10),
            r"metrics\.jsonl is missing or shorter than the \d+ bytes",
        ),
        (lambda run: progress_file(run).unlink(), r"progress\.json is missing"),
        (lambda run: progress_file(run).write_text("{"), r"progress\.json is damaged"),
        (lambda run: progress_file(run).write_text('{"a": 1}'), r"progress\.json is damaged"),
        (lambda run: tensor_file(run).unlink(), r"rank-0\.safetensors is missing"),
        (lambda run: os.truncate(tensor_file(run), 100), r"rank-0\.safetensors is damaged"),
        (lambda run: tensor_file(run).write_bytes(b"x" * 10_000), r"rank-0\.safetensors is damaged"),
        (lambda run: (tensor_file(run).parent / "tensors.json").unlink(), r"tensors\.json is missing"),
        (lambda run: (tensor_file(run).parent / "SHA256SUMS").unlink(), r"SHA256SUMS is missing"),
    ],
)
def test_resume_of_a_damaged_run_is_refused(finished, tmp_path, damage, message):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    damage(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=rf"^--resume .*{message}.*$"):
        resume(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def progress_file(run: Path) -> Path:
    return latest_checkpoint(run / "checkpoints") / "progress.json"


def tensor_file(run: Path) -> Path:
    return next(latest_checkpoint(run / "checkpoints").glob("*.safetensors"))


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        train(tiny(tmp_path / "run"))
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_other_poolings_train(tmp_path, pooling):
    config = tiny(tmp_path / "run", epochs=1)
    config.model.pooling = pooling
    config.encoder = EncoderConfig(num_layers=1)
    assert 0 <= train(config).test["auc"] <= 1
    assert not (tmp_path / "run" / "attention.png").exists()


def test_several_biases_crosses_and_statistics(tmp_path):
    config = tiny(tmp_path / "run", epochs=4, patience=None)
    config.data = dataclasses.replace(config.data, statistics=["item", "user"], batching="user")
    parts = {"bias": ["history_age", "position"], "cross_layers": 1}
    config.model = dataclasses.replace(config.model, **parts)
    with drawn():
        train(config)
    losses = [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["split"] == "train"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]), losses
    names = saved_tensors(tmp_path / "run")
    assert "model.sequence_arch.pooling.attention.history_by_position.bucket_bias" in names
    assert (tmp_path / "run/attention.png").exists()


def test_every_parameter_is_optimized_once():
    dataset = load_dataset(tiny(None).data)
    config = OptimizerConfig()
    model = build_model(tiny(None).model, EncoderConfig(num_layers=2), dataset.schema, optimizer=config)
    optimizer = build_optimizer(config, model)
    assert set(optimizer.params) == {name for name, _ in model.named_parameters()}
    *groups, dense = (group["params"] for group in optimizer.param_groups)
    tables = [p for group in groups for p in group]
    assert {id(p) for p in tables}.isdisjoint(id(p) for p in dense)
    assert len(tables) == 3  # item and category, shared with the history, and rating


def test_the_average_is_what_is_evaluated(tmp_path):
    config = tiny(None)
    config.optimizer.ema_decay = 0.75
    trainer = Trainer(config.with_training(device="cpu"), load_dataset(config.data), World())
    average = trainer.modules["average"]
    name, parameter = list(trainer.model.named_parameters())[-1]
    values = []
    for value in (0.0, 1.0, 1.0):
        torch.nn.init.constant_(parameter, value)
        average.update()
        values.append(dict(average.module.named_parameters())[name].mean().item())
    assert values == pytest.approx([0.0, 0.25, 0.4375])
    assert trainer.evaluated is average.module


def test_the_average_of_a_table_is_that_of_all_its_steps():
    """Rows that a batch has not read are averaged too, at the end of the epoch."""
    config = tiny(None)
    config.optimizer.ema_decay = 0.75
    trainer = Trainer(config.with_training(device="cpu"), load_dataset(config.data), World())
    trainer.load_pretrained()
    expected = None
    for batch in itertools.islice(trainer.dataset.batches("train", 16), 8):
        loss, _ = trainer._forward(batch)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        trainer.modules["average"].update()
        now = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
        expected = expected or now
        expected = {name: 0.75 * average + 0.25 * now[name] for name, average in expected.items()}
    trainer.modules["average"].flush()
    names = {name.removeprefix("module.") for name in trainer.modules["average"].state_dict()}
    assert names == {"n_averaged", *trainer.model.state_dict()}
    for name, average in trainer.modules["average"].module.named_parameters():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_without_histories_there_is_no_picture_of_attention(tmp_path):
    """Every user of the table has one event."""
    table = tmp_path / "table.csv"
    table.write_text("user_id,item_id,rating,timestamp\n" + "".join(f"{u},{u % 3},{u % 2},{u}\n" for u in range(40)))
    config = tiny(tmp_path / "run", epochs=1)
    config.data = data_config(interactions=str(table), label="rating >= 1", event_categorical=["rating"])
    with drawn():
        train(config)
    assert (tmp_path / "run" / "curves.png").exists()
    assert not (tmp_path / "run" / "attention.png").exists()


def test_settings_that_are_left_open_follow_from_the_table_and_are_written(tmp_path, capsys):
    config = tiny(tmp_path / "run", epochs=1)
    config.data = dataclasses.replace(config.data, statistics="auto")
    config.model = dataclasses.replace(config.model, bias="auto")
    config.optimizer = OptimizerConfig(dense=config.optimizer.dense)
    train(config.with_training(batch_size=None))
    chosen = f"data.statistics: {list(GROUPS)}, model.bias: ['history_age', 'recency'], optimizer.ema_decay: 0.98"
    chosen += ", optimizer.embeddings.weight_decay: 0.0224, training.batch_size: 512"
    assert f"defaults: {chosen}" in capsys.readouterr().out.splitlines()
    run, saved = RunFolder.open(tmp_path / "run")
    assert saved.optimizer.embeddings.weight_decay == 0.0224  # 25 / 1,114 samples
    assert (saved.model.bias, saved.optimizer.ema_decay) == (["history_age", "recency"], 0.98)
    # A config.yaml that leaves them open again is written settled, so that later commands take it.
    save_config(saved.with_training(batch_size=None, epochs=2), run.config)
    resume(tmp_path / "run", config_changed="accept")
    assert RunFolder.open(tmp_path / "run")[1].training.batch_size == 512
    resume(tmp_path / "run")


def test_a_whole_number_in_python_is_the_float_that_config_yaml_has():
    whole, same, other = (Config(optimizer=OptimizerConfig(dense=OptimizerGroup(weight_decay=x))) for x in (0, 0.0, 1))
    assert not list(config_changes(whole.as_dict(), same)) and list(config_changes(whole.as_dict(), other))


def test_the_bias_follows_from_other_settings():
    chosen = {
        "several heads": (Config(), ["history_age", "recency"]),
        "one head": (Config(model=ModelConfig(num_heads=1)), "history_age"),
        "an encoder": (Config(encoder=EncoderConfig(num_layers=1)), "history_age"),
        "no attention": (Config(model=ModelConfig(pooling="mean")), None),
        "given": (Config(model=ModelConfig(bias=None)), None),
    }
    assert {name: with_bias(config).model.bias for name, (config, _) in chosen.items()} == {
        name: bias for name, (_, bias) in chosen.items()
    }
