"""Which kernels run an attention call, on which tiles, and how their work is split: every choice and every threshold.

A plan follows from shapes, dtypes, the device and hints alone; launchers execute it and choose nothing themselves.
``jfi.ops.explain`` shows the plan of a call.  The block sizes of a CPU's batched products, and when it pads a batch,
are in jfi/cpu: they depend on each sample's length.  The numbers are the best of those measured on an H200 unless a
line says otherwise.
"""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property

import torch

from jfi.utils.context import interprets
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs, ceil_div, is_packed, power_of_two

# --- Thresholds -------------------------------------------------------------------------------------------------------
#: Stream-K: the cost of a sample in addition to its rows, in rows.  Kernels are compiled with it.
SAMPLE_WEIGHT = 64
#: Shortest range of a stream-K partition, in positions: below, finding the range costs more than it balances.
MIN_CHUNK = 256
#: Scales must be greater, in float32: maxima are found before scaling, and the -inf of hidden keys must stay -inf.
MIN_SCALE = 1e-30
#: Target attention: query rows per key head up to which they are one tile of the least size that tensor cores take.
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
#: Programs per SM that the chunks of the multi-tile kernels are cut for.
CHUNKED_PROGRAMS_PER_SM = 2
#: Bytes of the widest row that fits a tile, and the rows of the narrowest tiles with all that 3xTF32 keeps of them in
#: shared memory.
MAX_WIDTH_BYTES, TF32X3_ROWS = 2048, 162
#: Scores per sample and key head above which dense products are faster than sparse ones on a CPU.
CPU_DENSE_SCORES = 2048
#: The greatest scale of flash attention on a CPU: its exponentials, exact to 20 bits, lose digits of large scores.
CPU_FLASH_MAX_SCALE = 1.0
#: Packed digits: most digits of an event that fit a tile, and the registers of a warp.
MAX_DIGITS, MAX_REGISTER_DIGITS = 512, 128
#: Kernels in registers divide a table of biases by a scale above this, so that -inf stays far below all scores.
DIGIT_TABLE_MIN_SCALE = 2.0**-20
#: Tiles of 64 query rows per SM from which jagged attention gives every SM work though no history is split.
FILLING_TILES_PER_SM = 2
#: By width, query rows per key head from which the sm90 kernels of jagged attention are faster, both passes added, than
#: the multi-tile kernels, with a value of its own and with value = key.  Measured on 98 problems of 20 to 255 query
#: rows: this choice is within 0.6 % of the faster family on average and 16 % at worst.
JAGGED_QUERY_ROWS = {64: (65, 256), 128: (97, 256)}
#: Jagged attention on Hopper: by width, mean keys per sample up to which tiles of 64 keys are faster than of 128.
SM90_SHORT_KEYS = {64: 768, 128: 384}
#: Work tiles for each program that runs at once, up to which the keys of a tile are split: where later tiles of a
#: sample see more keys than earlier ones, short work tiles even out what the SMs do; else one for each is enough.
SM90_TAPERING_SPLITS, SM90_EQUAL_SPLITS = 4, 1
#: The same, up to which the tiles that see the most keys come first, and not all tiles of a sample one after the other,
#: which read the same keys: with more tiles the end of the kernel costs less than reading them again.
SM90_TAPERING_TILES = 8
#: Mean keys of a split from which it costs less than it gains, and the most splits.
SM90_SPLIT_KEYS, SM90_MAX_SPLITS = 1024, 8
#: Rows times heads that 32-bit row numbers count, a tile past the end included.
SM90_MAX_ROWS = 2**31 - 256
#: Elements of a tile of the kernel that computes log-sum-exp and Δ for the generic backward.
STATISTICS_ELEMENTS = 2048
#: Shared memory of a compiled kernel over what `_fit` counts, with 3xTF32, on AMD, and else: the most of those that
#: took at least 60 KB (on AMD 38), compiled with triton 3.7.1 for sm_80, sm_89 and gfx942 at widths of 64 to 256.
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

