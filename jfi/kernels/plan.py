"""Which kernels run an attention call, on which tiles, and how their work is split: every choice and every threshold.

A plan follows from shapes, dtypes, the device and hints alone; launchers execute it and choose nothing themselves.
``jfi.ops.explain`` shows the plan of a call.  Not here but in jfi/cpu are the block sizes of a CPU's batched products
and when it pads a batch: they go by each sample's length.  The numbers are the best of those measured on an H200 unless
a line says otherwise.  One file on purpose, long as it is: a choice can be read and changed in one place.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property

import torch

from jfi.utils.context import interprets
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs, ceil_div, is_packed, power_of_two

# --- Thresholds: stream-K ---------------------------------------------------------------------------------------------
#: The cost of a sample in addition to its rows, in rows.  Kernels are compiled with it.
SAMPLE_WEIGHT = 64
#: Shortest range of a stream-K partition, in positions: below, finding the range costs more than it balances.
MIN_CHUNK = 256

# --- Thresholds: target attention -------------------------------------------------------------------------------------
#: Query rows per key head up to which they are one tile of the least size that tensor cores take.
SINGLE_TILE_ROWS = 16
#: Up to this length, in rows and in bytes, one program handles one sample: the tail costs less than the partition
#: search and the combine step.
PROGRAM_PER_SAMPLE_ROWS, PROGRAM_PER_SAMPLE_BYTES = 512, 2**18
#: Longest history up to which steps of many rows would often be half empty.
SHORT_ROWS = 384
#: Samples per SM up to which starting with the longest saves more than finding the order costs.
LONGEST_FIRST_SAMPLES_PER_SM = 40
#: Rows of a bias table up to which its gradient is summed in the kernel; the events of a larger one are sorted.
TABLE_ROWS = 64
#: Elements of all programs' table gradients up to which there is a program per sample.
MAX_TABLE_ELEMENTS = 2**22
#: Programs per SM that the chunks of the kernels for many query rows are cut for.
CHUNKED_PROGRAMS_PER_SM = 2
#: Bytes of the widest row that fits a tile, and the rows of the narrowest tiles with all that 3xTF32 keeps of them in
#: shared memory.
MAX_WIDTH_BYTES, TF32X3_ROWS = 2048, 162
#: Scores per sample and key head above which dense products are faster than sparse ones on a CPU.
CPU_DENSE_SCORES = 2048
#: Scales that PyTorch's flash attention for CPUs takes: 0 and below would not leave the -inf of hidden keys -inf, and
#: its exponentials, exact to 20 bits, lose digits of large scores.
CPU_FLASH_MIN_SCALE, CPU_FLASH_MAX_SCALE = 1e-30, 1.0

# --- Thresholds: attention over digits --------------------------------------------------------------------------------
#: Most digits of an event that fit a tile, and the registers of a warp.
MAX_DIGITS, MAX_REGISTER_DIGITS = 512, 128
#: Kernels in registers divide a table of biases by a scale above this, so that -inf stays far below all scores.
DIGIT_TABLE_MIN_SCALE = 2.0**-20

# --- Thresholds: target attention as jagged attention -----------------------------------------------------------------
#: Tiles of 64 query rows per SM from which every SM has work though no history is split.
FILLING_TILES_PER_SM = 2
#: By width, query rows per key head from which the sm90 kernels of jagged attention are faster, both passes added, than
#: the kernels for many query rows, with a value of its own and with value = key.  Measured on 98 problems each of 20 to
#: 255 query rows: this choice is within 0.6 % of the faster family on average and 16 % at worst.
JAGGED_QUERY_ROWS: dict[int, int] = {64: 65, 128: 97}
JAGGED_QUERY_ROWS_SHARED: dict[int, int] = {64: 256, 128: 256}

# --- Thresholds: jagged attention (sm90) ------------------------------------------------------------------------------
#: By each width that the kernels are written for, mean keys per sample up to which tiles of 64 keys are faster than of
#: 128.
SM90_SHORT_KEYS = {64: 768, 128: 384}
#: Work tiles for each program that runs at once, up to which the keys of a tile are split: where later tiles of a
#: sample see more keys than earlier ones, short work tiles even out what the SMs do; else one for each is enough.
SM90_TAPERING_SPLITS, SM90_EQUAL_SPLITS = 4, 1
#: The same, up to which the tiles that see the most keys come first, and not all tiles of a sample one after the other,
#: which read the same keys: with more tiles the end of the kernel costs less than reading them again.
SM90_TAPERING_TILES = 8
#: Mean keys of a split from which it costs less than it gains, and the most splits.
SM90_SPLIT_KEYS, SM90_MAX_SPLITS = 1024, 8
#: The greatest score is found before it is scaled, so the scale must be positive, in float32.
SM90_MIN_SCALE = 1e-30
#: Rows times heads that 32-bit row numbers count, a tile past the end included.
SM90_MAX_ROWS = 2**31 - 256
#: Elements of a tile of the kernel that computes log-sum-exp and Δ for the generic backward.
STATISTICS_ELEMENTS = 2048

# --- Thresholds: shared memory ----------------------------------------------------------------------------------------
#: Shared memory of a compiled kernel over `_tile_bytes`, with 3xTF32, on AMD, and else: the most of those that took at
#: least 60 KB (on AMD 38), compiled with triton 3.7.1 for sm_80, sm_89 and gfx942 at widths of 64 to 256.
SHARED_MEMORY = {
    "target_attention_single_tile_fwd": (0.64, 0.59, 0.68),
    "target_attention_single_tile_bwd": (1.40, 0.34, 0.88),
    "target_attention_multi_tile_fwd": (0.50, 0.50, 0.55),
    "target_attention_multi_tile_dquery": (0.91, 0.80, 0.74),
    "target_attention_multi_tile_all": (0.91, 1.43, 0.74),  # dquery where one sweep gives all gradients
    "target_attention_multi_tile_dhistory": (0.63, 0.29, 0.79),
    "jagged_attention_fwd": (0.87, 0.38, 0.52),
    "jagged_attention_dquery": (1.25, 0.32, 0.78),
    "jagged_attention_dkey": (0.75, 0.25, 0.65),
}

# --- Overrides --------------------------------------------------------------------------------------------------------
#: For `override`: the number of SMs instead of the device's own, kernel families instead of the fastest, and splits of
#: the keys in the sm90 forward of jagged attention.
NUM_SMS: int | None = None
TARGET_FAMILY: str | None = None
JAGGED_FAMILY: str | None = None
SM90_SPLITS: int | None = None

#: The reason for the kernels for any GPU in an exported program.
_EXPORTED = "torch.export, and AOTInductor takes no Gluon"

_caches: list[Callable] = []


def cached(function: Callable) -> Callable:
    """functools.cache, cleared by `override`: for what follows from plans and problems, which are equal by identity."""
    found = cache(function)
    _caches.append(found)
    return found


@contextmanager
def override(**values: object) -> Iterator[None]:
    """Plan with other thresholds while the context lasts: for tests and measurements; not thread-safe.

    Plans and launchers made before are forgotten, so the first calls within the context and after it launch slowly.

    Args:
        values: constants of this module by name, such as ``MIN_CHUNK=128``, ``NUM_SMS=2`` or
            ``TARGET_FAMILY="target_multi_tile"``.
    """
    constants = globals()
    unknown = [name for name in values if not name.isupper() or name not in constants or name == "SAMPLE_WEIGHT"]
    if unknown:
        raise ValueError(f"override takes thresholds of {__name__}, got {', '.join(unknown)}")
    before = {name: constants[name] for name in values}
    try:
        constants.update(values)
        for function in _caches:
            function.cache_clear()
        yield
    finally:
        constants.update(before)
        for function in _caches:
            function.cache_clear()


# --- What a plan is made for ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Device:
    """The properties of a device that a plan depends on, and its name.

    Attributes:
        type: of torch.device.
        arch: "sm_90" or "gfx942", as compilers name it; "" means a CPU or Triton's interpreter.
        num_sms: SMs, or compute units of an AMD GPU.
        shared_memory: bytes that one program may have; None means no limit.
        name: as its maker writes it.
    """

    type: str
    arch: str = ""
    num_sms: int = 1
    shared_memory: int | None = None
    name: str = ""

    @cached_property
    def capability(self) -> tuple[int, int]:
        """The compute capability of an NVIDIA GPU, such as (9, 0); (0, 0) for others."""
        major, minor = (self.arch[3:-1], self.arch[-1]) if self.arch.startswith("sm_") else (0, 0)
        return int(major), int(minor)

    @cached_property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    def __str__(self) -> str:
        if not self.arch:
            return self.name or self.type
        memory = "" if self.shared_memory is None else f", {self.shared_memory // 1024} KB of shared memory per program"
        return f"{self.name} ({self.arch}), {self.num_sms} {'CUs' if self.is_amd else 'SMs'}{memory}"


A100 = Device("cuda", "sm_80", 108, 163 * 1024, "NVIDIA A100")
RTX3090 = Device("cuda", "sm_86", 82, 99 * 1024, "NVIDIA RTX 3090")
L4 = Device("cuda", "sm_89", 58, 99 * 1024, "NVIDIA L4")
RTX4090 = replace(L4, num_sms=128, name="NVIDIA RTX 4090")
H200 = Device("cuda", "sm_90", 132, 227 * 1024, "NVIDIA H200")
H100 = replace(H200, name="NVIDIA H100")
B200 = Device("cuda", "sm_100", 148, 227 * 1024, "NVIDIA B200")
RTX5090 = Device("cuda", "sm_120", 170, 99 * 1024, "NVIDIA RTX 5090")
MI300X = Device("cuda", "gfx942", 304, 64 * 1024, "AMD MI300X")
MI350X = Device("cuda", "gfx950", 256, 160 * 1024, "AMD MI350X")
CPU = Device("cpu")


@cached
def device_of(device: torch.device) -> Device:
    """Returns the properties of a device of this host."""
    if device.type != "cuda":
        return Device(device.type, num_sms=NUM_SMS or 1)
    properties = torch.cuda.get_device_properties(device)
    num_sms = NUM_SMS or properties.multi_processor_count
    if interprets():
        return Device("cuda", num_sms=num_sms)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        # Older releases of PyTorch do not know it; no GPU of AMD for data centers has less.
        memory = getattr(properties, "shared_memory_per_block", MI300X.shared_memory)
    else:
        arch, memory = f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin
    return Device("cuda", arch, num_sms, memory, properties.name)


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """The facts about a call that do not depend on its lengths: the first twelve fields are constants of kernels.

    One object per set of values, so that what follows from it is cached by identity.
    """

    num_kv_heads: int  # G
    qheads_per_kvhead: int  # H/G, query heads that share a key head
    head_dim: int  # D, of a query and of a key head
    value_dim: int  # E
    shared_kv: bool  # value = key; each history row is loaded once
    has_bias: bool  # by event and head
    bias_by_index: bool  # the bias is a table; each event names one of its rows
    has_value_scale: bool  # values are multiplied by a number per event
    num_fields: int  # tensors that hold a history row, in equal parts: 1 or 2
    num_tables: int  # whose rows are read by id and summed; 0 where the history is dense
    num_words: int  # int32 words of an event of packed digits; 0 where events are rows of numbers
    precision: str  # input_precision of tl.dot
    padded_queries: int  # the power of two that covers the query rows of a key head, T · H/G; 0 where T varies
    dtype: torch.dtype
    table_dtype: torch.dtype | None  # of rows by id
    device: Device

    @cached_property
    def block_d(self) -> int:
        return power_of_two(self.head_dim)

    @cached_property
    def block_e(self) -> int:
        return power_of_two(self.value_dim)

    @cached_property
    def width_bytes(self) -> int:
        """Bytes of the wider of a key and a value row, padded to a tile's width."""
        itemsize = max(self.dtype.itemsize, (self.table_dtype or self.dtype).itemsize)
        return itemsize * max(self.block_d, self.block_e)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a history row, padded to a tile's width."""
        return self.width_bytes * (1 if self.shared_kv else 2)

    @cached_property
    def sum_precision(self) -> str:
        """input_precision of tl.dot for sums of float32 over query rows, which keep its precision in every dtype."""
        return "ieee" if self.device.is_amd else "tf32x3"

    @cached_property
    def gluon_refusal(self) -> str | None:
        """The reason why no Gluon kernel takes a call; None if one may."""
        if self.device.capability[0] != 9:
            return "no Hopper GPU"
        return None if self.dtype.itemsize == 2 else f"{self.dtype} is not half precision"

    @cached_property
    def sm90_refusal(self) -> str | None:
        """The reason why the sm90 kernels take no call, whatever its lengths and its scale; None if they may."""
        if self.num_words:
            return "keys are packed digits"
        if self.gluon_refusal is not None:
            return self.gluon_refusal
        if self.head_dim not in SM90_SHORT_KEYS or self.value_dim != self.head_dim:
            return f"keys and values are not both {' or '.join(map(str, SM90_SHORT_KEYS))} wide"
        if 1 not in (self.num_kv_heads, self.qheads_per_kvhead):
            return "several query heads share each of several key heads"
        return "query heads with a bias share a key head" if self.has_bias and self.qheads_per_kvhead > 1 else None

    @cached_property
    def reads_halves_by_id(self) -> bool:
        """True if rows are read by id for products of half precision, of a width that has tiles of its own."""
        return self.num_tables > 0 and self.dtype.itemsize == 2 and self.block_d <= 128


