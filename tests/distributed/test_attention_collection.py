"""Attention that goes to the rows of other ranks, against one process; and what it sends, against the formulas."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from attention_worker import (
    CASES,
    EPS,
    LOCAL,
    OWN,
    RANDOM,
    SAMPLES,
    Case,
    as_on_a_gpu,
    build,
    count_outside,
    features_of,
    make_batch,
    part_of,
    shard,
    train_alone,
    train_together,
    use_stand_ins,
    work,
)
from processes import in_processes
from random_layers import differences, run
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from benchmarks.traffic import SequenceShape, by_attention
from jfi import FusedEmbeddingCollection, JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig
from jfi.distributed import AttentionCollectionSharder, CapturedShardedStep, FetchedBagsSharder, average_gradients
from jfi.distributed.input_dist import check_keys
from jfi.distributed.planning import TableGroup, plan_tables, remote_field, row_shardings, rows_by_rank
from jfi.modules import outside_ids
from jfi.modules.lookups import names_of
from jfi.modules.sequence_configs import FeatureGroup, group_features
from jfi.ops.partial_target_attention import combine_parts, pack_part
from jfi.tables.table_rows import with_weights


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """By rank what two processes found."""
    folder = tmp_path_factory.mktemp("exchange")
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        in_processes(work, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_losses_of_one(found, name):
    losses, states = train_alone(CASES[name])
    for way in ("eager", "without a GPU", "buffers", "levels")[: 2 if name == LOCAL else 4]:
        first, second = (rank[way][name] for rank in found)
        assert first["losses"] == second["losses"]
        assert first["losses"] == pytest.approx(losses, abs=2e-6), way
        # Adagrad's steps do not tell how gradients are scaled, its sums do.
        assert first["states"] == pytest.approx(states, rel=1e-4), way
    if name != LOCAL:
        summary = found[0]["buffers"][name]["summary"]
        assert summary.startswith("3 of 4 steps ran captured"), summary


def test_weights_that_a_layer_is_given_send_no_row(found):
    """A layer without a collection sends what a SequenceDLRM sends; with TorchRec's sharders it has the same losses."""
    losses, _ = train_alone(CASES[OWN])
    for rank in found:
        own, model = (rank["eager"][name]["sent"]["all_to_all_single"] for name in (OWN, "weights"))
        assert own == model
        assert rank["rows"][OWN]["losses"] == pytest.approx(losses, abs=2e-6)


def test_weights_other_than_those_that_were_sent_are_refused(alone):
    case = CASES[OWN]
    model = shard(build(case), case).module
    _, ids, _ = part_of(make_batch(case, 1), 0, SAMPLES)
    events = model.embedding_collection(ids)
    targets = {"item": events["item"].values()}
    # The collection's output has the weights that it was given.
    taste, recent = model.layers
    torch.testing.assert_close(taste(events, targets).values(), taste(events, targets, ids=ids).values())
    others = KeyedJaggedTensor(ids.keys(), ids.values(), ids.weights() + 1, lengths=ids.lengths())
    for layer, key in ((taste, "taste_item"), (recent, "recent_rating")):
        refused = rf"sequences\['{key}'\] must have the weights that the sharded collection was given"
        with pytest.raises(ValueError, match=refused):
            layer(events, targets, ids=others)


def test_bucket_ids_other_than_those_that_were_sent_are_refused(alone):
    case = CASES["key bias, own layers"]
    model = shard(build(case), case).module
    _, ids, _ = part_of(make_batch(case, 1), 0, SAMPLES)
    events = dict(model.embedding_collection(ids).items())
    targets, age = {"item": events["item"].values()}, ids["taste_age"]
    events |= {"taste_age": JaggedTensor(4 - age.values(), lengths=age.lengths())}
    events["taste_item"] = with_weights(events["taste_item"], ids["taste_item"].weights())
    refused = r"sequences\['taste_age'\] must have the bucket ids that the sharded collection was given"
    with pytest.raises(ValueError, match=refused):
        model.layers[0](events, targets)


