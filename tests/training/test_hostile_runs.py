"""Files that somebody else has written, with right checksums: no value in any of them runs code when it is loaded."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from commands import call
from hostile import MODULE, Marker, attack, recording
from own_table import config_of, row, write_table
from worker import without_pictures

import jfi
from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.io.blocks import read_table
from jfi.data.prepared.event_logs import training_log
from jfi.data.prepared.manifest import DatasetManifest
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.schema.semantic_ids import codec_folder, write_sids
from jfi.history_policies import Policy, fit
from jfi.semantic_ids import Codec, DiscretePCA
from jfi.semantic_ids.tensor_file import read_tensors, write_tensors
from jfi.training import resume, train
from jfi.training.config_parser import load_config
from jfi.training.loop.trainer import Trainer
from jfi.training.model_config import PretrainedConfig
from jfi.training.run.run_data import learnt_files, load_schema
from jfi.training.run.run_folder import RunFolder
from jfi.utils.files import SUMS, read_sums, sha256_of, write_sums

#: Random places of a file, and with the slow tests many or all of them.
FEW = [pytest.param(5, id="few"), pytest.param(None, id="all", marks=pytest.mark.slow)]
MANY = [pytest.param(5, id="few"), pytest.param(40, id="many", marks=pytest.mark.slow)]
LIMIT = "the training would begin here"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A table, its semantic IDs, a policy, a prepared dataset, pretrained rows, and a run of all but the third."""
    folder = tmp_path_factory.mktemp("hostile")
    write_table(folder / "table.csv", [row(i) for i in range(300)])
    (folder / "users.csv").write_text("\n".join(["user_id", *(f"u{i}" for i in range(6))]))
    codec = DiscretePCA(num_digits=6).fit(torch.randn(11, 4))
    codec_folder(folder / "sids.parquet").mkdir()
    codec.save(codec_folder(folder / "sids.parquet") / "codec.safetensors")
    write_sids(
        folder / "sids.parquet",
        "item_id",
        pa.array([f"i{i}" for i in range(11)]),
        codec.encode(torch.randn(11, 4)),
        codec,
    )
    vectors = pa.array(np.eye(3, 8, dtype=np.float32).tolist())
    pq.write_table(pa.table({"id": ["g0", "g1", "g2"], "vector": vectors}), folder / "genres.parquet")
    config = config_of(folder / "table.csv", folder / "run", epochs=1)
    data = dataclasses.replace(config.data, semantic_ids=str(folder / "sids.parquet"), dwell="seconds", max_history=12)
    fit(*training_log(data), remove=0.3, newest=2).save(folder / "policy.json")
    prepare_dataset(data, folder / "prepared")
    data = dataclasses.replace(data, policy=str(folder / "policy.json"))
    pretrained = {"genre": PretrainedConfig(str(folder / "genres.parquet"))}
    model = dataclasses.replace(config.model, pretrained=pretrained)
    with without_pictures():
        train(dataclasses.replace(config, data=data, model=model))
    return folder


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Marker:
    (tmp_path / "marker").mkdir()
    return Marker(tmp_path / "marker", monkeypatch)


@pytest.fixture
def run(made, tmp_path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def commands(made, run, monkeypatch) -> list[Callable]:
    """All that load a run: prediction (evaluation and export load it alike), resuming, warm start and preparation.

    A training ends where its first step would be, after its logger is made.
    """

    def stop(*_: object) -> None:
        raise RuntimeError(LIMIT)

    monkeypatch.setattr(Trainer, "_evaluate", stop)
    monkeypatch.setattr(Trainer, "_train", stop)
    monkeypatch.setattr(Trainer, "load_best", stop)
    own = load_config(made / "run/config.yaml")

    def predict() -> None:
        jfi.load_run(run).predict(str(made / "table.csv"))

    def go_on() -> None:
        resume(run, data_changed="accept", config_changed="accept")

    def start_warm() -> None:
        train(own.with_training(run_dir=str(run.parent / "warm"), warm_start=str(run), rows_after=None))

    def prepare() -> None:
        load_config(run / "config.yaml")
        load_schema(RunFolder(run))

    def cleared(command: Callable) -> Callable:
        def call() -> None:
            shutil.rmtree(run.parent / "warm", ignore_errors=True)
            command()

        return call

    return [cleared(one) for one in (predict, go_on, start_warm, prepare)]


def seal(run: Path) -> None:
    """Writes the checksums of a run as whoever wrote its files would."""
    data = run / "data"
    write_sums(data, {name: sha256_of(data / name) for name in read_sums(data)})
    for folder in (run / "checkpoints").iterdir():
        path = folder / "progress.json"
        tree = json.loads(path.read_text())
        if isinstance(tree, dict) and isinstance(tree.get("files"), dict):
            path.write_text(json.dumps(tree | {"files": learnt_files(RunFolder(run))}))
        write_sums(folder, {file.name: sha256_of(file) for file in folder.iterdir() if file.name != SUMS})


def test_the_commands_load_a_run_that_nobody_has_changed(run, commands):
    seal(run)
    predict, go_on, start_warm, prepare = commands
    predict()
    prepare()
    for command in (go_on, start_warm):
        with pytest.raises(RuntimeError, match=LIMIT):
            command()


def write_config(run: Path, tree: dict) -> None:
    """Writes the config, and the copies of it in the checkpoints, by which a changed one is noticed."""
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    for path in run.glob("checkpoints/*/progress.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"config": tree}))
    seal(run)


@pytest.mark.parametrize("few", MANY)
def test_no_value_of_config_yaml_runs_code(run, record_property, marker, commands, few):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    count = attack(marker, tree, lambda tree: write_config(run, tree), commands, few)
    record_property("cases", count)
    assert count >= 5


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("training", {"logger": "subprocess:Popen"}),
        ("training", {"logger": f"{MODULE}:Marker"}),
        ("training", {"logger": f"{MODULE}.Marker"}),
        ("model", {"pretrained": {"genre": f"{MODULE}.Marker"}}),
        ("model", {"pretrained": {"genre": {"class_path": f"{MODULE}.Marker"}}}),
        ("model", {"pretrained": {"class_path": f"{MODULE}.Marker", "init_args": {}}}),
        ("data", {"labels": [{"class_path": f"{MODULE}.Marker"}]}),
        ("data", {"header": f"{MODULE}.Marker"}),
    ],
)
def test_a_config_that_names_code_is_refused_by_every_command(run, marker, commands, section, changes):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree[section] |= json.loads(json.dumps(changes).replace("MARKER", str(marker.path)))
    write_config(run, tree)
    for command in commands:
        with pytest.raises(jfi.training.ConfigError):
            command()
        marker.check(changes)