Inputs = TargetAttentionInputs | JaggedAttentionInputs


# --- What a plan is made for ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Device:
    """The properties of a device that a plan depends on, and its name."""

    type: str  # of torch.device
    arch: str = ""  # "sm_90" or "gfx942", as compilers name it; "" means a CPU or Triton's interpreter
    num_sms: int = 1  # SMs, or compute units of an AMD GPU
    shared_memory: int | None = None  # bytes that one program may have; None means no limit
    name: str = ""  # as its maker writes it
    #: Under torch.export: no address, no length, no number of samples, queries or events is known.
    exported: bool = False

    def __hash__(self) -> int:
        return hash(self.name)  # plans of every call are found by it

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


@cache
def device_of(device: torch.device) -> Device:
    """Returns the properties of a device of this host."""
    if device.type != "cuda":
        return Device(device.type)
    properties = torch.cuda.get_device_properties(device)
    num_sms = properties.multi_processor_count
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
    """The facts about a call that do not depend on its lengths, one object per set of values to cache what follows.

    The first twelve fields are constants of kernels.
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
    def gluon_refusal(self) -> str | None:
        """The reason why no Gluon kernel takes a call; None if one may."""
        if self.device.exported:
            return "torch.export, and AOTInductor takes no Gluon"
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


@cache
def _problem(*fields) -> AttentionProblem:
    """Interned constructor of AttentionProblem: one object for the same values."""
    problem = AttentionProblem(*fields)
    if problem.width_bytes > MAX_WIDTH_BYTES:
        most, width = MAX_WIDTH_BYTES // problem.dtype.itemsize, max(problem.head_dim, problem.value_dim)
        limit = f"at most {most} wide for impl='triton' and {problem.dtype}"
        raise ValueError(f"key and value must be {limit}, got {width}: use impl='torch'")
    fits = problem.width_bytes * TF32X3_ROWS <= (problem.device.shared_memory or H200.shared_memory)
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


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """One kernel: its name, tiles, launch options and split of the work."""

    kernel: str
    split: Split | None = None  # None: a kernel without tiles, or PyTorch's operators
    block_m: int = 0  # query rows of a tile
    block_n: int = 0  # history rows of a tile
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int | None = None
    programs_per_sm: int = 0  # that ranges or chunks are cut for, or that run at once
    num_splits: int = 1  # work tiles that the history rows of a tile are split into; their results are combined
    options: dict[str, object] = field(default_factory=dict)  # further compile-time constants

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
        more += "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.kernel}: {size}{more}; {self.split}"


@cache
def _kernel(kernel: str, split: Split | None = None, *tiles, num_splits: int = 1, **options) -> KernelPlan:
    """Returns the plan of a kernel, one object for the same values: launchers are cached by it."""
    return KernelPlan(kernel, split, *tiles, num_splits=num_splits, options=options)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The kernels of a call and the reason for them.  Equal decisions are one object."""

    family: str  # target_single_tile, target_multi_tile, jagged_sm90, jagged_triton, digits_registers, cpu or reference
    forward: tuple[KernelPlan, ...]  # in the order of their launches
    backward: tuple[KernelPlan, ...]
    reason: str  # why this family
    problem: AttentionProblem | None = None  # what the kernels are compiled for; None where none is

    def __repr__(self) -> str:
        lines = [f"{self.family}: {self.reason}"]
        if self.problem is not None:
            lines.append(f"  device: {self.problem.device}")
        for name in ("forward", "backward"):
            lines += [f"  {name}: {kernel!r}" for kernel in getattr(self, name)]
        return "\n".join(lines)


@cache
def _torch_plan(family: str, kernel: str, reason: str = "impl='torch' on a GPU: the plain formula") -> AttentionPlan:
    kernels = (_kernel(kernel),)
    return AttentionPlan(family, kernels, kernels, reason)