def test_a_layer_reads_the_features_of_the_model_that_was_sharded(alone):
    case = CASES["position, two features"]
    sharded = shard(build(case), case).module
    _, ids, _ = part_of(make_batch(case, 1), 0, SAMPLES)
    events, (taste, recent) = sharded.embedding_collection(ids), features_of(case)
    targets = {"item": events["item"].values()}

    def output(*features: SequenceFeatureConfig) -> torch.Tensor:
        torch.manual_seed(0)
        layer = JaggedFeatureInteraction(list(features), 8, 2)
        return layer(events, targets, ids=ids)[features[-1].name]

    with pytest.raises(
        ValueError, match=r"feature 'taste' must be that of the model .* got .*PositionBias\(num_bucket"
    ):
        output(replace(taste, bias=PositionBias(9)), recent)
    with pytest.raises(ValueError, match=r"features \['taste', 'recent'\] must be read together.* reads \['taste'\]"):
        output(taste)
    unknown = output(recent, replace(taste, name="unknown"))  # whose rows are fetched
    torch.testing.assert_close(unknown, output(recent, replace(taste, max_seqlen=9)))


def test_layers_that_read_one_feature_differently_are_refused():
    groups = group_features(features_of(CASES["plain"]), 8)
    other = group_features([replace(groups[0].features[0], weighted_values=True)], 8)
    with pytest.raises(ValueError, match="feature 'taste' must read its events alike in all layers"):
        group_of(CASES["plain"], groups + other)


