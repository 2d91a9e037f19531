"""What runs a call: the plan names it, whatever device this host has."""

import copy
import json
import pickle

import pytest
import torch
from ops.overrides import FAMILIES, override, splits

import jfi.ops
import jfi.table1
from jfi.kernels import plan
from jfi.kernels.plan import A100, CPU, H200, Split

HALF = torch.bfloat16


def explain(
    batch, rows, width, num_queries, *, num_heads=1, num_kv_heads=1, shared=True, dtype=HALF, device=H200, **options
):
    """The plan of a batch with so many history rows in all."""

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    value = None if shared else empty(rows, num_kv_heads, width)
    offsets = empty(batch + 1, dtype=torch.int64)
    inputs = (empty(batch, num_queries, num_heads, width), empty(rows, num_kv_heads, width), value)
    return jfi.ops.explain(jfi.ops.target_attention, *inputs, offsets=offsets, device=device, **options)


@pytest.mark.parametrize("table", [torch.float32, HALF])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_tiles_of_rows_by_id_hold_them_as_stored_and_as_they_are_multiplied(dtype, table):
    query = torch.empty(64, 1, 4, 512, dtype=dtype, device="meta")
    rows = torch.empty(100, 1, 512, dtype=table, device="meta")
    ids, offsets = (torch.empty(n, dtype=torch.int64, device="meta") for n in (5000, 65))
    chosen = jfi.ops.explain(jfi.ops.target_attention, query, rows, indices=ids, offsets=offsets, device=H200)
    assert chosen.problem.width_bytes == 512 * max(dtype.itemsize, table.itemsize)


def test_few_query_rows_split_long_histories_and_not_short_ones():
    long = explain(1024, 2_000_000, 128, 1)
    assert long.family == "target_single_tile"
    assert long.forward[0].split is long.backward[0].split is Split.STREAM_K
    short = explain(1024, 100_000, 64, 1, max_seqlen=200)
    assert short.forward[0].split is Split.SAMPLE
    assert short.backward[0].split is Split.LONGEST_FIRST
    many_samples = explain(100_000, 1_000_000, 64, 1, max_seqlen=200)
    assert many_samples.backward[0].split is Split.SAMPLE


@pytest.mark.parametrize("max_seqlen", [512, 513])
def test_a_hint_up_to_the_threshold_gives_a_program_per_sample(max_seqlen):
    split = explain(1024, 100_000, 64, 1, max_seqlen=max_seqlen).forward[0].split
    assert split is (Split.SAMPLE if max_seqlen <= plan.PROGRAM_PER_SAMPLE_ROWS else Split.STREAM_K)


@pytest.mark.parametrize(
    ("num_queries", "num_heads", "num_kv_heads", "family"),
    [(16, 1, 1, "target_single_tile"), (17, 1, 1, "target_multi_tile")],
)
def test_the_family_goes_by_query_rows_per_key_head(num_queries, num_heads, num_kv_heads, family):
    assert explain(8, 8000, 64, num_queries, num_heads=num_heads, num_kv_heads=num_kv_heads).family == family
    assert explain(8, 8000, 64, num_queries, num_heads=4 * num_heads, num_kv_heads=4 * num_kv_heads).family == family


def test_one_tile_of_query_rows_has_one_backward_kernel_and_more_have_two():
    names = [kernel.kernel for kernel in explain(8, 80_000, 64, 64).backward]
    assert names == ["target_attention_multi_tile_dquery"]
    names = [kernel.kernel for kernel in explain(8, 80_000, 64, 65).backward]
    assert names == ["target_attention_multi_tile_dquery", "target_attention_multi_tile_dhistory"]


def test_jagged_attention_takes_over_where_query_rows_fill_the_device():
    filled = explain(1024, 500_000, 64, 300)
    assert filled.family == "jagged_sm90"


@pytest.mark.parametrize(
    ("batch", "width", "num_queries", "options", "why"),
    [
        (1024, 64, 300, {"device": A100}, "no Hopper GPU"),
        (1024, 96, 300, {}, "keys and values are not both 64 or 128 wide"),
        (1024, 64, 300, {"dtype": torch.float32}, "torch.float32 is not half precision"),
        (1024, 64, 300, {"scale": -1.0}, "scale is at most 1e-30"),
        (1024, 64, 255, {}, "fewer than 256 query rows per key head"),
        (2, 64, 300, {}, "fewer than 2 tiles of 64 query rows per SM"),
    ],
)
def test_the_kernels_for_many_query_rows_say_why_not_jagged_attention(batch, width, num_queries, options, why):
    chosen = explain(batch, 500_000, width, num_queries, **options)
    assert chosen.family == "target_multi_tile"
    assert chosen.reason == f"more than 16 query rows per key head, and not jagged attention: {why}"


@pytest.mark.parametrize("family", ["target_multi_tile", "jagged_sm90"])
def test_a_family_can_be_forced(family):
    with override(**FAMILIES[family]):
        assert explain(1024, 500_000, 64, 100).family == family
        assert explain(1024, 500_000, 64, 1).family == family


