"""The reference against loops over samples and events in float64, and its gradients against finite differences."""

import itertools

import pytest
import torch
from ops.ragged import LENGTHS, offsets_of
from torch import Tensor
from torch.autograd import gradcheck

from jfi import reference

CPU = torch.device("cpu")
SMALL = {"mixed": [0, 2, 1, 0, 3], "all_empty": [0, 0], "no_samples": []}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def samples(offsets: Tensor) -> list[slice]:
    return [slice(low, high) for low, high in itertools.pairwise(offsets.tolist())]


def cat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like


def softmax_or_zeros(scores: Tensor, dim: int) -> Tensor:
    return torch.softmax(scores, dim).nan_to_num(0.0) if scores.numel() else scores


@pytest.mark.parametrize("case", LENGTHS)
def test_table_1_operators_equal_loops(case):
    offsets = offsets_of(LENGTHS[case], CPU)
    other = offsets_of([(3 * n + 1) % 5 for n in LENGTHS[case]], CPU)
    s, r, b = int(offsets[-1]), int(other[-1]), len(LENGTHS[case])
    x, y, z, dense = random(s, 3), random(s, 2), random(r, 3), random(b, 3, 2)
    spans, other_spans = samples(offsets), samples(other)
    pairs = list(zip(spans, other_spans, strict=True))

    expected = cat([x[i] @ dense[b] for b, i in enumerate(spans)], x.new_zeros(0, 2))
    torch.testing.assert_close(reference.jagged_dense_bmm(x, offsets, dense), expected)
    expected = torch.stack([x[i].T @ y[i] for i in spans]) if spans else x.new_zeros(0, 3, 2)
    torch.testing.assert_close(reference.jagged_jagged_bmm(x, y, offsets), expected)
    expected = cat([softmax_or_zeros(x[i], 0) for i in spans], x)
    torch.testing.assert_close(reference.jagged_softmax(x, offsets), expected)
    a = cat([(x[i] @ z[j].T).flatten() for i, j in pairs], x.new_zeros(0))
    torch.testing.assert_close(reference.jagged_jagged_bmm_jagged_out(x, z, offsets, other), a)
    expected = cat([softmax_or_zeros(x[i] @ z[j].T, 1).flatten() for i, j in pairs], a)
    torch.testing.assert_close(reference.jagged2_softmax(a, offsets, other), expected)
    expected = cat([x[i] @ z[j].T @ z[j] for i, j in pairs], x)
    torch.testing.assert_close(reference.array_jagged_bmm_jagged_out(a, z, offsets, other, s), expected)


def attention_loop(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor, scale: float):
    """One sample, event by event: [T, H, D], [L, G, D], [L, G, E], [L, H], [T, L] -> [T, H, E], log-sum-exp [T, H]."""
    num_queries, num_heads, _ = q.shape
    out = q.new_zeros(num_queries, num_heads, v.shape[2])
    lse = q.new_full((num_queries, num_heads), -torch.inf)
    for t in range(num_queries):
        for h in range(num_heads):
            g = h // (num_heads // k.shape[1])
            scores = [
                -torch.inf if hidden[t, s] else float(scale * q[t, h] @ k[s, g] + bias[s, h]) for s in range(len(k))
            ]
            top = max(scores, default=-torch.inf)
            if top == -torch.inf:
                continue
            weights = torch.tensor(scores, dtype=torch.float64).sub(top).exp()
            out[t, h] = (weights / weights.sum()) @ v[:, g]
            lse[t, h] = top + weights.sum().log()
    return out, lse


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (2, 2)])
def test_target_attention_equals_loops(case, num_heads, num_kv_heads):
    offsets = offsets_of(SMALL[case], CPU)
    b, s = len(SMALL[case]), int(offsets[-1])
    q, k, v, bias = (
        random(b, 2, num_heads, 3),
        random(s, num_kv_heads, 3),
        random(s, num_kv_heads, 5),
        random(s, num_heads),
    )
    bias[: s // 2, 0] = -torch.inf
    expected = [
        attention_loop(q[b], k[i], v[i], bias[i], torch.zeros(2, len(k[i])), 0.7)[0]
        for b, i in enumerate(samples(offsets))
    ]
    expected = torch.stack(expected) if expected else q.new_zeros(0, 2, num_heads, 5)
    torch.testing.assert_close(reference.target_attention(q, k, v, offsets, bias, 0.7), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (1, 0), (None, 1), (2, None)])
def test_jagged_attention_equals_loops(causal, window):
    q_offsets, k_offsets = offsets_of([0, 2, 1, 3, 4, 2], CPU), offsets_of([3, 2, 0, 5, 3, 4], CPU)
    r, s = int(q_offsets[-1]), int(k_offsets[-1])
    q, k, v, bias = random(r, 4, 3), random(s, 2, 3), random(s, 2, 5), random(s, 4)
    left, right = window or (None, None)
    expected, expected_lse = [], []
    for i, j in zip(samples(q_offsets), samples(k_offsets), strict=True):
        length, keys = i.stop - i.start, j.stop - j.start
        ahead = torch.arange(keys)[None] - (torch.arange(length)[:, None] + keys - length)
        hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
        hidden = hidden | (ahead < -(10**6 if left is None else left)) | (ahead > (10**6 if right is None else right))
        out, sums = attention_loop(q[i], k[j], v[j], bias[j], hidden, 0.7)
        expected.append(out)
        expected_lse.append(sums)
    got, lse = reference.jagged_attention(q, k, v, q_offsets, k_offsets, causal, window, bias, 0.7)
    torch.testing.assert_close(got, torch.cat(expected))
    torch.testing.assert_close(lse, torch.cat(expected_lse))


def test_gradients_equal_finite_differences():
    x_offsets, y_offsets = offsets_of([0, 2, 1, 3], CPU), offsets_of([2, 1, 0, 2], CPU)
    x, y, z = (random(n, 2).requires_grad_() for n in (6, 6, 5))
    dense, a = random(4, 2, 3).requires_grad_(), random(8).requires_grad_()
    q, k, v = random(4, 2, 2, 2).requires_grad_(), random(6, 1, 2).requires_grad_(), random(6, 1, 3).requires_grad_()
    bias = random(6, 2).requires_grad_()
    assert gradcheck(lambda x, d: reference.jagged_dense_bmm(x, x_offsets, d), (x, dense))
    assert gradcheck(lambda x, y: reference.jagged_jagged_bmm(x, y, x_offsets), (x, y))
    assert gradcheck(lambda x: reference.jagged_softmax(x, x_offsets), (x,))
    assert gradcheck(lambda x, z: reference.jagged_jagged_bmm_jagged_out(x, z, x_offsets, y_offsets), (x, z))
    assert gradcheck(lambda a: reference.jagged2_softmax(a, x_offsets, y_offsets), (a,))
    assert gradcheck(lambda a, z: reference.array_jagged_bmm_jagged_out(a, z, x_offsets, y_offsets, 6), (a, z))
    assert gradcheck(lambda q, k, v, b: reference.target_attention(q, k, v, x_offsets, b, 0.7), (q, k, v, bias))
    assert gradcheck(lambda q, k: reference.target_attention(q, k, None, x_offsets, None, 0.7), (q, k))

    def attend(q, k, v, b):
        out, lse = reference.jagged_attention(q, k, v, y_offsets, x_offsets, True, (1, 0), b, 0.7)
        return out, lse.where(lse > -torch.inf, 0.0)

    assert gradcheck(
        attend,
        (random(5, 2, 2).requires_grad_(), k, v, bias),
    )