def _fit(
    problem: AttentionProblem, kernel: str, block_m: int, block_n: int, warps: int, stages: int, registers=None
) -> tuple[int | None, ...]:
    """Returns tiles and options that fit a program's shared memory: with fewer stages, then with smaller tiles.

    A tile of queries and one of the history count, and the looped one of them again for each stage, at least twice:
    queries with their gradient, the history as keys and values.  A forward loops over a shared history alone.
    """
    device, row_bytes = problem.device, 2 * problem.width_bytes
    tf32x3 = problem.dtype == torch.float32 and problem.precision == "tf32x3"
    factor = SHARED_MEMORY[kernel][1 if device.is_amd else 0 if tf32x3 else 2]
    loops_queries = kernel.endswith(("dkey", "dhistory"))
    looped_bytes = problem.row_bytes if kernel.endswith("fwd") else row_bytes

    def fits() -> bool:
        looped = (block_m if loops_queries else block_n) * looped_bytes
        buffers = 2 if problem.num_words and not loops_queries else max(stages, 2)  # packed digits have no stages
        return factor * ((block_m + block_n) * row_bytes + buffers * looped) <= (device.shared_memory or math.inf)

    while not fits() and (stages > 2 or max(block_m, block_n) > 16):
        if stages > 2:
            stages -= 1
        elif block_m == 16 or (block_n > 16 and not loops_queries):
            block_n //= 2
        else:
            block_m //= 2
    return block_m, block_n, warps, stages, None if device.is_amd else registers  # AMD's compiler limits none


def _fitted(problem: AttentionProblem, kernel: str, split: Split, tiles, programs: int = 0, **options) -> KernelPlan:
    """Returns the plan of a kernel on tiles that fit; tiles are the arguments of `_fit`."""
    programs = 0 if split in (Split.SAMPLE, Split.LONGEST_FIRST) else programs
    return _kernel(kernel, split, *_fit(problem, kernel, *tiles), programs, **options)


def stream_k(rows: int, batch: int, num_sms: int, programs_per_sm: int) -> tuple[int, int]:
    """Splits a batch's rows, and SAMPLE_WEIGHT more for each sample, into ranges; returns (their length, number)."""
    line = rows + batch * SAMPLE_WEIGHT
    chunk = ceil_div(line, num_sms * programs_per_sm)
    chunk = max(MIN_CHUNK, chunk) if isinstance(chunk, int) else torch.sym_max(MIN_CHUNK, chunk)  # symbolic
    return chunk, ceil_div(line, chunk)