def test_random_layers_are_those_over_dense_tables(alone, found):
    """20 of them in this process, 20 in two."""
    texts = [text for seed in range(RANDOM.start) for text in differences(seed)]
    assert not texts + found[0]["random"] + found[1]["random"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_many_random_layers_are_those_over_dense_tables(processes, tmp_path, request):
    seeds = range(RANDOM.stop, RANDOM.stop + 400)
    if processes == 2:
        in_processes(run, str(tmp_path / "store"), seeds, seconds=3600)
        return
    request.getfixturevalue("alone")
    assert not [text for seed in seeds for text in differences(seed)]


@pytest.mark.parametrize("way", ["eager", "without a GPU", "buffers", "levels"])
def test_ids_outside_of_their_tables_are_counted_by_the_ranks_of_their_samples(found, way):
    name = "ids outside of their tables"
    assert way != "levels" or found[0][way][name]["sent again"] > 0
    counts = [rank[way][name]["outside"] for rank in found]
    assert all(counts)
    expected = count_outside(CASES[name])
    assert {table: sum(one.get(table, 0) for one in counts) for table in expected} == expected
    assert set(expected) == {"item", "rating", "user", "tag", "city"} and all(expected.values())


def test_all_rows_that_a_step_sends_take_peer_memory(found):
    """In four steps."""
    first, second = (rank["buffers"]["plain"]["peers"] for rank in found)
    # Rows of targets and their gradients; attention; the dense gradients.
    assert first == second == {"send": 4 * (2 + 4 + 1)}


@pytest.mark.parametrize("name", ["plain", "a rank without samples"])
def test_ranks_with_other_numbers_of_samples_make_eager_steps(found, name):
    losses, _ = train_alone(CASES[name])
    first, second = (rank["uneven"][name] for rank in found)
    assert first["losses"] == second["losses"] == pytest.approx(losses, abs=2e-6)
    assert first["summary"].startswith("0 of 4 steps ran captured"), first["summary"]


def test_events_that_do_not_fit_are_found_before_they_are_sent(alone):
    case = Case({"taste": {"bias": KeyBias("taste_age", 5)}})
    model = shard(build(case), case, data_parallel=False)
    batches = [part_of(make_batch(case, seed), 0, SAMPLES) for seed in range(2)]
    dense, ids, labels = batches[1]
    parts = {key: ids[key] for key in list(ids.keys())}
    lengths = {key: part.lengths().clone() for key, part in parts.items()}
    lengths["taste_age"][int(lengths["taste_age"].argmax())] -= 1
    values = [part.values()[: int(lengths[key].sum())] for key, part in parts.items()]
    fewer = KeyedJaggedTensor(list(parts), torch.cat(values), lengths=torch.cat(list(lengths.values())))
    first = batches[0][1]
    first = KeyedJaggedTensor(first.keys(), first.values(), lengths=first.lengths())
    captured = CapturedShardedStep(lambda batch: model(batch[0], batch[1]), model)
    use_stand_ins(captured)
    given = iter([(batches[0][0], first, batches[0][2]), (dense, fewer, labels)])
    with as_on_a_gpu(), pytest.raises(ValueError, match=r"features\['taste_age'\] must have as many events"):
        captured.progress(given)
    captured.reset()


@pytest.mark.parametrize("name", ["plain", "bags"])
def test_two_backward_passes_over_one_graph_are_those_over_two(alone, name):
    case, found = CASES[name], []
    for forwards in (1, 2):
        model = shard(build(case), case, data_parallel=False)

        def step(batch: tuple, model=model, forwards=forwards) -> None:
            logits = [model(batch[0], batch[1]) for _ in range(forwards)]
            logits[0].square().sum().backward(retain_graph=True)
            (3 * logits[-1]).sum().backward()

        captured = CapturedShardedStep(step, model)
        use_stand_ins(captured)
        with as_on_a_gpu():
            captured.progress(iter([part_of(make_batch(case, 0), 0, SAMPLES)]))
        captured.reset()
        states = model.fused_optimizer.state_dict()["state"].values()
        found.append([one.local_shards()[0].tensor for state in states for one in state.values()])
    assert len(found[0]) >= 2
    for one, other in zip(*found, strict=True):
        assert one.sum() > 0
        torch.testing.assert_close(one, other)


def test_batches_of_many_sizes_take_every_way_into_the_buffers(found):
    of_all = found[0]["levels"].values()
    assert sum(one["narrowed"] for one in of_all) > 0 and sum(one["sent again"] for one in of_all) > 0
    assert not any(one["narrowed"] or one["sent again"] for one in found[0]["buffers"].values())


@pytest.mark.parametrize("name", [name for name in CASES if name != LOCAL])
def test_one_process_reads_its_own_buffers(alone, name):
    losses, _ = train_alone(CASES[name])
    for way in ("buffers", "levels"):
        assert train_together(CASES[name], way)["losses"] == pytest.approx(losses, abs=2e-6), way


def test_rows_of_another_table_or_size_are_not_frozen(alone):
    collection = shard(build(Case()), Case(), data_parallel=False).module.embedding_collection
    table = collection._shardings[0]
    for rows in (torch.ones(1, dtype=torch.bool), torch.ones(table.num_rows), torch.ones(0, dtype=torch.bool)):
        with pytest.raises(ValueError, match=rf"rows must be bool of shape \[{table.num_rows}\], got torch"):
            collection.freeze_rows(table.table, rows)
    with pytest.raises(TypeError, match=r"rows must be a Tensor, got \[True\]"):
        collection.freeze_rows(table.table, [True])
    with pytest.raises(ValueError, match="tables must hold the key 'itm'"):
        collection.freeze_rows("itm", torch.ones(table.num_rows, dtype=torch.bool))


def test_names_in_the_state_are_those_of_the_collection(found):
    assert found[0]["eager"]["plain"]["weights"] == {
        "embedding_collection.embeddings.item.weight": "ShardedTensor",
        "embedding_collection.embeddings.rating.weight": "ShardedTensor",
    }


def test_no_row_of_a_history_is_sent(found):
    """What leaves a rank for another one is what the formula says, and the rows of the targets."""
    case, parts = CASES["plain"], CASES["plain"].parts
    _, columns, _ = make_batch(case, 3)
    own = parts[1] - parts[0]
    ids, _, lengths = columns["taste_item"]
    count, targets = int(lengths[:own].sum()), columns["item"][0]
    asked, given = int((targets[:own] >= 25).sum()), int((targets[own:] < 25).sum())
    # Lengths, then slots of two columns for events and of one for targets: the most that a rank has for an owner.
    ranks = (ids[:count], ids[count:]), (targets[:own], targets[own:])
    slots = [max(int(x.sum()) for one in parts for x in (one < 25, one >= 25)) for parts in ranks]
    away = 4 * own + 8 * slots[0] + 4 * slots[1]
    rows = 4 * 8 * (asked + given)  # gradients of what was asked for, rows that were given
    shape = SequenceShape(0, 8, heads=2)
    both = by_attention(shape, 2, itemsize=4).total - 4
    heads = 2 * 4 * 8
    sent = own * (2 * heads + 2 * 4 * 2) + (SAMPLES - own) * (2 * heads + 2 * 4)
    assert 2 * heads * 2 + 3 * 4 * 2 == both
    assert found[0]["eager"]["plain"]["sent"]["all_to_all_single"] == away + rows + sent


def test_one_process_is_its_own_owner():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        case = Case({"taste": {"bias": PositionBias(8)}})
        torch.manual_seed(0)
        whole, sharded = build(case), shard(build(case), case)
        dense, ids, _ = part_of(make_batch(case, 1), 0, SAMPLES)
        expected = whole(dense, ids)
        torch.testing.assert_close(sharded(dense, ids), expected)
        model = sharded.module
        own, other = (one.attention_weights(dense, ids)["taste"].values() for one in (model, whole))
        torch.testing.assert_close(own, other)
        ids.values()[0] = 99
        with pytest.raises(ValueError, match=r"features\['item'\].*99"):
            sharded(dense, ids)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_step_looks_up_the_ids_that_were_sent_ahead(alone):
    case = Case()
    model = shard(build(case), case, data_parallel=False)
    batches = [part_of(make_batch(case, seed), 0, SAMPLES) for seed in range(3)]
    other = part_of(make_batch(case, 7), 0, SAMPLES)[1]
    seen = []

    def step(batch: tuple) -> torch.Tensor:
        seen.append(batch[0].clone())
        return model(batch[0], other if len(seen) == 2 else batch[1])

    captured, given = CapturedShardedStep(step, model, warmup_steps=9), iter(batches)
    use_stand_ins(captured)
    with as_on_a_gpu():
        torch.testing.assert_close(captured.progress(given), model(*batches[0][:2]))
        with pytest.raises(ValueError, match="features must be the ids of the batch"):
            captured.progress(given)
        captured.progress(given)
        with pytest.raises(StopIteration):
            captured.progress(given)
        captured.progress(iter(batches))
        captured.reset()  # else the second one would come first, which was sent ahead
        captured.progress(iter(batches[2:]))
    assert torch.equal(seen[-1], batches[2][0])
    assert captured.summary().startswith("0 of 4 steps ran captured, in 0 CUDA graphs; eagerly: 4 as warm-up")


def test_without_a_gpu_steps_are_eager(alone):
    case = Case()
    model = shard(build(case), case, data_parallel=False)
    batches = [part_of(make_batch(case, seed), 0, SAMPLES) for seed in range(2)]
    captured, given = CapturedShardedStep(lambda batch: model(*batch[:2]), model), iter(batches)
    for batch in batches:
        torch.testing.assert_close(captured.progress(given), model(*batch[:2]))
    with pytest.raises(StopIteration):
        captured.progress(given)
    assert captured.summary() == "0 of 2 steps ran captured, in 0 CUDA graphs; eagerly: 2 without a GPU"


def test_a_batch_that_no_capacity_holds_is_an_eager_step(alone):
    case = Case()
    model = shard(build(case), case, data_parallel=False)
    batches = [part_of(make_batch(case, seed), 0, SAMPLES) for seed in range(2)]
    fewer = part_of(make_batch(case, 2), 0, SAMPLES - 1)
    captured, given = CapturedShardedStep(lambda batch: model(*batch[:2]), model), iter([batches[0], fewer, batches[1]])
    use_stand_ins(captured)
    with as_on_a_gpu():
        for batch in (batches[0], fewer, batches[1]):
            torch.testing.assert_close(captured.progress(given), model(*batch[:2]))
    assert captured.summary().startswith(
        "0 of 3 steps ran captured, in 0 CUDA graphs; eagerly: 2 as warm-up, 1 another"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="ids on a CPU are counted by Triton's interpreter alone")
def test_ids_outside_are_counted_once_where_a_batch_that_was_sent_ahead_is_an_eager_step(alone):
    """Its second sample has two tags and its third none, which is found when it has been sent."""
    case = Case(bags="sum", optimizer="sgd")
    model = shard(build(case), case, data_parallel=False)
    dense, ids, labels = part_of(make_batch(case, 0), 0, SAMPLES)
    batches = []
    for second, third in ((1, 1), (2, 0)):
        lengths = {key: ids[key].lengths() for key in list(ids.keys())} | {"tag": torch.ones(SAMPLES).int()}
        lengths["tag"][1:3] = torch.tensor([second, third])
        values = {key: ids[key].values() for key in lengths} | {"tag": torch.arange(18, 18 + SAMPLES)}
        parts = [torch.cat(list(one.values())) for one in (values, lengths)]
        batches.append((dense, KeyedJaggedTensor(list(lengths), parts[0], lengths=parts[1]), labels))
    captured, given = CapturedShardedStep(lambda batch: model(*batch[:2]), model), iter(batches)
    use_stand_ins(captured)
    with as_on_a_gpu():
        for count in (1, 2):
            captured.progress(given)
            assert captured.steps == count
    assert dict(captured.eager) == {"as warm-up": 1, "not one value a sample in 'tag', as the first batch has": 1}
    assert outside_ids(model) == {"tag": 2}


@pytest.mark.parametrize("way", ["eager", "buffers"])
def test_queries_are_sent_to_the_owners_of_histories_alone(alone, way, monkeypatch):
    groups, to_owners = [], TableGroup.to_owners

    def recorded(group: TableGroup, *args: object) -> object:
        groups.append(group)
        return to_owners(group, *args)

    monkeypatch.setattr(TableGroup, "to_owners", recorded)
    train_together(CASES["plain"], way)
    assert groups and all(group.features for group in groups)


def test_models_that_cannot_be_captured_are_refused(alone):
    case = Case()
    with pytest.raises(ValueError, match="init_data_parallel=False"):
        CapturedShardedStep(len, shard(build(case), case))
    with pytest.raises(ValueError, match="must be of AttentionCollectionSharder and FetchedBagsSharder, got none"):
        CapturedShardedStep(len, build(case))
    local = Case({"taste": {}, "recent": {}}, replicate_below=1000)
    batch = part_of(make_batch(local, 0), 0, SAMPLES)
    model = shard(build(local), local, data_parallel=False)
    refused = "the features taste, recent are read in one launch, with the padding between them; use a layer for each"
    with pytest.raises(ValueError, match=refused):
        CapturedShardedStep(len, model, reference=batch)
    captured = CapturedShardedStep(len, model)
    use_stand_ins(captured)
    for _ in range(2):  # the first batch is refused as often as it comes
        with pytest.raises(ValueError, match=refused):
            captured.progress(iter([batch]))


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad])
def test_rows_in_half_precision_are_rounded_as_those_of_one_table(alone, kind, decay):
    """A shard from row 7 on has the bits of those rows of a FusedEmbeddingCollection, also from a checkpoint on."""
    whole_options = {"lr": 0.01, "weight_decay": decay}
    options = whole_options if kind is torch.optim.SGD else whole_options | {"eps": EPS}

    def tables_of(rows):
        table = EmbeddingConfig(num_embeddings=rows, embedding_dim=8, name="t", feature_names=["t"])
        table.data_type = DataType.FP16
        return [table]

    def train(model, first, steps):
        for step in steps:
            ids = first + torch.randint(0, 20, (30,), generator=torch.Generator().manual_seed(step))
            model(KeyedJaggedTensor(["t"], ids, lengths=torch.ones_like(ids)))["t"].values().float().sum().backward()
        return model

    def build_sharded(**fused_params):
        collection = EmbeddingCollection(tables=tables_of(20))
        apply_optimizer_in_backward(kind, collection.parameters(), dict(options))
        sharder = AttentionCollectionSharder(build(CASES["plain"]), fused_params, replicate_below=0)
        own = {"t": row_wise()}
        sharding = construct_module_sharding_plan(collection, own, sharder, 1, 1, "cpu")
        plan, on = ShardingPlan({"": sharding}), torch.device("cpu")
        model = DistributedModelParallel(collection, device=on, plan=plan, sharders=[sharder], init_data_parallel=False)
        (table,) = [one for lookup in model.module._lookups for one in lookup._emb_modules[0].config.embedding_tables]
        table.local_metadata.shard_offsets[0] = 7
        nn.init.ones_(model.module.local_shard.memory)
        return model

    for stochastic in (True, False):
        whole = FusedEmbeddingCollection(tables_of(27), kind, whole_options, stochastic_rounding=stochastic)
        weight = nn.init.ones_(whole.embeddings["t"].weight)
        train(whole, 7, range(6))
        begun, model = (build_sharded(stochastic_rounding=stochastic) for _ in range(2))
        train(begun, 0, range(3))
        model.load_state_dict(begun.state_dict())
        model.fused_optimizer.load_state_dict(begun.fused_optimizer.state_dict())
        train(model, 0, range(3, 6))
        assert torch.equal(model.module.local_shard.memory, weight[7:])
        assert ("steps" in model.state_dict()) == (stochastic or decay > 0)
    model = build_sharded()
    saved = model.state_dict()
    assert int(saved.pop("steps")) == 0  # as TorchRec's own collection saves
    model.load_state_dict(saved)


