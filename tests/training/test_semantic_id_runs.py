"""A table, its semantic IDs by the command, a run, its scores by predict and by serving; and what each step refuses."""

import dataclasses
import json
import shutil
from contextlib import closing
from pathlib import Path

import commands
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from data_configs import lists_of, replace_data
from own_table import config_of, row, write_table
from worker import without_pictures

import jfi
from jfi import SemanticIDEmbedding
from jfi.cli.audit import audit_of
from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.config_checks import check_data_config
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.store import FINGERPRINT
from jfi.data.schema.semantic_ids import codec_folder, write_sids
from jfi.semantic_ids import UNKNOWN_SID, Codec, DiscretePCA
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export, inputs_of, tables_of
from jfi.serving.model import ScoringModel
from jfi.serving.request_log import Line, digests
from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Limits, Served
from jfi.serving.scorer import Scorer, batch_inputs
from jfi.serving.tables import FloatTables
from jfi.state.load import fill
from jfi.state.state import UserState, read_layout
from jfi.state.stores import open_store
from jfi.training import Config, ConfigError, resume, train
from jfi.training.config_parser import load_config, save_config
from jfi.training.model.build_model import build_model
from jfi.training.run.recorder import read_metrics

ROOT = Path(__file__).parents[2]
WORDS = ["red pen", "blue pen", "paper clip", "green folder", "desk lamp"]


@pytest.fixture(autouse=True)
def _no_pictures():
    with without_pictures():
        yield


def items(folder: Path, count: int) -> None:
    """A table of items: the last has no text, and the command knows one that the interactions lack."""
    titles = [f"{WORDS[i % 5]} number {i % 3}" for i in range(count - 1)] + [""]
    pq.write_table(pa.table({"item_id": [f"i{i}" for i in range(count)], "title": titles}), folder / "items.parquet")


def make_ids(folder: Path, out: str = "sids.parquet", *more: str) -> None:
    arguments = ["--items", folder / "items.parquet", "--item", "item_id", "--text", "title", "--out", folder / out]
    assert commands.call("semantic-ids", *arguments, *(more or DPCA)) == 0


DPCA = ("--codec", "dpca", "--digits", "8")


