"""Look-up, target attention, backward and the step of the table: rows read by id, beside rows that a look-up writes.

*jfi* looks up in a FusedEmbeddingCollection, whose rows target attention reads by id, and the backward pass steps them.
*fbgemm + jfi* is the way without rows by id: fbgemm's table-batched embeddings write the rows [S, D] in float32 or
bfloat16, target attention reads them, and fbgemm's fused optimizer steps the table. Both have row-wise Adagrad, int64
ids, bfloat16 queries (converted to float32 where the rows are), and value = key.

Times are those of kernels, by replaying a CUDA graph: forward without gradients, and a whole step. The least time
(`floor_*`) is bytes over this run's copy speed:

- forward: ids, the row of each event in the table's dtype, queries and output;
- backward and update: ids and rows again, queries, the output's gradient and the queries'; the gradient of each event's
  row, written and read in bfloat16; each distinct row and its state, read and written.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec import EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from benchmarks import measure
from benchmarks.problem import DTYPES, Shape, log_normal, order, random
from benchmarks.run import TOLERANCE, Missing, Rates, summary
from jfi import FusedEmbeddingCollection
from jfi.ops import target_attention
from jfi.tables.rows_by_id import RowsById

SETS = 2  # of ids and queries; a table is several times larger than any cache
LEARNING_RATE, EPS = 0.1, 1e-8
JFI, FLOAT32, BFLOAT16 = "jfi", "fbgemm + jfi, float32", "fbgemm + jfi, bfloat16"


@dataclass(frozen=True)
class RowsShape(Shape):
    """Histories are log-normal with that mean, cut at N; dtype is that of queries and of the gradients of rows.

    Args:
        mean: events of a history.
        rows: of the table.
        table: its dtype: "float32" or "float16".
        ids: "uniform" or "zipf", the law of the events' ids.
    """

    mean: int = 200
    rows: int = 1_000_000
    table: str = "float32"
    ids: str = "uniform"

    @property
    def name(self) -> str:
        queries = f" T={self.T} H={self.H}" if self.T * self.H > 1 else ""
        return f"B={self.B} mean={self.mean:,} D={self.D}{queries}, {self.rows:,} {self.table} rows, {self.ids} ids"


@dataclass(frozen=True)
class RowsCase:
    shape: RowsShape

    @property
    def name(self) -> str:
        return self.shape.name


def draw_ids(law: str, count: int, rows: int, generator: torch.Generator) -> Tensor:
    """[count], int64: uniform, or row of rank r in proportion to 1 / r, where ranks are spread over the table."""
    if law == "uniform":
        return torch.randint(rows, (count,), generator=generator)
    shares = (1 / torch.arange(1, rows + 1, dtype=torch.float64)).cumsum(0)
    drawn = torch.rand(count, dtype=torch.float64, generator=generator) * shares[-1]
    ranks = torch.searchsorted(shares, drawn).clamp(max=rows - 1)
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))[ranks]


@dataclass
class Inputs:
    """One set: ids [S], offsets [B + 1], query [B, T, H, D] and the gradient of the output."""

    ids: Tensor
    offsets: Tensor
    query: Tensor
    grad: Tensor


def make_inputs(shape: RowsShape, seed: int, device: torch.device) -> Inputs:
    """Another seed gives the same lengths in another order, and other ids and queries."""
    lengths = log_normal(shape.B, shape.N, shape.mean * shape.B, torch.Generator().manual_seed(0))
    lengths = lengths[order(shape.B, seed)]
    ids = draw_ids(shape.ids, int(lengths.sum()), shape.rows, torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    query, grad = (random((shape.B, shape.T, shape.H, shape.D), shape.dtype, device) for _ in range(2))
    return Inputs(ids.to(device), F.pad(lengths.cumsum(0), (1, 0)).to(device), query, grad)


def make_table(shape: RowsShape, device: torch.device) -> Tensor:
    """Returns the table, [rows, D]."""
    torch.manual_seed(0)
    return random((shape.rows, shape.D), shape.table, device)


class ById:
    """Rows that target attention reads by id from a FusedEmbeddingCollection, whose backward steps them."""

    def __init__(self, shape: RowsShape, table: Tensor) -> None:
        self.shape = shape
        kind = {"float32": DataType.FP32, "float16": DataType.FP16}[shape.table]
        config = EmbeddingConfig(
            name="item", embedding_dim=shape.D, num_embeddings=shape.rows, feature_names=["item"], data_type=kind
        )
        options = {"lr": LEARNING_RATE, "eps": EPS}
        dtype = DTYPES[shape.dtype]
        self.tables = FusedEmbeddingCollection([config], RowWiseAdagrad, options, output_dtype=dtype, device="meta")
        self.tables.to_empty(device=table.device)
        self.weight = self.tables.embeddings["item"].weight.detach()
        self.weight.copy_(table)

    def prepare(self, inputs: Inputs) -> KeyedJaggedTensor:
        """Not timed: the ids as a batch has them."""
        keyed = KeyedJaggedTensor(
            ["item"],
            inputs.ids,
            lengths=inputs.offsets.diff(),
            offsets=inputs.offsets,
            stride=self.shape.B,
            length_per_key=[len(inputs.ids)],
            offset_per_key=[0, len(inputs.ids)],
        )
        keyed.to_dict()
        return keyed

    def attend(self, query: Tensor, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.tables(keyed)["item"]
        rows = RowsById(history.rows, (history.table,), (history.ids,))
        return target_attention(query, rows, offsets=history.offsets(), max_seqlen=self.shape.N)


class ByFbgemm:
    """Rows that fbgemm's look-up writes in some dtype, and fbgemm's fused optimizer."""

    def __init__(self, shape: RowsShape, table: Tensor, dtype: str) -> None:
        try:
            from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                BoundsCheckMode,
                EmbeddingLocation,
                PoolingMode,
            )
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        except ImportError as error:
            raise Missing(f"fbgemm_gpu: {error}") from None
        self.shape, self.dtype = shape, DTYPES[dtype]
        gpu = table.is_cuda
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        types = {"float32": SparseType.FP32, "float16": SparseType.FP16, "bfloat16": SparseType.BF16}
        self.look_up = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.D, *place)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            pooling_mode=PoolingMode.NONE,
            weights_precision=types[shape.table],
            # On a CPU float32 is all there is; `attend` converts.
            output_dtype=types[dtype] if gpu else SparseType.FP32,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=table.device,
        )
        self.weight = self.look_up.split_embedding_weights()[0].detach()
        self.weight.copy_(table)

    def prepare(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return inputs.ids, inputs.offsets

    def attend(self, query: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, offsets = batch
        rows = self.look_up(ids, offsets).to(self.dtype)
        query = query.to(rows.dtype)
        out = target_attention(query, rows.unsqueeze(1), offsets=offsets, max_seqlen=self.shape.N)
        return out.to(DTYPES[self.shape.dtype])


#: In the order in which they run: the first is what the others are compared with.
WAYS: dict[str, Callable[[RowsShape, Tensor], object]] = {
    FLOAT32: partial(ByFbgemm, dtype="float32"),
    BFLOAT16: partial(ByFbgemm, dtype="bfloat16"),
    JFI: ById,
}


def forward(way: object, inputs: Inputs) -> Callable[[], Tensor]:
    batch = way.prepare(inputs)

    @torch.no_grad()
    def call() -> Tensor:
        return way.attend(inputs.query, batch)

    return call


def step(way: object, inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """The output and the queries' gradient; the table is stepped in the backward."""
    batch = way.prepare(inputs)

    def call() -> tuple[Tensor, Tensor]:
        query = inputs.query.detach().requires_grad_()
        out = way.attend(query, batch)
        out.backward(inputs.grad)
        return out.detach(), query.grad

    return call