@pytest.mark.parametrize(
    ("tables", "weighted", "reason"),
    [
        ({"a": {}}, True, "must have no weights by id"),
        ({"a": {}, "b": {"embedding_dim": 4}}, False, "must have tables of one width, got {'a': 8, 'b': 4}"),
        ({"a": {}, "b": {"pooling": PoolingType.MEAN}}, False, "must all be summed or all averaged"),
    ],
)
def test_bags_that_cannot_be_fetched_are_refused(alone, tables, weighted, reason):
    options = {name: {"embedding_dim": 8, "num_embeddings": 9} | own for name, own in tables.items()}
    configs = [EmbeddingBagConfig(name=name, feature_names=[name], **own) for name, own in options.items()]
    with pytest.raises(ValueError, match=re.escape(reason)):
        FetchedBagsSharder().shard(EmbeddingBagCollection(configs, is_weighted=weighted), {}, None)


def test_gradients_that_no_rank_has_are_left_out(found):
    assert found[0]["averages"] == found[1]["averages"] == [[1.5, 1.5], [0.5, 0.5], None, *[[1.5, 1.5]] * 3]


def test_gradients_are_averaged_of_what_is_trained(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.mul_(3))
    trained, unused, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    trained.grad, frozen.requires_grad = torch.tensor([2.0, 4.0]), False
    average_gradients([trained, unused, frozen])
    assert trained.grad.tolist() == [3, 6] and unused.grad is None and frozen.grad is None