@cached
def _problem(sizes: tuple, flags: tuple, rows: tuple, precision, padded_queries, dtypes, device) -> AttentionProblem:
    """Returns the problem of these fields in their order, one object for the same values."""
    problem = AttentionProblem(*sizes, *flags, *rows, precision, padded_queries, *dtypes, device)
    dtype = problem.dtype
    if problem.width_bytes > MAX_WIDTH_BYTES:
        raise ValueError(
            f"key and value must be at most {MAX_WIDTH_BYTES // dtype.itemsize} wide for impl='triton' and {dtype}, "
            f"got {max(problem.head_dim, problem.value_dim)}: use impl='torch'"
        )
    fits = problem.width_bytes * TF32X3_ROWS <= (device.shared_memory or H200.shared_memory)
    return problem if fits else replace(problem, precision="ieee")


def precision_of(dtype: torch.dtype, device: Device) -> str:
    """Returns tl.dot's input_precision for torch.get_float32_matmul_precision(); "tf32x3" has the error of float32."""
    if device.is_amd:  # whose matrix cores multiply float32
        return "ieee"
    highest = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "tf32x3" if highest else "tf32"


# --- Plans ------------------------------------------------------------------------------------------------------------
class Split(StrEnum):
    """The distribution of a batch's rows over the programs of a kernel."""

    SAMPLE = "one program per sample"
    LONGEST_FIRST = "one program per sample, longest first"
    STREAM_K = "stream-K: equal ranges of all rows, then combine"
    CHUNKS = "chunks of long samples, then combine"
    TILES = "one program per tile"
    TILE_SCHEDULER = "tiles of the longest samples first"
    TAPERING = "tiles that see the most keys first"
    PYTORCH = "as PyTorch's operators do"


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """One kernel: its name, tiles, launch options and split of the work.

    Attributes:
        kernel: name of the kernel.
        split: how rows are distributed over programs.
        block_m, block_n: query rows and history rows of a tile.
        num_warps, num_stages, max_registers: Triton's options.
        programs_per_sm: programs per SM that ranges or chunks are cut for, or that run at once.
        options: further compile-time constants of the kernel, by name.
        num_splits: work tiles that the history rows of a tile are split into; their results are combined.
    """

    kernel: str
    split: Split
    block_m: int = 0
    block_n: int = 0
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int | None = None
    programs_per_sm: int = 0
    options: tuple[tuple[str, object], ...] = ()
    num_splits: int = 1

    @cached_property
    def constants(self) -> dict[str, object]:
        """The options by name."""
        return dict(self.options)

    @cached_property
    def launch(self) -> dict[str, int]:
        """Triton's options."""
        launch = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return launch if self.max_registers is None else launch | {"maxnreg": self.max_registers}

    def __repr__(self) -> str:
        if not self.block_n:
            return self.kernel
        size = f"{self.block_m} x {self.block_n} tiles, {self.num_warps} warps, {self.num_stages} stages"
        more = f", {self.programs_per_sm} programs per SM" if self.programs_per_sm else ""
        more += f", {self.max_registers} registers" if self.max_registers else ""
        more += f", {self.num_splits} splits of the history rows, then combine" if self.num_splits > 1 else ""
        more += "".join(f", {name}={value}" for name, value in self.options)
        return f"{self.kernel}: {size}{more}; {self.split}"