# --- Target attention -------------------------------------------------------------------------------------------------
def plan_target_attention(x: TargetAttentionInputs, impl: str, device: Device | None = None) -> AttentionPlan:
    """Returns the plan of `jfi.ops.target_attention` for impl "triton" or "torch" and a device, None for x's own.

    Of tensors it reads shapes, dtypes and addresses.
    """
    query, key, value, _, bias, bias_index, value_scale, second, tables, _, scale, max_seqlen = x
    device = device_of(query.device) if device is None else device
    packed = is_packed(key)
    batch, num_keys = query.shape[0], key.shape[0]
    # Under torch.export sizes may be symbols, of which these must be known.
    num_queries, num_heads, head_dim, num_kv_heads = map(int, (*query.shape[1:], key.shape[1]))
    qheads_per_kvhead = num_heads // num_kv_heads
    query_rows = num_queries * qheads_per_kvhead
    if impl == "torch" and device.type != "cpu":
        return _torch_plan("reference", f"jfi.reference.{'digit' if packed else 'target'}_attention")
    if impl == "torch" and packed:
        reason = "at most 2^15 events or one sample at a time"
        return _torch_plan("cpu", "digits decoded by blocks of samples", reason)
    if impl == "torch":
        dense = not 0 < num_keys * query_rows <= CPU_DENSE_SCORES * batch  # as jfi.cpu.target_attention decides
        kernel, than = ("dense products", "more than") if dense else ("sparse products", "at most")
        return _torch_plan("cpu", kernel, f"{than} {CPU_DENSE_SCORES} scores per sample and key head")
    sizes = (num_kv_heads, qheads_per_kvhead, head_dim, head_dim if value is None else value.shape[2])
    flags = (value is None, bias is not None, bias_index is not None, value_scale is not None)
    rows = (1 if second is None else 2, len(tables), key.shape[2] if packed else 0)
    padded_queries = 0 if packed else 1 << (query_rows - 1).bit_length()
    table_dtype = tables[0].dtype if tables and not packed else None
    types = (precision_of(query.dtype, device), padded_queries, query.dtype, table_dtype, device)
    problem = _problem(*sizes, *flags, *rows, *types)
    table_rows = 0 if bias_index is None else bias.shape[0]
    block_r = power_of_two(table_rows) if 0 < table_rows <= TABLE_ROWS else 0
    if packed:
        min_scale = DIGIT_TABLE_MIN_SCALE if block_r else MIN_SCALE
        refusal = None if device.exported or scale > min_scale else f"scale is at most {min_scale}"
        return _plan_digits(problem, block_r, num_queries == 1, refusal)
    if query_rows <= SINGLE_TILE_ROWS:
        whole = not device.exported and max_seqlen is not None and max_seqlen <= PROGRAM_PER_SAMPLE_ROWS
        whole = whole and max_seqlen <= PROGRAM_PER_SAMPLE_BYTES // problem.row_bytes
        backward = Split.STREAM_K
        if whole and (table_rows > TABLE_ROWS or batch * table_rows * num_heads <= MAX_TABLE_ELEMENTS):
            ordered = batch <= LONGEST_FIRST_SAMPLES_PER_SM * device.num_sms
            backward = Split.LONGEST_FIRST if ordered else Split.SAMPLE
        return _plan_single_tile(problem, whole, whole and max_seqlen <= SHORT_ROWS, backward, block_r)
    refusal = _jagged_refusal(problem, x, query_rows)
    if refusal is None:
        return _plan_sm90(problem, _sm90_forward(problem, num_keys, batch), False, Split.TILE_SCHEDULER, 1)
    reason = f"more than {SINGLE_TILE_ROWS} query rows per key head, and not jagged attention: {refusal}"
    by_tma = not device.exported and 0 < num_keys < 2**31 and is_aligned(x)
    return _plan_multi_tile(problem, by_tma, reason)


def _jagged_refusal(problem: AttentionProblem, x: TargetAttentionInputs, query_rows: int) -> str | None:
    """Returns why jagged attention's sm90 kernels cannot run, or are slower than the multi-tile kernels; or None."""
    samples = x.query.shape[0] * problem.num_kv_heads
    if refusal := _sm90_refusal(problem, x, samples * query_rows):
        return refusal
    least = JAGGED_QUERY_ROWS[problem.head_dim][problem.shared_kv]
    if query_rows < least:
        return f"fewer than {least} query rows per key head"
    filled = samples * ceil_div(query_rows, 64) >= FILLING_TILES_PER_SM * problem.device.num_sms
    return None if filled else f"fewer than {FILLING_TILES_PER_SM} tiles of 64 query rows per SM"


@cache
def _plan_single_tile(
    problem: AttentionProblem, whole: bool, short: bool, backward_split: Split, block_r: int
) -> AttentionPlan:
    """Plans few query rows: one tile of them; every history row is read once."""
    name, split = "target_attention_single_tile", Split.SAMPLE if whole else Split.STREAM_K
    *tiles, programs = _single_tile_forward(problem, whole, short)
    forward = _fitted(problem, f"{name}_fwd", split, (SINGLE_TILE_ROWS, *tiles), programs)
    *tiles, programs = _single_tile_backward(problem, backward_split is not Split.STREAM_K)
    backward = _fitted(problem, f"{name}_bwd", backward_split, (SINGLE_TILE_ROWS, *tiles), programs, BLOCK_R=block_r)
    reason = f"at most {SINGLE_TILE_ROWS} query rows per key head: the history is read once"
    if problem.num_tables:
        reason += f", by id from {problem.num_tables} table{'s' * (problem.num_tables > 1)}"
    return AttentionPlan("target_single_tile", (forward,), (backward,), reason, problem)