def test_parts_combine_to_the_whole():
    torch.manual_seed(0)
    scores, values = torch.randn(3, 9), torch.randn(3, 9, 4)
    parts = [slice(0, 0), slice(0, 2), slice(2, 9)]
    outs = torch.stack([torch.softmax(scores[:, p], 1).unsqueeze(1).bmm(values[:, p]).squeeze(1) for p in parts])
    lses = torch.stack([scores[:, p].logsumexp(1) for p in parts])
    merged, lse = combine_parts(pack_part(outs.nan_to_num(), lses, "torch"), "torch")
    torch.testing.assert_close(merged, torch.softmax(scores, 1).unsqueeze(1).bmm(values).squeeze(1))
    torch.testing.assert_close(lse, scores.logsumexp(1))
    nobody = combine_parts(pack_part(torch.zeros(2, 1, 4), torch.full((2, 1), -torch.inf), "torch"), "torch")
    assert (nobody[0] == 0).all() and (nobody[1] == -torch.inf).all()


def sharding(*shards: tuple[int, int, int], columns: int = 0) -> ParameterSharding:
    spec = [ShardMetadata([first, columns], [rows, 8], f"rank:{rank}/cpu") for first, rows, rank in shards]
    return ParameterSharding("row_wise", "fused", [rank for *_, rank in shards], EnumerableShardingSpec(spec))


