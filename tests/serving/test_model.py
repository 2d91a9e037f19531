"""The exported model against the SequenceDLRM, on a table with every kind of column; attention against the operator."""

import csv
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_configs import data_config
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig

from jfi.data import DataSchema, load_dataset
from jfi.models import AttentionPooling, SequenceDLRM
from jfi.modules import JaggedEncoder, SequenceFeatureConfig, TimeBias
from jfi.ops import jagged_attention
from jfi.serving import artifact
from jfi.serving.attention import PackedUsers, attend
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import inputs_of, tables_of
from jfi.serving.model import ScoringModel
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Limits
from jfi.serving.scorer import batch_inputs
from jfi.serving.tables import FloatTables
from jfi.training import EncoderConfig, ModelConfig
from jfi.training.model.build_model import build_model

from .conftest import logits

GENRES = ["war", "love", "space", "tax"]


def write(path, rows: list[dict]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> SimpleNamespace:
    """Users, items and interactions as CSV files, and as rows."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("table")
    users = [
        {
            "user": u,
            "city": draw.choice(["Bonn", "Ulm", ""]),
            "hobbies": "|".join(draw.sample(["chess", "tea"], draw.randint(0, 2))),
            "income": draw.choice(["", 10.5, 3]),
        }
        for u in range(25)
    ]
    items = [
        {
            "item": f"i{i}",
            "genres": "|".join(draw.sample(GENRES, draw.randint(0, 3))),
            "price": draw.choice(["", 1 + i]),
        }
        for i in range(15)
    ]
    rows = [
        {
            "user": draw.randrange(25),
            "item": f"i{draw.randrange(15)}",
            "time": t * 50,
            "like": draw.randint(0, 1),
            "device": draw.choice(["tv", "phone", ""]),
            "seconds": draw.choice(["", draw.randint(1, 99)]),
            "place": draw.choice(["top", "side", ""]),
            "labels": "|".join(draw.sample(["new", "sale", "last"], draw.randint(0, 3))),
            "discount": draw.choice(["", draw.randint(0, 50)]),
        }
        for t in range(500)
    ]
    config = data_config(
        interactions=write(folder / "rows.csv", rows),
        users=write(folder / "users.csv", users),
        items=write(folder / "items.csv", items),
        user="user",
        item="item",
        timestamp="time",
        label="like",
        user_categorical=["city", "hobbies"],
        user_dense=["income"],
        item_categorical=["genres"],
        item_dense=["price"],
        event_categorical=["device"],
        event_dense=["seconds"],
        context_categorical=["place", "device", "labels"],
        context_dense=["discount"],
        separators={"genres": "|", "hobbies": "|", "labels": "|"},
        max_history=12,
        max_slots=2,
    )
    dataset = load_dataset(config)
    return SimpleNamespace(config=config, dataset=dataset, users=users, items=items, rows=rows)


def raw_requests(table: SimpleNamespace) -> tuple[list[dict], np.ndarray]:
    """For the samples that have a history the request that a client would make, and which samples these are."""
    events, order = (
        table.dataset.arrays().events,
        sorted(table.rows, key=lambda r: (str(r["user"]).zfill(3), r["time"])),
    )
    split = lambda text: text.split("|") if text else []  # noqa: E731
    number = lambda value: None if value == "" else value  # noqa: E731

    def item(name: str) -> dict:
        found = table.items[int(name[1:])]
        return {"item": name, "genres": split(found["genres"])}

    requests, samples = [], []
    everything = np.concatenate([table.dataset.arrays().samples[name] for name in ("train", "validation", "test")])
    for sample, start, length in zip(everything, *events.histories(everything, table.config.max_history), strict=True):
        end = start + length
        if not length:
            continue
        now, user = order[sample], table.users[order[sample]["user"]]
        samples.append(sample)
        requests.append(
            {
                "user": {
                    "city": number(user["city"]),
                    "hobbies": split(user["hobbies"]),
                    "income": number(user["income"]),
                },
                "history": [
                    item(event["item"])
                    | {
                        "device": number(event["device"]),
                        "seconds": number(event["seconds"]),
                        "age": now["time"] - event["time"],
                    }
                    for event in order[start:end]
                ],
                "candidates": [
                    item(now["item"])
                    | {"price": number(table.items[int(now["item"][1:])]["price"])}
                    | {name: number(now[name]) for name in ("place", "device", "discount")}
                    | {"labels": split(now["labels"])},
                    item("i3") | {"price": 2, "place": None, "device": "tv", "labels": ["new"], "discount": 7},
                ],
            }
        )
    return requests, np.array(samples)


@pytest.mark.parametrize(
    ("model", "encoder"),
    [
        ({"bias": "history_age"}, {"num_layers": 1, "causal": True}),
        ({"bias": "position"}, {}),
        ({}, {"num_layers": 2, "causal": True, "relative_bias": "distance"}),
        ({}, {"num_layers": 2}),
        ({"pooling": "mean"}, {}),
        ({"pooling": "mean"}, {"num_layers": 1}),
        ({"pooling": "sum"}, {}),
        ({"bias": ["position", "history_age"], "cross_layers": 2}, {}),
        ({"pooling": "none"}, {}),
    ],
    ids=str,
)
def test_it_gives_the_logits_of_the_model(table, model, encoder):
    plain = {"embedding_dim": 8, "num_heads": 2, "dense_arch": [8], "over_arch": [8], "cross_layers": 0, "dropout": 0.0}
    model = ModelConfig(**plain | model)
    trained = build_model(model, EncoderConfig(**encoder), table.dataset.schema)
    reads_age = model.pooling == "attention" and "history_age" in model.biases()
    assert_served(table, trained, model.pooling != "none", reads_age)


def assert_served(table: SimpleNamespace, trained: SequenceDLRM, reads_history: bool, reads_age: bool) -> None:
    """That requests get the logits of the model."""
    dataset, trained = table.dataset, trained.eval()
    for parameter in trained.parameters():  # those that begin as zeros too
        torch.nn.init.normal_(parameter, std=0.5)
    schema = schema_of(table.config, dataset.schema, reads_history, reads_age)
    read = RequestReader(schema, Limits(max_candidates=9, max_history=table.config.max_history))
    requests, samples = raw_requests(table)
    for request in requests:
        if not reads_history:
            del request["history"]
        elif not reads_age:
            request["history"] = [{k: v for k, v in event.items() if k != "age"} for event in request["history"]]
    assert list(read.fields["candidates"]) == [*("item", "genres", "place", "device", "labels", "price", "discount")]
    scoring = ScoringModel(trained, [key for one in schema.user for key in one.keys])
    inputs = inputs_of(scoring)
    encoded = [read(json.loads(json.dumps(request))) for request in requests]
    arguments = batch_inputs(encoded, inputs, FloatTables(*tables_of(trained, inputs.keys)), torch.device("cpu"))
    events = dataset.arrays().events
    with torch.no_grad():
        found = scoring(*arguments)
        # The second candidate of every user is item i3 with other values, so the first is the sample itself.
        wanted = logits(trained, dataset.batch_of(samples, events.item[samples]))
    assert len(wanted) > 300 and wanted.std() > 0.05
    torch.testing.assert_close(found[::2], wanted, atol=1e-4 * max(1.0, wanted.abs().max().item() / 10), rtol=1e-4)


def of_other_widths(schema: DataSchema, **options: object) -> SequenceDLRM:
    """Entries of 8; tables of events are 12 wide, the others 4, 6, 8 and so on."""
    made = build_model(ModelConfig(embedding_dim=8, cross_layers=0, dropout=0.0), EncoderConfig(), schema)
    bags, events = made.embedding_bag_collection, made.embedding_collection
    bags = [replace(one, embedding_dim=4 + 2 * place) for place, one in enumerate(bags.embedding_bag_configs())]
    events = [replace(table, embedding_dim=12) for table in events.embedding_configs()]
    return SequenceDLRM(
        EmbeddingBagCollection(tables=bags),
        EmbeddingCollection(tables=events),
        [replace(feature, combine="concat") for feature in made.sequence_arch.features],
        dense_in_features=len(schema.dense_names),
        dense_arch_layer_sizes=[8],
        over_arch_layer_sizes=[8, 1],
        **options,
    )


@pytest.mark.parametrize("options", [{"pooling": AttentionPooling(2, 2)}, {"pooling": "mean"}])
def test_embeddings_of_other_widths_are_projected(table, options):
    trained = of_other_widths(table.dataset.schema, **options)
    assert len(trained.sequence_arch.projections) > 5
    assert (trained.sequence_arch.pooled_projection is None) == (options["pooling"] != "mean")
    assert_served(table, trained, reads_history=True, reads_age=False)


@pytest.mark.slow
def test_an_artifact_of_other_widths_in_float32_and_int8(table, tmp_path, monkeypatch):
    from jfi.serving.export import Export
    from jfi.serving.scorer import Scorer

    trained = of_other_widths(table.dataset.schema, pooling=AttentionPooling(2)).eval()
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    schema = schema_of(table.config, table.dataset.schema, True, False)
    requests, samples = raw_requests(table)
    for request in requests:
        request["history"] = [{k: v for k, v in event.items() if k != "age"} for event in request["history"]]
    paths = {kind: tmp_path / kind for kind in ("float32", "int8")}
    Export(trained, schema, Limits(9, 12)).write(paths["float32"])
    package = paths["float32"] / artifact.MODEL
    monkeypatch.setattr("jfi.serving.export.write_package", lambda program, path, metadata: shutil.copy(package, path))
    Export(trained, schema, Limits(9, 12), tables="int8").write(paths["int8"])
    tables = artifact.read(paths["int8"])[0].tables
    assert {one.width for one in tables.values()} > {4, 6, 12} and len(tables) > 6
    with torch.no_grad():
        wanted = logits(trained, table.dataset.batch_of(samples, table.dataset.arrays().events.item[samples]))
    for kind, tolerance in (("float32", 1e-4), ("int8", 0.1)):
        scorer = Scorer(paths[kind])
        scores = scorer.score([scorer.reader(json.loads(json.dumps(request))) for request in requests])
        assert (torch.tensor(scores)[:, 0] - wanted).abs().max() < tolerance * wanted.std()


def test_statistics_of_the_past_are_numbers_of_a_request(table):
    config = replace(table.config, statistics=["item", "user_item"])
    dataset = load_dataset(config)
    schema = schema_of(config, dataset.schema, reads_history=True, reads_age=False)
    numbers = [one.name for one in schema.user + schema.candidate if one.kind == "number"]
    assert numbers == dataset.schema.dense_names and numbers[-1] == "past_user_item_newest_3"
    config = replace(config, label=None, statistics=["item", "popularity", "session"])
    dataset = load_dataset(config)
    schema = schema_of(config, dataset.schema, reads_history=True, reads_age=False)
    numbers = [one.name for one in schema.user + schema.candidate if one.kind == "number"]
    assert numbers == dataset.schema.dense_names and "past_item_share" in numbers


def test_features_of_other_events_are_refused():
    tables = [
        EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=9, feature_names=[name, f"history_{name}"])
        for name in ("item", "genre")
    ]
    features = [SequenceFeatureConfig(name, [f"history_{name}"], ["item"]) for name in ("item", "genre")]
    sizes = {"dense_in_features": 1, "dense_arch_layer_sizes": [8], "over_arch_layer_sizes": [8, 1]}
    model = SequenceDLRM(None, EmbeddingCollection(tables=tables), features, **sizes)
    message = r"must have the same events, got 'item' of \['history_item'\] and 'genre' of \['history_genre'\]"
    with pytest.raises(ValueError, match=message):
        ScoringModel(model, [])


def test_a_model_with_times_is_refused():
    table = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=9, feature_names=["item", "history"])
    timed = SequenceFeatureConfig("taste", ["history"], ["item"], relative_bias=TimeBias("time"))
    model = SequenceDLRM(
        None,
        EmbeddingCollection(tables=[table]),
        [SequenceFeatureConfig("taste", ["history"], ["item"])],
        dense_in_features=1,
        dense_arch_layer_sizes=[8],
        over_arch_layer_sizes=[8, 1],
        encoder=JaggedEncoder([timed], 8, causal=True),
    )
    with pytest.raises(ValueError, match="feature 'taste' reads times of events, which requests do not have"):
        ScoringModel(model, [])


def segments(offsets: list[int], device: torch.device) -> PackedUsers:
    lengths = torch.tensor(offsets).diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return PackedUsers(*(x.to(device) for x in (torch.tensor(offsets), owner, torch.arange(int(lengths.max())))))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("case", ["candidates", "causal", "distance"])
def test_attention_is_that_of_the_operator(case, impl, device):
    if impl == "triton":
        pytest.importorskip("triton")
    events, bias = segments([0, 5, 5, 8, 40], device), torch.randn(40, 4, device=device)
    bias[[1, 5, 6, 7, 20]] = -torch.inf  # hides events, and all of a user's
    if case == "candidates":
        query, key = torch.randn(30, 4, 24, device=device), torch.randn(40, 1, 24, device=device)
        rows, options = segments([0, 7, 9, 10, 30], device), {"key_bias": bias, "scale": 0.3}
        found = attend(query, key, queries=rows, keys=events, impl=impl, **options)
        wanted = jagged_attention(query, key, query_offsets=rows.offsets, key_offsets=events.offsets, **options)
    else:
        query, key, value = torch.randn(3, 40, 4, 24, device=device)
        options = {"position_bias": torch.randn(5, 4, device=device), "key_bias": bias} if case == "distance" else {}
        found = attend(query, key, value, queries=events, keys=events, causal=True, impl=impl, **options)
        wanted = jagged_attention(query, key, value, query_offsets=events.offsets, causal=True, **options)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_offsets_are_not_taken_for_written_to_and_a_package_has_no_operator_of_python():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("written_tensors.py")
    found = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    # The edges of a relative bias are made inside of the package, and so are the offsets of target attention
    # (history_0, history_3): no slice of an input.
    jagged = ["_schedule_kernel schedule_ptr", "jagged_attention_fwd_kernel biases_1 tiles_ptr results_0 results_1"]
    single = ["target_attention_single_tile_fwd_kernel queries_1 queries_2 queries_3 history_0"]
    multi = "target_attention_multi_tile_fwd_kernel history_3 outputs_0 outputs_1 outputs_2 outputs_3"
    written = [*jagged * 2, *[*single, "_combine_ranges_kernel out_ptr lse_ptr"] * 4]
    written += [multi, "_combine_tiles_kernel out_ptr lse_ptr", multi]
    operators = ["jfi::jagged_attention_exported_fwd", *["jfi::target_attention_exported_fwd"] * 2]
    assert found.stdout.splitlines() == [*written, *operators]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_package_for_a_gpu(table, tmp_path, impl):
    from jfi.serving.export import Export
    from jfi.serving.scorer import Scorer

    model = ModelConfig(
        embedding_dim=8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0
    )
    encoder = EncoderConfig(num_layers=1, causal=True, relative_bias="distance")
    trained = build_model(model, encoder, table.dataset.schema).eval()
    for parameter in trained.parameters():  # those that begin as zeros too
        torch.nn.init.normal_(parameter, std=0.5)
    schema = schema_of(table.config, table.dataset.schema, True, True)
    Export(trained, schema, Limits(9, 12), device="cuda", impl=impl).write(tmp_path / "artifact")
    scorer = Scorer(tmp_path / "artifact")
    requests, samples = raw_requests(table)
    scores = scorer.score([scorer.reader(json.loads(json.dumps(request))) for request in requests])
    events = table.dataset.arrays().events
    with torch.no_grad():
        batch = table.dataset.batch_of(samples, events.item[samples])
        wanted = logits(trained.cpu(), batch)
    torch.testing.assert_close(torch.tensor(scores)[:, 0], wanted, atol=1e-3, rtol=1e-3)