#: KernelPlan(...), one object for the same values: launchers are cached by it.
_kernel = cached(KernelPlan)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The kernels of a call and the reason for them.  Equal decisions are one object.

    Attributes:
        family: "target_single_tile", "target_multi_tile", "jagged_sm90", "jagged_triton", "digits_registers", "cpu" or
            "reference".
        forward, backward: the kernels, in the order of their launches.
        reason: why this family.
        problem: what the kernels are compiled for; None where none is.
    """

    family: str
    forward: tuple[KernelPlan, ...]
    backward: tuple[KernelPlan, ...]
    reason: str
    problem: AttentionProblem | None = None

    def __repr__(self) -> str:
        lines = [f"{self.family}: {self.reason}"]
        if self.problem is not None:
            lines.append(f"  device: {self.problem.device}")
        for name in ("forward", "backward"):
            lines += [f"  {name}: {kernel!r}" for kernel in getattr(self, name)]
        return "\n".join(lines)


@cached
def _torch_plan(family: str, kernel: str, reason: str) -> AttentionPlan:
    kernels = (_kernel(kernel, Split.PYTORCH),)
    return AttentionPlan(family, kernels, kernels, reason)


def _tile_bytes(problem: AttentionProblem, kernel: str, block_m: int, block_n: int, stages: int) -> int:
    """Returns the bytes of a tile of queries and one of the history, and once more of the looped one by stage.

    Queries count with their gradient, the history as keys and values; a forward loops over a shared history alone.
    What has no stages, or stages of packed digits, takes as much as with two.
    """
    row_bytes = 2 * problem.width_bytes
    if kernel.endswith(("dkey", "dhistory")):
        looped = block_m * row_bytes
    else:
        looped = block_n * (problem.row_bytes if kernel.endswith("fwd") else row_bytes)
        stages = 2 if problem.num_words else stages
    return (block_m + block_n) * row_bytes + max(stages, 2) * looped


def _fit(
    problem: AttentionProblem,
    kernel: str,
    block_m: int,
    block_n: int,
    warps: int,
    stages: int,
    registers: int | None = None,
) -> tuple[int | None, ...]:
    """Returns tiles and options that fit a program's shared memory: with fewer stages, then with smaller tiles."""
    device = problem.device
    split = problem.dtype == torch.float32 and problem.precision == "tf32x3"
    factor = SHARED_MEMORY[kernel][1 if device.is_amd else 0 if split else 2]
    limit = math.inf if device.shared_memory is None else device.shared_memory
    while factor * _tile_bytes(problem, kernel, block_m, block_n, stages) > limit:
        if stages > 2:
            stages -= 1
        elif block_m == block_n == 16:
            break
        elif block_m == 16 or (block_n > 16 and not kernel.endswith(("dkey", "dhistory"))):
            block_n //= 2
        else:
            block_m //= 2
    return block_m, block_n, warps, stages, None if device.is_amd else registers  # AMD's compiler limits none