def _single_tile_forward(problem: AttentionProblem, whole: bool, short: bool) -> tuple[int, ...]:
    """Returns (block_n, warps, stages, programs per SM unless a program handles a whole sample)."""
    width, row, shared = problem.width_bytes, problem.row_bytes, problem.shared_kv
    if whole and width == 512:
        return 16, 1 if shared else 2, 3, 0
    if short and width <= 256:
        return 16, 1, 4, 0
    if whole and row <= 256:
        return (32, 1, 4, 0) if row <= 128 else (64, 2, 3, 0)
    if row > 1024:
        return 16, 8 if width > 1024 else 4, 1, 1
    if row <= 128 or (problem.reads_halves_by_id and problem.block_d <= 64):
        return 64, 1, 3, 8
    if row <= 256 or problem.reads_halves_by_id:
        # A step loads the queries again: fewer steps where they are many.
        many = problem.padded_queries > 4 and not problem.reads_halves_by_id
        return (128, 4, 3, 2) if many else (64, 2, 3, 4)
    return (32, 4, 3, 2) if shared else (32, 2, 3, 3)


def _single_tile_backward(problem: AttentionProblem, whole: bool) -> tuple[int, ...]:
    """Returns the same of the backward."""
    width, shared = problem.width_bytes, problem.shared_kv
    if problem.reads_halves_by_id:
        return (32, 1, 3, 8) if problem.block_d <= 64 else (32, 2, 3, 4)
    if whole and width <= 512:
        return (16, 2, 3, 0) if width == 512 else (16, 1, 4, 0)
    if width > 512:
        return 16, 8 if width > 1024 else 4, 1, 1
    if width <= 256:
        return (32, 1, 3, 8) if shared and width <= 128 else (32, 2, 3, 3 if shared else 4)
    return 16, 2, 3 if shared else 2, 4


@cache
def _plan_multi_tile(problem: AttentionProblem, aligned: bool, reason: str) -> AttentionPlan:
    """Plans many query rows: tiles of them, and chunks of long histories."""
    name, programs, qheads = "target_attention_multi_tile", CHUNKED_PROGRAMS_PER_SM, problem.qheads_per_kvhead
    num_kv_heads, num_heads = problem.num_kv_heads, problem.num_kv_heads * qheads
    by_tma = aligned and _by_tma(problem, num_kv_heads)
    queries_by_tma = by_tma and num_kv_heads in (1, num_heads) and _by_tma(problem, num_heads)
    block_h = power_of_two(qheads, 1 if qheads.bit_count() == 1 else 16)
    tiles, dquery_tiles, dhistory_tiles = _multi_tile_tiles(problem)
    forward = _fitted(problem, f"{name}_fwd", Split.CHUNKS, tiles, programs, BY_TMA=by_tma)
    options = {"BLOCK_H": block_h, "BY_TMA": queries_by_tma}
    backward = (_fitted(problem, f"{name}_dhistory", Split.TILES, dhistory_tiles, **options),)
    tiles, tile_rows = _fit(problem, f"{name}_dquery", *dquery_tiles), backward[0].block_n
    # One sweep gives all gradients where its tile takes all query rows.
    one_sweep = _fit(problem, f"{name}_all", 64, 64, 4, 3 if problem.shared_kv else 2)
    if one_sweep[0] >= problem.padded_queries and problem.width_bytes <= 256 and problem.dtype.itemsize == 2:
        tiles, tile_rows, backward = one_sweep, 0, ()
    options = {"TILE_ROWS": tile_rows, "BLOCK_H": block_h, "BY_TMA": by_tma}
    backward = (_kernel(f"{name}_dquery", Split.CHUNKS, *tiles, programs, **options), *backward)
    return AttentionPlan("target_multi_tile", (forward,), backward, reason, problem)


