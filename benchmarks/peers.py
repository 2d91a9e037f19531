"""Target attention by the peers and by jfi.  A missing peer raises Missing, which becomes a line of the results.

Where several query heads share a key head (G < H), peers get them as further queries, which is the same mathematics at
the least reading.  What a peer wants laid out differently (padding, a transposed and scaled query) it gets beforehand:
only its own work is timed.
"""

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import jfi.ops
from benchmarks.problem import BATCH, ROWS, Problem, Shape, draw_lengths, pad, random, valid
from benchmarks.run import Implementation, Missing, Prepared


def attend(query: Tensor, key: Tensor, value: Tensor | None = None, causal: bool = False) -> Tensor:
    """[T, H, D], [L, G, D], [L, G, E] -> [T, H, E]: the formula on one sample.  Causal: of T = L."""
    value = key if value is None else value
    share = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.einsum("thd,lhd->htl", query, keys) / math.sqrt(query.shape[2])
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("htl,lhe->the", scores.softmax(-1), values)


def attention_problem(shape: Shape, seed: int, device: torch.device) -> Problem:
    torch.manual_seed(seed)
    lengths = draw_lengths(shape, seed)
    rows = int(lengths.sum())
    inputs = {"query": random((shape.B, shape.T, shape.H, shape.D), shape.dtype, device)}
    for name in ["key"] if shape.shared else ["key", "value"]:
        inputs[name] = random((rows, shape.G, shape.D), shape.dtype, device)
    # Two products forward; backward the scores again and four products more.
    product = 2.0 * rows * shape.T * shape.H * shape.D
    return Problem(
        shape=shape,
        lengths=lengths,
        offsets=F.pad(lengths.cumsum(0), (1, 0)).to(device),
        inputs=inputs,
        layouts={"query": BATCH, "key": ROWS, "value": ROWS, "out": BATCH},
        grad=random((shape.B, shape.T, shape.H, shape.D), shape.dtype, device),
        formula=attend,
        flops=(2 * product, 5 * product),
    )


def fold(x: Tensor, shape: Shape) -> Tensor:
    """[B, T, H, W] -> [B, T · H/G, G, W]."""
    return x.unflatten(2, (shape.G, -1)).transpose(2, 3).flatten(1, 2).contiguous()


def unfold(x: Tensor, shape: Shape) -> Tensor:
    """The inverse of fold."""
    return x.unflatten(1, (shape.T, -1)).transpose(2, 3).flatten(2, 3)


def key_and_value(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return tensors[0], tensors[-1]


def ours(problem: Problem, longest_known: bool = True) -> Prepared:
    """With the longest length, which every peer gets, or without."""
    offsets, max_seqlen = problem.offsets, problem.shape.N if longest_known else None

    def call(query: Tensor, key: Tensor, value: Tensor | None = None) -> Tensor:
        return jfi.ops.target_attention(query, key, value, offsets=offsets, max_seqlen=max_seqlen)

    return Prepared(list(problem.inputs.values()), call, problem.grad)


def padded(problem: Problem) -> Prepared:
    """scaled_dot_product_attention over [B, N], the padding hidden by an additive mask."""
    shape, lengths = problem.shape, problem.device_lengths
    query, *rest = problem.inputs.values()
    mask = torch.zeros(shape.B, 1, 1, shape.N, dtype=query.dtype, device=query.device)
    # An empty sample sees one row of padding: its value, 0, is the right answer, and no kernel makes NaN of it.
    mask.masked_fill_(~valid(lengths.clamp(min=1), shape.N)[:, None, None], -torch.inf)
    leaves = [fold(query, shape).transpose(1, 2).contiguous()]
    leaves += [pad(x, lengths, shape.N).transpose(1, 2).contiguous() for x in rest]

    def call(query: Tensor, *rest: Tensor) -> Tensor:
        key, value = key_and_value(rest)
        return F.scaled_dot_product_attention(query, key, value, mask)

    def gradients(grads: list[Tensor]) -> list[Tensor]:
        rows = [x.transpose(1, 2)[valid(lengths, shape.N)] for x in grads[1:]]
        return [unfold(grads[0].transpose(1, 2), shape), *rows]

    grad = fold(problem.grad, shape).transpose(1, 2).contiguous()
    return Prepared(leaves, call, grad, lambda out: unfold(out.transpose(1, 2), shape), gradients)


def pad_and_attend(problem: Problem) -> Prepared:
    """The same from packed rows: what a model pays whose histories arrive jagged."""
    shape, lengths = problem.shape, problem.device_lengths
    attention = padded(problem)
    place = valid(lengths, shape.N).flatten().nonzero()[:, 0]

    def call(query: Tensor, *rest: Tensor) -> Tensor:
        rows = [x.new_zeros(shape.B * shape.N, *x.shape[1:]).index_copy(0, place, x) for x in rest]
        return attention.call(query, *(x.unflatten(0, (shape.B, shape.N)).transpose(1, 2) for x in rows))

    def gradients(grads: list[Tensor]) -> list[Tensor]:
        return [unfold(grads[0].transpose(1, 2), shape), *grads[1:]]

    _, *rest = problem.inputs.values()
    return Prepared([attention.leaves[0], *rest], call, attention.grad, attention.output, gradients)


def varlen_attn(shape: Shape) -> Callable[..., Tensor]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Missing(f"no torch.nn.attention.varlen in torch {torch.__version__}") from error
    if shape.dtype == "float32":
        raise Missing("half precision only")
    return varlen_attn


def flash_attention_4(shape: Shape, deterministic: bool = False) -> Callable[..., Tensor]:
    """Returns FlashAttention 4, whose CuTe kernels run on Hopper too, with the arguments of `varlen_attn`.

    deterministic: its backward gives the same bits each time, as jfi's does.
    """
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise Missing(f"flash-attn-4 is not installed: {error}") from error
    if shape.dtype == "float32":
        raise Missing("half precision only")

    def attention(query, key, value, query_offsets, offsets, max_queries, longest, causal: bool = False) -> Tensor:
        found = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=query_offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=max_queries,
            max_seqlen_k=longest,
            causal=causal,
            deterministic=deterministic,
        )
        return found[0] if isinstance(found, tuple) else found

    return attention


