"""The forward of target attention for torch.export, run eagerly, against the operator; a package of it needs a GPU."""

from dataclasses import replace

import pytest
import torch
from ops.overrides import override
from ops.ragged import offsets_of

import jfi.ops
from jfi.kernels import plan
from jfi.kernels.plan import A100, plan_target_attention
from jfi.semantic_ids import pack_words
from jfi.utils.operands import TargetAttentionInputs

LENGTHS = [5, 0, 300, 32]


@pytest.mark.parametrize("case", ["one", "bias by index", "bias", "halves", "tables", "digits", "many"])
def test_the_exported_forward(case, device):
    from jfi.kernels.exported import target_attention_fwd

    offsets, events = offsets_of(LENGTHS, device), sum(LENGTHS)
    heads, queries = (1, 1) if case == "one" else (4, 20 if case == "many" else 1)
    query, key = torch.randn(4, queries, heads, 32, device=device), torch.randn(events, 1, 32, device=device)
    index, scale = torch.randint(0, 7, (events,), device=device), torch.rand(events, device=device)
    bias = torch.randn(7 if case == "bias by index" else events, heads, device=device)
    tables = torch.randn(2, 7, 1, 32, device=device)
    absent = {"value": None, "bias": None, "bias_index": None, "value_scale": None, "second": None}
    absent |= {"tables": [], "indices": [], "scale": 0.3, "max_seqlen": None}
    given, options, history = {}, {}, key
    if case == "bias by index":
        given = {"bias": bias, "bias_index": index, "value_scale": scale}
        options = {"key_bias": bias, "key_bias_index": index, "value_scale": scale}
    elif case in ("bias", "many"):
        given, options = {"bias": bias, "value": key + 1}, {"key_bias": bias, "value": key + 1}
    elif case == "halves":
        given = {"second": key[:, 0, 16:].contiguous()}
    elif case == "tables":
        given = {"tables": list(tables.flatten(2)), "indices": [index, index.flip(0)]}
        history, options = tuple(tables), {"indices": (index, index.flip(0))}
    own = key[..., :16].contiguous() if case == "halves" else key
    if case == "digits":
        digits = torch.randint(-1, 2, (events, 32), device=device)
        history, own = digits[:, None].float(), pack_words(digits)[:, None]
    x = TargetAttentionInputs(**absent | {"query": query, "key": own, "offsets": offsets} | given)
    with override(MIN_CHUNK=64, num_sms=4):  # the long history is split
        found, lse = target_attention_fwd(x)
    wanted = jfi.ops.target_attention(query, history, offsets=offsets, scale=0.3, **options)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert lse.shape == query.shape[:3]
    assert lse[1].isneginf().all()


@pytest.mark.parametrize(("queries", "family"), [(1, "target_single_tile"), (64, "target_multi_tile")])
def test_the_plan_of_an_exported_program_knows_no_length_and_no_address(queries, family):
    query, key = torch.randn(3, queries, 4, 64).bfloat16(), torch.randn(8, 1, 64).bfloat16()
    optional = (None,) * 4
    x = TargetAttentionInputs(query, key, None, torch.tensor([0, 3, 3, 8]), *optional, [], [], 0.125, 5)
    for device in (A100, plan.H100):
        chosen = plan_target_attention(x, "triton", replace(device, exported=True))
        assert chosen.family == family
        assert chosen.forward[0].split in (plan.Split.STREAM_K, plan.Split.CHUNKS)
        assert not chosen.forward[0].options.get("BY_TMA")
