"""Jagged attention by the peers and by jfi: self-attention, or a ragged number of candidates.

As in ``peers``, each peer gets its inputs in its own layout, padding and a scaled query included; that is not timed.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import jfi.ops
import jfi.table1
from benchmarks.peers import allow_tf32, attend, compiled_flex, fbgemm, flash_attention_4, varlen_attn
from benchmarks.problem import PAIRS, QUERIES, ROWS, Problem, Shape, draw_lengths, order, pad, random, valid
from benchmarks.run import Implementation, Missing, Prepared


@dataclass(frozen=True)
class JaggedShape(Shape):
    """T is the most candidates of a sample, which has one at least, or T where lengths are full; 0: self-attention."""

    T: int = 0
    causal: bool = False

    @property
    def name(self) -> str:
        queries = f" T={'' if self.lengths == 'full' else '1..'}{self.T}" if self.T else ""
        lengths = "" if self.lengths == "uniform" else f", {self.lengths}"
        heads = f"H={self.H}" + (f" G={self.G}" if self.G != self.H else "")
        text = f"B={self.B} N={self.N} D={self.D} {heads}{queries} {self.dtype}{', one read' if self.shared else ''}"
        return f"{text}{', causal' if self.causal else ''}{lengths}"

    @property
    def most_queries(self) -> int:
        return self.T or self.N


def draw_candidates(shape: JaggedShape, seed: int) -> Tensor | None:
    """[B] on the CPU: T, or uniform in [1, T], in the order of the lengths that are drawn with the same seed."""
    if not shape.T:
        return None
    if shape.lengths == "full":
        return torch.full((shape.B,), shape.T)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, shape.T + 1, (shape.B,), generator=generator)[order(shape.B, seed)]


def jagged_problem(shape: JaggedShape, seed: int, device: torch.device) -> Problem:
    torch.manual_seed(seed)
    lengths, candidates = draw_lengths(shape, seed), draw_candidates(shape, seed)
    queries = lengths if candidates is None else candidates
    seen = (lengths + 1) / 2 if shape.causal else lengths
    rows = {QUERIES: int(queries.sum()), ROWS: int(lengths.sum())}
    layouts = {"query": QUERIES, "key": ROWS, "value": ROWS, "out": QUERIES}
    heads = {"query": shape.H, "key": shape.G} | ({} if shape.shared else {"value": shape.G})
    inputs = {name: random((rows[layouts[name]], count, shape.D), shape.dtype, device) for name, count in heads.items()}
    # Two products forward; backward the scores again and four products more.
    product = 2.0 * float((queries * seen).sum()) * shape.H * shape.D
    return Problem(
        shape=shape,
        lengths=lengths,
        offsets=F.pad(lengths.cumsum(0), (1, 0)).to(device),
        inputs=inputs,
        layouts=layouts,
        grad=random((rows[QUERIES], shape.H, shape.D), shape.dtype, device),
        formula=functools.partial(attend, causal=shape.causal),
        flops=(2 * product, 5 * product),
        query_lengths=candidates,
        kept=4 * rows[QUERIES] * shape.H,  # the log-sum-exp
    )


def ours(problem: Problem) -> Prepared:
    query_offsets, offsets, causal = problem.query_offsets, problem.offsets, problem.shape.causal

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return jfi.ops.jagged_attention(
            query, key, value, query_offsets=query_offsets, key_offsets=offsets, causal=causal
        )

    return Prepared(list(problem.inputs.values()), call, problem.grad)


def varlen(problem: Problem) -> Prepared:
    """torch's variable-length flash attention."""
    shape, attention = problem.shape, varlen_attn(problem.shape)
    bounds = problem.query_offsets.int(), problem.offsets.int(), shape.most_queries, shape.N
    options = {"window_size": (-1, 0)} if shape.causal else {}
    if shape.G != shape.H:
        if "enable_gqa" not in inspect.signature(attention).parameters:
            raise Missing(f"as many key heads as query heads only, in torch {torch.__version__}")
        options["enable_gqa"] = True
    return Prepared(
        list(problem.inputs.values()),
        lambda query, key, value: attention(query, key, value, *bounds, **options),
        problem.grad,
    )


def flash_4(problem: Problem, deterministic: bool = False) -> Prepared:
    """FlashAttention 4 over packed rows."""
    shape, attention = problem.shape, flash_attention_4(problem.shape, deterministic)
    bounds = problem.query_offsets.int(), problem.offsets.int(), shape.most_queries, shape.N
    return Prepared(
        list(problem.inputs.values()),
        lambda query, key, value: attention(query, key, value, *bounds, causal=shape.causal),
        problem.grad,
    )


def attend_by_silu(query: Tensor, key: Tensor, value: Tensor, longest: int) -> Tensor:
    """HSTU's attention on one sample: silu(q·k / sqrt(D)) / longest in the place of the softmax, causal."""
    scores = torch.einsum("thd,lhd->htl", query, key) / math.sqrt(query.shape[2])
    weights = F.silu(scores).tril() / longest
    return torch.einsum("htl,lhe->the", weights, value)