def config(folder: Path, run: str | Path, model: dict | None = None, **training: object) -> Config:
    made = config_of(folder / "table.csv", folder / run, **training)
    return dataclasses.replace(
        made,
        data=dataclasses.replace(made.data, semantic_ids=str(folder / "sids.parquet"), max_history=12),
        model=dataclasses.replace(made.model, **(model or {})),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The table, the IDs of i0 to i9, of which i9 has no content, and a finished run; i10 has no ID at all."""
    path = tmp_path_factory.mktemp("semantic")
    write_table(path / "table.csv", [row(i) for i in range(300)])
    items(path, 10)
    make_ids(path)
    with without_pictures():
        train(config(path, "run"))
    return path


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    shutil.copytree(folder, tmp_path / "all")
    return tmp_path / "all"


def table(rows: list[list]) -> pa.Table:
    names = ["user_id", "item_id", "timestamp", "clicked", "genre", "price", "tags", "seconds"]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return pa.table({name: pa.array(map(str, values)) for name, values in columns.items()})


def rebuild_ids(folder: Path, digits: str = "9", seed: str = "0") -> None:
    """The same file with IDs of another codec."""
    shutil.rmtree(folder / "sids.codec")
    (folder / "sids.parquet").unlink()
    make_ids(folder, "sids.parquet", "--codec", "dpca", "--digits", digits, "--seed", seed)


# The data


def test_keys_of_a_batch(folder):
    dataset = load_dataset(config(folder, "x").data)
    known = dict(
        zip(*(pq.read_table(folder / "sids.parquet")[name].to_pylist() for name in ("item_id", "sid")), strict=True)
    )
    assert known["i9"] == UNKNOWN_SID and "i10" not in known
    values = dataset.schema.encodings.vocabularies["item_id"].values
    for batching in ("sample", "user"):
        batch = dataset.batches("train", 64, shuffle=True, batching=batching)[0].sparse_features.to_dict()
        for key in ("item", "history"):
            ids = batch["item_id" if key == "item" else "history_item_id"]
            sids = batch[f"{key}_sid"]
            assert torch.equal(ids.lengths(), sids.lengths())
            wanted = [known.get(values[i - 1], UNKNOWN_SID) for i in ids.values().tolist()]
            assert sids.values().tolist() == wanted and UNKNOWN_SID in wanted
    assert dataset.summary.missing["sid"] == pytest.approx(2 / 11)
    assert dataset.schema.codec.fingerprint == Codec.load(folder / "sids.codec/codec.safetensors").fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "sids.parquet").unlink(), r"data.semantic_ids: .*sids.parquet: no such file"),
        (
            lambda f: (shutil.rmtree(f / "sids.codec"), (f / "sids.parquet").unlink()),
            r"data.semantic_ids: .*sids.parquet: no such file",
        ),
        (lambda f: (f / "sids.codec/codec.safetensors").unlink(), r"data.semantic_ids: .*codec.safetensors.*no such"),
        (
            lambda f: pq.write_table(
                pq.read_table(f / "sids.parquet").rename_columns(["item", "sid"]), f / "sids.parquet"
            ),
            "data.semantic_ids: .*sids.parquet: no column 'item_id'; did you mean 'item'",
        ),
        (
            lambda f: pq.write_table(
                pq.read_table(f / "sids.parquet").rename_columns(["item_id", "s"]), f / "sids.parquet"
            ),
            "data.semantic_ids: .*sids.parquet: no column 'sid'",
        ),
        (
            lambda f: pq.write_table(pq.read_table(f / "sids.parquet").replace_schema_metadata({}), f / "sids.parquet"),
            "data.semantic_ids: .*: no fingerprint of a codec, so it is no file of semantic IDs",
        ),
        (
            lambda f: other_codec(f),
            "data.semantic_ids: .*: its IDs are of the codec .{12}, but the codec here is .{12}",
        ),
        (lambda f: out_of_range(f), r"data.semantic_ids: .*: sids\[0\] is 999999, which is no ID of 8 ternary digits"),
        (lambda f: other_items(f), "data.semantic_ids: .*sids.parquet has none of the items of the interactions"),
    ],
)
def test_wrong_files_are_refused_by_name(copied, change, message):
    change(copied)
    with pytest.raises(DataError, match=message) as fault:
        load_dataset(config(copied, "x").data)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("field", ["item_dense", "item_categorical", "event_categorical", "user_categorical"])
def test_a_column_with_the_name_of_the_ids_is_refused(folder, field):
    data = config(folder, "x").data
    data = replace_data(data, **{field: [*lists_of(data)[field], "sid"]})
    with pytest.raises(DataError, match=r"data.features lists 'sid', which is the column of data.semantic_ids; rename"):
        check_data_config(data)
    check_data_config(dataclasses.replace(data, semantic_ids=None))


def other_codec(folder: Path) -> None:
    DiscretePCA(8).fit(torch.randn(20, 3)).save(codec_folder(folder / "sids.parquet") / "codec.safetensors")


def out_of_range(folder: Path) -> None:
    codec = Codec.load(folder / "sids.codec/codec.safetensors")
    write_sids(folder / "sids.parquet", "item_id", pa.array(["i1"]), torch.tensor([999_999]), codec)


def other_items(folder: Path) -> None:
    codec = Codec.load(folder / "sids.codec/codec.safetensors")
    write_sids(folder / "sids.parquet", "item_id", pa.array(["x1"]), torch.tensor([0]), codec)


def test_a_prepared_dataset_has_the_same_batches(folder, tmp_path):
    config_of_run = config(folder, tmp_path / "run")
    data, prepared = config_of_run.data, tmp_path / "prepared"
    prepare_dataset(data, prepared, show=False)
    choices = {"max_history": data.max_history}
    here, there = load_dataset(data), load_dataset(DataConfig(prepared=str(prepared), **choices))
    assert there.schema.codec.fingerprint == here.schema.codec.fingerprint
    for split in ("train", "test"):
        for one, other in zip(here.batches(split, 40), there.batches(split, 40), strict=True):
            assert one.sparse_features.keys() == other.sparse_features.keys()
            assert torch.equal(one.sparse_features.values(), other.sparse_features.values())


# Training


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"semantic_ids": "decode"},
        {"semantic_ids": "decode", "pooling": "mean", "bias": None},
        {"item_id": False, "bias": ["position", "history_age"]},
        {"pooling": "none", "bias": None},
    ],
    ids=str,
)
def test_batches_by_user_give_the_logits_of_batches_by_sample(folder, model):
    made = config(folder, "x", model)
    dataset = load_dataset(made.data)
    trained = build_model(made.model, made.encoder, dataset.schema).eval()
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    found = {}
    for batching in ("sample", "user"):
        for batch in dataset.batches("train", 50, batching=batching):
            with torch.no_grad():
                logits = trained(batch.dense_features, batch.sparse_features, batch.timelines).squeeze(-1)
            found.setdefault(batching, {}).update(zip(batch.samples.tolist(), logits.tolist(), strict=True))
    samples = sorted(found["sample"])
    one, other = (np.array([found[name][sample] for sample in samples]) for name in ("sample", "user"))
    assert np.std(one) > 0.05
    np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


def test_a_run_reads_the_content_itself(folder, tmp_path):
    size = sum(bool(title) for title in pq.read_table(folder / "items.parquet")["title"].to_pylist())
    make_ids(folder, "raw.parquet", "--codec", "rq", "--levels", "1", "--codebook-size", str(size))
    made = config(folder, tmp_path / "run", {"semantic_ids": "decode"}, epochs=1)
    train(dataclasses.replace(made, data=dataclasses.replace(made.data, semantic_ids=str(folder / "raw.parquet"))))
    assert [one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in one]
    assert Codec.load(tmp_path / "run" / "data" / "codec.safetensors").layout.codebook_size == size


def test_a_run_on_semantic_ids_alone_learns_from_their_digits(folder, tmp_path, monkeypatch):
    """Events that are IDs and nothing else: the losses of attention to digits are those of attention to embeddings."""
    made, losses = [], {}
    embed = SemanticIDEmbedding.embed
    monkeypatch.setattr(SemanticIDEmbedding, "embed", lambda own, sids: made.append(len(sids)) or embed(own, sids))
    for name in ("digits", "embeddings"):
        alone = config(folder, tmp_path / name, {"item_id": False, "bias": "position"})
        alone.data = replace_data(
            alone.data, item_categorical=[], item_dense=[], event_categorical=[], event_dense=[], separators={}
        )
        if name == "embeddings":  # as a tracer gets them
            assert max(made) <= 32  # the targets of a batch: no history
            monkeypatch.setattr("jfi.modules.semantic_id_embedding.is_traced", lambda: True)
        train(alone)
        losses[name] = [one["loss"] for one in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in one]
    assert max(made) > 32 and len(losses["digits"]) > 2
    np.testing.assert_allclose(losses["digits"], losses["embeddings"], rtol=1e-5)


def test_a_run_goes_on_where_it_was_killed(folder, tmp_path):
    whole, parts = (config(folder, tmp_path / name, {"semantic_ids": "decode"}) for name in ("whole", "parts"))
    train(whole)
    train(parts.with_training(epochs=1))
    save_config(parts, tmp_path / "parts/config.yaml")
    resume(tmp_path / "parts", config_changed="accept")
    one, other = (jfi.load_run(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resume_refuses_ids_of_another_codec(copied):
    rebuild_ids(copied)
    run = load_config(copied / "run/config.yaml")
    save_config(dataclasses.replace(run, data=config(copied, "run").data), copied / "run/config.yaml")
    message = r"--resume .*: data.semantic_ids: the IDs of .*sids.parquet are of the codec .*, those of the run are"
    with pytest.raises(DataError, match=message):
        resume(copied / "run")
    data = dataclasses.replace(config(copied, "run").data, semantic_ids=None)
    save_config(dataclasses.replace(run, data=data), copied / "run/config.yaml")
    with pytest.raises(DataError, match=r"data.semantic_ids: got None, but the run was started with semantic IDs"):
        resume(copied / "run")


def test_resume_notices_other_ids_of_the_same_codec(copied):
    codec = Codec.load(copied / "sids.codec/codec.safetensors")
    known = pq.read_table(copied / "sids.parquet")
    sids = torch.tensor(known["sid"].to_pylist()).roll(1)
    write_sids(copied / "sids.parquet", "item_id", known["item_id"].combine_chunks(), sids, codec)
    run = load_config(copied / "run/config.yaml")
    save_config(dataclasses.replace(run, data=config(copied, "run").data), copied / "run/config.yaml")
    with pytest.raises(ConfigError, match=r"has changed; restore it"):
        resume(copied / "run")


def test_a_run_whose_codec_was_replaced_is_refused(copied):
    """Its schema and its data agree, but the parameters are of the codec before."""
    rebuild_ids(copied, "8", seed="1")
    schema = load_dataset(config(copied, "run").data).schema
    shutil.copy(copied / f"run/data/{FINGERPRINT}", copied)
    shutil.rmtree(copied / "run/data")
    schema.save(copied / "run/data")
    shutil.copy(copied / FINGERPRINT, copied / "run/data")
    run = load_config(copied / "run/config.yaml")
    save_config(dataclasses.replace(run, data=config(copied, "run").data), copied / "run/config.yaml")
    for command in (jfi.load_run, lambda path: resume(path, data_changed="accept")):
        with pytest.raises(ConfigError, match=f"^{copied}/run/data/codec.safetensors has changed since the checkpoint"):
            command(copied / "run")


def test_a_warm_start_takes_the_same_codec(folder, copied):
    made = config(folder, copied / "warm", epochs=1, warm_start=str(folder / "run"), rows_after=None)
    train(made)
    old, new = (jfi.load_run(path).model.state_dict() for path in (folder / "run", copied / "warm"))
    assert torch.equal(old["semantic_ids.fingerprint"], new["semantic_ids.fingerprint"])
    rebuild_ids(copied, "9")
    with pytest.raises(
        ConfigError, match=r"training.warm_start: the semantic IDs of this run are of the codec .*, those"
    ):
        train(config(copied, "warm again", epochs=1, warm_start=str(folder / "run"), rows_after=None))


def test_settings_that_do_not_go_together(folder, copied):
    with pytest.raises(ConfigError, match=r"model.semantic_ids: got 'digit', must be digits or decode"):
        config(folder, "x", {"semantic_ids": "digit"})
    made = config(folder, "x")
    with pytest.raises(
        ConfigError, match=r"model.semantic_ids: got 'decode', must be digits without data.semantic_ids"
    ):
        plain = dataclasses.replace(made.data, semantic_ids=None)
        dataclasses.replace(made, data=plain, model=dataclasses.replace(made.model, semantic_ids="decode"))
    with pytest.raises(
        ConfigError, match=r"model.item_id: got False, must be true with 'item_id_x_tags' of data.features, a cross"
    ):
        crossed = replace_data(made.data, event_crosses=[["item_id", "tags"]])
        dataclasses.replace(made, data=crossed, model=dataclasses.replace(made.model, item_id=False))
    rebuild_ids_by_codes(copied)
    made = config(copied, "x")
    with pytest.raises(ConfigError, match=r"model.semantic_ids: read must be 'decode' for a codec of 2 codes below 4"):
        build_model(made.model, made.encoder, load_dataset(made.data).schema)


def rebuild_ids_by_codes(folder: Path) -> None:
    shutil.rmtree(folder / "sids.codec")
    (folder / "sids.parquet").unlink()
    make_ids(folder, "sids.parquet", "--codec", "rq", "--levels", "2", "--codebook-size", "4")


# Predict


def test_predict_gives_the_logits_of_the_trainer(folder):
    run = jfi.load_run(folder / "run")
    wanted = {}
    dataset = load_dataset(run.config.data, run.schema)
    rows = [row(i) for i in range(300)]  # times are unique, and the splits are in their order
    logits = []
    for split in ("train", "validation", "test"):
        for batch in dataset.batches(split, 32):
            with torch.no_grad():
                logits += run.model(batch.dense_features, batch.sparse_features).squeeze(-1).tolist()
    wanted = np.array(logits)
    found = run.predict(table(rows)).column("score").to_numpy()
    assert np.std(wanted) > 0.01
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_predict_reads_the_ids_that_it_is_given(folder, copied, caplog):
    run = jfi.load_run(folder / "run")
    with pytest.raises(DataError, match=r"semantic_ids: the IDs of .* are of the codec .*, those of the run are"):
        rebuild_ids(copied)
        run.predict(table([row(5)]), semantic_ids=copied / "sids.parquet")
    # A grown catalogue: i10 has an ID now, and other scores with it; rows of other items keep theirs.
    grown = copied / "grown"
    grown.mkdir()
    shutil.copytree(folder / "sids.codec", grown / "sids.codec")
    shutil.copy(folder / "sids.parquet", grown / "sids.parquet")
    items(grown, 13)
    make_ids(grown)
    rows = [[*row(i)[:1], item, *row(i)[2:]] for i, item in enumerate(("i10", "i3", "i12"))]
    before = run.predict(table(rows)).column("score").to_numpy()
    assert "2 rows to score have an item without a semantic ID in" in caplog.text
    after = run.predict(table(rows), semantic_ids=grown / "sids.parquet").column("score").to_numpy()
    assert before[0] != after[0] and before[1] == after[1] and before[2] == after[2]  # i12 has no content


def test_a_run_without_semantic_ids_takes_none(folder, tmp_path):
    made = config(folder, tmp_path / "run")
    train(dataclasses.replace(made, data=dataclasses.replace(made.data, semantic_ids=None)))
    run = jfi.load_run(tmp_path / "run")
    with pytest.raises(DataError, match=r"semantic_ids: got '.*sids.parquet', but the run has no semantic IDs"):
        run.predict(table([row(5)]), semantic_ids=folder / "sids.parquet")


def test_an_item_that_training_never_saw_is_scored_by_its_content(folder, tmp_path):
    """Without item ids a new item with an old one's content gets the old one's score, and others other ones."""
    for name in ("table.csv", "items.parquet", "sids.parquet"):
        shutil.copy(folder / name, tmp_path / name)
    shutil.copytree(folder / "sids.codec", tmp_path / "sids.codec")
    model = {"item_id": False, "bias": None}
    made = config(tmp_path, "run", model, epochs=1)
    made.data = replace_data(made.data, item_categorical=[], item_dense=[])
    train(made)
    run = jfi.load_run(tmp_path / "run")
    assert not any("item_id" in name for name in run.model.state_dict())
    titles = pq.read_table(tmp_path / "items.parquet")["title"].to_pylist()
    more = pa.table({"item_id": ["new a", "new b"], "title": [titles[3], "paper pen number 1 lamp"]})
    pq.write_table(pa.concat_tables([pq.read_table(tmp_path / "items.parquet"), more]), tmp_path / "items.parquet")
    make_ids(tmp_path)
    rows = [["u1", item, 90_000, 1, "g1", 1, "a", 5] for item in ("i3", "new a", "new b", "i9", "never heard of")]
    history = table([row(i) for i in range(300)])
    scores = [run.predict(table([one]), history=history).column("score")[0].as_py() for one in rows]
    assert scores[0] == scores[1] != scores[2]
    assert scores[3] == scores[4] not in scores[:3]


# Serving


@pytest.mark.parametrize(
    "model", [{}, {"item_id": False, "semantic_ids": "decode"}, {"pooling": "none", "bias": None}], ids=str
)
def test_requests_give_the_scores_of_predict(folder, tmp_path, model):
    run = jfi.load_run(folder / "run")
    if model:
        train(config(folder, tmp_path / "run", model, epochs=1))
        run = jfi.load_run(tmp_path / "run")
    known = dict(
        zip(*(pq.read_table(folder / "sids.parquet")[name].to_pylist() for name in ("item_id", "sid")), strict=True)
    )
    reads_history, reads_item = run.config.model.pooling != "none", run.config.model.item_id
    schema = schema_of(run.config.data, run.schema, reads_history, reads_history, reads_item)
    read = RequestReader(schema, Limits(10, 12))
    rows = [row(i) for i in range(300)]

    def item(one: list, *more: str) -> dict:
        own = {"item_id": one[1], "genre": one[4], "sid": known.get(one[1]), "price": one[5]}
        own |= {"tags": one[6].split(";"), "seconds": one[7]}
        return {name: own[name] for name in ("genre", "sid", *(["item_id"] if reads_item else []), *more)}

    requests, chosen = [], []
    for number, now in enumerate(rows):
        before = [one for one in rows[:number] if one[0] == now[0]]
        if not before:
            continue
        chosen.append(number)
        request = {
            "user": {"user_id": now[0]},
            "candidates": [item(now, "price")],
            "codec": run.schema.codec.fingerprint,
        }
        if reads_history:
            request["history"] = [item(one, "tags", "seconds") | {"age": now[2] - one[2]} for one in before]
        requests.append(request)
    said = read.json_schema()["$defs"]["Request"]["properties"]["codec"]
    assert said["const"] == run.schema.codec.fingerprint
    assert read.fields["candidates"]["sid"] == "sid"
    scoring = ScoringModel(run.model, [key for one in schema.user for key in one.keys])
    inputs = inputs_of(scoring)
    assert inputs.semantic == (["history_sid", "item_sid"] if reads_history else ["item_sid"])
    tables = FloatTables(*tables_of(run.model, inputs.keys))
    arguments = batch_inputs(
        [read(json.loads(json.dumps(one))) for one in requests], inputs, tables, torch.device("cpu")
    )
    with torch.no_grad():
        found = scoring(*arguments).numpy()
    wanted = run.predict(table(rows)).column("score").to_numpy()[chosen]
    assert len(wanted) > 250 and np.std(wanted) > 0.01
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    exported = torch.export.export(scoring, arguments)
    torch.testing.assert_close(exported.module()(*arguments), torch.from_numpy(found))


def test_a_request_by_ids_has_the_semantic_ids_of_the_state(folder, tmp_path):
    """So have the events of the state; a request that gives the codec's IDs itself reads the same."""
    run = jfi.load_run(folder / "run")
    schema = schema_of(run.config.data, run.schema, True, True)
    with closing(open_store(str(tmp_path), create=True)) as store:
        fill(store, schema, run.config.data, run.schema, None)
        reader = RequestReader(schema, Limits(20, 12), state=read_layout(store).info)
        state = UserState(store, reader)
        rows = {one[1]: one for one in map(row, range(300))}
        known = dict(
            zip(*(pq.read_table(folder / "sids.parquet")[name].to_pylist() for name in ("item_id", "sid")), strict=True)
        )
        by_id = {"user": "u1", "candidates": [*rows], "context": {"price": 1}, "time": 20_000}
        own = [{"item_id": item, "genre": rows[item][4], "sid": known.get(item)} for item in rows]
        carried = by_id | {"user": {"user_id": "u1"}, "candidates": own, "codec": run.schema.codec.fingerprint}
        (one,), (other,) = state.fill([reader(by_id)]), state.fill([reader(carried)])
        assert one.ids["item_sid"].tolist() == [known.get(item, UNKNOWN_SID) for item in rows]
        for name, ids in other.ids.items():
            np.testing.assert_array_equal(one.ids[name], ids, name)
        newest = [one for one in map(row, range(300)) if one[0] == "u1"][-12:]
        assert one.ids["history_sid"].tolist() == [known.get(event[1], UNKNOWN_SID) for event in newest]


def test_an_audit_reads_the_semantic_ids_that_a_request_gives(folder, tmp_path):
    run = jfi.load_run(folder / "run")
    schema = schema_of(run.config.data, run.schema, True, True)
    with closing(open_store(str(tmp_path / "state"), create=True)) as store:
        fill(store, schema, run.config.data, run.schema, None)
        reader = RequestReader(schema, Limits(20, 12), state=read_layout(store).info)
        first, second = pq.read_table(folder / "sids.parquet")["sid"].unique().to_pylist()[:2]
        given = {"item_id": ["i0", "i1", "i2", "i10"], "sid": [str(second), first, None, second]}
        body = {"user": "u1", "candidates": given, "context": {"price": 1}, "time": 20_000}
        body["codec"] = run.schema.codec.fingerprint
        (request,) = UserState(store, reader).fill([reader(body)])
    assert request.ids["item_sid"].tolist() == [second, first, UNKNOWN_SID, second]
    model, raw = Served("a", None, None, "logits"), msgspec.Raw(json.dumps(body).encode())
    line = Line("r", 0.0, 20_000.0, model, None, 0, True, [0.0] * 4, digests(request, reader), raw)
    (tmp_path / "requests-1.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    report = audit_of(run)(tmp_path / "requests-1.jsonl")
    assert report.compared == 1 and not report.features


@pytest.mark.slow  # compiling takes half a minute
def test_an_artifact_gives_the_scores_of_the_dense_part(folder, tmp_path):
    run = jfi.load_run(folder / "run")
    schema = schema_of(run.config.data, run.schema, True, True)
    Export(run.model, schema, Limits(10, 12)).write(tmp_path / "artifact")
    scorer, codec = Scorer(tmp_path / "artifact"), run.schema.codec
    sids = codec.encode(torch.randn(9, codec.widths[0])).tolist()
    item = {"item_id": "i1", "genre": "g1"}
    history = [item | {"sid": sid, "tags": [], "seconds": 1, "age": 5} for sid in (*sids[:6], None)]
    candidates = [item | {"sid": sid, "price": 1} for sid in (*sids[6:], None)]
    body = {"user": {"user_id": "u1"}, "history": history, "candidates": candidates, "codec": codec.fingerprint}
    request = scorer.reader(json.loads(json.dumps(body)))
    scoring = ScoringModel(run.model, ["user_id"])
    arguments = batch_inputs([request], scorer.inputs, scorer.tables, torch.device("cpu"))
    wanted = scoring(*arguments)
    assert len({*wanted.tolist()}) == len(candidates)
    torch.testing.assert_close(torch.tensor(scorer.score([request])[0]), wanted)
    with pytest.raises(BadRequestError, match=f"codec must be '{codec.fingerprint}'"):
        scorer.reader(body | {"codec": "f" * 64})


def test_requests_are_checked(folder):
    run = jfi.load_run(folder / "run")
    read = RequestReader(schema_of(run.config.data, run.schema, True, True), Limits(10, 12))
    candidate = {"item_id": "i1", "genre": "g1", "sid": None, "price": 1}
    codec = run.schema.codec.fingerprint

    def request(sid: object, **changes: object) -> dict:
        event = {"item_id": "i1", "genre": "g1", "sid": sid, "tags": [], "seconds": 1, "age": 5}
        return {"user": {"user_id": "u"}, "history": [event], "candidates": [candidate], "codec": codec, **changes}

    def refused(sid: object, message: str, **changes: object) -> None:
        with pytest.raises(BadRequestError, match=message):
            read(request(sid, **changes))

    sid = run.schema.codec.encode(torch.ones(1, run.schema.codec.widths[0])).item()
    for given, wanted in ((sid, sid), (str(sid), sid), (-1, UNKNOWN_SID), (None, UNKNOWN_SID)):
        assert read(request(given)).ids["history_sid"].tolist() == [wanted]
    refused(sid, f"codec must be '{codec}', whose semantic IDs the model reads, got 'abc'", codec="abc")
    refused(10**9, r"history\[0\].sid is 1000000000, which is no ID of 8 ternary digits; another codec's\?")
    for wrong in (True, []):
        refused(wrong, r"history\[0\].sid must be int \| float \| str \| null, got")
    for wrong in (1.5, "1.5", 2**63, "x"):
        refused(wrong, r"history\[0\].sid must be a semantic ID: an integer of 64 bits or its text, or null, got")
    with pytest.raises(BadRequestError, match="the request lacks the field 'codec'"):
        read({name: value for name, value in request(sid).items() if name != "codec"})
