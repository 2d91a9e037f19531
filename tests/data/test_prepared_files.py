"""The files of a prepared dataset: what a manifest may say, damage that is noticed, what a failure leaves."""

import errno
import json
import re
import signal
import struct
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jfi.baselines.run import run_baselines
from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.prepared import manifest, prepare, store
from jfi.data.prepared.manifest import FORMAT, DatasetManifest, Verification, prepared_config, resolve, verify_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.stages.column_files import ColumnWriter, map_arrow, read_columns
from jfi.data.prepared.stages.sort import MemoryLimitError, sort_batches
from jfi.training import Interrupted, resume, train
from jfi.training.config_parser import parse_config
from jfi.training.distributed.processes import stop_on_signals
from jfi.utils.files import read_sums, sha256_of, write_sums


@pytest.fixture
def config(write) -> DataConfig:
    rng = np.random.default_rng(0)
    rows = [f"{rng.integers(6)},{rng.integers(9)},{rng.integers(2)},{i}" for i in range(80)]
    path = write("rows.csv", "user_id,item_id,clicked,timestamp", *rows)
    return DataConfig(interactions=path, label="clicked", max_history=7, fractions=[0.5, 0.25, 0.25])


@pytest.fixture
def folder(config, tmp_path) -> Path:
    prepare_dataset(config, tmp_path / "prepared")
    return tmp_path / "prepared"


def seal(folder: Path) -> None:
    """Writes the checksums as whoever wrote the files would."""
    write_sums(folder, {name: sha256_of(folder / name) for name in read_sums(folder)})


def manifest_of(**content: object) -> str:
    return json.dumps({"format": FORMAT, **content})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is damaged: expected `object`, got `array`"),
        ('{"format": "other"}', "not a file of this version of jfi"),
        (manifest_of(), "is damaged: object missing required field `data`"),
        (manifest_of(data={"split": "times"}, sizes={}), "invalid enum value 'times' - at `$.data.split`"),
        (manifest_of(data={"max_history": "7"}, sizes={}), "expected `int`, got `str` - at `$.data.max_history`"),
        ("{", "is damaged: "),
        ("[" * 100_000, "is damaged: "),
    ],
)
def test_what_is_no_manifest_is_one_line(folder, text, message):
    (folder / "manifest.json").write_text(text)
    seal(folder)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        DatasetManifest.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "before", "advice"),
    [
        ("manifest.json", FORMAT, "jfi prepared dataset 5", "prepare the tables again"),
        ("schema.json", "jfi data schema 5", "jfi data schema 4", "prepare the dataset, or train the run, again"),
    ],
)
def test_a_dataset_of_an_earlier_version_is_not_said_to_be_damaged(folder, name, kind, before, advice):
    tree = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(tree | {"format": before}))
    sizes = json.loads((folder / "manifest.json").read_text()).get("sizes", {})
    edit_sizes(folder, sizes | {name: (folder / name).stat().st_size} if name in sizes else sizes)
    with pytest.raises(DataError, match=f"{name}: not a file of this version of jfi .*'{kind}'\\); {advice}$"):
        load_dataset(DataConfig(prepared=str(folder)))


def edit_sizes(folder: Path, sizes: dict[str, int]) -> None:
    tree = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(tree | {"sizes": sizes}))
    seal(folder)


