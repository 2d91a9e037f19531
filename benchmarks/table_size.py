"""A training step over the number of rows of its largest table, on a CPU.

The rows of a case are optimizers and numbers of items. All take turns, step by step, with the steps of `jfi.training`:
forward, loss, backward, both optimizers and the moving average; batches are in memory. The time is the least CPU time
of the process, so that other programs are not counted. Ids are drawn uniformly or by Zipf's law over the whole table;
distinct rows of a batch, which the optimizer steps, grow with the table: `distinct_rows` counts them.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from benchmarks.synthetic_data import synthetic_config
from benchmarks.timeline import StepTrainer
from jfi.data import Batch, load_dataset
from jfi.training import Config, ModelConfig, OptimizerConfig, OptimizerGroup
from jfi.training.distributed.processes import World

SIZES = (10_000, 1_000_000, 3_000_000)
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "adam")
BATCH_SIZE, MAX_HISTORY, WIDTH = 1024, 50, 64
HELD = 4  # batches, whose steps rotate
WARM_UP, LEAST_STEPS = 4, 8


@dataclass(frozen=True)
class TableCase:
    """An optimizer of the tables, and the sizes of the table of items.

    Args:
        optimizer: `optimizer.embeddings.name`.
        ema_decay: `optimizer.ema_decay`.
        ids: "uniform" or "zipf", the law of the items' ids.
        sizes: numbers of items, the smallest first.
        batch_size: samples.
        width: `model.embedding_dim`.
    """

    optimizer: str
    ema_decay: float | None
    ids: str
    sizes: tuple[int, ...] = SIZES
    batch_size: int = BATCH_SIZE
    width: int = WIDTH

    @property
    def name(self) -> str:
        average = "" if self.ema_decay is None else ", average"
        return f"{self.optimizer}{average}, {self.ids} ids"


def cases(quick: bool) -> list[TableCase]:
    all_cases = [
        TableCase(optimizer, average, ids)
        for ids in ("uniform", "zipf")
        for optimizer in OPTIMIZERS
        for average in (None, 0.99)
    ]
    return [replace(case, sizes=SIZES[:2], batch_size=128) for case in all_cases[:2]] if quick else all_cases


def draw_ids(law: str, count: int, rows: int) -> Tensor:
    """[count] ids below `rows`; by Zipf's law row r is drawn in proportion to 1 / (r + 1), and then spread."""
    if law == "uniform":
        return torch.randint(0, rows, (count,))
    # The inverse of the cumulative sum, which is log(1 + r) but for the first rows.
    ranks = ((rows + 1.0) ** torch.rand(count, dtype=torch.float64) - 1).long().clamp(max=rows - 1)
    return ranks * 1_000_003 % rows  # popular rows are not neighbours; the factor is prime to all sizes


class Steps:
    """The trainer of a table size with its batches, and what was measured."""

    def __init__(self, case: TableCase, items: int) -> None:
        table = {"num_users": 2 * case.batch_size, "num_items": 1000}
        data = synthetic_config("quickstart", [f"--data.max_history={MAX_HISTORY}"], **table).data
        dataset = load_dataset(data)
        features = [replace(one, num_embeddings=items) if one.table == "item" else one for one in dataset.features]
        optimizer = OptimizerConfig(OptimizerGroup(), OptimizerGroup(case.optimizer, 0.02), case.ema_decay)
        config = Config(
            data=data,
            model=ModelConfig(embedding_dim=case.width, bias=None, cross_layers=0, dropout=0.0),
            optimizer=optimizer,
        ).with_training(device="cpu", batch_size=case.batch_size)
        # Until it is asked for batches a trainer reads the schema of a dataset and counts its samples.
        of_items = SimpleNamespace(schema=replace(dataset.schema, features=features), num_samples=dataset.num_samples)
        self.trainer = StepTrainer(config, of_items, World())
        self.items, self.seconds = items, []
        batch = dataset.batches("train", case.batch_size, shuffle=True)[0]
        of_table = [one.table == "item" for one in features]
        self.batches = [_with_items(batch, of_table, case.ids, items) for _ in range(HELD)]
        ids = self.batches[0].sparse_features
        item_ids = [ids[key].values() for key, own in zip(ids.keys(), of_table, strict=True) if own]
        self.distinct = torch.cat(item_ids).unique().numel()
        self._next = itertools.cycle(self.batches)

    def step(self) -> None:
        start = time.process_time()
        self.trainer.train_on(iter([next(self._next)]))
        self.seconds.append(time.process_time() - start)


def _with_items(batch: Batch, of_table: list[bool], law: str, items: int) -> Batch:
    """The batch with other ids of items."""
    ids = batch.sparse_features
    values = ids.values().clone()
    for own, (begin, end) in zip(of_table, itertools.pairwise(ids.offset_per_key()), strict=True):
        if own:
            values[begin:end] = draw_ids(law, end - begin, items).to(values.dtype)
    drawn = KeyedJaggedTensor(ids.keys(), values, weights=ids.weights_or_none(), lengths=ids.lengths())
    return replace(batch, sparse_features=drawn)


def run(case: TableCase, device: torch.device, seconds: float) -> Iterator[dict]:
    """A row for each size: the least time of a step, and how it compares with the smallest table's."""
    torch.manual_seed(0)
    sizes = [Steps(case, items) for items in case.sizes]
    for _ in range(WARM_UP):
        for one in sizes:
            one.step()
    for one in sizes:
        one.seconds.clear()
    begun = time.perf_counter()
    while len(sizes[0].seconds) < LEAST_STEPS or time.perf_counter() - begun < seconds * len(sizes):
        for one in sizes:
            one.step()
    smallest = min(sizes[0].seconds)
    for one in sizes:
        least = min(one.seconds)
        yield {
            "case": case.name,
            "implementation": f"{one.items:,} items",
            "status": "ok",
            "items": one.items,
            "distinct_rows": one.distinct,
            "samples": case.batch_size,
            "table_step_us": least * 1e6,
            "over_smallest": least / smallest,
            "steps": len(one.seconds),
        }
