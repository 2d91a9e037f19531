"""Edits of every file of a run before every command: the file is named and refused, or the command does not read it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import commands
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from own_table import config_of, row, write_table
from test_run import read_results
from worker import without_pictures

import jfi
from jfi.data.prepared.manifest import prepared_config
from jfi.training import OptimizerGroup, resume, train
from jfi.training.loop.trainer import Trainer
from jfi.utils.exit_codes import run_command

LOG_EVERY = 4

#: Edits of config.yaml.
FIELDS = {
    "max_slots: 8": "max_slots: 9",
    "label: clicked": "label: seconds > 20",
    "num_heads: 2": "num_heads: 4",
    "ranking: sampled": "ranking: none",
    "epochs: 2": "epochs: 3",
}


def stop_at_save(number: int) -> Callable:
    """A Trainer.save that ends the training after so many checkpoints."""
    saved, count = Trainer.save, iter(range(1, number + 1))

    def save(self, *arguments):
        saved(self, *arguments)
        if next(count) == number:
            raise KeyboardInterrupt

    return save


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A table, and a run that was stopped in its second epoch."""
    path = tmp_path_factory.mktemp("edited")
    write_table(path / "table.csv", [row(i) for i in range(300)])
    with mock.patch.object(Trainer, "save", stop_at_save(4)), pytest.raises(KeyboardInterrupt):
        train(config_of(path / "table.csv", path / "run", checkpoint_every=3))
    assert [one.name for one in sorted((path / "run/checkpoints").iterdir())] == [
        "epoch-0001-batch-0000000",
        "epoch-0001-batch-0000001",
    ]
    return path


def predict(folder: Path, run: Path) -> list:
    scores = run.parent / "scores.parquet"
    commands.run("predict", "--run", run, "--interactions", folder / "table.csv", "--out", scores)
    return pa.parquet.read_table(scores).to_pylist()


def evaluate(folder: Path, run: Path) -> list:
    metrics = run.parent / "metrics.json"
    commands.run("evaluate", "--run", run, "--interactions", folder / "table.csv", "--out", metrics)
    return [metrics.read_text()]


def export(folder: Path, run: Path) -> list:
    found = []

    def read(model: torch.nn.Module, *_: object, **__: object) -> mock.Mock:
        found.extend(value.tolist() for value in model.state_dict().values())
        return mock.Mock()

    with mock.patch("jfi.cli.export.Export", read):
        commands.run("export", "--run", run)
    return found


def prepare(folder: Path, run: Path) -> list:
    out = run.parent / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    commands.run("prepare", "--run", run, "--out", out)
    return [prepared_config(out), (out / "SHA256SUMS").read_text()]


def warm_start(folder: Path, run: Path) -> list:
    out = run.parent / "warm"
    shutil.rmtree(out, ignore_errors=True)
    train(config_of(folder / "table.csv", out, warm_start=str(run), rows_after=None, epochs=1))
    return read_results(out / "metrics.jsonl")


def go_on(folder: Path, run: Path) -> list:
    resume(run)
    return read_results(run / "metrics.jsonl")


SLOW = [evaluate, prepare, warm_start, go_on]
COMMANDS = [predict, export, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.__name__)
def test_a_file_that_was_edited_is_named_or_not_read(folder, tmp_path, capfd, record_property, command):
    def ends(change: Callable[[Path], object] = lambda run: None) -> tuple[int, str, list]:
        """The exit code, what stderr says, and the result of the command on a copy of the run after a change."""
        run, result = tmp_path / "run", []
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "run", run)
        change(run)
        capfd.readouterr()
        with without_pictures():
            code = run_command(lambda: result.extend(command(folder, run)))
        return code, capfd.readouterr().err, result

    code, _, wanted = ends()
    assert code == 0 and wanted
    names = [str(path.relative_to(folder / "run")) for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(names) > 15
    record_property("cases", len(names) + len(FIELDS))
    refused = set()
    for name in set(names) - {"config.yaml"}:
        code, errors, result = ends(lambda run, name=name: flip(run / name) if (run / name).stat().st_size else None)
        if code == 0:
            assert result == wanted, name
            code, errors, result = ends(lambda run, name=name: (run / name).unlink())
            assert code == 0 and result == wanted, (name, errors)
        else:
            assert code == 2 and errors.count("\n") == 1 and name in errors, (name, errors)
            refused.add(name)
    assert {"data/schema.json", "data/vocabularies.parquet"} <= refused
    for old, new in FIELDS.items():

        def edit(run: Path, old: str = old, new: str = new) -> None:
            text = (run / "config.yaml").read_text()
            assert text.count(f" {old}\n") == 1
            (run / "config.yaml").write_text(text.replace(f" {old}\n", f" {new}\n"))

        code, errors, result = ends(edit)
        if code == 0:
            assert result == wanted, old
        else:
            assert code == 2 and "config.yaml has changed since the checkpoint" in errors, (old, errors)


def test_a_checkpoint_under_another_name_is_refused(folder, tmp_path, capfd):
    shutil.copytree(folder / "run", tmp_path / "run")
    best, last = sorted((tmp_path / "run/checkpoints").iterdir())
    shutil.rmtree(best)
    shutil.copytree(last, best)
    for command in (jfi.load_run, resume):
        assert run_command(lambda command=command: command(tmp_path / "run") and None) == 2
        assert f"{best}/progress.json is damaged: it is not of a checkpoint of this name" in capfd.readouterr().err


@pytest.mark.parametrize(("first", "then"), [(0.0, 0.1), (0.1, 0.0)])
def test_a_run_goes_on_with_a_weight_decay_or_without(tmp_path, first, then):
    """A row has no penalty of the steps that were made without one."""
    write_table(tmp_path / "table.csv", [row(i) for i in range(300)])
    config = config_of(tmp_path / "table.csv", tmp_path / "run", epochs=1)
    config.optimizer.embeddings = OptimizerGroup("adagrad", 0.05, first)
    train(config)
    text = (tmp_path / "run/config.yaml").read_text().replace(f"weight_decay: {first}", f"weight_decay: {then}")
    (tmp_path / "run/config.yaml").write_text(text.replace("epochs: 1", "epochs: 2"))
    found, restore = [], Trainer.restore

    def restored(trainer, run):
        restore(trainer, run)
        states = trainer.optimizer.state_dict()["state"].values()
        found.extend(one["stepped_at"].clone() - trainer.progress.step for one in states if "stepped_at" in one)

    with mock.patch.object(Trainer, "restore", restored):
        assert resume(tmp_path / "run", config_changed="accept").epochs == 2
    assert len(found) == 5 * (then > 0) and not any(one.any() for one in found)