def test_an_edited_manifest_is_refused(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"max_history": 7', '"max_history": 8'))
    with pytest.raises(DataError, match=r"manifest\.json is damaged: its SHA-256 is not the one in SHA256SUMS$"):
        load_dataset(DataConfig(prepared=str(folder)))


def test_what_is_no_prepared_dataset_is_named_without_a_file_below_it(folder, tmp_path):
    for path, what in (
        (folder / "schema.json", "it is no folder"),
        (tmp_path, "manifest.json is missing"),
        (tmp_path / "absent", "manifest.json is missing"),
    ):
        with pytest.raises(DataError) as caught:
            DatasetManifest.load(path)
        assert str(caught.value) == f"{path}: not a prepared dataset, {what}"


def test_a_prepared_dataset_that_is_named_as_a_table_is_said_to_be_one(folder):
    with pytest.raises(DataError) as caught:
        load_dataset(DataConfig(interactions=str(folder)))
    assert str(caught.value) == f"{folder}: a prepared dataset, not a table; train on it with data.prepared"


def test_the_tables_of_a_manifest_are_those_of_the_dataset(folder):
    # The run's own names of tables make no difference.
    given = DataConfig(prepared=str(folder), interactions="elsewhere.csv", label="clicked")
    assert resolve(given).interactions == DatasetManifest.load(folder).data.interactions
    assert DataConfig(interactions="s3://bucket/rows").with_absolute_paths().interactions == "s3://bucket/rows"


def test_an_argument_that_is_the_default_counts_and_an_absent_one_is_as_prepared(folder):
    arguments = ["--data.prepared", str(folder)]
    assert parse_config(arguments)[0].data.max_history == 7
    config = parse_config([*arguments, "--data.max_history", "200"])[0].data
    assert resolve(config).max_history == 200
    assert load_dataset(config).schema.max_history == 200
    assert load_dataset(prepared_config(folder)).schema.max_history == 7
    parse_config(["--data.prepared", f"{folder}/absent"])  # training says that it is no dataset


def test_a_malformed_memory_is_refused_before_anything_is_read(config, folder, tmp_path):
    with pytest.raises(DataError, match=r"^--memory many: not an amount of memory such as 1GB$"):
        prepare_dataset(config, tmp_path / "other", "many")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "rows.csv"]


