"""The command that scores a table: what it writes, what it refuses, and what it leaves when it is stopped."""

import csv
import json
import resource
import signal
import sys
from pathlib import Path

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from own_table import config_of, row, write_table
from worker import without_pictures

import jfi
from jfi.cli import evaluate
from jfi.data import Batch
from jfi.data.batches.dataset import Batches
from jfi.data.io import blocks
from jfi.data.schema import columns as coded
from jfi.training import ConfigError, train
from jfi.training.run.scores import check_results
from jfi.utils.files import temporary_folder

ROOT = Path(__file__).parents[2]
KEYS = ["user_id", "item_id", "timestamp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("command")
    write_table(path / "table.csv", [row(i) for i in range(300)])
    with without_pictures():
        train(config_of(path / "table.csv", path / "run"))
    return path


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


def command(capsys, *arguments: object) -> tuple[int, str, str]:
    return commands.call(*arguments), *capsys.readouterr()


def test_the_command_writes_scores_and_metrics(folder, run, tmp_path, monkeypatch, capsys):
    common = ["--run", folder / "run", "--interactions", folder / "table.csv"]
    out, metrics = tmp_path / "scores.csv", tmp_path / "metrics.json"
    code, text, _ = command(capsys, "evaluate", *common, "--scores", out, "--out", metrics, "--by", "genre")
    assert code == 0
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*KEYS, "genre", "score", "probability"] and len(rows) == 300
    wanted = run.predict(folder / "table.csv").column("score").to_numpy()
    np.testing.assert_allclose([float(line["score"]) for line in rows], wanted, rtol=1e-6)
    assert json.loads(metrics.read_text())["overall"] == run.evaluate(folder / "table.csv")["overall"]
    *lines, shares, first, second = text.splitlines()[1:]
    assert [line.split()[0] for line in (*lines, first, second)] == ["all", "genre", "genre", "genre", "wrote", "wrote"]
    assert shares == "unknown or missing in 300 rows: user_id 0.0%, item_id 0.0%, genre 0.0%"
    code, text, _ = command(capsys, "predict", *common, "--out", tmp_path / "again.parquet")
    assert (code, text) == (0, f"{shares}\nwrote {tmp_path / 'again.parquet'}\n")
    assert pa.parquet.read_table(tmp_path / "again.parquet").column_names == [*KEYS, "score", "probability"]


def test_a_text_file_of_any_name_is_left_to_the_delimiter_of_the_run(tmp_path):
    (tmp_path / "table.txt").write_text("user_id|item_id\n")
    read = {"--interactions": str(tmp_path / "table.txt")}
    check_results({"--out": tmp_path / "scores.csv"}, read)
    with pytest.raises(ConfigError, match="--interactions names this file too"):
        check_results({"--out": tmp_path / "table.txt"}, read)


