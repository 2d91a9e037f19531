"""The mathematics of a tile of attention, forward and backward, on scores in base 2.

Forward, over tiles of keys (Dao et al., 'FlashAttention', 2022), with m the running maximum of a query row's scores, l
the sum of exp2(s - m) and o the weighted sum of values, all rescaled by exp2(m_old - m) when the maximum grows:

    out = o / l        lse = (m + log2 l) ln 2

A row without a visible key has m = -inf and l = 0: its output is 0 and its lse -inf.  Backward, with Δ = Σ_e dO · O:

    P = exp(S - lse)        dS = P (dP - Δ)        dP = dO Vᵀ

There an empty row's lse is taken as +inf, so that its weights are exp(-inf) = 0 and never NaN.
"""

import triton
import triton.language as tl

from jfi.kernels.common.primitives import LN2, LOG2E


@triton.jit
def reference_of(maximum):
    """Returns what scores are taken relative to: their maximum, or 0 and not -inf where no key was visible."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(maximum, total, acc) of a tile of query rows before its first tile of keys, or its first partial result."""
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    return maximum, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_D), tl.float32)


@triton.jit
def online_softmax_update(scores, maximum):
    """Returns (P [M, N], the new maximum [M], the factor of earlier sums [M]) of a tile's scores [M, N] in base 2.

    The caller adds up: l = l · factor + Σ P, o = o · factor + P V.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = reference_of(new_maximum)
    p = tl.exp2(scores - base[:, None])
    return p, new_maximum, tl.exp2(maximum - base)


@triton.jit
def nonzero(total):
    """The sum of weights as a divisor: 1 where nothing was summed."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def log_sum_exp(maximum, total):
    """The natural log-sum-exp of scores in base 2, -inf where there was none."""
    return tl.where(total == 0.0, -float("inf"), (maximum + tl.log2(nonzero(total))) * LN2)


@triton.jit
def finish(maximum, total, acc):
    """Returns (output, log-sum-exp): 0 and -inf where no key was visible."""
    lse = log_sum_exp(maximum, total)
    return acc * (1.0 / nonzero(total))[:, None], lse


@triton.jit
def combine_weights(lse, maximum, new_maximum):
    """Weights of partial results with these natural log-sum-exps, and the factor of those combined before.

    The partial outputs are normalized: out = Σ_i exp(lse_i - lse) out_i.
    """
    base = reference_of(new_maximum)
    return tl.exp2((lse - base) * LOG2E), tl.exp2((maximum - base) * LOG2E)


@triton.jit
def hide_empty(lse):
    """The log-sum-exp for the backward: +inf where no key was visible, so that every weight is 0."""
    return tl.where(lse == -float("inf"), float("inf"), lse)


@triton.jit
def scores_gradient(p, dp, delta):
    """dS = P (dP - Δ); Δ is broadcast along the keys."""
    return p * (dp - delta)


@triton.jit
def scaled_scores_gradient(p, dp, delta, scale, NEEDS_DS: tl.constexpr):
    """(dS, scale · dS).  If only the latter is needed Δ comes scaled, which saves a multiplication per score."""
    if NEEDS_DS:
        ds = scores_gradient(p, dp, delta)
        return ds, ds * scale
    else:
        ds = p * (dp * scale - delta)
        return ds, ds