def test_ids_are_located_whatever_the_shards():
    plan = {"a": sharding((0, 4, 0), (4, 6, 1)), "b": sharding((0, 5, 1))}
    shardings = row_shardings({table: rows_by_rank(table, one, 2) for table, one in plan.items()})
    ranks, places = shardings["a"].locate(torch.tensor([0, 3, 4, 9]))
    assert ranks.tolist() == [0, 0, 1, 1] and places.tolist() == [0, 3, 0, 5]
    ranks, places = shardings["b"].locate(torch.tensor([0, 4]))
    assert ranks.tolist() == [1, 1] and places.tolist() == [6, 10]  # behind the six rows of a
    assert shardings["b"].owned_by(0)[0] == range(0) and shardings["b"].owned_by(1)[1] == range(6, 11)


@pytest.mark.parametrize("id", [10, 12, -1, -7, 2**31, 2**40, -(2**62)])
def test_an_id_outside_has_no_place_in_any_memory(id):
    """Not behind the last shard's rows, where another table's may lie."""
    for table in row_shardings({"a": [5, 5], "b": [0, 10]}).values():
        ranks, places = table.locate(torch.tensor([3, id, 9]))
        assert places[1] == -1 and int(ranks[1]) in table.ranks
        assert (places[[0, 2]] >= 0).all()


def test_ranks_beyond_those_of_a_byte():
    shardings = row_shardings({"a": [1] * 300})
    assert shardings["a"].locate(torch.tensor([0, 299]))[0].tolist() == [0, 299]


