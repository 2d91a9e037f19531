"""`jfi train --resume RUN --follow FOLDER`: a log on the command line, and options that do not go together."""

import json
from pathlib import Path

import commands
import pytest
from follow.followed_log import config_of, make_rows, write, write_parts

from jfi.training import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, rows = tmp_path_factory.mktemp("follow"), make_rows(700)
    write(folder / "log.parquet", rows[:300])
    write_parts(folder / "parts", rows[300:], 2)
    train(config_of(folder / "log.parquet", folder / "run"))
    return folder


def test_a_log_is_followed(folder, capsys):
    options = "train", "--resume", folder / "run", "--follow", folder / "parts", "--until-idle"
    assert commands.call(*options, "--checkpoint-seconds", 60) == 0
    first, second, last = capsys.readouterr().out.splitlines()[-3:]
    assert first.startswith("part-0000.parquet: 200 rows; ne ") and second.startswith(
        "part-0001.parquet: 200 rows; ne "
    )
    assert last == f"trained on 2 parts; run folder {folder / 'run'}"
    lines = [json.loads(line) for line in (folder / "run" / "follow" / "metrics.jsonl").read_text().splitlines()]
    parts, hours = [line for line in lines if "part" in line], [line for line in lines if line.get("window") == "hour"]
    assert [line["part"] for line in parts] == ["part-0000.parquet", "part-0001.parquet"]
    assert len(hours) >= 4 and all(0 <= hour["auc"] <= 1 for hour in hours)
    # The hours that have ended, and the one that has not.
    assert sum(hour["rows"] for hour in hours) < 400 and abs(parts[-1]["all_auc"] - 0.5) < 0.4
    assert (folder / "run" / "follow" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert commands.call(*options) == 0
    assert "trained on 0 parts" in capsys.readouterr().out
    (folder / "parts" / "part-0002.parquet").write_bytes(b"half")
    assert commands.call(*options) == 2
    assert "part-0002.parquet: a damaged Parquet file" in capsys.readouterr().err
    assert commands.call(*options, "--refused-to", folder / "refused") == 0
    assert "a damaged Parquet file" in (folder / "refused" / "part-0002.parquet.reason.txt").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--follow", "parts"], "--follow belongs to --resume"),
        (["--until-idle"], "--until-idle belongs to --follow"),
        (["--resume", "RUN", "--late-seconds", "5"], "--late-seconds belongs to --follow"),
        (["--resume", "RUN", "--refused-to", "x"], "--refused-to belongs to --follow"),
        (["--resume", "RUN", "--follow", ""], "--follow: got '', must be a folder of Parquet files"),
        (["--resume", "RUN", "--follow", "nowhere"], "--follow nowhere: no such folder"),
        (["--resume", "RUN", "--follow", ".", "--training.seed", "3"], "takes no other option such as --training.seed"),
        (["--resume", "RUN", "--follow", ".", "--late-seconds=-5"], "--late-seconds: got -5.0, must be a number of"),
        (["--resume", "RUN", "--follow", ".", "--checkpoint-seconds=-1"], "--checkpoint-seconds: got -1.0, must be"),
        (["--resume", "nowhere", "--follow", "."], "nowhere: not a run folder"),
    ],
)
def test_options_that_do_not_go_together(folder, options, message, capsys):
    before = sorted((folder / "run").rglob("*"))
    assert commands.call("train", *(str(folder / "run") if one == "RUN" else one for one in options)) == 2
    assert message in capsys.readouterr().err
    assert sorted((folder / "run").rglob("*")) == before
