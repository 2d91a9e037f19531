"""docs/integration.md runs from top to bottom, and what it says of rates, checkpoints and other attentions holds."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from integration.page import run


@pytest.fixture(scope="module")
def page():
    """What the page's blocks have defined."""
    torch.manual_seed(0)
    try:
        return run()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_both_models_give_logits(page):
    assert page.logits.shape == page.shared_logits.shape == (3, 1)
    assert page.shared.over_arch.model[0]._mlp[0]._linear.in_features == page.D + math.comb(3, 2) + 3


def test_samples_with_several_targets_or_none_stay_aligned(page):
    """A batch gives what its samples give alone; 2, 0 and 1 targets are as many rows as samples."""
    samples = [
        {"user": [5], "item": [4, 9], "history_item": [7, 3], "history_rating": [4, 5]},
        {"user": [0], "item": [], "history_item": [1], "history_rating": [2]},
        {"user": [2], "item": [7], "history_item": [5, 1, 7], "history_rating": [1, 2, 5]},
    ]

    def logits(rows: list[int]) -> torch.Tensor:
        lists = [samples[row][key] for key in samples[0] for row in rows]
        values = torch.tensor([one for ids in lists for one in ids], dtype=torch.long)
        ids = page.KeyedJaggedTensor(list(samples[0]), values, lengths=torch.tensor([len(ids) for ids in lists]))
        return page.shared(page.dense_features[rows], ids)

    torch.testing.assert_close(logits([0, 1, 2]), torch.cat([logits([row]) for row in range(3)]))


def test_the_pipeline_trains_it(page):
    assert len(page.losses) == 20 and page.losses[-1] < 0.5 * page.losses[0]


def test_every_table_trains_at_the_rate_that_was_set(page):
    assert page.rates == pytest.approx(
        {
            "embedding_bags.t_user.weight": page.LEARNING_RATE,
            "embedding_bags.t_item.weight": page.LEARNING_RATE,
            "embeddings.t_history_item.weight": page.LEARNING_RATE,
            "embeddings.t_history_rating.weight": page.LEARNING_RATE,
        }
    )
    assert not any("embedding" in name for name in page.dense_parameters)


def test_a_checkpoint_brings_the_loss_back(page):
    assert page.loaded_loss == page.saved_loss


@pytest.fixture
def problem():
    """Targets [B, D], packed events with a gradient, and which places of the padded histories hold an event."""
    lengths = torch.tensor([3, 0, 7, 1])
    events = torch.randn(int(lengths.sum()), 16, requires_grad=True)
    targets = torch.randn(4, 16, requires_grad=True)
    return targets, events, lengths


def padded(events: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    history = nn.utils.rnn.pad_sequence(events.split(lengths.tolist()), batch_first=True)
    return history, torch.arange(history.size(1)) < lengths[:, None]


def softmax(scores: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Over the last dimension; zeros where nothing is valid."""
    return scores.masked_fill(~valid, -torch.inf).softmax(-1).nan_to_num(0)


def assert_same(got: torch.Tensor, want: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Outputs, and the gradients of all leaves."""
    upstream = torch.randn_like(want)
    grads = [torch.autograd.grad(out, leaves, upstream, retain_graph=True) for out in (got, want)]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_din(page, problem):
    targets, events, lengths = problem
    history, valid = padded(events, lengths)
    query = targets[:, None].expand_as(history)
    scores = page.din.scorer(torch.cat([query, history, query - history, query * history], dim=2)).squeeze(2)
    want = (softmax(scores, valid)[:, None] @ history).squeeze(1)
    got = page.din(targets, JaggedTensor(events, lengths=lengths))
    assert not got[1].any()
    # The bias of the scorer's last layer cancels in the softmax: its gradient is rounding.
    assert_same(got, want, [targets, events, *list(page.din.scorer.parameters())[:-1]])


def test_torcheasyrec(page, problem):
    targets, events, lengths = problem
    history, valid = padded(events, lengths)
    want = (softmax(torch.einsum("bd,bld->bl", targets, history), valid)[:, None] @ history).squeeze(1)
    assert_same(page.dot_attention(targets, JaggedTensor(events, lengths=lengths)), want, [targets, events])


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(page, problem, bias):
    targets, events, lengths = problem
    theirs = nn.MultiheadAttention(16, 2, bias=bias, batch_first=True)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    present = lengths > 0  # of an empty history it makes NaN
    history, valid = padded(events, lengths)
    want = theirs(targets[present, None], history[present], history[present], key_padding_mask=~valid[present])[0]

    feature = page.SequenceFeatureConfig("taste", ["history_item"], ["item"])
    layer = page.JaggedFeatureInteraction([feature], 16, num_heads=2)
    page.load_multihead_attention(layer, "taste", theirs)
    got = layer({"history_item": JaggedTensor(events, lengths=lengths)}, {"item": targets})["taste"]
    assert_same(got[present], want.squeeze(1), [targets, events])


def test_fuxictr(page, problem):
    """Projections without biases, heads of D/H, scores over sqrt(D/H), then the output projection."""
    targets, events, lengths = problem
    projections = {name: nn.Linear(16, 16, bias=False) for name in ("W_q", "W_k", "W_v", "W_o")}
    theirs = SimpleNamespace(num_heads=2, **projections)
    history, valid = padded(events, lengths)
    query = theirs.W_q(targets).unflatten(1, (2, 1, 8))  # [B, H, 1, D/H]
    key, value = (linear(history).unflatten(2, (2, 8)).transpose(1, 2) for linear in (theirs.W_k, theirs.W_v))
    weights = softmax(query @ key.mT / math.sqrt(8), valid[:, None, None])
    want = theirs.W_o((weights @ value).flatten(1))

    feature = page.SequenceFeatureConfig("taste", ["history_item"], ["item"])
    layer = page.JaggedFeatureInteraction([feature], 16, num_heads=2)
    page.load_fuxictr_attention(layer, "taste", theirs)
    got = layer({"history_item": JaggedTensor(events, lengths=lengths)}, {"item": targets})["taste"]
    assert_same(got, want, [targets, events])