def stream_k(rows: int, batch: int, num_sms: int, programs_per_sm: int) -> tuple[int, int]:
    """Splits a batch's rows, and SAMPLE_WEIGHT more for each sample, into ranges; returns (their length, number)."""
    line = rows + batch * SAMPLE_WEIGHT
    chunk = ceil_div(line, num_sms * programs_per_sm)
    chunk = max(MIN_CHUNK, chunk) if isinstance(chunk, int) else torch.sym_max(MIN_CHUNK, chunk)  # symbolic
    return chunk, ceil_div(line, chunk)


# --- Target attention -------------------------------------------------------------------------------------------------
def plan_target_attention(
    x: TargetAttentionInputs, impl: str, device: Device | None = None, exported: bool = False
) -> AttentionPlan:
    """Returns the plan of `jfi.ops.target_attention`.

    Args:
        x: the operands; of tensors, shapes, dtypes and addresses are read.
        impl: "triton" or "torch".
        device: where it would run; None means on x's device.
        exported: on a GPU under torch.export: no address, no length and no number of samples or events is known.
    """
    query, key, value, _, bias, bias_index, value_scale, second, tables, _, scale, max_seqlen = x
    device = device_of(query.device) if device is None else device
    packed = is_packed(key)
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    if exported:  # sizes may be symbols, of which these must be known
        num_queries, num_heads, head_dim, num_kv_heads = map(int, (num_queries, num_heads, head_dim, num_kv_heads))
    qheads_per_kvhead = num_heads // num_kv_heads
    query_rows = num_queries * qheads_per_kvhead
    if impl == "torch":
        if device.type == "cpu":
            if packed:
                reason = "at most 2^15 events or one sample at a time"
                return _torch_plan("cpu", "digits decoded by blocks of samples", reason)
            scores = num_keys * query_rows
            dense = scores == 0 or scores > CPU_DENSE_SCORES * batch
            kernel, than = ("dense products", "more than") if dense else ("sparse products", "at most")
            return _torch_plan("cpu", kernel, f"{than} {CPU_DENSE_SCORES} scores per sample and key head")
        formula = f"jfi.reference.{'digit' if packed else 'target'}_attention"
        return _torch_plan("reference", formula, "impl='torch' on a GPU: the plain formula")
    sizes = (num_kv_heads, qheads_per_kvhead, head_dim, head_dim if value is None else value.shape[2])
    flags = (value is None, bias is not None, bias_index is not None, value_scale is not None)
    rows = (1 if second is None else 2, len(tables), key.shape[2] if packed else 0)
    padded_queries = 0 if packed else 1 << (query_rows - 1).bit_length()
    dtypes = (query.dtype, tables[0].dtype if tables and not packed else None)
    problem = _problem(sizes, flags, rows, precision_of(query.dtype, device), padded_queries, dtypes, device)
    table_rows = 0 if bias_index is None else bias.shape[0]
    block_r = power_of_two(table_rows) if 0 < table_rows <= TABLE_ROWS else 0
    if packed:
        min_scale = DIGIT_TABLE_MIN_SCALE if block_r else SM90_MIN_SCALE
        refusal = _EXPORTED if exported else None if scale > min_scale else f"scale is at most {min_scale}"
        return _plan_digits(problem, block_r, num_queries == 1, refusal)
    if fits_single_tile(query_rows):
        if exported:
            return _plan_single_tile(problem, False, False, False, False, block_r)
        whole = max_seqlen is not None and max_seqlen <= PROGRAM_PER_SAMPLE_ROWS
        whole = whole and max_seqlen <= PROGRAM_PER_SAMPLE_BYTES // problem.row_bytes
        tables_fit = table_rows > TABLE_ROWS or batch * table_rows * num_heads <= MAX_TABLE_ELEMENTS
        ordered = batch <= LONGEST_FIRST_SAMPLES_PER_SM * device.num_sms
        return _plan_single_tile(
            problem, whole, whole and max_seqlen <= SHORT_ROWS, whole and tables_fit, ordered, block_r
        )
    forced = "TARGET_FAMILY is not target_single_tile" if query_rows <= SINGLE_TILE_ROWS else None
    reason = forced or f"more than {SINGLE_TILE_ROWS} query rows per key head"
    if exported:
        return _plan_multi_tile(problem, False, f"{reason}; {_EXPORTED}")
    aligned = (query.data_ptr() | key.data_ptr() | (0 if value is None else value.data_ptr())) % 16 == 0
    refusal = _jagged_refusal(problem, batch, query_rows, num_keys, scale, aligned)
    if refusal is None:
        return _plan_sm90(problem, num_keys <= SM90_SHORT_KEYS[head_dim] * batch, False, Split.TILE_SCHEDULER, 1)
    return _plan_multi_tile(problem, aligned and 0 < num_keys < 2**31, f"{reason}, and not jagged attention: {refusal}")