def _by_tma(problem: AttentionProblem, num_heads: int) -> bool:
    """Returns whether TMA can load tiles of whole heads of rows of so many, if the tensors are aligned."""
    widths = (problem.head_dim, problem.value_dim)
    fits = all([(num_heads == 1 or x == power_of_two(x)) and x * problem.dtype.itemsize % 16 == 0 for x in widths])
    return fits and problem.dtype.itemsize == 2 and problem.device.capability >= (9, 0)


def _wide_tiles(problem: AttentionProblem) -> tuple[int, ...] | None:
    """Returns (block_m, block_n, warps, stages) of rows above 512 bytes; None for others."""
    return (16, 16, 8 if problem.width_bytes > 1024 else 4, 1) if problem.width_bytes > 512 else None


def _multi_tile_tiles(problem: AttentionProblem) -> tuple[tuple[int, ...], ...]:
    """Returns (block_m, block_n, warps, stages), and registers where limited, of the three kernels of two sweeps.

    They are the forward, the kernel of dq and that of dk, dv and dbias, which has a program per tile of history rows.
    """
    width, shared, queries = problem.width_bytes, problem.shared_kv, problem.padded_queries
    if wide := _wide_tiles(problem):
        return wide, wide, wide
    if problem.dtype.itemsize > 2:
        dhistory = (64, 32, 4, 2) if width <= 256 else (64, 32, 8, 1)
        return (min(64, queries), 64, 4, 1), (64, 32, 4, 2 if shared else 1), dhistory
    if width > 256:
        if shared:
            return (64, 64, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2)
        return (64, 32, 4, 2), (64, 32, 4, 2), (32, 64, 8, 2)
    # 168 registers let three programs run at once; a bias by head needs more.
    forward = (64, 64, 4, 3) if problem.has_bias and problem.qheads_per_kvhead > 1 else (64, 64, 4, 3, 168)
    dquery = (64, 64, 4, 2, 168) if shared or queries <= 64 else (128, 64, 8, 3)
    return forward, dquery, (32, 64, 4, 3) if shared else (64, 64, 4, 2)


# --- Packed digits ----------------------------------------------------------------------------------------------------
@cache
def _plan_digits(problem: AttentionProblem, block_r: int, one_query: bool, refusal: str | None) -> AttentionPlan:
    """Plans packed digits; refusal: why the kernels in registers cannot run, whatever the problem, or None."""
    block_n, warps = 32 if problem.block_d <= 128 else 16, 1 if problem.block_d <= 64 else 4
    if problem.block_d * problem.dtype.itemsize <= 128:
        block_n, warps = 64, 1
    tiles, name, split = (SINGLE_TILE_ROWS, block_n, warps, 2), "target_attention_single_tile", Split.STREAM_K
    forward = _fitted(problem, f"{name}_fwd", split, tiles, 8)
    backward = _fitted(problem, f"{name}_bwd", split, tiles, 8, BLOCK_R=block_r)
    most = f"more than {MAX_REGISTER_DIGITS} digits" if problem.head_dim > MAX_REGISTER_DIGITS else None
    refusal = problem.gluon_refusal or most or refusal
    if refusal is not None:
        reason = f"packed digits, decoded element by element: {refusal}"
        return AttentionPlan("target_single_tile", (forward,), (backward,), reason, problem)
    # As many programs of one warp as find registers.
    block_n, registers, programs = 32 if problem.num_words > 4 else 64, None, 8
    if not (problem.num_words > 2 or problem.has_bias or problem.has_value_scale):
        registers, programs = 168, 12
    name, launch = "digit_attention_registers", (1, 1, registers, programs)
    rows = max(block_r, 16) if block_r else 0  # one dimension of a product of tensor cores
    forward = _kernel(f"{name}_fwd", split, SINGLE_TILE_ROWS, block_n, *launch, BLOCK_R=rows)
    # By event the gradient of a bias there is by query row, not summed over the queries.
    if one_query or block_r > 0 or not problem.has_bias:
        # The sums of a table's gradient leave registers for tiles of half as many events.
        block_n = 32 if block_r else block_n
        backward = _kernel(f"{name}_bwd", split, SINGLE_TILE_ROWS, block_n, *launch, BLOCK_R=rows)
    reason = "packed digits in half precision: decoded in registers"
    return AttentionPlan("digits_registers", (forward,), (backward,), reason, problem)