@pytest.mark.parametrize("family", ["target_single_tile", "target_multi_tile"])
def test_a_forced_family_computes_the_same_from_a_bias_table_and_scaled_values(family, device):
    query, key = torch.randn(2, 1, 2, 16, device=device), torch.randn(5, 1, 16, device=device)
    offsets, table = torch.tensor([0, 2, 5], device=device), torch.randn(3, 2, device=device)
    index, value_scale = torch.tensor([0, 2, 1, 1, 0], device=device), torch.rand(5, device=device)
    by_event = {"value": key * value_scale[:, None, None], "key_bias": table[index], "impl": "torch"}
    expected = jfi.ops.target_attention(query, key, offsets=offsets, **by_event)
    events = {"key_bias": table, "key_bias_index": index, "value_scale": value_scale, "impl": "triton"}
    with override(**FAMILIES[family]):
        torch.testing.assert_close(jfi.ops.target_attention(query, key, offsets=offsets, **events), expected)


def test_tables_too_large_for_a_program_each_are_split():
    index = torch.empty(3_000_000, dtype=torch.int64, device="meta")

    def table(rows, batch=50_000):
        options = {"key_bias": torch.empty(rows, 4, device="meta"), "key_bias_index": index, "max_seqlen": 100}
        return explain(batch, 3_000_000, 64, 1, num_heads=4, **options)

    assert table(32).forward[0].split is Split.SAMPLE and table(32).backward[0].split is Split.STREAM_K
    assert table(32, 1000).backward[0].split is Split.LONGEST_FIRST
    assert dict(table(32).backward[0].options)["BLOCK_R"] == 32
    assert dict(table(65).backward[0].options)["BLOCK_R"] == 0  # sorted instead


def test_cpus_and_the_plain_formula_are_plans_too():
    assert explain(8, 800, 64, 1, device=CPU).forward[0].kernel == "sparse products"
    assert explain(8, 80_000, 64, 1, device=CPU).forward[0].kernel == "dense products"
    assert explain(8, 800, 64, 1, impl="torch").family == "reference"
    query, key, offsets = torch.zeros(2, 1, 1, 4), torch.zeros(3, 1, 4), torch.tensor([0, 1, 3])
    assert jfi.ops.explain(jfi.ops.target_attention, query, key, offsets=offsets).family == "cpu"


@pytest.mark.parametrize("device", [None, CPU])
def test_a_cpu_says_whether_jagged_attention_is_flash_or_batched(device):
    query, offsets = torch.zeros(4, 2, 8), torch.tensor([0, 1, 4])

    def chosen(value=None, queries=query, query_offsets=offsets, **options):
        options |= {"query_offsets": query_offsets, "key_offsets": offsets, "device": device}
        found = jfi.ops.explain(jfi.ops.jagged_attention, queries, query, value, **options)
        return found.family, found.forward[0].kernel, found.reason

    flash = "no bias, one width, no window but causal; batched matmul in the backward of a log-sum-exp"
    for options in ({}, {"causal": True}):
        assert chosen(**options) == ("cpu", "padded flash attention", flash)
    for options, why in (
        ({"key_bias": torch.zeros(4, 2)}, "it has no gradient for a bias"),
        ({"value": torch.zeros(4, 2, 4)}, "keys and values differ in width"),
        ({"scale": 2.0}, "scale is not above 1e-30 and at most 1.0"),
        ({"window_size": (1, 0)}, "it takes no window but causal"),
    ):
        assert chosen(**options) == ("cpu", "batched matmul", f"no flash attention: {why}")
    if device is None:  # else offsets have no content
        reason = chosen(queries=query[:3], query_offsets=torch.tensor([0, 1, 3]), causal=True)[2]
        assert reason == "no flash attention: causal, and a sample has other numbers of queries and keys"


def test_equal_decisions_are_one_plan_that_says_why():
    first, second = explain(1024, 2_000_000, 128, 1), explain(1000, 1_900_000, 128, 1)
    assert first is second
    text = str(first)
    assert text.startswith("target_single_tile: at most 16 query rows per key head")
    assert "forward: target_attention_single_tile_fwd: 16 x 64 tiles" in text and "stream-K" in text


def test_a_call_that_the_operator_refuses_has_no_plan():
    query = torch.empty(2, 1, 1, 4, device="meta")
    with pytest.raises(ValueError, match="device must be given where tensors are on the meta device"):
        jfi.ops.explain(jfi.ops.target_attention, query, query, offsets=query)
    with pytest.raises(ValueError, match="key must have D = 64, got 32"):
        key = torch.empty(8, 1, 32, dtype=HALF, device="meta")
        offsets = torch.empty(3, dtype=torch.int64, device="meta")
        query = torch.empty(2, 1, 1, 64, dtype=HALF, device="meta")
        jfi.ops.explain(jfi.ops.target_attention, query, key, offsets=offsets, device=H200)
    with pytest.raises(TypeError, match="query must be a Tensor, got int"):
        jfi.ops.explain(jfi.ops.target_attention, 1, key, offsets=offsets)
    with pytest.raises(TypeError, match=r"operator must be one of .*target_attention.*, got 'jagged_softmax'"):
        jfi.ops.explain(jfi.table1.jagged_softmax, query, key)