def hstu(problem: Problem) -> Prepared:
    """The HSTU attention of generative-recommenders in Triton: the same two products without a softmax."""
    shape, offsets = problem.shape, problem.offsets
    if shape.T or not shape.causal or shape.G != shape.H:
        raise Missing("causal self-attention only")
    try:
        from generative_recommenders.ops.triton.triton_hstu_attention import triton_hstu_mha
    except ImportError as error:
        raise Missing(f"generative-recommenders is not installed: {error}") from error

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return triton_hstu_mha(shape.N, 1 / math.sqrt(shape.D), query, key, value, offsets, enable_tma=True)

    solves = replace(problem, formula=functools.partial(attend_by_silu, longest=shape.N))
    return Prepared(list(problem.inputs.values()), call, problem.grad, solves=solves)


#: Query rows of a candidate in `ikbo`, as in its own benchmark.
IKBO_SEEDS = 64
#: Of its 320 configurations, those that are tried.
IKBO_TILES = {"BLOCK_M": (64, 128), "BLOCK_N": (64, 128), "warps": (4, 8), "stages": (2, 3, 4)}


def ikbo(problem: Problem) -> Prepared:
    """FBGEMM's in-kernel broadcast attention in Triton: candidates of 64 query rows share their user's history."""
    shape = problem.shape
    if shape.lengths != "full" or shape.T % IKBO_SEEDS or shape.T == 0 or shape.G != shape.H:
        raise Missing(f"histories of one length and a multiple of {IKBO_SEEDS} query rows a user only")
    try:
        from ikbo.ops import triton_ikbo_fa
    except ImportError as error:
        raise Missing(f"FBGEMM's experimental ikbo is not installed: {error}") from error
    kernel = triton_ikbo_fa._attn_fwd_tma
    kernel.configs = [
        one
        for one in kernel.configs
        if all(one.kwargs[name] in IKBO_TILES[name] for name in ("BLOCK_M", "BLOCK_N"))
        and one.num_warps in IKBO_TILES["warps"]
        and one.num_stages in IKBO_TILES["stages"]
    ]
    users = torch.arange(shape.B, dtype=torch.int32, device=problem.offsets.device)
    user_of = users.repeat_interleave(shape.T // IKBO_SEEDS)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return triton_ikbo_fa.triton_flash_attn_ikbo_tma(query, key, value, user_of, IKBO_SEEDS, shape.N)

    return Prepared(list(problem.inputs.values()), call, problem.grad)


def hidden_rows(problem: Problem) -> Tensor:
    """[B, 1, 1, N]: the padding.  An empty sample sees one row of it, as in ``peers.padded``."""
    return ~valid(problem.device_lengths.clamp(min=1), problem.shape.N)[:, None, None]


def padded(problem: Problem, attention: Callable[..., Tensor]) -> Prepared:
    """Inputs as [B, H, N, D], queries as [B, H, T, D] where they are candidates."""
    shape, device = problem.shape, problem.offsets.device
    if shape.causal:
        raise Missing("measured without causal alone")
    queries = problem.device_lengths if problem.query_lengths is None else problem.query_lengths.to(device)
    sides = {ROWS: (problem.device_lengths, shape.N), QUERIES: (queries, shape.most_queries)}

    def widen(x: Tensor, layout: str) -> Tensor:
        return pad(x, *sides[layout]).transpose(1, 2).contiguous()

    def narrow(x: Tensor, layout: str) -> Tensor:
        return x.transpose(1, 2)[valid(*sides[layout])]

    layouts = [problem.layouts[name] for name in problem.inputs]
    return Prepared(
        [widen(x, layout) for x, layout in zip(problem.inputs.values(), layouts, strict=True)],
        attention,
        widen(problem.grad, QUERIES),
        lambda out: narrow(out, QUERIES),
        lambda grads: [narrow(x, layout) for x, layout in zip(grads, layouts, strict=True)],
    )


def padded_sdpa(problem: Problem) -> Prepared:
    """The padding hidden by an additive mask, with whichever backend torch picks for that."""
    query = problem.inputs["query"]
    mask = query.new_zeros(problem.shape.B, 1, 1, problem.shape.N).masked_fill_(hidden_rows(problem), -torch.inf)
    return padded(problem, lambda query, key, value: F.scaled_dot_product_attention(query, key, value, mask))


def pad_and_attend(problem: Problem) -> Prepared:
    """Padded SDPA from packed rows and back: what a model pays whose tensors are jagged."""
    shape, lengths = problem.shape, problem.device_lengths
    if shape.T:
        raise Missing("measured on self-attention alone")
    place = valid(lengths, shape.N).flatten().nonzero()[:, 0]
    options = {"is_causal": True}  # which hides the padding, too
    if not shape.causal:
        mask = problem.inputs["query"].new_zeros(shape.B, 1, 1, shape.N)
        options = {"attn_mask": mask.masked_fill_(hidden_rows(problem), -torch.inf)}

    def call(*tensors: Tensor) -> Tensor:
        rows = [x.new_zeros(shape.B * shape.N, *x.shape[1:]).index_copy(0, place, x) for x in tensors]
        wide = (x.unflatten(0, (shape.B, shape.N)).transpose(1, 2) for x in rows)
        return F.scaled_dot_product_attention(*wide, **options).transpose(1, 2).flatten(0, 1).index_select(0, place)

    return Prepared(list(problem.inputs.values()), call, problem.grad)


def padded_unmasked(problem: Problem) -> Prepared:
    """The padding attended to as if it were events, which spares padded flash attention its mask.

    It solves another problem, in which every sample is full, and is compared with the truth about that one.
    """
    shape = problem.shape
    prepared = padded(problem, F.scaled_dot_product_attention)

    def pack(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)

    full = replace(
        problem,
        lengths=torch.full_like(problem.lengths, shape.N),
        query_lengths=torch.full_like(problem.lengths, shape.most_queries),
        inputs={name: pack(x) for name, x in zip(problem.inputs, prepared.leaves, strict=True)},
        grad=pack(prepared.grad),
    )
    return replace(prepared, output=pack, gradients=lambda grads: [pack(x) for x in grads], solves=full)


def dense(problem: Problem) -> Prepared:
    """The formula on padded tensors, in their type.  (SDPA's own widens half precision to float32.)"""
    hidden, scale = hidden_rows(problem), 1 / math.sqrt(problem.shape.D)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query * scale) @ key.transpose(2, 3)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value

    return padded(problem, attention)