# --- Jagged attention -------------------------------------------------------------------------------------------------
def plan_jagged_attention(x: JaggedAttentionInputs, impl: str, device: Device | None = None) -> AttentionPlan:
    """Returns the plan of `jfi.ops.jagged_attention`; arguments as those of `plan_target_attention`."""
    query, key, value = x.query, x.key, x.value
    device = device_of(query.device) if device is None else device
    if impl == "torch" and device.type != "cpu":
        return _torch_plan("reference", "jfi.reference.jagged_attention")
    if impl == "torch":
        if refusal := cpu_flash_refusal(x):
            return _torch_plan("cpu", "batched matmul", f"no flash attention: {refusal}")
        reason = "no bias, one width, no window but causal; batched matmul in the backward of a log-sum-exp"
        return _torch_plan("cpu", "padded flash attention", reason)
    packed = x.is_packed
    # A compiler's may be symbols.
    num_heads, head_dim, columns = map(int, (*query.shape[1:], key.shape[1]))
    num_kv_heads = 1 if packed else columns
    value_dim = head_dim if value is None or packed else int(value.shape[2])
    sizes = (num_kv_heads, num_heads // num_kv_heads, head_dim, value_dim)
    flags, rows = (value is None, x.bias is not None, False, False), (1, 0, columns if packed else 0)
    types = (precision_of(query.dtype, device), 0, query.dtype, None, device)
    problem = _problem(*sizes, *flags, *rows, *types)
    query_rows, num_keys = query.shape[0] * num_heads, key.shape[0]
    refusal = _sm90_refusal(problem, x, query_rows)
    if refusal is None and x.bias is not None and x.edges is not None:
        refusal = "a bias by key together with times or a bias by bucket"
    if refusal is not None:
        return _plan_jagged_triton(problem, refusal)
    batch = x.key_offsets.shape[0] - 1
    tiles = _sm90_forward(problem, num_keys, batch)
    work = _sm90_work(problem, tiles, batch, query_rows, num_keys, x.tapers)
    return _plan_sm90(problem, tiles, x.table is not None, *work)


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
    if not MIN_SCALE < x.scale <= CPU_FLASH_MAX_SCALE:
        return f"scale is not above {MIN_SCALE} and at most {CPU_FLASH_MAX_SCALE}"
    if x.left is None and x.right is None:
        return None
    if x.left is not None or x.right != 0:
        return "it takes no window but causal"
    if x.query_offsets.is_meta or torch.equal(x.query_offsets.long(), x.key_offsets.long()):
        return None
    return "causal, and a sample has other numbers of queries and keys"


def is_aligned(x: Inputs) -> bool:
    """Returns whether query, key and value begin at multiples of 16 bytes, as TMA needs."""
    return not (x.query.data_ptr() | x.key.data_ptr() | (0 if x.value is None else x.value.data_ptr())) % 16


def _sm90_refusal(problem: AttentionProblem, x: Inputs, rows: int) -> str | None:
    """Returns why the sm90 kernels do not take a call with so many (query, head) pairs; None if they do."""
    if problem.sm90_refusal is not None:
        return problem.sm90_refusal
    if not x.scale > MIN_SCALE:
        return f"scale is at most {MIN_SCALE}"
    if max(rows, x.key.shape[0] * problem.num_kv_heads) >= SM90_MAX_ROWS:
        return f"rows · heads are at least {SM90_MAX_ROWS}"
    return None if is_aligned(x) else "a tensor does not begin at a multiple of 16 bytes, as TMA needs"


def _sm90_work(
    problem: AttentionProblem, tiles: tuple[int, ...], batch: int, query_rows: int, num_keys: int, tapers: bool
) -> tuple[Split, int]:
    """Returns (order of the tiles of queries, splits of each one's keys).

    Splits are a power of two, so that few kernels are compiled.  query_rows counts all (query, head) pairs; tapers: the
    tiles of a sample see unequal numbers of keys.
    """
    samples = max(batch * problem.num_kv_heads, 1)
    block_m, _, _, programs_per_sm = tiles
    count = max(ceil_div(ceil_div(query_rows, samples), block_m), 1)  # tiles of a mean sample and key head
    programs = problem.device.num_sms * programs_per_sm
    by_tile = tapers and count > 1 and samples * count <= SM90_TAPERING_TILES * programs
    aim = (SM90_TAPERING_SPLITS if tapers else SM90_EQUAL_SPLITS) * programs
    most = min(aim // (samples * count), num_keys // (max(batch, 1) * SM90_SPLIT_KEYS), SM90_MAX_SPLITS)
    num_splits = 1 << max(most, 1).bit_length() - 1
    return Split.TAPERING if by_tile else Split.TILE_SCHEDULER, num_splits


def _sm90_forward(problem: AttentionProblem, num_keys: int, batch: int) -> tuple[int, ...]:
    """Returns the forward's tiles; short histories: smaller ones of keys, more programs to hide a work tile's ends."""
    short = num_keys <= SM90_SHORT_KEYS[problem.head_dim] * batch
    if problem.head_dim > 64:
        return (64, 64, 2, 2) if short else (128, 128, 2, 1)
    return (64, 64, 2, 3) if short else (64, 128, 2, 2)


@cache
def _plan_sm90(
    problem: AttentionProblem, tiles: tuple, has_table: bool, split: Split, num_splits: int
) -> AttentionPlan:
    """Plans persistent programs of one producing warp group and one or two consuming ones, of 64 rows each.

    ``tiles`` are the forward's block_m, block_n, stages and programs per SM; split and num_splits are the forward's.
    """

    def plan(kernel: str, split: Split, block_m: int, block_n: int, stages: int, programs: int, **splits) -> KernelPlan:
        registers = {1: None, 2: 128, 3: 80}[programs]  # an equal share, which the compiler moves to the consumers
        name = f"jagged_attention_sm90_{kernel}"
        return _kernel(name, split, block_m, block_n, 4, stages, registers, programs, **splits)

    if problem.head_dim > 64:
        # Biases by bucket take registers, which a smaller tile of queries leaves.
        dquery, dkey = (128, 64, 4, 1), (32, 128, 4, 1) if has_table else (64, 128, 2, 1)
    else:
        dquery, dkey = (64, 64, 3, 2 if has_table else 3), (64, 64, 2, 2)
    forward = plan("fwd", split, *tiles, num_splits=num_splits)
    backward = plan("dquery", Split.TILE_SCHEDULER, *dquery), plan("dkey", Split.TILE_SCHEDULER, *dkey)
    return AttentionPlan("jagged_sm90", (forward,), backward, "Hopper, half precision, width 64 or 128", problem)


@cache
def _plan_jagged_triton(problem: AttentionProblem, refusal: str) -> AttentionPlan:
    """Plans the kernels for any GPU: the wider a row, the smaller a tile."""
    forward, backward = (64, 64, 4, 2), (64, 64, 4, 2 if problem.dtype.itemsize == 2 else 1)
    if problem.width_bytes > 256:
        forward, backward = (64, 32, 4, 2), (32, 32, 4, 1)
    elif problem.dtype.itemsize > 2 and problem.device.arch.startswith("sm_10"):
        backward = (32, 32, 4, 1)  # Blackwell's tensor memory holds no larger ones
    if wide := _wide_tiles(problem):
        forward = backward = wide
    name, split = "jagged_attention", Split.TILE_SCHEDULER
    statistics = _kernel(f"{name}_statistics", None, max(STATISTICS_ELEMENTS // problem.block_e, 1))
    backward = (statistics, *[_fitted(problem, f"{name}_{x}", split, backward) for x in ("dquery", "dkey")])
    forward = (_fitted(problem, f"{name}_fwd", split, forward),)
    return AttentionPlan("jagged_triton", forward, backward, f"no sm90 kernels: {refusal}", problem)