def test_other_kernels_are_refused():
    dense = sharding((0, 4, 0))
    dense.compute_kernel = "dense"
    with pytest.raises(ValueError, match="table 'a' must have compute_kernel 'fused'"):
        rows_by_rank("a", dense, 2)


def test_a_key_that_does_not_fit_is_named():
    group = group_of(CASES["weights"])
    lengths = torch.tensor([1, 2])
    one = {"taste_item": JaggedTensor(torch.zeros(3).long(), lengths=lengths)}
    with pytest.raises(ValueError, match="must hold the key 'taste_rating'"):
        check_keys(group, one)
    with pytest.raises(
        ValueError, match=r"features\['taste_rating'\] must have as many events as 'taste_item', 3, got 2"
    ):
        check_keys(group, one | {"taste_rating": JaggedTensor(torch.zeros(2).long(), lengths=torch.tensor([1, 1]))})
    rating = {"taste_rating": JaggedTensor(torch.zeros(3).long(), lengths=lengths)}
    with pytest.raises(ValueError, match=r"features\['taste_item'\] must have weights"):
        check_keys(group, one | rating)
    weights = torch.ones(3, requires_grad=True)
    trained = {"taste_item": JaggedTensor(torch.zeros(3).long(), lengths=lengths, weights=weights)}
    with pytest.raises(ValueError, match=r"features\['taste_item'\] must have weights without a gradient"):
        check_keys(group, trained | rating)


def group_of(case: Case, features: list[FeatureGroup] | None = None) -> TableGroup:
    counts = {"item": [50], "rating": [6]}
    features = group_features(features_of(case), 8) if features is None else features
    _, groups, _ = plan_tables(names_of(build(case).embedding_collection), counts, features, 10)
    return groups[0]


def test_columns_of_a_table_are_not_divided():
    with pytest.raises(ValueError, match="table 'a' must shard it by rows"):
        rows_by_rank("a", sharding((0, 4, 0), columns=8), 2)


def test_features_that_attention_cannot_go_to_are_named():
    sizes = {"item": 30, "shop": 20}
    tables = {key: EmbeddingConfig(size, 8, name=f"{key}s", feature_names=[key]) for key, size in sizes.items()}
    feature = SequenceFeatureConfig("taste", ["item", "shop"], ["target"])
    with pytest.raises(ValueError, match=r"'taste' lie in \['items', 'shops'\]"):
        remote_field(feature, tables, 10)
    side = SequenceFeatureConfig("taste", ["item", "shop"], ["target"], combine="concat")
    with pytest.raises(ValueError, match="combine='concat'"):
        remote_field(side, tables, 20)
    tables["item"].num_embeddings = 20
    assert remote_field(feature, tables, 20) is None
    tables["shop"].num_embeddings = 21
    assert remote_field(feature, tables, 20) == 1


@pytest.mark.parametrize(
    ("options", "must"),
    [
        ({"replicate_below": -1}, "replicate_below must be at least 0, got -1"),
        ({"replicate_below": "x"}, "replicate_below must be an int, got"),
        ({"dtype": "bf16"}, "dtype must be a floating torch.dtype or None, got 'bf16'"),
        ({"dtype": torch.int32}, "dtype must be a floating torch.dtype or None, got torch.int32"),
    ],
)
def test_options_of_the_sharders_are_checked(options, must):
    for sharder in (FetchedBagsSharder, partial(AttentionCollectionSharder, build(Case()))):
        with pytest.raises((ValueError, TypeError), match=must):
            sharder(**options)
        sharder(replicate_below=2**40)  # all tables, as the setting takes it


def test_a_step_that_is_no_function_is_refused(alone):
    with pytest.raises(TypeError, match="step must be a function of a batch, got None"):
        CapturedShardedStep(None, shard(build(Case()), Case(), data_parallel=False))


def test_the_sharder_says_what_it_can_do():
    model = build(CASES["plain"])
    with pytest.raises(TypeError, match=r"model must be an nn.Module with the JaggedFeatureInteraction"):
        AttentionCollectionSharder(features_of(CASES["plain"]))
    with pytest.raises(ValueError, match="got EmbeddingCollection without one"):
        AttentionCollectionSharder(model.embedding_collection)
    sharder = AttentionCollectionSharder(model)
    assert sharder.sharding_types("cpu") == ["table_wise", "row_wise"]
    assert sharder.compute_kernels("row_wise", "cuda") == ["fused"]