def test_the_table_is_straight_in_a_terminal_and_its_heads_are_whole():
    names = ["loss", "ne", "auc", "user_auc", "mean_label", "mean_prediction", "calibration", "ndcg@10_full"]
    record = {"samples": 1_234_567, **dict.fromkeys(names, 0.5), "auc": None}
    values = ["phone", "手机", "カナ", "e\u0301te\u0301", "平板电脑" * 9, "two\nlines", None]
    groups = [{"value": value, **record} for value in values]
    head, *lines = evaluate.table({"overall": record, "by": {"设备": groups}}).splitlines()
    assert head.split() == ["samples", *names] and len(lines) == 1 + len(values)
    wide = "设备手机カナ平板电脑"
    for line in lines:
        cells = sum(0 if c == "\u0301" else 2 if c in wide else 1 for c in line)
        assert (cells, line.split()[-9:]) == (len(head), ["1,234,567", "0.5000", "0.5000", "-", *["0.5000"] * 5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "scores.txt"], "--out scores.txt: the name must end in .parquet or .csv"),
        (["--out", "no/scores.csv"], "--out no/scores.csv: there is no folder no"),
        ([], "the following arguments are required: --out"),
        (["--out", "s.csv", "--by", "genre"], "unknown option --by"),
        (["--out", "s.csv", "--run", "nowhere"], "error: --run nowhere: not a run folder, config.yaml is missing"),
        (["--out", "s.csv", "--interactions", "no.csv"], "no.csv: no such file or directory"),
        (["--out", "s.csv", "--history", "no.csv"], "no.csv: no such file or directory"),
        (["--out", "s.csv", "--interactions", ""], "--interactions is ''; it must name a file, a folder or a glob"),
        (["--out", "s.csv", "--interactions", "*.parq"], "*.parq: no file matches; --interactions is read as a glob"),
        (["--out", "s.csv", "--history", "no-*"], "no-*: no file matches; --history is read as a glob"),
        (["--out", "s.csv", "--users", ""], "--users is ''"),
        (["--out", "s.csv", "--items", "items"], "items: no such file or directory"),
        (["--out", "folder.csv"], "--out folder.csv: is a folder; name a file"),
        (["--out", "s.csv", "--batch-size", "many"], "--batch-size: got 'many', must be a whole number of at least 1"),
        (["--out", "s.csv", "--batch", "1"], "unknown option --batch; did you mean '--batch-size'?"),
        (["--out", "s.csv", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--out", "s.csv", "new.csv"], "unknown argument new.csv"),
        (["--out"], "--out: expected one argument"),
    ],
)
def test_wrong_options_are_refused_in_one_line_and_write_nothing(
    folder, tmp_path, monkeypatch, capsys, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    common = ["--run", folder / "run", "--interactions", folder / "table.csv"]
    code, _, errors = command(capsys, "predict", *common, *options)
    assert code == 2 and errors.startswith("error: ") and message in errors and errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.csv"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "no/m.json"], "--out no/m.json: there is no folder no"),
        (["--out", "folder.csv"], "--out folder.csv: is a folder; name a file"),
        (["--scores", "scores.txt"], "--scores scores.txt: the name must end in .parquet or .csv"),
        (["--out", "m.json", "--by", "gendre"], "no column 'gendre'; did you mean 'genre'?"),
    ],
)
def test_wrong_options_of_an_evaluation_are_refused_too(folder, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    common = ["--run", folder / "run", "--interactions", folder / "table.csv"]
    code, _, errors = command(capsys, "evaluate", *common, *options)
    assert code == 2 and errors.startswith("error: ") and message in errors and errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.csv"]


@pytest.mark.parametrize("target", ["score", "write"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda signum: signum.name)
def test_a_signal_leaves_nothing_behind(folder, tmp_path, monkeypatch, capsys, target, signum):
    """It comes where the third batch is scored, or after the first rows are written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.parquet").write_bytes(b"before")
    seen, read, write = [], Batches.__getitem__, pa.parquet.ParquetWriter.write_batch

    def stop() -> None:
        seen.append({path.name[:5] for path in tmp_path.iterdir()})
        signal.raise_signal(signum)

    def read_or_stop(batches: Batches, number: int) -> Batch:
        if number == 2:
            stop()  # in a thread that assembles; the main thread gets the signal
        return read(batches, number)

    def write_batch(*arguments: object) -> None:
        write(*arguments)
        stop()

    if target == "score":
        monkeypatch.setattr(Batches, "__getitem__", read_or_stop)
    else:
        monkeypatch.setattr(pa.parquet.ParquetWriter, "write_batch", write_batch)
    options = ["--run", folder / "run", "--interactions", folder / "table.csv", "--batch-size", 8]
    code, text, errors = command(capsys, "predict", *options, "--out", "scores.parquet")
    assert (code, text, errors) == (128 + signum, "", f"stopped by {signum.name}\n")
    assert seen == [{"score", ".jfi-"} | ({".scor"} if target == "write" else set())]  # something to leave behind
    assert [path.name for path in tmp_path.iterdir()] == ["scores.parquet"]
    assert (tmp_path / "scores.parquet").read_bytes() == b"before"


def test_a_signal_while_the_temporary_folder_is_made_or_removed_waits(tmp_path, monkeypatch):
    for name in ("tempfile.mkdtemp", "shutil.rmtree"):
        module, _, function = name.partition(".")
        original = getattr(sys.modules[module], function)

        def signalled(*arguments: object, original=original, **options: object):
            signal.raise_signal(signal.SIGINT)
            result = original(*arguments, **options)
            signal.raise_signal(signal.SIGINT)
            return result

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"jfi.utils.files.{name}", signalled)
            with temporary_folder(".jfi-", tmp_path) as folder:
                (folder / "file").touch()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["predict", "--out", "in.csv"], "--out in.csv: --interactions names this file too"),
        (["predict", "--out", "link.csv"], "--out link.csv: --interactions names this file too"),
        (["evaluate", "--out", "./in.csv"], "--out ./in.csv: --interactions names this file too"),
        (["evaluate", "--out", "same.csv", "--scores", "same.csv"], "--scores same.csv: --out names this file too"),
        (["predict", "--out", "log/0.csv", "--history", "log"], "--out log/0.csv: --history names this file too"),
    ],
)
def test_no_result_replaces_a_table_or_another_result(folder, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    Path("log").mkdir()
    for name in ("in.csv", "log/0.csv"):
        write_table(Path(name), [row(i) for i in range(20)])
    Path("link.csv").symlink_to("in.csv")
    before = Path("in.csv").read_bytes()
    code, _, errors = command(capsys, *options, "--run", folder / "run", "--interactions", "in.csv")
    assert (code, errors) == (2, f"error: {message}; name a new one\n")
    assert Path("in.csv").read_bytes() == Path("log/0.csv").read_bytes() == before and not Path("same.csv").exists()


@pytest.mark.parametrize("size", [100, 5000, 35_000])
def test_a_full_disk_names_the_file_in_one_line(run, folder, tmp_path, monkeypatch, capsys, size):
    """The files of the parts, the map of the scores, and the result itself; nothing is left."""
    write_table(tmp_path / "table.csv", [row(i) for i in range(9000 if size > 5000 else 300)])
    arguments = ["--run", folder / "run", "--interactions", tmp_path / "table.csv", "--out", tmp_path / "out.csv"]
    monkeypatch.setattr(coded.blocks, "__defaults__", (100,))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        code, _, errors = command(capsys, "predict", *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 3 and errors.count("\n") == 1 and "File too large" in errors
    assert errors.startswith(f"error: {tmp_path}/"), errors
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_the_memory_of_sorting_is_an_option_of_each_command_that_prepares(folder, tmp_path, capsys):
    table = ["--interactions", folder / "table.csv"]
    scoring, settings = ["--run", folder / "run", *table], ["--data.interactions", folder / "table.csv"]
    for arguments in (
        ["predict", *scoring, "--out", tmp_path / "scores.csv"],
        ["evaluate", *scoring],
        ["train", *settings, "--training.run_dir", tmp_path / "run"],
        ["train", "--resume", folder / "run"],
        ["compare", *settings, "--training.run_dir", tmp_path / "run"],
        ["prepare", *settings, "--out", tmp_path / "prepared"],
    ):
        code, _, errors = command(capsys, *arguments, "--memory", "many")
        assert code == 2 and errors.count("\n") == 1, arguments
        assert errors.endswith("--memory many: not an amount of memory such as 1GB\n"), errors
    assert not [*tmp_path.iterdir()]
    assert command(capsys, "predict", *scoring, "--out", tmp_path / "scores.csv", "--memory", "300MB")[0] == 0


def test_each_table_is_looked_for_once(folder, tmp_path, monkeypatch):
    """A glob on another machine is a listing."""
    looked, find = [], blocks.find_files
    monkeypatch.setattr(blocks, "find_files", lambda *arguments: looked.append(arguments[1]) or find(*arguments))
    commands.run(
        *("predict", "--run", folder / "run", "--interactions", folder / "table.csv"),
        *("--history", folder / "table.csv", "--out", tmp_path / "scores.csv"),
    )
    assert sorted(looked) == ["--history", "--interactions"]