def plan_absorbed_target_attention(
    operands: tuple[TargetAttentionInputs, bool], impl: str, device: Device | None = None
) -> AttentionPlan:
    """Returns the plan of `jfi.ops.absorbed_target_attention`.

    ``operands`` are those of its target attention, and whether kernels absorb the weights.
    """
    x, in_kernel = operands
    return _with_absorbed_weights(plan_target_attention(x, impl, device), in_kernel)


@cached
def _with_absorbed_weights(attention: AttentionPlan, in_kernel: bool) -> AttentionPlan:
    if in_kernel:
        forward = (_kernel("absorbed_weights_fwd", Split.TILES),)
        backward = (_kernel("absorbed_weights_bwd_batch", Split.TILES), _kernel("absorbed_weights_bwd", Split.TILES))
    else:
        forward = backward = (_kernel("absorbed weights by PyTorch's matrix products", Split.PYTORCH),)
    return replace(attention, forward=forward + attention.forward, backward=attention.backward + backward)


def fits_single_tile(query_rows: int) -> bool:
    """Returns whether the single-tile kernels take so many query rows per key head: only they read bias tables.

    Then key may also be the left half of the history's one head, whose right half is ``second``.
    """
    return query_rows <= SINGLE_TILE_ROWS and TARGET_FAMILY in (None, "target_single_tile")


def _jagged_refusal(
    problem: AttentionProblem, batch: int, query_rows: int, num_keys: int, scale: float, aligned: bool
) -> str | None:
    """Returns why jagged attention's sm90 kernels cannot run, or are slower than the multi-tile kernels; or None."""
    if TARGET_FAMILY not in (None, "jagged_sm90"):
        return f"TARGET_FAMILY is {TARGET_FAMILY}"
    refusal = sm90_refusal(problem, batch * problem.num_kv_heads * query_rows, num_keys, scale, aligned)
    if refusal is not None or TARGET_FAMILY is not None:
        return refusal
    least = (JAGGED_QUERY_ROWS_SHARED if problem.shared_kv else JAGGED_QUERY_ROWS)[problem.head_dim]
    if query_rows < least:
        return f"fewer than {least} query rows per key head"
    tiles = batch * problem.num_kv_heads * ceil_div(query_rows, 64)
    if tiles < FILLING_TILES_PER_SM * problem.device.num_sms:
        return f"fewer than {FILLING_TILES_PER_SM} tiles of 64 query rows per SM"
    return None


@cached
def _plan_single_tile(
    problem: AttentionProblem, whole: bool, short: bool, whole_backward: bool, ordered: bool, block_r: int
) -> AttentionPlan:
    """Plans few query rows: one tile of them; every history row is read once."""
    name, how = "target_attention_single_tile_fwd", Split.STREAM_K
    block_n, warps, stages, programs = _single_tile_forward(problem)
    if whole:
        how, programs = Split.SAMPLE, 0
        block_n, warps, stages = _per_sample_forward(problem, short) or (block_n, warps, stages)
    forward = _kernel(name, how, *_fit(problem, name, SINGLE_TILE_ROWS, block_n, warps, stages), programs)
    name, how = "target_attention_single_tile_bwd", Split.STREAM_K
    options = ("BLOCK_H", power_of_two(problem.qheads_per_kvhead)), ("BLOCK_R", block_r)
    *tiles, programs = _single_tile_backward(problem, whole_backward)
    if whole_backward:
        how, programs = Split.LONGEST_FIRST if ordered else Split.SAMPLE, 0
    backward = _kernel(name, how, *_fit(problem, name, SINGLE_TILE_ROWS, *tiles), programs, options)
    reason = f"at most {SINGLE_TILE_ROWS} query rows per key head: the history is read once"
    if problem.num_tables:
        reason += f", by id from {problem.num_tables} table{'s' * (problem.num_tables > 1)}"
    return AttentionPlan("target_single_tile", (forward,), (backward,), reason, problem)


# The tiles below are (block_n, warps, stages), and programs per SM where no program handles a whole sample.
def _single_tile_forward(problem: AttentionProblem) -> tuple[int, ...]:
    if problem.row_bytes > 1024:
        return 16, 8 if problem.width_bytes > 1024 else 4, 1, 1
    if problem.reads_halves_by_id:
        return (64, 1, 3, 8) if problem.block_d <= 64 else (64, 2, 3, 4)
    if problem.row_bytes <= 128:
        return 64, 1, 3, 8
    if problem.row_bytes <= 256:
        # A step loads the queries again: fewer steps where they are many.
        return (128, 4, 3, 2) if problem.padded_queries > 4 else (64, 2, 3, 4)
    return (32, 4, 3, 2) if problem.shared_kv else (32, 2, 3, 3)


