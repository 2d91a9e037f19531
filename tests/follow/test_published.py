"""A run that follows a log and publishes: a server's scores are those of the run, with tables that grow."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from jfi.cli.state import schema_of_run
from jfi.follow.start import follow
from jfi.serving import MAX_CANDIDATES
from jfi.serving.export import Export
from jfi.serving.published import numbers, path_of, read_version
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.serving.version_chain import VersionChain
from jfi.training import ConfigError, train
from jfi.training.run.saved_run import load_run
from jfi.utils.files import LOCK, locking

from .comparing import bodies
from .followed_log import FEATURES, GROWING, config_of, lines, make_rows, write, write_parts


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> Path:
    """A run that has followed three parts, and published after each step."""
    folder = tmp_path_factory.mktemp("published")
    rows = make_rows(700, items=150)
    write(folder / "log.parquet", rows[:500])
    write_parts(folder / "parts", rows[500:], 3)
    features = [*GROWING[2:], *(one for one in FEATURES if one.name not in ("tags", "brand", "brand_device"))]
    config = config_of(folder / "log.parquet", folder / "run", features=features, max_history=4)
    config.optimizer.ema_decay = "auto"
    train(config.with_training(batch_size=16, admit_every=3, publish_every=0.0))
    assert follow(folder / "run", folder / "parts", until_idle=True) == 3
    return folder / "run"


def scores(scorer: Scorer) -> list:
    return scorer.score([scorer.reader(body) for body in bodies(scorer.reader.fields)])


def test_the_last_version_scores_as_an_export_of_the_run(followed, tmp_path):
    folder = followed / "published"
    found = [read_version(folder, number).manifest for number in numbers(folder)]
    assert found[-1].log_position["part"] == "part-0002.parquet" and found[-1].version > 10
    assert {one.kind for one in found} >= {"artifact", "snapshot"}  # the tables are tiny
    run = load_run(followed)
    Export(run.model, schema_of_run(run), Limits(MAX_CANDIDATES, run.schema.max_history)).write(tmp_path / "artifact")
    chain = VersionChain(folder, Scorer)
    scorer, fresh = chain.start(), Scorer(tmp_path / "artifact")
    assert chain.manifest.version == found[-1].version and not chain.reasons
    assert scores(scorer) == scores(fresh)
    grown = scorer.tables.rows
    assert grown.keys() == fresh.tables.rows.keys() and len(grown) == 2
    assert all(torch.equal(rows.ids, fresh.tables.rows[name].ids) for name, rows in grown.items())
    first = Scorer(path_of(folder, 1) / "artifact")
    assert any(not torch.equal(rows.ids, first.tables.rows[name].ids) for name, rows in grown.items())
    assert scores(first) != scores(scorer)


def test_a_run_that_goes_on_publishes_its_place_at_once(followed, tmp_path):
    shutil.copytree(followed, tmp_path / "run")
    folder = tmp_path / "run" / "published"
    before = numbers(folder)[-1]
    assert follow(tmp_path / "run", followed.parent / "parts", until_idle=True) == 0
    (number,) = (one for one in numbers(folder) if one > before)
    assert read_version(folder, number).manifest.log_position == read_version(folder, before).manifest.log_position


def test_versions_of_a_run_with_statistics_have_one_base_whatever_becomes_of_the_interactions(tmp_path, monkeypatch):
    """Compiling is left out."""
    monkeypatch.setattr("jfi.serving.export.write_package", lambda program, path, metadata: path.write_bytes(b""))
    monkeypatch.setattr("jfi.serving.artifact.read", lambda *_: None)
    log, run, rows = tmp_path / "log.parquet", tmp_path / "run", make_rows(400)
    write(log, rows[:300])
    config = config_of(log, run, statistics=["item", "user"])
    config.optimizer.ema_decay = "auto"
    train(config.with_training(publish_every=0.0))
    write_parts(tmp_path / "parts", rows[300:360], 1)
    assert follow(run, tmp_path / "parts", until_idle=True) == 1
    (base,) = {read_version(run / "published", number).manifest.base for number in numbers(run / "published")}
    at = read_version(run / "published", numbers(run / "published")[-1]).manifest.base_version
    for change in (lambda: write(log, rows[:320]), log.unlink):
        change()
        before = numbers(run / "published")[-1]
        assert follow(run, tmp_path / "parts", until_idle=True) == 0
        last = read_version(run / "published", numbers(run / "published")[-1]).manifest
        assert last.version > before and (last.kind, last.base, last.base_version) == ("snapshot", base, at)


def test_a_folder_that_another_run_publishes_to_is_refused_by_name(followed, tmp_path):
    shutil.copytree(followed, tmp_path / "run")
    folder = tmp_path / "run" / "published"
    before = numbers(folder)
    refused = pytest.raises(ConfigError, match=r"training\.publish_every: .*/published: process .* publishes to")
    with locking(folder / LOCK, ValueError), refused:
        follow(tmp_path / "run", followed.parent / "parts", until_idle=True)
    assert numbers(folder) == before


def test_when_versions_are_published_may_change_and_a_rule_holds_them_back(followed, tmp_path, caplog):
    run = Path(shutil.copytree(followed, tmp_path / "run"))
    parts = Path(shutil.copytree(followed.parent / "parts", tmp_path / "parts"))
    before, config = numbers(run / "published"), (run / "config.yaml").read_text()
    rows = make_rows(900, items=150)[700:]

    def follow_another(number: int, **changes: object) -> dict:
        text = config
        for name, value in changes.items():
            text, count = re.subn(rf"(?m)^  {name}: .*$", f"  {name}: {value}", text)
            assert count == 1
        (run / "config.yaml").write_text(text)
        write(parts / f"part-{number:04d}.parquet", rows[30 * number : 30 * (number + 1)])
        assert follow(run, parts, until_idle=True) == 1
        return lines(run)[-1]

    line = follow_another(3, publish_if="auc > 2")
    assert line["publish_held_back"] > 0 and numbers(run / "published") == before
    assert "held back a version, training goes on: training.publish_if does not hold, auc " in caplog.text
    line = follow_another(4, publish_if="ne < 100 or rows < 1000", publish_every=3600.0)
    assert "publish_held_back" not in line
    new = [read_version(run / "published", one).manifest for one in numbers(run / "published") if one > before[-1]]
    assert new[0].kind == "snapshot" and new[0].log_position["part"] == "part-0003.parquet"
    assert {one.log_position["part"] for one in new[1:]} == {"part-0004.parquet"}


def test_a_file_in_the_place_of_the_folder_is_refused_by_name(followed, tmp_path):
    run = Path(shutil.copytree(followed, tmp_path / "run", ignore=shutil.ignore_patterns("published")))
    (run / "published").touch()
    with pytest.raises(ConfigError, match=r"training\.publish_every: .*/published is a file, must be a folder of pub"):
        follow(run, followed.parent / "parts", until_idle=True)


def test_settings_of_publishing_are_refused_by_name(followed, tmp_path):
    config = config_of(tmp_path / "log.parquet", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer\.ema_decay: got 0\.9, must be null with training\.publish_every"):
        config.with_training(publish_every=1.0)
    with pytest.raises(ConfigError, match=r"training\.publish_every: got -1"):
        config.with_training(publish_every=-1.0)
