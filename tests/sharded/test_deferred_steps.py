"""Steps of fbgemm's tables that wait are the step of one batch of all samples."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from jfi.sharded.deferred_steps import DeferredSteps

#: The tables of features 0, 1 and 2, and their sizes.
FEATURES, ROWS = [0, 0, 1], [7, 5]
WIDTHS = {PoolingMode.SUM: [4, 8], PoolingMode.MEAN: [4, 8], PoolingMode.NONE: [4, 4]}


def made(pooling: PoolingMode, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    on_gpu = device.type == "cuda"
    where = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, *where) for rows, width in zip(ROWS, WIDTHS[pooling], strict=True)],
        feature_table_map=FEATURES,
        pooling_mode=pooling,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.3,
        device=device,
    )
    draw = torch.Generator().manual_seed(0)
    for weight in tables.split_embedding_weights():
        weight.copy_(torch.randn(weight.shape, generator=draw))
    return tables


def bags(samples: int, draw: torch.Generator) -> list[list[list[int]]]:
    """By feature, by sample the ids; some samples have none."""
    count = lambda: int(torch.randint(0, 4, (), generator=draw))  # noqa: E731
    return [
        [torch.randint(0, ROWS[table], (count(),), generator=draw).tolist() for _ in range(samples)]
        for table in FEATURES
    ]


def run(tables: SplitTableBatchedEmbeddingBagsCodegen, part: list[list[list[int]]], weighted: bool) -> None:
    """Forward and backward of a part, whose loss is a sum over its samples."""
    device = tables.split_embedding_weights()[0].device
    flat = [one for feature in part for one in feature]
    offsets = torch.tensor([0, *map(len, flat)], device=device).cumsum(0)
    indices = torch.tensor([i for one in flat for i in one], dtype=torch.int64, device=device)
    weights = 0.5 + 0.25 * (indices % 3) if weighted else None
    rows = tables(indices=indices, offsets=offsets, per_sample_weights=weights)
    rows.mul(torch.linspace(1, 2, rows.size(-1), device=device)).sin().sum().backward()


@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingMode.SUM, False), (PoolingMode.SUM, True), (PoolingMode.MEAN, False), (PoolingMode.NONE, False)],
)
def test_the_step_is_that_of_all_samples(device, pooling, weighted):
    draw = torch.Generator().manual_seed(1)
    parts = [bags(3, draw), bags(1, draw), [[[]], [[]], [[]]], bags(5, draw)]
    whole = [[one for part in parts for one in part[feature]] for feature in range(len(FEATURES))]
    begun, wanted, found = (made(pooling, device) for _ in range(3))
    for _ in range(2):  # the second step divides by what the first has summed
        run(wanted, whole, weighted)
        with DeferredSteps(found).deferring():
            for part in parts:
                run(found, part, weighted)
            assert_same(found, begun)  # nothing has been stepped yet
        assert_same(found, wanted)
        begun.load_state_dict(found.state_dict())
    with pytest.raises(AssertionError):
        assert_same(found, made(pooling, device))
    run(wanted, parts[0], weighted)
    run(found, parts[0], weighted)  # steps by itself again
    assert_same(found, wanted)


def assert_same(one: SplitTableBatchedEmbeddingBagsCodegen, other: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    torch.testing.assert_close(one.split_embedding_weights(), other.split_embedding_weights())


def test_an_error_drops_what_waits(device):
    tables, part = made(PoolingMode.SUM, device), bags(3, torch.Generator().manual_seed(1))
    with pytest.raises(KeyError), DeferredSteps(tables).deferring():
        run(tables, part, False)
        raise KeyError
    assert_same(tables, made(PoolingMode.SUM, device))


def test_other_inputs_are_refused(device):
    tables = made(PoolingMode.SUM, device)
    ids = {"indices": torch.tensor([1, 2, 3], device=device), "offsets": torch.tensor([0, 1, 2, 3], device=device)}
    weights = torch.ones(3, device=device, requires_grad=True)
    with DeferredSteps(tables).deferring(), pytest.raises(ValueError, match=r"got \['per_sample_weights with a gradi"):
        tables(**ids, per_sample_weights=weights)
    with DeferredSteps(tables).deferring(), pytest.raises(ValueError, match=r"got \['batch_size_per_feature_per_ran"):
        tables(**ids, batch_size_per_feature_per_rank=[[1], [1], [1]])
