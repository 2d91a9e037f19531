"""Every argument of the public constructors and forwards, and of the batches that they take, is refused by its name."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)

import jfi.models
import jfi.modules
from jfi import CapturedStep, SequenceDLRM
from jfi.models import AttentionPooling, Heads, require_optimizer_in_backward, table_parameters
from jfi.modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    GrowingIds,
    GrowingTable,
    JaggedEncoder,
    JaggedFeatureInteraction,
    JaggedPooling,
    KeyBias,
    PositionBias,
    SemanticIDEmbedding,
    SequenceFeatureConfig,
    TableRows,
    TimeBias,
    WeightBias,
    defer_steps,
    outside_ids,
)
from jfi.semantic_ids import DiscretePCA

D = 8
TASTE = SequenceFeatureConfig("taste", ["history"], ["item"], bias=PositionBias(4))
LENGTHS, COUNTS = torch.tensor([2, 0, 3]), torch.tensor([1, 0, 2])
CODEC = DiscretePCA(num_digits=10).fit(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))
ITEMS = EmbeddingConfig(name="t", embedding_dim=D, num_embeddings=10, feature_names=["history", "item"])
BAGS = EmbeddingBagConfig(name="b", embedding_dim=D, num_embeddings=10, feature_names=["user"])
SGD = torch.optim.SGD, {"lr": 0.1}
NESTED = torch.nested.nested_tensor([torch.zeros(2, D), torch.zeros(1, D)])
JAGGED = torch.nested.nested_tensor([torch.zeros(2, D), torch.zeros(3, D)], layout=torch.jagged)
SPARSE = torch.zeros(5, D).to_sparse()

#: What no argument takes by accident: of another type, or a size that nothing has.
WRONG = {
    "a string": "x",
    "None": None,
    "a float": 1.5,
    "NaN": float("nan"),
    "True": True,
    "0": 0,
    "-1": -1,
    "2**62": 2**62,
    "an array": np.zeros(3),
    "a number of numpy": np.int64(-3),
    "a list": [1],
    "an empty list": [],
    "a list of strings": ["x"],
    "a list of arrays": [np.zeros(2)],
    "a tuple": ("a",),
    "an empty dict": {},
    "a dict": {"history": [1], "item": [1], "lr": "x"},
    "an object": object(),
    "a class": int,
    "a tensor": torch.zeros(3),
    "a nested tensor": NESTED,
    "a sparse tensor": SPARSE,
}


class Case(NamedTuple):
    """A public function, arguments that it takes, and by argument which of WRONG it takes too."""

    function: Callable
    right: dict
    fine: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it
    signature: Callable | None = None


def events(values=None, lengths=LENGTHS, **parts):
    return JaggedTensor(torch.randn(5, D) if values is None else values, lengths=lengths, **parts)


def ids(values=None, lengths=None, weights=None):
    lengths = torch.tensor([2, 0, 3, 1, 1, 1, 1, 0, 2]) if lengths is None else lengths
    values = torch.randint(10, (11,)) if values is None else values
    return KeyedJaggedTensor(["history", "item", "user"], values, lengths=lengths, weights=weights)


def layer(**options):
    return JaggedFeatureInteraction([TASTE], D, 2, **options)


def dense_targets():
    return {"item": torch.randn(3, D)}


def ragged_targets():
    return {"item": JaggedTensor(torch.randn(3, D), lengths=COUNTS)}


def model(**changes):
    arguments = {
        "embedding_bag_collection": EmbeddingBagCollection(tables=[BAGS]),
        "embedding_collection": EmbeddingCollection(tables=[ITEMS]),
        "sequence_features": [TASTE],
        "dense_in_features": 4,
        "dense_arch_layer_sizes": [6, D],
        "over_arch_layer_sizes": [6, 1],
    }
    return SequenceDLRM(**{**arguments, **changes})


#: A torch built for an accelerator takes a number for a device, and of a large one its last bits.
NO_DEVICE = "None, 0, 2**62" if torch.accelerator.current_accelerator() else "None"
OF_SIDS = {"device": NO_DEVICE, "feature_names": "a list of strings"}
OF_TABLES = {"output_dtype": "None", "ema_decay": "None", "device": NO_DEVICE, "optimizer_kwargs": "an empty dict"}
OF_TABLES |= {"stochastic_rounding": "True"}
TIMES = {"target_times": "None", "event_times": "None", "max_events": "None", "ids": "None"}
NOT_READ = ", ".join(WRONG)
CASES = {
    "PositionBias": Case(PositionBias, {}, {"recency": "True"}),
    "WeightBias": Case(WeightBias, {}),
    "KeyBias": Case(KeyBias, {"key": "age"}, {"key": "a string"}),
    "TimeBias": Case(TimeBias, {"key": "age"}, {"key": "a string"}),
    "SequenceFeatureConfig": Case(
        SequenceFeatureConfig,
        {"name": "a", "sequence_keys": ["h"], "target_keys": ["i"]},
        {
            "name": "a string",
            "sequence_keys": "a list of strings",
            "target_keys": "a list of strings",
            "bias": "None",
            "weighted_values": "True",
            "max_seqlen": "None, 2**62",
            "relative_bias": "None",
        },
    ),
    "JaggedFeatureInteraction": Case(
        JaggedFeatureInteraction,
        {"features": [TASTE], "embedding_dim": D},
        {
            "embedding_collection": "None",
            "sequence_dim": "None",
            "target_dim": "None",
            "device": NO_DEVICE,
        },
    ),
    "JaggedFeatureInteraction.forward": Case(
        lambda **given: layer()(**given),
        {"sequences": {"history": events()}, "targets": dense_targets()},
        TIMES,
        JaggedFeatureInteraction.forward,
    ),
    "JaggedFeatureInteraction.forward of ids": Case(
        lambda **given: layer(embedding_collection=EmbeddingCollection(tables=[ITEMS]))(**given),
        {"sequences": ids(), "targets": ragged_targets()},
        TIMES,
        JaggedFeatureInteraction.forward,
    ),
    "JaggedFeatureInteraction.attention_weights": Case(
        lambda **given: layer().attention_weights(**given),
        {"sequences": {"history": events()}, "targets": dense_targets()},
        TIMES,
        JaggedFeatureInteraction.attention_weights,
    ),
    "JaggedEncoder": Case(
        JaggedEncoder,
        {"features": [TASTE], "embedding_dim": D},
        {"dropout": "0", "causal": "True", "device": NO_DEVICE},
    ),
    "JaggedEncoder.forward": Case(
        lambda **given: JaggedEncoder([TASTE], D)(**given),
        {"sequences": {"history": events()}},
        {"ids": "None"},
        JaggedEncoder.forward,
    ),
    "GrowingTable": Case(
        GrowingTable,
        {"name": "t", "capacity": 10, "feature_names": ["item"]},
        {"name": "a string", "feature_names": "a list of strings"},
    ),
    "GrowingIds": Case(GrowingIds, {"tables": [GrowingTable("t", 10, ["item"])]}, {"device": NO_DEVICE}),
    "JaggedPooling": Case(JaggedPooling, {"features": [TASTE], "embedding_dim": D}),
    "JaggedPooling.forward": Case(
        lambda **given: JaggedPooling([TASTE], D)(**given),
        {"sequences": {"history": events()}, "targets": ragged_targets()},
        {**TIMES, "targets": NOT_READ},
        JaggedPooling.forward,
    ),
    "SemanticIDEmbedding": Case(
        SemanticIDEmbedding, {"codec": CODEC, "embedding_dim": D, "feature_names": ["s"]}, OF_SIDS
    ),
    "SemanticIDEmbedding.forward": Case(
        lambda **given: SemanticIDEmbedding(CODEC, D, ["s"])(**given),
        {"features": KeyedJaggedTensor(["s"], CODEC.encode(torch.randn(5, 4)), lengths=LENGTHS)},
        signature=SemanticIDEmbedding.forward,
    ),
    "FusedEmbeddingCollection": Case(
        FusedEmbeddingCollection,
        {"tables": [ITEMS], "optimizer_type": SGD[0], "optimizer_kwargs": SGD[1]},
        OF_TABLES,
    ),
    "FusedEmbeddingCollection.forward": Case(
        lambda **given: FusedEmbeddingCollection([ITEMS], *SGD)(**given),
        {"features": ids()},
        signature=FusedEmbeddingCollection.forward,
    ),
    "FusedEmbeddingBagCollection": Case(
        FusedEmbeddingBagCollection,
        {"tables": [BAGS], "optimizer_type": SGD[0], "optimizer_kwargs": SGD[1]},
        {**OF_TABLES, "is_weighted": "True"},
    ),
    "FusedEmbeddingBagCollection.forward": Case(
        lambda **given: FusedEmbeddingBagCollection([BAGS], *SGD)(**given),
        {"features": ids()},
        signature=FusedEmbeddingBagCollection.forward,
    ),
    "TableRows": Case(
        TableRows,
        {"table": torch.randn(4, D), "ids": torch.tensor([1, 0]), "rows": torch.zeros(2, D), "lengths": COUNTS[:2]},
        # The contents are checked by what reads them.
        {
            **dict.fromkeys(["table", "ids", "rows"], "a tensor, a nested tensor, a sparse tensor"),
            "offsets": "None",
            "weights": "None, a tensor, a nested tensor, a sparse tensor",
        },
        TableRows.__init__,
    ),
    "defer_steps": Case(lambda **given: defer_steps(**given).__enter__(), {"model": nn.Linear(1, 1)}, {}, defer_steps),
    "Heads": Case(Heads, {}, {"moments": "None", "auxiliary": "0"}),
    "SequenceDLRM": Case(
        model,
        {},
        {
            "embedding_bag_collection": "None",
            "sequence_features": "an empty list",
            "dense_arch_layer_sizes": "a list",
            "encoder": "None",
            "dropout": "0",
            "cross_layers": "0",
            "user_keys": "None, an empty list",
            "semantic_ids": "None",
            "growing_ids": "None",
            "heads": "None",
        },
        SequenceDLRM.__init__,
    ),
    "SequenceDLRM.forward": Case(
        lambda **given: model()(**given),
        {"dense_features": torch.randn(3, 4), "sparse_features": ids()},
        {"timelines": "None"},
        SequenceDLRM.forward,
    ),
    "SequenceDLRM.attention_weights": Case(
        lambda **given: model().attention_weights(**given),
        {"dense_features": torch.randn(3, 4), "sparse_features": ids()},
        {"timelines": "None", "dense_features": NOT_READ},
        SequenceDLRM.attention_weights,
    ),
    "AttentionPooling": Case(AttentionPooling, {}),
    "outside_ids": Case(outside_ids, {"model": nn.Linear(1, 1)}),
    "table_parameters": Case(table_parameters, {"model": EmbeddingCollection(tables=[ITEMS])}),
    "require_optimizer_in_backward": Case(require_optimizer_in_backward, {"model": None}),
    "CapturedStep": Case(
        CapturedStep,
        {"step": lambda batch: batch, "model": nn.Linear(1, 1)},
        {"step": "a class", "reference": NOT_READ},  # read at the first batch
    ),
}


def test_every_public_name_has_a_case():
    public = {*jfi.modules.__all__, *jfi.models.__all__, "CapturedStep"}
    assert {name.split(".")[0].split()[0] for name in CASES} == public


def parameters():
    for name, case in CASES.items():
        for parameter in inspect.signature(case.signature or case.function).parameters:
            if parameter != "self":
                yield pytest.param(case, parameter, id=f"{name}-{parameter}")


@pytest.mark.parametrize(("case", "name"), parameters())
def test_wrong_arguments_are_named(case, name):
    fine = case.fine.get(name, "").split(", ")
    assert fine == [""] or {*fine} <= WRONG.keys()
    for kind, value in WRONG.items():
        given = {**case.right, name: value}
        if kind in fine:
            try:
                case.function(**given)
            except (TypeError, ValueError):
                assert fine == NOT_READ.split(", "), kind
            except RuntimeError:  # the device is absent
                assert kind in ("0", "2**62") and name.endswith("device") and not torch.accelerator.is_available()
            continue
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            case.function(**given)
            pytest.fail(f"{kind} was taken for {name}")


#: In the place of rows [5, D], of numbers [5] and of ids [11].
ROWS = {
    "nested": NESTED,
    "nested, jagged": JAGGED,
    "sparse": SPARSE,
    "a list": [[0.0] * D] * 5,
    "an array": np.zeros((5, D)),
    "a string": "x",
    "one dimension": torch.zeros(5),
    "a scalar": torch.zeros(()),
    "three dimensions": torch.zeros(5, D, 1),
    "integers": torch.zeros(5, D, dtype=torch.int64),
    "complex": torch.zeros(5, D, dtype=torch.complex64),
    "8 bits": torch.zeros(5, D).to(torch.float8_e4m3fn),
    "elsewhere": torch.zeros(5, D, device="meta"),
}
NUMBERS = {
    "nested": torch.nested.nested_tensor([torch.zeros(5)]),
    "sparse": torch.zeros(5).to_sparse(),
    "a list": [0] * 5,
    "an array": np.zeros(5),
    "a string": "x",
    "two dimensions": torch.zeros(5, 1),
    "a scalar": torch.zeros(()),
    "too few": torch.zeros(4),
    "bools": torch.zeros(5, dtype=torch.bool),
    "complex": torch.zeros(5, dtype=torch.complex64),
    "elsewhere": torch.zeros(5, device="meta"),
}
WRONG_LENGTHS = {
    "two dimensions": LENGTHS[None],
    "sparse": LENGTHS.to_sparse(),
    "8 bits": LENGTHS.to(torch.uint8),
    "elsewhere": LENGTHS.to("meta"),
    "negative": torch.tensor([-1, 3, 3]),
}
IDS = {
    "nested": torch.nested.nested_tensor([torch.zeros(11)]),
    "sparse": torch.ones(11).long().to_sparse(),
    "a list": [1] * 11,
    "an array": np.ones(11, int),
    "floats": torch.ones(11),
    "16 bits": torch.ones(11).short(),
    "two dimensions": torch.ones(11, 1).long(),
    "too few": torch.ones(10).long(),
    "too many": torch.ones(12).long(),
}


#: Lengths of `ids`, without those that TorchRec refuses itself.
ID_LENGTHS = {
    "negative": torch.tensor([-1, 3, 3, 1, 1, 1, 1, 0, 2]),
    "too few": torch.tensor([2, 0, 3, 1, 1, 1, 1, 0]),
}
TWO = [TASTE, SequenceFeatureConfig("near", ["history"], ["item"], bias=PositionBias(4))]


def pooled(features, history, targets=None, **others):
    sequences = {"history": history, **{key: JaggedTensor(x, lengths=LENGTHS) for key, x in others.items()}}
    return JaggedFeatureInteraction(features, D)(sequences, targets or dense_targets())


def encoded(features, history, **others):
    sequences = {"history": history, **{key: JaggedTensor(x, lengths=LENGTHS) for key, x in others.items()}}
    return JaggedEncoder(features, D, causal=True)(sequences)


def mean(features, history):
    return JaggedPooling(features, D)({"history": history})


def with_times(target_times=(5, 3, 4), event_times=(0, 1, 2, 3, 4)):
    target_times, event_times = (torch.tensor(x) if isinstance(x, tuple) else x for x in (target_times, event_times))
    times = JaggedTensor(target_times, lengths=COUNTS), JaggedTensor(event_times, lengths=LENGTHS)
    return layer()({"history": events()}, ragged_targets(), *times)


def feature(**options):
    return [SequenceFeatureConfig("taste", ["history"], ["item"], **options)]


def bag(features, **options):
    return FusedEmbeddingBagCollection([BAGS], *SGD, **options)(features)


#: What takes ids, by the name of the argument.
READERS = [
    ("features", FusedEmbeddingCollection([ITEMS], *SGD)),
    ("features", bag),
    ("features", SemanticIDEmbedding(CODEC, D, ["history"])),
    ("sparse_features", lambda features: model()(torch.randn(3, 4), features)),
]
WEIGHTS = {kind: x for kind, x in IDS.items() if kind not in ("floats", "16 bits")} | {"none": None}
DENSE = {"too narrow": torch.zeros(3, 3), "integers": torch.ones(3, 4).long(), "nested": NESTED, "sparse": SPARSE}
LAYERS = (pooled, encoded, mean)
#: What a message must name, a call with a part of a batch, and wrong parts.
PARTS = [
    *[("history", lambda x, f=f: f(TWO[:1], events(x)), ROWS) for f in LAYERS],
    *[("history", lambda x, f=f: f(TWO, events(x)), ROWS) for f in LAYERS],
    *[("history", lambda x, f=f: f(TWO, events(lengths=x)), WRONG_LENGTHS) for f in LAYERS],
    ("item", lambda x: pooled(TWO, events(), {"item": x}), ROWS),
    ("item", lambda x: pooled(TWO, events(), {"item": JaggedTensor(x, lengths=COUNTS)}), ROWS),
    ("history", lambda x: pooled(feature(bias=WeightBias()), events(weights=x)), NUMBERS),
    ("history", lambda x: pooled(feature(weighted_values=True), events(weights=x)), NUMBERS),
    ("age", lambda x: pooled(feature(bias=KeyBias("age", 4)), events(), age=x), NUMBERS),
    ("time", lambda x: encoded(feature(relative_bias=TimeBias("time")), events(), time=x), NUMBERS),
    ("target_times", lambda x: with_times(target_times=x), NUMBERS),
    ("event_times", lambda x: with_times(event_times=x), NUMBERS),
    *[(argument, lambda x, f=f: f(ids(x)), IDS) for argument, f in READERS],
    *[(argument, lambda x, f=f: f(ids(lengths=x)), ID_LENGTHS) for argument, f in READERS],
    ("features", lambda x: bag(ids(weights=x), is_weighted=True), WEIGHTS),
    ("dense_features", lambda x: model()(x, ids()), DENSE),
]


def test_a_nested_tensor_is_not_a_history():
    with pytest.raises(TypeError, match=r"sequences\['history'\] must be a JaggedTensor, got NestedTensor"):
        layer()({"history": JAGGED}, dense_targets())


@pytest.mark.parametrize(
    ("key", "call", "part"),
    [
        pytest.param(key, call, part, id=f"{key}-{number}-{kind}")
        for number, (key, call, parts) in enumerate(PARTS)
        for kind, part in parts.items()
    ],
)
def test_wrong_parts_of_a_batch_are_named(key, call, part):
    with pytest.raises((TypeError, ValueError), match=rf"\b{key}\b"):
        call(part)
