"""The sharders of jfi, which DistributedModelParallel takes instead of TorchRec's, and what they make."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from jfi.distributed.sharded_tables import ShardedTables
from jfi.modules import JaggedFeatureInteraction
from jfi.utils.arguments import check_type


class ShardedAttentionCollection(ShardedTables, ShardedEmbeddingCollection):
    """A ShardedEmbeddingCollection whose histories are read at the owner ranks of their rows.

    The tables, their names in state_dict() and their optimizer are TorchRec's: a checkpoint of one collection loads in
    the other. What differs is the path of a batch. Ids go to the owner ranks of their rows while the batch before it
    computes. A history comes out as `RemoteRows`: the layer sends its queries to the owners, and no row of a history
    travels, nor a gradient of one. Rows of other keys are fetched.

    Created by `AttentionCollectionSharder`, whose arguments are described there.
    """


class ShardedFetchedBags(ShardedTables, ShardedEmbeddingBagCollection):
    """A ShardedEmbeddingBagCollection that fetches the rows of its samples' ids and pools them itself.

    It shares input dist, optimizer steps and captured steps with `ShardedAttentionCollection`. Of a key with one id a
    sample it sends what TorchRec's collection sends or less; of one with several ids a row for each of them. Tables,
    names in state_dict() and optimizer are TorchRec's.

    Created by `FetchedBagsSharder`, whose arguments are described there.
    """


class _Sharder:
    _sharded: type[ShardedTables]  # the class that `shard` makes
    _options: tuple
    fused_params: dict[str, Any] | None  # TorchRec's

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTables:
        return self._sharded(module, params, env, self.fused_params, device, module_fqn, *self._options)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def sharded_module_type(self) -> type[ShardedTables]:
        return self._sharded


class AttentionCollectionSharder(_Sharder, EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection so that attention goes to its rows.

    DistributedModelParallel takes it instead of TorchRec's EmbeddingCollectionSharder, and so do planners and
    train pipelines. It shards the collection and not the layer, since a target shares its history's table, and since
    TorchRec's pipelines send what they find in a batch, the ids, but not what a model computes, the targets.

    Args:
        model: the model, or another module that contains the layers which read the collection. Their features are those
            whose histories attention goes to, found by name.
        fused_params: as of TorchRec's sharder.
        replicate_below: tables of at most so many rows are summed up on every rank in each step.
        dtype: of queries, partial outputs and fetched rows, and of the rows as attention reads them; None for that of
            the tables.

    Raises:
        TypeError: `model` is no module.
        ValueError: `model` has no JaggedFeatureInteraction. In `shard`: a plan that divides columns; a feature whose
            histories lie in two tables that are not replicated, or whose fields are concatenated, or that two layers
            read differently. At the first batch: tables of several data types or
            optimizers, or of one that `jfi.tables.step_rows` has not.

    Example:
        >>> from jfi import JaggedFeatureInteraction, SequenceFeatureConfig
        >>> layer = JaggedFeatureInteraction([SequenceFeatureConfig("taste", ["history_item"], ["item"])], 8)
        >>> AttentionCollectionSharder(layer).sharding_types("cuda")
        ['table_wise', 'row_wise']
    """

    _sharded = ShardedAttentionCollection

    def __init__(
        self,
        model: nn.Module,
        fused_params: dict[str, Any] | None = None,
        *,
        replicate_below: int = 100_000,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fused_params)
        must = "an nn.Module with the JaggedFeatureInteraction that reads the collection"
        check_type("model", model, nn.Module, must)
        if not any(isinstance(module, JaggedFeatureInteraction) for module in model.modules()):
            raise ValueError(f"model must be {must}, got {type(model).__name__} without one")
        self._options = model, replicate_below, dtype


class FetchedBagsSharder(_Sharder, EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection so that the rows of a sample's ids are fetched from their owners.

    DistributedModelParallel takes it instead of TorchRec's EmbeddingBagCollectionSharder, together with an
    `AttentionCollectionSharder`.

    Args:
        fused_params: as of TorchRec's sharder.
        replicate_below: tables of at most so many rows are summed up on every rank in each step.
        dtype: of rows that are sent; None for that of the tables, which is that of the output.

    Raises:
        ValueError: in `shard`: a plan that divides columns, bags with weights, tables of several widths or poolings. At
            the first batch: tables of several data types or optimizers, or of one that `jfi.tables.step_rows` has not.

    Example:
        >>> FetchedBagsSharder().sharding_types("cuda")
        ['table_wise', 'row_wise']
    """

    _sharded = ShardedFetchedBags

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *,
        replicate_below: int = 100_000,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fused_params)
        self._options = None, replicate_below, dtype