def fail(error: BaseException):
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_a_failed_preparation_keeps_what_another_call_can_use_and_says_so(config, tmp_path, monkeypatch, capsys):
    out, work = tmp_path / "out", tmp_path / ".out.preparing"
    kept = f"{work} keeps what is done; call again to continue, or remove it"
    for error in (OSError(errno.ENOSPC, "no space left", "x.bin"), MemoryLimitError("too little")):
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "order_and_split", fail(error))
            with pytest.raises(type(error)):
                prepare_dataset(config, out)
        assert kept in capsys.readouterr().err.splitlines()
        assert (work / "rows.done").exists()
    monkeypatch.setattr(prepare, "order_and_split", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(config, out)
    assert kept in capsys.readouterr().err
    # A fault of the table comes again until the table changes.
    monkeypatch.setattr(prepare, "order_and_split", fail(DataError("the test split is empty")))
    with pytest.raises(DataError, match=r"^the test split is empty$"):
        prepare_dataset(config, out)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_a_folder_of_somebody_else_is_not_taken_for_an_unfinished_preparation(config, tmp_path):
    own = tmp_path / ".out.preparing"
    own.mkdir()
    (own / "thesis.txt").write_text("my own")
    with pytest.raises(DataError, match="has files, and none of `jfi prepare`; move it away"):
        prepare_dataset(config, tmp_path / "out")
    assert [path.name for path in own.iterdir()] == ["thesis.txt"]


def test_every_bit_that_changes_is_noticed(folder):
    assert verify_dataset(folder) is None
    names = sorted(path.name for path in folder.iterdir() if path.name != "SHA256SUMS")
    assert len(names) == 12
    for name in [*names, "SHA256SUMS"]:
        path, content = folder / name, (folder / name).read_bytes()
        for place in np.random.default_rng(len(name)).integers(0, len(content), 3):
            damaged = bytearray(content)
            damaged[place] ^= 4
            path.write_bytes(damaged)
            for attempt in (lambda: verify_dataset(folder), lambda: load_dataset(prepared_config(folder))):
                with pytest.raises(DataError):
                    attempt()
        path.write_bytes(content)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(DataError, match=r"SHA256SUMS is missing$"):
        load_dataset(prepared_config(folder))


def test_a_file_that_says_that_it_has_more_rows_than_it_has_is_refused(folder):
    """Training would read other memory. Whoever wrote the file wrote its checksum too."""
    path = folder / "train.arrow"
    count = len(map_arrow(path)["event"])
    content = path.read_bytes().replace(struct.pack("<q", count), struct.pack("<q", 10**7))
    assert content.count(struct.pack("<q", 10**7)) == 2
    path.write_bytes(content)
    seal(folder)
    verify_dataset(folder)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: damaged: .*too small"):
        load_dataset(DataConfig(prepared=str(folder)))


def test_columns_of_a_preparation_that_goes_on_are_numbers(tmp_path):
    """A map of objects would take the file's bytes for addresses."""
    writer = ColumnWriter(tmp_path, {"a": np.int64})
    writer.append("a", np.arange(3))
    writer.close()
    index = tmp_path / "columns.json"
    assert read_columns(tmp_path)["a"].tolist() == [0, 1, 2]
    index.write_text(index.read_text().replace("<i8", "|O"))
    with pytest.raises(DataError, match=r"columns.json: damaged: a column has the type '\|O'"):
        read_columns(tmp_path)


@pytest.fixture
def damaged(folder, monkeypatch) -> str:
    """A dataset with a flipped label in a large file; returns the message that says so."""
    monkeypatch.setattr("jfi.data.prepared.manifest.SMALL", 1000)
    path = folder / "events.arrow"
    labels = map_arrow(path)["label"]
    content, bits = bytearray(path.read_bytes()), labels.to_numpy().tobytes()
    assert len(content) > 1000
    content[content.index(bits) + 3] ^= 0x80
    path.write_bytes(content)
    assert (map_arrow(path)["label"].to_numpy() != labels.to_numpy()).sum() <= 1
    return f"{path} is damaged: its SHA-256 is not the one in SHA256SUMS"


def test_large_files_are_verified_in_the_background(folder, damaged, monkeypatch):
    dataset = load_dataset(prepared_config(folder))
    for attempt in (dataset.verification.check, lambda: verify_dataset(folder), lambda: run_baselines(dataset)):
        with pytest.raises(DataError, match=f"^{re.escape(damaged)}$"):
            attempt()
    with pytest.raises(DataError, match=f"^{re.escape(damaged)}$"):
        dataset.verification.check(0)  # it is known by now
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert load_dataset(prepared_config(folder)).verification is None  # the host's first process verifies


def test_nothing_is_stored_of_a_run_on_a_damaged_dataset(folder, damaged, tmp_path):
    options = ["--data.prepared", str(folder), "--model.embedding_dim=4", "--training.epochs=1"]
    config, _ = parse_config([*options, f"--training.run_dir={tmp_path / 'run'}"])
    with pytest.raises(DataError, match=f"^{re.escape(damaged)}$"):
        train(config)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_only_a_full_disk_is_said_to_be_full(tmp_path):
    rows = [pa.RecordBatch.from_pydict({"row": np.arange(i, i + 200_000)}) for i in range(4)]
    with pytest.raises(OSError, match=r"sorting in .*No such file or directory") as caught:
        list(sort_batches(rows, ["row"], "10MB", Path("/proc/no folder")))
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("at", ["step", "save"])
def test_a_signal_saves_a_run_before_its_dataset_is_verified(folder, tmp_path, monkeypatch, at):
    """It comes in a step, or while a checkpoint waits until the files are verified, which takes until then."""
    saved, checked, found, running = threading.Event(), Verification.check, manifest.verify, []

    def verify(*arguments) -> None:
        found(*arguments)
        running.append(not saved.wait(timeout=10))

    def check(self, seconds=None) -> bool:
        if at == "save" and seconds != 0:
            signal.raise_signal(signal.SIGTERM)
        return checked(self, seconds)

    @contextmanager
    def stopping(*arguments: object):
        with stop_on_signals(*arguments) as stop:
            if at == "step":
                signal.raise_signal(signal.SIGTERM)
            yield stop

    monkeypatch.setattr(store, "open_checked", lambda path, sizes: Verification(path, list(sizes)))
    monkeypatch.setattr(manifest, "verify", verify)
    monkeypatch.setattr(Verification, "check", check)
    monkeypatch.setattr("jfi.training.loop.trainer.stop_on_signals", stopping)
    options = ["--data.prepared", str(folder), "--model.embedding_dim=4", "--training.batch_size=8"]
    config, _ = parse_config([*options, f"--training.run_dir={tmp_path / 'run'}", "--training.epochs=1"])
    with pytest.raises(Interrupted):
        train(config)
    saved.set()
    assert not running and len(list((tmp_path / "run").glob("checkpoints/*"))) == 1


def test_a_run_on_a_dataset_that_is_damaged_later_has_no_test_metrics(folder, tmp_path, monkeypatch):
    options = ["--data.prepared", str(folder), "--model.embedding_dim=4", "--training.epochs=1"]
    config, _ = parse_config([*options, f"--training.run_dir={tmp_path / 'run'}"])
    train(config)
    content = bytearray((folder / "events.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "events.arrow").write_bytes(content)
    log = (tmp_path / "run/metrics.jsonl").read_bytes()
    monkeypatch.setattr("jfi.data.prepared.manifest.SMALL", 1000)
    with pytest.raises(DataError, match=r"events\.arrow is damaged"):
        resume(tmp_path / "run", data_changed="accept")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() in log
