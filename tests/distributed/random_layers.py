"""Random layers over sharded tables, against the same layers over dense tables in one process."""

import random
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi import JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig, TimeBias, WeightBias
from jfi.distributed import AttentionCollectionSharder, average_gradients

WIDTH, RATE = 8, 0.1
#: Rows of the tables of histories; those of at most REPLICATED are read whole by every rank.
SIZES, REPLICATED = {"item": 40, "other": 30, "rating": 6, "shop": 5}, 10
LARGE, SMALL = ("item", "other"), ("rating", "shop")


def _takes_no_samples() -> bool:
    """Returns whether TorchRec's own collections, which jfi's are compared with, take a batch without samples."""
    none = torch.empty(0, dtype=torch.int64)
    try:
        KeyedJaggedTensor(["a", "b"], none, lengths=none, stride=0).to_dict()
    except IndexError:  # TorchRec 1.6
        return False
    return True


FEWEST = 0 if _takes_no_samples() else 1


class RandomCase:
    """What a seed draws: features, layers, tables, how they are sharded, and a batch.

    A key of ids is named by the feature that reads it and its table, `f0_item`; events of a feature are aligned.
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.seed, self.samples = seed, max(FEWEST, draw.choice([0, 1, 4, 7, 7]))
        self.features: list[SequenceFeatureConfig] = []
        for index in range(draw.randint(1, 4)):
            self.features.append(self._feature(f"f{index}"))
        self.tables: dict[str, list[str]] = {"item": ["item"], "rating": ["stars"]}
        for feature in self.features:
            for key in feature.sequence_keys:
                keys = self.tables.setdefault(key.split("_")[1], [])
                keys += [key] * (key not in keys)
        draw.shuffle(self.features)
        counts = [draw.randint(1, len(self.features)) for _ in range(draw.randint(0, 2))]
        self.layers = [draw.sample(self.features, count) for count in counts]
        read = {feature.name for layer in self.layers for feature in layer}
        self.layers += [missing] if (missing := [one for one in self.features if one.name not in read]) else []
        self.heads = [(draw.choice([1, 2]), draw.choice([1, 2])) for _ in self.layers]
        self.owns = draw.random() < 0.2  # the first layer its collection, beside the one that all others read
        fields = [key for feature in self.features for key in feature.sequence_keys if key.endswith(SMALL)]
        self.changed = draw.choice(fields) if fields and draw.random() < 0.35 else None
        self.placements = {table: draw.choice(["rows", 0, 1]) for table in SIZES}
        # Adagrad divides by the gradient: a large epsilon does not make a step of its rounding.
        self.optimizer, self.options = draw.choice(
            [(torch.optim.SGD, {"lr": RATE}), (torch.optim.Adagrad, {"lr": RATE, "eps": 0.1})]
        )
        self.cut = draw.randint(0, self.samples)  # the first sample of the second rank

    def _feature(self, name: str) -> SequenceFeatureConfig:
        draw = self.draw
        if self.features and draw.random() < 0.5:  # one that is read in the same launch as another
            like = draw.choice(self.features)
            if draw.random() < 0.3:  # of the same history
                return replace(like, name=name)
            keys, bias = [f"{name}_{key.split('_')[1]}" for key in like.sequence_keys], like.bias
            bias = replace(bias, key=f"{name}_age") if isinstance(bias, KeyBias) else bias
            return replace(like, name=name, sequence_keys=keys, bias=bias)
        fields = draw.sample(LARGE, draw.choice([0, 1, 1, 1])) + draw.sample(SMALL, draw.randint(0, 2))
        fields = draw.sample(fields or ["item"], len(fields) or 1)
        kinds = [
            None,
            PositionBias(draw.choice([3, 8])),
            KeyBias(f"{name}_age", draw.choice([4, 6])),
            TimeBias(f"{name}_age", 6),
            WeightBias(),
        ]
        is_local = set(fields) <= set(SMALL)
        return SequenceFeatureConfig(
            name,
            [f"{name}_{field}" for field in fields],
            [draw.choice(["item", "stars"])],
            combine=draw.choice(["sum", "concat"]) if is_local or len(fields) == 1 else "sum",
            bias=draw.choice(kinds),
            weighted_values=draw.random() < 0.3,
        )

    def collection(self, suffix: str = "") -> EmbeddingCollection:
        tables = self.tables.items()
        configs = [EmbeddingConfig(SIZES[name], WIDTH, name=name + suffix, feature_names=keys) for name, keys in tables]
        return EmbeddingCollection(configs)

    def batch(self) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        """Returns by key ids and lengths, and by sample the factors of its outputs."""
        draw = torch.Generator().manual_seed(self.seed)
        lengths = {"item": torch.ones(self.samples).long(), "stars": torch.ones(self.samples).long()}
        highest = {"item": SIZES["item"], "stars": SIZES["rating"]}
        for feature in self.features:
            own = torch.randint(0, 6, (self.samples,), generator=draw)
            for key in (*feature.sequence_keys, *feature.input_keys):
                lengths[key], highest[key] = own, SIZES.get(key.split("_")[1], 4)
        columns = {key: (torch.randint(highest[key], (int(n.sum()),), generator=draw), n) for key, n in lengths.items()}
        keys = list(columns)
        self.draw.shuffle(keys)
        width = WIDTH * sum(map(len, self.layers))
        return {key: columns[key] for key in keys}, torch.randn(self.samples, width, generator=draw)

    def part(self, columns: dict[str, tuple[Tensor, Tensor]], first: int, end: int) -> KeyedJaggedTensor:
        """Returns the ids of some samples, whose weights differ by key."""
        values, weights = [], []
        for number, (ids, lengths) in enumerate(columns.values()):
            starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            kept = slice(int(starts[first]), int(starts[end]))
            values.append(ids[kept])
            weights.append((torch.arange(len(ids))[kept] * 0.37 + number * 0.61) % 1 + 0.2)
        counts = [lengths[first:end] for _, lengths in columns.values()]
        sizes = {"stride": end - first, "length_per_key": [len(one) for one in values]}
        parts = torch.cat(values), torch.cat(weights), torch.cat(counts)
        return KeyedJaggedTensor(list(columns), *parts, **sizes)


class RandomModel(nn.Module):
    def __init__(self, case: RandomCase) -> None:
        super().__init__()
        self.collection, self.changed = case.collection(), case.changed
        own = case.collection("_own") if case.owns else None
        self.layers = nn.ModuleList()
        for number, (features, (heads, queries)) in enumerate(zip(case.layers, case.heads, strict=True)):
            options = {"embedding_collection": None if number else own}
            self.layers.append(JaggedFeatureInteraction(features, WIDTH, heads, queries, **options))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.5)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = dict(self.collection(ids).items())
        targets = {key: found[key].values() for key in ("item", "stars")}
        if self.changed is not None:
            changed = found[self.changed]
            found[self.changed] = JaggedTensor(changed.values() * 0.5, lengths=changed.lengths())
        outputs = []
        for layer in self.layers:
            owns = layer.embedding_collection is not None
            outputs.append((layer(ids, targets) if owns else layer(found, targets, ids=ids)).values())
        return torch.cat(outputs, 1)


def shard(case: RandomCase, model: RandomModel) -> DistributedModelParallel:
    size, sharder, plan = dist.get_world_size(), AttentionCollectionSharder(model, replicate_below=REPLICATED), {}
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingCollection):
            ways = {}
            for table in module.embeddings:
                place = case.placements[table.split("_")[0]]
                ways[table] = row_wise() if place == "rows" else table_wise(rank=place % size)
            apply_optimizer_in_backward(case.optimizer, module.parameters(), dict(case.options))
            plan[name] = construct_module_sharding_plan(module, ways, sharder, size, size, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedModelParallel(
            model, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=[sharder], init_data_parallel=False
        )


def differences(seed: int) -> list[str]:
    """Compares outputs, dense gradients and stepped rows of a step with those over dense tables; all ranks call it."""
    case = RandomCase(seed)
    torch.manual_seed(seed)
    whole = RandomModel(case)
    torch.manual_seed(seed)
    sharded = shard(case, RandomModel(case))
    rank, size, (columns, factors) = dist.get_rank(), dist.get_world_size(), case.batch()
    first, end = (0, case.samples) if size == 1 else ((0, case.cut), (case.cut, case.samples))[rank]
    expected, found = whole(case.part(columns, 0, case.samples)), sharded(case.part(columns, first, end))
    (expected * factors).sum().backward()
    (found * factors[first:end]).sum().mul(size).backward()
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    average_gradients(dense.values())
    pairs, by_name = {"outputs": (found, expected[first:end])}, dict(whole.named_parameters())
    pairs |= {f"the gradient of {name}": (own.grad, by_name[name].grad) for name, own in dense.items()}
    tables = {name: own for name, own in by_name.items() if name not in dense}
    case.optimizer(tables.values(), **case.options).step()
    state = sharded.state_dict()
    for name, table in tables.items():
        for part in state[name].local_shards():
            begin, count = part.metadata.shard_offsets[0], part.metadata.shard_sizes[0]
            pairs[f"rows of {name} from {begin} on"] = part.tensor, table[begin : begin + count]
    texts = []
    for what, (own, other) in pairs.items():
        if not torch.allclose(own, other, rtol=1e-4, atol=1e-4):
            texts.append(f"seed {seed}: {what} differ by {(own - other).abs().max()}")
    return texts


def run(rank: int, store: str, seeds: range) -> None:
    """What one process of two does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    texts = [text for seed in seeds for text in differences(seed)]
    dist.destroy_process_group()
    assert not texts, "\n".join(texts)