def _per_sample_forward(problem: AttentionProblem, short: bool) -> tuple[int, ...] | None:
    """Returns tiles of a program per sample; None for those of stream-K."""
    if problem.width_bytes == 512:
        return 16, 1 if problem.shared_kv else 2, 3
    if short and problem.width_bytes <= 256:
        return 16, 1, 4
    if problem.row_bytes <= 256:
        return (32, 1, 4) if problem.row_bytes <= 128 else (64, 2, 3)
    return None


def _single_tile_backward(problem: AttentionProblem, whole: bool) -> tuple[int, ...]:
    if problem.reads_halves_by_id:
        return (32, 1, 3, 8) if problem.block_d <= 64 else (32, 2, 3, 4)
    if whole and problem.width_bytes == 512:
        return 16, 2, 3, 0
    if whole and problem.width_bytes <= 256:
        return 16, 1, 4, 0
    if problem.width_bytes > 512:
        return (16, 8, 1, 1) if problem.width_bytes > 1024 else (16, 4, 1, 1)
    if problem.width_bytes <= 128 and problem.shared_kv:
        return 32, 1, 3, 8
    if problem.width_bytes <= 256:
        return 32, 2, 3, 4 if problem.row_bytes <= 128 or not problem.shared_kv else 3
    return 16, 2, 3 if problem.shared_kv else 2, 4