def varlen(problem: Problem, attention_of: Callable[[Shape], Callable[..., Tensor]] = varlen_attn) -> Prepared:
    """Variable-length flash attention, torch's or another, the queries of a sample as a short sequence."""
    shape = problem.shape
    attention = attention_of(shape)
    query, *rest = problem.inputs.values()
    queries = shape.T * shape.H // shape.G
    query_offsets = torch.arange(shape.B + 1, dtype=torch.int32, device=query.device) * queries
    offsets = problem.offsets.int()

    def call(query: Tensor, *rest: Tensor) -> Tensor:
        return attention(query, *key_and_value(rest), query_offsets, offsets, queries, shape.N)

    def back(x: Tensor) -> Tensor:
        return unfold(x.unflatten(0, (shape.B, -1)), shape)

    leaves = [fold(query, shape).flatten(0, 1), *rest]
    grad = fold(problem.grad, shape).flatten(0, 1)
    return Prepared(leaves, call, grad, back, lambda grads: [back(grads[0]), *grads[1:]])


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(problem: Problem) -> Prepared:
    """FlexAttention over the packed rows, a mask of documents keeping the samples apart."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()
    shape, query = problem.shape, problem.inputs["query"]
    queries = shape.T * shape.H // shape.G
    ids = torch.arange(shape.B, device=query.device, dtype=torch.int32)
    query_sample = ids.repeat_interleave(queries)
    row_sample = ids.repeat_interleave(problem.device_lengths)

    def same_sample(b: Tensor, h: Tensor, q: Tensor, row: Tensor) -> Tensor:
        return query_sample[q] == row_sample[row]

    mask = create_block_mask(same_sample, None, None, shape.B * queries, problem.rows, device=query.device)
    attention = compiled_flex()

    def pack(x: Tensor) -> Tensor:
        """[R, G, W] -> [1, G, R, W]."""
        return x.transpose(0, 1)[None].contiguous()

    def back(x: Tensor) -> Tensor:
        return unfold(x[0].transpose(0, 1).unflatten(0, (shape.B, -1)), shape)

    def call(query: Tensor, *rest: Tensor) -> Tensor:
        return attention(query, *key_and_value(rest), block_mask=mask)

    _, *rest = problem.inputs.values()
    leaves = [pack(fold(query, shape).flatten(0, 1)), *(pack(x) for x in rest)]
    grad = pack(fold(problem.grad, shape).flatten(0, 1))
    return Prepared(
        leaves, call, grad, back, lambda grads: [back(grads[0]), *(x[0].transpose(0, 1) for x in grads[1:])]
    )


@functools.cache
def fbgemm(module: str = "fbgemm_gpu") -> ModuleType:
    """Registers torch.ops.fbgemm.*, of that module too."""
    try:
        importlib.import_module("fbgemm_gpu")
        return importlib.import_module(module)
    except Exception as error:  # a build for another torch fails in many ways
        raise Missing(f"{module} does not import: {' '.join(str(error).split())[:100]}") from error


def _fbgemm_like(problem: Problem, attention: Callable[..., Tensor]) -> Prepared:
    """For peers that take the query as [B, D, queries], scaled beforehand, and [S, D] rows."""
    shape = problem.shape
    if shape.G > 1:
        raise Missing("one key head only")
    query, *rest = problem.inputs.values()
    scale = 1 / math.sqrt(shape.D)
    dense = (fold(query, shape)[:, :, 0] * scale).transpose(1, 2).contiguous()

    def call(dense: Tensor, *rest: Tensor) -> Tensor:
        return attention(dense, *key_and_value(rest))

    def back(x: Tensor) -> Tensor:
        return unfold(x[:, :, None], shape)

    def gradients(grads: list[Tensor]) -> list[Tensor]:
        return [back(grads[0].transpose(1, 2) * scale), *(x[:, None] for x in grads[1:])]

    grad = fold(problem.grad, shape)[:, :, 0].contiguous()
    return Prepared([dense, *(x[:, 0] for x in rest)], call, grad, back, gradients)


def fbgemm_operators(problem: Problem) -> Prepared:
    fbgemm()
    ops, offsets, longest = torch.ops.fbgemm, problem.offsets, problem.shape.N

    def attention(dense: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = ops.jagged_dense_bmm(key, offsets, dense, longest)[0]
        weights = ops.jagged_softmax(scores, offsets, longest)[0]
        return ops.jagged_jagged_bmm(weights, value, offsets, longest)

    return _fbgemm_like(problem, attention)


def allow_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def sll_unfused(problem: Problem) -> Prepared:
    """The paper's operators one after another."""
    fbgemm("fbgemm_gpu.sll")
    ops, offsets, longest, tf32 = torch.ops.fbgemm, problem.offsets, problem.shape.N, allow_tf32()

    def attention(dense: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = ops.sll_jagged_dense_bmm(key, dense, offsets, longest, tf32, use_fbgemm_kernel=False)
        weights = ops.sll_jagged_softmax(scores, offsets, longest, use_fbgemm_kernel=False)
        return ops.sll_jagged_jagged_bmm(weights, value, offsets, longest, tf32, use_fbgemm_kernel=False)

    return _fbgemm_like(problem, attention)


def sll_fused(problem: Problem) -> Prepared:
    """The paper's fused kernel, which wants a padded bias."""
    fbgemm("fbgemm_gpu.sll")
    shape, offsets, tf32 = problem.shape, problem.offsets, allow_tf32()
    query = problem.inputs["query"]
    bias = query.new_zeros(shape.B, shape.N, shape.T * shape.H)

    def attention(dense: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.ops.fbgemm.sll_jagged_dense_flash_attention(key, dense, value, bias, offsets, shape.N, tf32)

    return _fbgemm_like(problem, attention)


def segments(problem: Problem) -> Prepared:
    """Segment operations in torch: every sample's query repeated for its rows, sums by index."""
    shape, lengths = problem.shape, problem.device_lengths
    sample = torch.repeat_interleave(lengths)
    scale = 1 / math.sqrt(shape.D)

    def call(query: Tensor, *rest: Tensor) -> Tensor:
        key, value = key_and_value(rest)
        scores = (query[sample] * key[:, None]).sum(-1) * scale  # [S, queries, G]
        with torch.no_grad():
            top = torch.segment_reduce(scores, "max", lengths=lengths, unsafe=True, initial=0)
        weights = (scores - top[sample]).exp()
        total = weights.new_zeros(shape.B, *weights.shape[1:]).index_add(0, sample, weights)
        sums = value.new_zeros(*query.shape).index_add(0, sample, weights[..., None] * value[:, None])
        return sums / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]

    leaves = [fold(problem.inputs["query"], shape), *list(problem.inputs.values())[1:]]
    return Prepared(
        leaves,
        call,
        fold(problem.grad, shape),
        lambda out: unfold(out, shape),
        lambda grads: [unfold(grads[0], shape), *grads[1:]],
    )


def sdpa(name: str, backend: SDPBackend) -> Implementation:
    return Implementation(f"padded, {name}", padded, context=lambda: sdpa_kernel(backend))


OURS = Implementation("jfi", ours, ours=True, graph=True)
OURS_ALONE = Implementation("jfi, longest unknown", functools.partial(ours, longest_known=False), ours=True, graph=True)
PADDED = Implementation("padded SDPA", padded)
PADDING = Implementation("padding + SDPA", pad_and_attend)
PADDED_MATH = sdpa("math", SDPBackend.MATH)
PADDED_EFFICIENT = sdpa("memory-efficient", SDPBackend.EFFICIENT_ATTENTION)
PADDED_CUDNN = sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION)
VARLEN = Implementation("torch varlen_attn", varlen)
FLASH_4 = Implementation("FlashAttention 4", functools.partial(varlen, attention_of=flash_attention_4))
FLEX = Implementation("FlexAttention", flex, rotate=False)
FBGEMM = Implementation("fbgemm operators", fbgemm_operators)
SLL_UNFUSED = Implementation("sll, unfused", sll_unfused)
SLL_FUSED = Implementation("sll, fused", sll_fused)
SEGMENTS = Implementation("segments in torch", segments)
