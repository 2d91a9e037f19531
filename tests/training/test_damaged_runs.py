"""Random damage to the files of a run: resuming it is refused in one line, or ends with the same bits."""

import json
import random
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_run import assert_same_run, killed_after, tiny

from jfi.data import DataSchema
from jfi.data.config import FILES
from jfi.data.prepared.manifest import check_equal
from jfi.training import resume, train
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.run.saved_run import SavedRun, load_run
from jfi.utils.encoding import Vocabulary
from jfi.utils.exit_codes import run_command
from jfi.utils.files import SUMS, sha256_of, write_sums

LOG_EVERY = 4

#: Damages in CI, and with the slow tests.
FEW, MANY = 21, 280


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """A run that nothing disturbed, and one that died with a last checkpoint and another one of the best epoch."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("draw_curves", "draw_attention"):
            patched.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        config = tiny(None, checkpoint_every=4)
        train(config.with_training(run_dir=str(folder / "whole")))
        last = json.loads((latest_checkpoint(folder / "whole/checkpoints") / "progress.json").read_text())
        killed_after(last["step"] * 5 // 6, config.with_training(run_dir=str(folder / "died")), patched)
    assert len(list((folder / "died/checkpoints").iterdir())) == 2
    return folder / "whole", folder / "died"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def zero(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = draw.randrange(len(content) + 1)
    end = min(len(content), begin + draw.choice([1, 8, 512, len(content)]))
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


def damage(run: Path, seed: int) -> str:
    """Damages a file of `run`, or swaps two; returns what was done."""
    draw = random.Random(seed)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    kind, path = ("delete", "empty", "cut", "zero", "flip", "flip", "swap")[seed % 7], draw.choice(files)
    if kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "swap":
        other = draw.choice([file for file in files if file != path])
        mine, its = path.read_bytes(), other.read_bytes()
        path.write_bytes(its)
        other.write_bytes(mine)
        return f"swap {path.relative_to(run)} and {other.relative_to(run)}"
    else:
        {"cut": cut, "zero": zero, "flip": flip}[kind](path, draw)
    return f"{kind} {path.relative_to(run)}"


@pytest.mark.parametrize("seeds", [range(FEW), pytest.param(range(FEW, FEW + MANY), marks=pytest.mark.slow)], ids=len)
def test_a_damaged_run_is_refused_in_one_line_or_ends_with_the_same_bits(runs, tmp_path, capfd, record_property, seeds):
    record_property("cases", len(seeds))
    whole, died = runs
    ends = Counter()
    for seed in seeds:
        run = tmp_path / f"{seed}"
        shutil.copytree(died, run)
        what = damage(run, seed)
        capfd.readouterr()
        code = run_command(lambda run=run: resume(run) and None)
        errors = capfd.readouterr().err.splitlines()
        if code == 0:
            assert_same_run(whole, run)
        else:
            assert code == 2 and len(errors) == 1 and errors[0].startswith("error: "), (what, code, errors)
        ends[f"{what.split()[0]}: {'refused' if code else 'same bits'}"] += 1
        shutil.rmtree(run)
    print(dict(ends))
    assert sum(count for end, count in ends.items() if end.endswith("refused")) > len(seeds) // 3


def assert_same_scores(one: SavedRun, other: SavedRun) -> None:
    """Both encode and score alike, whatever tables they have."""
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert repr(one.model) == repr(other.model)
    check_equal(one.schema, other.schema, "the damaged run")
    configs = [
        [replace(run.config.data, **dict.fromkeys(FILES), prepared=None), run.config.model] for run in (one, other)
    ]
    assert configs[0] == configs[1] and one.config.encoder == other.config.encoder


@pytest.mark.parametrize("seeds", [range(FEW), pytest.param(range(FEW, FEW + MANY), marks=pytest.mark.slow)], ids=len)
def test_a_damaged_run_predicts_as_before_or_is_refused_in_one_line(runs, tmp_path, capfd, record_property, seeds):
    record_property("cases", len(seeds))
    whole, loaded, ends = load_run(runs[0]), [], Counter()
    for seed in seeds:
        run = tmp_path / f"{seed}"
        shutil.copytree(runs[0], run)
        if seed % 3 == 0:  # most files are not read
            what = damage(run / "data", seed)
        elif seed % 3 == 1:
            flip(run / "config.yaml", random.Random(seed))
            what = "flip config.yaml"
        else:
            what = damage(run, seed)
        capfd.readouterr()
        code = run_command(lambda run=run: loaded.append(load_run(run)))
        errors = capfd.readouterr().err.splitlines()
        if code == 0:
            assert_same_scores(loaded.pop(), whole)
        else:
            assert code == 2 and len(errors) == 1 and errors[0].startswith("error: "), (what, code, errors)
        ends[code] += 1
        shutil.rmtree(run)
    assert min(ends[0], ends[2]) > len(seeds) // 5, ends


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("split: time", "split: leave_one_out", ['data.split was "time" and is "leave_one_out"']),
        ("history: null", "history: rating > 1", ['data.history was null and is "rating > 1"']),
        ("ema_decay: 0.9", "ema_decay: null", ["optimizer.ema_decay was 0.9 and is null"]),
        ("pooling: attention", "pooling: mean", ['model.pooling was "attention" and is "mean"']),
        ("epochs: 3", "epochs: 4", []),
        (r"interactions: \S+", "interactions: moved.csv", []),
    ],
)
def test_a_run_whose_scores_would_change_with_its_config_is_refused_with_the_fields(
    runs, tmp_path, capfd, old, new, changes
):
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    text, count = re.subn(rf"(?m) {old}$", f" {new}", (run / "config.yaml").read_text())
    assert count == 1
    (run / "config.yaml").write_text(text)
    assert run_command(lambda: load_run(run) and None) == (2 if changes else 0)
    lines = [
        f"error: run {run}: config.yaml has changed since the checkpoint: {change}; restore it" for change in changes
    ]
    assert capfd.readouterr().err.splitlines() == lines


def test_the_vocabularies_of_another_run_are_refused_by_every_command(runs, tmp_path, capfd):
    """Whole files with right checksums, whose values have other ids."""
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    schema = DataSchema.load(run / "data")
    values = {name: Vocabulary(list(one.values)[::-1]) for name, one in schema.encodings.vocabularies.items()}
    other = replace(schema, encodings=replace(schema.encodings, vocabularies=values))
    other.save(tmp_path / "other")
    for name in ("schema.json", "vocabularies.parquet", SUMS):
        (tmp_path / "other" / name).replace(run / "data" / name)
    assert values and DataSchema.load(run / "data").encodings.vocabularies.keys() == values.keys()
    warm = tiny(tmp_path / "warm", warm_start=str(run), rows_after=None)
    for command in (resume, lambda run: resume(run, data_changed="accept"), load_run, lambda _: train(warm)):
        assert run_command(lambda command=command: command(run) and None) == 2
        line = f"error: {run}/data/vocabularies.parquet has changed since the checkpoint; restore it\n"
        assert capfd.readouterr().err == line
    assert not (tmp_path / "warm").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "data", "checkpoints", "checkpoints/*", "config.yaml"])
def test_a_run_that_goes_on_holds_no_links(runs, tmp_path, capfd, name):
    """Training would write where they lead: it cuts metrics.jsonl and removes old checkpoints."""
    run, other = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(runs[0], run)
    path = next(run.glob(name))
    path.rename(other)
    path.symlink_to(other)
    before = sorted((one, one.stat().st_mtime_ns) for one in (other, *other.rglob("*")))
    assert run_command(lambda: resume(run) and None) == 2
    assert capfd.readouterr().err == f"error: --resume {run}: {path} is a link; a run that goes on holds none\n"
    assert sorted((one, one.stat().st_mtime_ns) for one in (other, *other.rglob("*"))) == before
    load_run(run)  # which writes nothing


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "tensors.json", "progress.json", SUMS])
def test_every_flipped_bit_of_a_checkpoint_is_refused_by_resume_and_export_with_the_file_s_name(
    runs, tmp_path, capfd, name
):
    """Of the last checkpoint by resume, of the best epoch's by both."""
    run = tmp_path / "run"
    shutil.copytree(runs[1], run)
    best, last = sorted((run / "checkpoints").iterdir())
    assert run_command(lambda: load_run(run) and None) == 0
    for folder, commands in ((last, [resume]), (best, [resume, load_run])):
        path, draw = folder / name, random.Random(0)
        for bit in draw.sample(range(8 * path.stat().st_size), 2):
            flip_bit(path, bit)
            capfd.readouterr()
            for command in commands:
                assert run_command(lambda command=command: command(run) and None) == 2
                (line,) = capfd.readouterr().err.splitlines()
                assert str(path) in line, line
            flip_bit(path, bit)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("epoch", value) for value in ("1", -1, 1.5, None, True, 10**400)],
        *[("best", "high"), ("log_sha256", 3), ("config", []), ("best_epoch", 10**6), ("unknown", 1)],
    ],
)
def test_progress_of_a_wrong_type_is_refused_in_one_line(runs, tmp_path, capfd, key, value):
    """Whoever wrote it wrote its checksum too."""
    run = tmp_path / "run"
    shutil.copytree(runs[1], run)
    folder = latest_checkpoint(run / "checkpoints")
    path = folder / "progress.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    write_sums(folder, {file.name: sha256_of(file) for file in folder.iterdir() if file.name != SUMS})
    assert run_command(lambda: resume(run) and None) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{path} is damaged" in line


def test_a_damaged_line_of_metrics_is_named(runs, tmp_path, capfd):
    run = tmp_path / "run"
    shutil.copytree(runs[1], run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = b"x" * (len(lines[1]) - 1) + b"\n"
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    assert run_command(lambda: resume(run) and None) == 2
    assert capfd.readouterr().err == f"error: {run}/metrics.jsonl:2: damaged, not a line of metrics\n"


def test_a_changed_config_is_refused_with_its_fields_or_accepted(runs, tmp_path, capfd):
    run = tmp_path / "run"
    shutil.copytree(runs[1], run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("epochs: 3", "epochs: 4").replace("patience: 2", "patience: null"))
    assert run_command(lambda: resume(run) and None) == 2
    assert "training.epochs was 3 and is 4, training.patience was 2 and is null" in capfd.readouterr().err
    assert resume(run, config_changed="accept").epochs == 4
    resume(run)  # it is the run's config from now on