def flex(problem: Problem) -> Prepared:
    """FlexAttention over the padded tensors, whose empty blocks it leaves out."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()
    shape, lengths = problem.shape, problem.device_lengths
    if shape.T:
        raise Missing("measured on self-attention alone")

    def real(b: Tensor, h: Tensor, q: Tensor, row: Tensor) -> Tensor:
        return (q < lengths[b]) & (row < lengths[b])

    mask = create_block_mask(real, shape.B, None, shape.N, shape.N, device=lengths.device)
    attention = compiled_flex()
    return padded(problem, lambda query, key, value: attention(query, key, value, block_mask=mask))


def scaled(problem: Problem, attention: Callable[..., Tensor], pack: Callable[[Tensor], Tensor], size: int) -> Prepared:
    """For peers without a softmax scale, which divide their output by ``size``; ``pack`` is its own inverse."""
    query, key, value = problem.inputs.values()
    scale = 1 / math.sqrt(problem.shape.D)

    def gradients(grads: list[Tensor]) -> list[Tensor]:
        return [pack(grads[0]) * scale, pack(grads[1]), pack(grads[2])]

    leaves = [pack(query * scale), pack(key), pack(value)]
    return Prepared(leaves, attention, pack(problem.grad * size), lambda out: pack(out) * size, gradients)


def sll(problem: Problem) -> Prepared:
    """The paper's fused kernel for self-attention, over [H, S, D]."""
    shape, offsets, tf32 = problem.shape, problem.offsets, allow_tf32()
    if shape.T or shape.causal:
        raise Missing("self-attention over all events only")
    if not offsets.is_cuda:
        raise Missing("on a GPU only")
    fbgemm("fbgemm_gpu.sll")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.ops.fbgemm.sll_multi_head_jagged_flash_attention(query, key, value, offsets, shape.N, tf32)

    return scaled(problem, attention, lambda x: x.transpose(0, 1).contiguous(), shape.N)


def unfused(problem: Problem) -> Prepared:
    """jfi's operators of the paper's Table 1 one after another: every pair passes through memory."""
    shape, offsets, pairs = problem.shape, problem.offsets, problem.starts[PAIRS][-1]
    if shape.T or shape.causal or shape.H > 1:
        raise Missing("measured on self-attention over all events alone, of one head")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = jfi.table1.jagged_jagged_bmm_jagged_out(query, key, offsets, out_size=pairs)
        weights = jfi.table1.jagged2_softmax(scores, offsets)
        return jfi.table1.array_jagged_bmm_jagged_out(weights, value, offsets, out_rows=problem.rows)

    return scaled(problem, attention, lambda x: x[:, 0] if x.dim() == 3 else x[:, None], 1)


OURS = Implementation("jfi", ours, ours=True, graph=True)
VARLEN = Implementation("torch varlen_attn", varlen)
FLASH_4 = Implementation("FlashAttention 4", flash_4)
FLASH_4_SAME_BITS = Implementation("FlashAttention 4, deterministic", functools.partial(flash_4, deterministic=True))
HSTU = Implementation("HSTU, no softmax", hstu)
IKBO = Implementation("IKBO, Triton", ikbo)
PADDED = Implementation("padded SDPA", padded_sdpa)
PADDING = Implementation("padding + SDPA", pad_and_attend)
UNMASKED = Implementation("padded SDPA, no mask", padded_unmasked)
DENSE = Implementation("dense", dense)
FLEX = Implementation("FlexAttention", flex, rotate=False)
SLL = Implementation("sll, multi-head", sll)
UNFUSED = Implementation("jagged, unfused", unfused)