@cached
def _plan_multi_tile(problem: AttentionProblem, aligned: bool, reason: str) -> AttentionPlan:
    """Plans many query rows: tiles of them, and chunks of long histories."""

    def fit(kernel: str, tiles: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return _fit(problem, f"target_attention_multi_tile_{kernel}", *tiles)

    def plan(kernel: str, tiles: tuple[int | None, ...], programs: int, **options: object) -> KernelPlan:
        how, name = Split.CHUNKS if programs else Split.TILES, f"target_attention_multi_tile_{kernel}"
        return _kernel(name, how, *tiles, programs, tuple(options.items()))

    num_kv_heads, num_heads = problem.num_kv_heads, problem.num_kv_heads * problem.qheads_per_kvhead
    history_by_tma = aligned and _by_tma(problem, num_kv_heads)
    queries_by_tma = history_by_tma and num_kv_heads in (1, num_heads) and _by_tma(problem, num_heads)
    single = _single_sweep(problem)
    block_h = power_of_two(problem.qheads_per_kvhead, 1 if problem.qheads_per_kvhead.bit_count() == 1 else 16)
    wide = _wide_tiles(problem)
    tiles = fit("fwd", wide or _multi_tile_forward(problem))
    forward = plan("fwd", tiles, CHUNKED_PROGRAMS_PER_SM, BY_TMA=history_by_tma)
    tiles = single or fit("dquery", wide or _multi_tile_dquery(problem))
    dhistory = fit("dhistory", wide or _multi_tile_dhistory(problem))
    options = {"TILE_ROWS": 0 if single else dhistory[1], "BLOCK_H": block_h, "BY_TMA": history_by_tma}
    backward = (plan("dquery", tiles, CHUNKED_PROGRAMS_PER_SM, **options),)
    if not single:
        backward += (plan("dhistory", dhistory, 0, BLOCK_H=block_h, BY_TMA=queries_by_tma),)
    return AttentionPlan("target_multi_tile", (forward,), backward, reason, problem)


def _by_tma(problem: AttentionProblem, num_heads: int) -> bool:
    """Returns whether TMA can load tiles of whole heads of rows of so many, if the tensors are aligned."""
    widths = (problem.head_dim, problem.value_dim)
    fits = all([(num_heads == 1 or x == power_of_two(x)) and x * problem.dtype.itemsize % 16 == 0 for x in widths])
    return fits and problem.dtype.itemsize == 2 and problem.device.capability >= (9, 0)


# The tiles below are (block_m, block_n, warps, stages), and registers where they are limited.
def _wide_tiles(problem: AttentionProblem) -> tuple[int, ...] | None:
    """Returns the tiles of rows above 512 bytes; None for others."""
    return (16, 16, 8 if problem.width_bytes > 1024 else 4, 1) if problem.width_bytes > 512 else None


def _multi_tile_forward(problem: AttentionProblem) -> tuple[int | None, ...]:
    if problem.dtype.itemsize > 2:
        return min(64, problem.padded_queries), 64, 4, 1
    if problem.width_bytes > 256:
        return (64, 64, 4, 2) if problem.shared_kv else (64, 32, 4, 2)
    # 168 registers let three programs run at once; a bias by head needs more.
    return 64, 64, 4, 3, None if problem.has_bias and problem.qheads_per_kvhead > 1 else 168


def _single_sweep(problem: AttentionProblem) -> tuple[int | None, ...] | None:
    """Returns the tiles of a kernel that gives all gradients; None where a tile does not take all query rows."""
    if problem.padded_queries > 64 or problem.width_bytes > 256 or problem.dtype.itemsize > 2:
        return None
    tiles = _fit(problem, "target_attention_multi_tile_all", 64, 64, 4, 3 if problem.shared_kv else 2)
    return tiles if tiles[0] >= problem.padded_queries else None


def _multi_tile_dquery(problem: AttentionProblem) -> tuple[int, ...]:
    """Returns the tiles of the kernel that gives dq alone."""
    if problem.dtype.itemsize > 2:
        return 64, 32, 4, 2 if problem.shared_kv else 1
    if problem.width_bytes > 256:
        return 64, 32, 4, 3 if problem.shared_kv else 2
    if not problem.shared_kv and problem.padded_queries > 64:
        return 128, 64, 8, 3
    # 168 registers let three programs run at once.
    return 64, 64, 4, 2, 168


def _multi_tile_dhistory(problem: AttentionProblem) -> tuple[int, ...]:
    """Returns the tiles of the kernel that gives dk, dv and dbias: a program per tile of history rows."""
    if problem.dtype.itemsize > 2:
        return (64, 32, 4, 2) if problem.width_bytes <= 256 else (64, 32, 8, 1)
    if problem.width_bytes > 256:
        return (32, 64, 4, 2) if problem.shared_kv else (32, 64, 8, 2)
    return (32, 64, 4, 3) if problem.shared_kv else (64, 64, 4, 2)


# --- Packed digits ----------------------------------------------------------------------------------------------------
@cached
def _plan_digits(problem: AttentionProblem, block_r: int, one_query: bool, refusal: str | None) -> AttentionPlan:
    """Plans packed digits; refusal: why the kernels in registers cannot run, whatever the problem, or None."""
    if problem.block_d * problem.dtype.itemsize <= 128:
        block_n, warps = 64, 1
    else:
        block_n, warps = 32 if problem.block_d <= 128 else 16, 1 if problem.block_d <= 64 else 4
    tiles = (SINGLE_TILE_ROWS, block_n, warps, 2)
    options = ("BLOCK_H", power_of_two(problem.qheads_per_kvhead)), ("BLOCK_R", block_r)
    name = "target_attention_single_tile_fwd"
    forward = _kernel(name, Split.STREAM_K, *_fit(problem, name, *tiles), 8)
    name = "target_attention_single_tile_bwd"
    backward = _kernel(name, Split.STREAM_K, *_fit(problem, name, *tiles), 8, options)
    most = f"more than {MAX_REGISTER_DIGITS} digits" if problem.head_dim > MAX_REGISTER_DIGITS else None
    refusal = problem.gluon_refusal or most or refusal
    if refusal is not None:
        reason = f"packed digits, decoded element by element: {refusal}"
        return AttentionPlan("target_single_tile", (forward,), (backward,), reason, problem)
    # As many programs of one warp as find registers.
    block_n, registers, programs = 64, None, 8
    if problem.num_words > 4:
        block_n = 32
    elif not (problem.num_words > 2 or problem.has_bias or problem.has_value_scale or problem.num_tables):
        registers, programs = 168, 12
    launch = (1, 1, registers, programs)
    # One dimension of a product of tensor cores.
    of_table = (("BLOCK_R", max(block_r, 16) if block_r else 0),)
    forward = _kernel("digit_attention_registers_fwd", Split.STREAM_K, SINGLE_TILE_ROWS, block_n, *launch, of_table)
    # By event the gradient of a bias there is by query row, not summed over the queries.
    if one_query or block_r > 0 or not problem.has_bias:
        # The sums of a table's gradient leave registers for tiles of half as many events.
        tiles = (SINGLE_TILE_ROWS, 32 if block_r else block_n, *launch)
        backward = _kernel("digit_attention_registers_bwd", Split.STREAM_K, *tiles, of_table)
    reason = "packed digits in half precision: decoded in registers"
    return AttentionPlan("digits_registers", (forward,), (backward,), reason, problem)


# --- Jagged attention -------------------------------------------------------------------------------------------------
def plan_jagged_attention(
    x: JaggedAttentionInputs, impl: str, device: Device | None = None, exported: bool = False
) -> AttentionPlan:
    """Returns the plan of `jfi.ops.jagged_attention`; arguments as those of `plan_target_attention`.

    ``exported`` means on a GPU under torch.export: no address and no size is known.
    """
    query, key, value, key_offsets, scale = x.query, x.key, x.value, x.key_offsets, x.scale
    device = device_of(query.device) if device is None else device
    if impl == "torch":
        if device.type == "cpu":
            if refusal := cpu_flash_refusal(x):
                return _torch_plan("cpu", "batched matmul", f"no flash attention: {refusal}")
            reason = "no bias, one width, no window but causal; batched matmul in the backward of a log-sum-exp"
            return _torch_plan("cpu", "padded flash attention", reason)
        return _torch_plan("reference", "jfi.reference.jagged_attention", "impl='torch' on a GPU: the plain formula")
    # A compiler's may be symbols.
    num_heads, head_dim, num_kv_heads, value_dim = map(int, (*query.shape[1:], x.num_kv_heads, x.value_dim))
    sizes = (num_kv_heads, num_heads // num_kv_heads, head_dim, value_dim)
    flags, rows = (value is None, x.bias is not None, False, False), (1, 0, int(key.shape[1]) if x.is_packed else 0)
    problem = _problem(sizes, flags, rows, precision_of(query.dtype, device), 0, (query.dtype, None), device)
    if exported:
        return _plan_jagged_triton(problem, _EXPORTED)
    query_rows, num_keys = query.shape[0] * query.shape[1], key.shape[0]
    aligned = (query.data_ptr() | key.data_ptr() | (0 if value is None else value.data_ptr())) % 16 == 0
    refusal = sm90_refusal(problem, query_rows, num_keys, scale, aligned)
    if refusal is None and x.bias is not None and x.edges is not None:
        refusal = "a bias by key together with times or a bias by bucket"
    if refusal is None and JAGGED_FAMILY != "jagged_triton":
        batch = key_offsets.shape[0] - 1
        short = num_keys <= SM90_SHORT_KEYS[problem.head_dim] * batch
        work = _sm90_work(problem, _sm90_forward(problem, short), batch, query_rows, num_keys, x.tapers)
        return _plan_sm90(problem, short, x.table is not None, *work)
    return _plan_jagged_triton(problem, refusal or "overridden by JAGGED_FAMILY")


def cpu_flash_refusal(x: JaggedAttentionInputs) -> str | None:
    """Returns why PyTorch's flash attention for CPUs refuses a call, which goes to batched matmul; None if it takes it.

    Of causal attention the offsets are read: flash attention aligns the first query with the first key.  Offsets on the
    meta device are taken for those of self-attention.
    """
    if x.bias is not None or x.table is not None:
        return "it has no gradient for a bias"
    if x.edges is not None:
        return "it takes no times"
    if x.value_dim != x.query.shape[2]:
        return "keys and values differ in width"
    if not CPU_FLASH_MIN_SCALE < x.scale <= CPU_FLASH_MAX_SCALE:
        return f"scale is not above {CPU_FLASH_MIN_SCALE} and at most {CPU_FLASH_MAX_SCALE}"
    if x.left is None and x.right is None:
        return None
    if x.left is not None or x.right != 0:
        return "it takes no window but causal"
    if x.query_offsets.is_meta or torch.equal(x.query_offsets.long(), x.key_offsets.long()):
        return None
    return "causal, and a sample has other numbers of queries and keys"


def sm90_refusal(problem: AttentionProblem, query_rows: int, num_keys: int, scale: float, aligned: bool) -> str | None:
    """Returns why the sm90 kernels do not take such a call; None if they do.

    query_rows counts all (query, head) pairs of the batch.
    """
    if problem.sm90_refusal is not None:
        return problem.sm90_refusal
    if not scale > SM90_MIN_SCALE:
        return f"scale is at most {SM90_MIN_SCALE}"
    if max(query_rows, num_keys * problem.num_kv_heads) >= SM90_MAX_ROWS:
        return f"rows · heads are at least {SM90_MAX_ROWS}"
    return None if aligned else "a tensor does not begin at a multiple of 16 bytes, as TMA needs"


def _sm90_work(
    problem: AttentionProblem, tiles: tuple[int, ...], batch: int, query_rows: int, num_keys: int, tapers: bool
) -> tuple[Split, int]:
    """Returns (order of the tiles of queries, splits of each one's keys).

    Splits are a power of two, so that few kernels are compiled.  query_rows counts all (query, head) pairs; tapers: the
    tiles of a sample see unequal numbers of keys.
    """
    samples = max(batch * problem.num_kv_heads, 1)
    block_m, _, _, programs_per_sm, _ = tiles
    count = max(ceil_div(ceil_div(query_rows, samples), block_m), 1)  # tiles of a mean sample and key head
    programs = problem.device.num_sms * programs_per_sm
    by_tile = tapers and count > 1 and samples * count <= SM90_TAPERING_TILES * programs
    aim = (SM90_TAPERING_SPLITS if tapers else SM90_EQUAL_SPLITS) * programs
    most = min(aim // (samples * count), num_keys // (max(batch, 1) * SM90_SPLIT_KEYS), SM90_MAX_SPLITS)
    num_splits = 1 << max(most, 1).bit_length() - 1 if SM90_SPLITS is None else SM90_SPLITS
    return Split.TAPERING if by_tile else Split.TILE_SCHEDULER, num_splits


def _sm90(kernel: str, tiles: tuple[int, ...], work: tuple[Split, int] = (Split.TILE_SCHEDULER, 1)) -> KernelPlan:
    """Persistent programs of one producing warp group and one or two consuming ones, of 64 rows each.

    ``tiles`` are block_m, block_n, stages, programs per SM and consumers.  Registers are divided evenly among the
    programs of an SM; the compiler then moves them to the consumers.
    """
    block_m, block_n, stages, programs, consumers = tiles
    split, num_splits = work
    registers = None if programs == 1 else 65536 // (programs * 128 * (consumers + 1)) // 8 * 8
    return _kernel(kernel, split, block_m, block_n, 4, stages, registers, programs, num_splits=num_splits)


def _sm90_forward(problem: AttentionProblem, short: bool) -> tuple[int, ...]:
    """Returns the forward's tiles; short histories: smaller ones of keys, more programs to hide a work tile's ends."""
    if problem.head_dim > 64:
        return (64, 64, 2, 2, 1) if short else (128, 128, 2, 1, 2)
    return (64, 64, 2, 3, 1) if short else (64, 128, 2, 2, 1)


@cached
def _plan_sm90(problem: AttentionProblem, short: bool, has_table: bool, split: Split, num_splits: int) -> AttentionPlan:
    if problem.head_dim > 64:
        dquery = (128, 64, 4, 1, 2)
        # Biases by bucket take registers, which a smaller tile of queries leaves.
        dkey = (32, 128, 4, 1, 2) if has_table else (64, 128, 2, 1, 2)
    else:
        dquery, dkey = (64, 64, 3, 2 if has_table else 3, 1), (64, 64, 2, 2, 1)
    forward = _sm90("jagged_attention_sm90_fwd", _sm90_forward(problem, short), (split, num_splits))
    backward = _sm90("jagged_attention_sm90_dquery", dquery), _sm90("jagged_attention_sm90_dkey", dkey)
    return AttentionPlan("jagged_sm90", (forward,), backward, "Hopper, half precision, width 64 or 128", problem)


@cached
def _plan_jagged_triton(problem: AttentionProblem, refusal: str) -> AttentionPlan:
    """Plans the kernels for any GPU: the wider a row, the smaller a tile."""
    forward, backward = (64, 64, 4, 2), (64, 64, 4, 2 if problem.dtype.itemsize == 2 else 1)
    if problem.width_bytes > 256:
        forward, backward = (64, 32, 4, 2), (32, 32, 4, 1)
    elif problem.dtype.itemsize > 2 and problem.device.arch.startswith("sm_10"):
        backward = (32, 32, 4, 1)  # Blackwell's tensor memory holds no larger ones
    if wide := _wide_tiles(problem):
        forward = backward = wide
    statistics = _kernel("jagged_attention_statistics", Split.TILES, max(STATISTICS_ELEMENTS // problem.block_e, 1))
    names, tiles = [f"jagged_attention_{x}" for x in ("fwd", "dquery", "dkey")], (forward, backward, backward)
    kernels = [
        _kernel(name, Split.TILE_SCHEDULER, *_fit(problem, name, *some))
        for name, some in zip(names, tiles, strict=True)
    ]
    backward = (statistics, *kernels[1:])
    return AttentionPlan("jagged_triton", (kernels[0],), backward, f"no sm90 kernels: {refusal}", problem)