def test_short_and_long_histories_share_the_kernels_that_are_the_same():
    short, long = explain(1024, 500_000, 64, 300), explain(1024, 5_000_000, 64, 300)
    assert short.family == long.family == "jagged_sm90" and short.forward[0] is not long.forward[0]
    assert short.backward[0] is long.backward[0] and short.backward[1] is long.backward[1]


def test_an_override_ends_with_its_context():
    with pytest.raises(RuntimeError, match="leaves"), override(SINGLE_TILE_ROWS=1):
        assert explain(8, 8000, 64, 2).family == "target_multi_tile"
        raise RuntimeError("leaves")
    assert explain(8, 8000, 64, 2).family == "target_single_tile"


def explain_jagged(batch, queries, keys, num_heads=4, *, num_kv_heads=1, width=128, **options):
    """The plan of so many samples with as many queries and keys each; times=True: of timelines."""

    def empty(*shape, dtype=HALF):
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, events = batch * queries, batch * keys
    if options.pop("times", True):
        options |= {"query_time": empty(rows, dtype=torch.int64), "key_time": empty(events, dtype=torch.int64)}
    offsets = {f"{name}_offsets": empty(batch + 1, dtype=torch.int64) for name in ("query", "key")}
    inputs = empty(rows, num_heads, width), empty(events, num_kv_heads, width)
    return jfi.ops.explain(jfi.ops.jagged_attention, *inputs, **offsets, device=H200, **options)


@pytest.mark.parametrize(
    ("shape", "options", "num_splits"),
    [
        ((64, 64, 16384), {}, 4),
        ((64, 128, 16384), {}, 2),
        ((64, 512, 16384), {}, 1),  # enough tiles
        ((64, 64, 16384), {"times": False}, 1),  # a tile for each SM, all of them equal
        ((64, 32, 16384), {"times": False}, 2),
        ((64, 64, 16384), {"times": False, "causal": True}, 4),
        ((64, 64, 4096), {}, 4),  # no split of fewer than 1,024 keys
        ((64, 64, 1500), {}, 1),
        ((1024, 32, 4096, 2), {}, 1),
        ((1, 1, 10**6), {}, 8),
        ((1, 8192, 8192), {"num_kv_heads": 4, "times": False}, 1),
    ],
)
def test_keys_are_split_where_few_queries_leave_sms_idle(shape, options, num_splits):
    chosen = explain_jagged(*shape, **options)
    assert chosen.family == "jagged_sm90" and chosen.forward[0].num_splits == num_splits
    assert (f"{num_splits} splits of the history rows, then combine" in repr(chosen)) == (num_splits > 1)
    assert all(kernel.num_splits == 1 for kernel in chosen.backward)


@pytest.mark.parametrize(
    ("shape", "options", "split"),
    [
        ((64, 512, 16384), {}, Split.TAPERING),
        ((64, 512, 16384), {"times": False, "causal": True}, Split.TAPERING),
        ((64, 512, 16384), {"times": False}, Split.TILE_SCHEDULER),  # all tiles see all keys
        ((1024, 32, 4096, 2), {}, Split.TILE_SCHEDULER),  # a tile a sample
        ((1024, 128, 4096, 2), {}, Split.TILE_SCHEDULER),  # too many tiles
    ],
)
def test_few_tiles_are_ordered_by_the_keys_that_they_see(shape, options, split):
    assert explain_jagged(*shape, **options).forward[0].split is split


def test_the_number_of_splits_can_be_forced_and_an_empty_batch_has_none():
    with override(**splits(4)):
        assert explain_jagged(4, 10, 10).forward[0].num_splits == 4
    assert explain_jagged(0, 0, 0).forward[0].num_splits == 1


@pytest.mark.parametrize(
    ("rows", "batch", "num_sms", "programs"), [(0, 1, 132, 8), (10**6, 64, 132, 4), (5, 10**5, 2, 1)]
)
def test_stream_k_ranges_cover_the_line(rows, batch, num_sms, programs):
    chunk, ranges = plan.stream_k(rows, batch, num_sms, programs)
    line = rows + batch * plan.SAMPLE_WEIGHT
    assert chunk >= plan.MIN_CHUNK and (ranges - 1) * chunk < line <= ranges * chunk
    assert ranges <= max(num_sms * programs, 1) or chunk == plan.MIN_CHUNK


def test_a_spec_can_be_dumped_as_tritons_compile_hooks_do():
    spec, chosen = pytest.importorskip("jfi.kernels.common.launch"), explain(1024, 500_000, 128, 300)
    visibility = pytest.importorskip("jfi.kernels.jagged_attention.visibility").Visibility
    first, equal, other = (
        spec.attention_spec(chosen.problem, chosen.forward[0], visibility(True, right, 0, False, False))
        for right in (True, True, False)
    )
    assert json.loads(json.dumps(first))[0] == {"constexpr": 1}
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == eval(repr(first)) == first
    assert first == equal and hash(first) == hash(equal) and str(first) == str(equal)
    assert first != other and hash(first) != hash(other) and str(first) != str(other)