def reference(folder: Path, marker: Marker) -> str:
    """The URL of a file system whose files are what a template says; some versions of fsspec run what it has."""
    run = "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}".replace("MARKER", str(marker.path))
    (folder / "refs.json").write_text(json.dumps({"version": 1, "templates": {"u": run}, "refs": {"x.csv": ["{{u}}"]}}))
    return f"reference://x.csv::{folder / 'refs.json'}"


@pytest.mark.parametrize("url", ["reference", "s3://bucket/x.csv"])
def test_a_url_of_a_file_is_opened_only_if_the_command_line_names_it_too(made, run, marker, capfd, url):
    url = reference(run, marker) if url == "reference" else url
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"] |= {"interactions": [url], "items": url, "users": url, "policy": None}
    tree["training"] |= {"run_dir": str(run.parent / "new")}
    write_config(run, tree)
    out, refused = run.parent / "out.csv", "of a config file or a run is a URL, " + url
    # What the command line names is read, and then the next URL is refused.
    rows, items = f"--interactions {made / 'table.csv'}", f"--data.items {run.parent / 'items.csv'}"
    (run.parent / "items.csv").write_text("item_id,genre\ni0,g0\n")
    cases = [
        (f"predict --run {run} --out {out} {rows}", f"--users {refused}"),
        (f"evaluate --run {run} {rows} --users {made / 'table.csv'}", f"--items {refused}"),
        (f"state load --run {run} --state {run.parent / 'state'}", f"data.items {refused}"),
        (f"state load --run {run} --state {run.parent / 'state'} {items}", f"data.interactions {refused}"),
        (f"state load --run {run} --state {run.parent / 'state'} {rows}", f"add --data.items {url}"),
        (f"prepare --run {run} --out {run.parent / 'out'}", f"data.interactions {refused}"),
        (f"train --resume {run}", f"data.users {refused}"),
        (f"train --resume {run} --data.users {made / 'users.csv'}", f"add --data.items {url}"),
        (f"train --config {run / 'config.yaml'}", f"add --data.users {url}"),
        (f"compare --config {run / 'config.yaml'}", f"add --data.users {url}"),
        (f"policy --config {run / 'config.yaml'} --out {run.parent / 'new.json'}", f"add --data.interactions {url}"),
    ]
    for arguments, part in cases:
        with recording() as done:
            code = call(*arguments.split())
        text = capfd.readouterr().err
        assert (code, done) == (2, []) and part in text, (arguments, text, done)
        marker.check(arguments)


def test_pretrained_rows_come_from_no_url_of_a_config(run, commands):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    path = run / "config.yaml"
    shutil.rmtree(run / "checkpoints")  # as a run that was killed at its start
    tree["model"]["pretrained"] = {"genre": {"path": "s3://bucket/x.parquet"}}
    path.write_text(yaml.safe_dump(tree))
    with recording() as done, pytest.raises(jfi.training.ConfigError, match="no such file"):
        resume(run, config_changed="accept")
    assert done == []