def result(way: object, table: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the queries' gradient and the change of the whole table, after a step."""
    out, grad = step(way, inputs)()
    return out.float(), grad.float(), way.weight.float() - table.float()


def worst(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """The largest relative error in the Frobenius norm; a NaN is larger than any number."""
    errors = [float((x - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def floor_bytes(shape: RowsShape, inputs: Inputs) -> tuple[int, int]:
    """The fewest of the forward, and of backward and update; see the module's docstring."""
    events, ids = len(inputs.ids), inputs.ids.nbytes
    row = shape.D * DTYPES[shape.table].itemsize
    gradients = events * shape.D * DTYPES[shape.dtype].itemsize
    distinct, state = inputs.ids.unique().numel(), 4
    read = ids + events * row
    return (
        read + 2 * inputs.query.nbytes,
        read + 3 * inputs.query.nbytes + 2 * gradients + 2 * distinct * (row + state),
    )


def times(row: dict, make: Callable[[], object], sets: list[Inputs], floors: tuple[float, float]) -> None:
    """Fills in the times; `make` is called on the stream that captures, where a backward's forward has to be."""

    def calls(of: Callable) -> Callable[[], list[measure.Call]]:
        def build() -> list[measure.Call]:
            way = make()
            return [of(way, inputs) for inputs in sets]

        return build

    row["kernel_forward_us"] = measure.kernel_us(calls(forward))
    row["efficiency_forward"] = floors[0] / row["kernel_forward_us"]
    row["kernel_forward_backward_us"] = measure.kernel_us(calls(step))
    row["efficiency_forward_backward"] = sum(floors) / row["kernel_forward_backward_us"]
    row["peak_mb"] = measure.peak_mb(step(make(), sets[0]))


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(case: RowsCase, device: torch.device, seconds: float, rates: Rates) -> Iterator[dict]:
    """A row for each way, with its ratios to fbgemm's; `seconds` is not needed, since graphs are replayed."""
    shape = case.shape
    sets = [make_inputs(shape, seed, device) for seed in range(SETS)]
    table = make_table(shape, device)
    floors = tuple(rates.floor_us(size, 0.0) or 0.0 for size in floor_bytes(shape, sets[0]))
    columns = {"headline": True, **shape_columns(shape), "S": len(sets[0].ids)}
    columns |= {"distinct_rows": sets[0].ids.unique().numel()}
    columns |= {"floor_forward_us": floors[0]}
    columns |= {"floor_backward_us": floors[1], "floor_forward_backward_us": sum(floors)}
    with torch.autograd.set_multithreading_enabled(False):  # as `jfi.training` trains
        for row in _trained(shape, table, sets, floors):
            release(device)
            yield {"case": case.name, **columns, **row}


def shape_columns(shape: RowsShape) -> dict[str, object]:
    names = ("B", "N", "D", "T", "H", "mean", "rows", "table", "ids", "dtype")
    return {name: getattr(shape, name) for name in names}


def _attempt(row: dict, measured: Callable[[], None]) -> None:
    try:
        measured()
    except Missing as reason:
        row |= {"status": "missing", "note": str(reason)}
    except Exception as error:
        row |= {"status": "failed", "note": summary(error)}


def _check(row: dict, found: tuple[Tensor, ...], truth: tuple[Tensor, ...], tolerance: float, name: str) -> bool:
    row["error"] = worst(found, truth)
    row["status"] = "ok" if row["error"] <= tolerance else "wrong"
    if row["status"] == "wrong":
        row["note"] = f"differs from {name} by {row['error']:.1e}"
    return row["status"] == "ok"


def _trained(shape: RowsShape, table: Tensor, sets: list[Inputs], floors: tuple[float, float]) -> list[dict]:
    """Everything is compared with fbgemm's float32 rows."""
    truth: list[Tensor] = []
    rows = {}
    for name, way in WAYS.items():
        row = rows[name] = {"implementation": name, "ours": name == JFI}

        def measured(row: dict = row, name: str = name, way: Callable = way) -> None:
            found = result(way(shape, table), table, sets[0])
            if name == FLOAT32:
                truth[:] = found
            if not truth:
                raise Missing(f"{FLOAT32}, which it is compared with, has failed")
            if _check(row, found, tuple(truth), TOLERANCE[shape.dtype], FLOAT32):
                del found
                release(table.device)
                times(row, lambda: way(shape, table), sets, floors)

        _attempt(row, measured)
        release(table.device)
    for row in rows.values():
        for name, peer in ((FLOAT32, "fbgemm"), (BFLOAT16, "fbgemm_bfloat16")):
            if row["status"] == rows[name]["status"] == "ok":
                for column in ("forward", "forward_backward"):
                    time = f"kernel_{column}_us"
                    row[f"{column}_speed_over_{peer}"] = rows[name][time] / row[time]
                row[f"memory_over_{peer}"] = row["peak_mb"] / rows[name]["peak_mb"]
    return [rows[JFI], rows[FLOAT32], rows[BFLOAT16]]


USUAL = RowsShape(B=4096, N=1024, D=64)
LONG = RowsShape(B=1024, N=8192, D=128, mean=1500, rows=4_000_000, ids="zipf")
HEADLINES = (USUAL, replace(USUAL, ids="zipf"), LONG, replace(LONG, table="float16"))
OTHERS = (
    replace(USUAL, D=32),
    replace(USUAL, D=256),
    replace(USUAL, H=8),
    replace(USUAL, T=4, H=4),
    replace(USUAL, N=128, mean=20),
    replace(USUAL, B=64, N=100_000, mean=20_000),
)


def cases(quick: bool) -> list[RowsCase]:
    return [RowsCase(shape) for shape in (HEADLINES[:2] if quick else HEADLINES + OTHERS)]