def test_urls_that_the_command_line_names_are_read(made, run, capfd):
    fsspec.filesystem("memory").pipe("/named.csv", (made / "table.csv").read_bytes())
    tree, named = yaml.safe_load((run / "config.yaml").read_text()), "[memory://named.csv]"
    tree["data"]["interactions"] = ["memory://named.csv"]
    write_config(run, tree)
    assert call("train", "--resume", str(run), "--data.interactions", named) == 0, capfd.readouterr()
    tree["data"]["policy"] = None
    (config := run.parent / "config.yaml").write_text(yaml.safe_dump(tree))
    out = run.parent / "prepared"
    assert call("prepare", "--config", str(config), "--out", str(out), "--data.interactions", named) == 0
    # A dataset that was prepared of them keeps their names, which are as those of a config.
    with pytest.raises(DataError, match=r"add --data\.interactions memory://named\.csv"):
        load_dataset(dataclasses.replace(DatasetManifest.load(out).data, prepared=None))


@pytest.mark.parametrize("protocol", ["reference", "filecache", "zip", "github", "S3", "s3 ", ""])
def test_only_known_protocols_are_read(protocol):
    for url in (f"{protocol}://x.csv", f"file://x.csv::{protocol}://y.zip"):
        with recording() as done, pytest.raises(DataError, match=r"must be one of file, |chained by ::"):
            read_table(url, ["user_id"])
        assert done == []


@pytest.mark.parametrize("tag", ["python/object/apply", "python/object/new", "python/name", "python/module"])
def test_a_tag_of_yaml_makes_no_object(run, marker, commands, tag):
    path, name = run / "config.yaml", MODULE if tag.endswith("module") else f"{MODULE}.Marker"
    value = f"!!{tag}:{name} " + ("[]" if "object" in tag else "''")
    path.write_text(path.read_text().replace("logger: null", f"logger: {value}"))
    assert value in path.read_text()
    for command in commands:
        with pytest.raises(jfi.training.ConfigError, match="not YAML"):
            command()
        marker.check(tag)


def plain(path: Path) -> tuple[dict, Callable[[dict], object]]:
    return json.loads(path.read_text()), lambda tree: path.write_text(json.dumps(tree))


def sums(path: Path) -> tuple[dict, Callable[[dict], object]]:
    return read_sums(path.parent, path.name), lambda tree: write_sums(path.parent, tree, path.name)


def lines(path: Path) -> tuple[list, Callable[[list], object]]:
    tree = [json.loads(line) for line in path.read_text().splitlines()]
    return tree, lambda tree: path.write_text("".join(json.dumps(one) + "\n" for one in tree))


def codec_of(path: Path) -> tuple[dict, Callable[[dict], object]]:
    """The texts of the codec's file; the header is built of them."""
    tensors, description = read_tensors(path, FileNotFoundError)
    return description, lambda tree: write_tensors(path, tensors, tree)


FILES = {
    "data/schema.json": plain,
    "data/fingerprint.sha256": sums,
    "data/policy.json": plain,
    "data/codec.safetensors": codec_of,
    "checkpoints/*/progress.json": plain,
    "checkpoints/*/tensors.json": plain,
    "metrics.jsonl": lines,
    "summary.json": plain,
    "versions.json": plain,
}


@pytest.mark.parametrize("few", MANY)
@pytest.mark.parametrize("name", FILES)
def test_no_value_of_a_file_of_a_run_runs_code(run, record_property, marker, commands, name, few):
    path = max(run.glob(name))
    tree, write = FILES[name](path)

    def write_and_seal(tree: dict) -> None:
        write(tree)
        seal(run)

    count = attack(marker, tree, write_and_seal, commands, few)
    record_property("cases", count)
    assert count >= 5


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize(
    "name", ["manifest.json", "schema.json", "fingerprint.sha256", "summary.json", "codec.safetensors"]
)
def test_no_value_of_a_prepared_dataset_runs_code(made, tmp_path, record_property, marker, name, few):
    folder = tmp_path / "prepared"
    shutil.copytree(made / "prepared", folder)
    kind = {"fingerprint.sha256": sums, "codec.safetensors": codec_of}.get(name, plain)
    tree, write = kind(folder / name)

    def seal_prepared(tree: dict) -> None:
        write(tree)
        sizes = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.name not in (SUMS, "manifest.json")
        }
        if name != "manifest.json":
            manifest, write_manifest = plain(folder / "manifest.json")
            write_manifest(manifest | {"sizes": sizes})
        write_sums(folder, {path: sha256_of(folder / path) for path in (*sizes, "manifest.json")})

    seal_prepared(tree)
    load_dataset(DataConfig(prepared=str(folder)))
    count = attack(marker, tree, seal_prepared, [lambda: load_dataset(DataConfig(prepared=str(folder)))], few)
    record_property("cases", count)
    assert count >= 5


@pytest.mark.parametrize("few", FEW)
def test_no_value_of_a_codec_or_a_policy_runs_code(made, tmp_path, record_property, marker, few):
    for name, kind, load in (
        ("sids.codec/codec.safetensors", codec_of, Codec.load),
        ("policy.json", plain, Policy.load),
    ):
        path = tmp_path / Path(name).name
        shutil.copy(made / name, path)
        tree, write = kind(path)
        load(path)
        count = attack(marker, tree, write, [lambda path=path, load=load: load(path)], few)
        record_property("cases", count)
        assert count >= 5
