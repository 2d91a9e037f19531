"""Checks whether a model's training step can be captured in a CUDA graph, and finds the ids that pad its buffers."""

from typing import Any

from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from jfi.cuda_graphs.static_batch import UnsupportedBatch, describe
from jfi.kernels.plan import SINGLE_TILE_ROWS, TABLE_ROWS
from jfi.modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    JaggedEncoder,
    JaggedFeatureInteraction,
    lookups,
)
from jfi.modules.sequence_configs import FeatureGroup

_MANAGED = ManagedCollisionEmbeddingCollection, ManagedCollisionEmbeddingBagCollection


def why_not_captured(model: nn.Module, batch: Any) -> str | None:
    """Returns why a training step of a model cannot be captured with batches like this one; None if nothing is known.

    Keys with one value a sample are not padded; the other ones are, and not every layer skips the padding.

    Args:
        model: a model with its tables, not sharded.
        batch: a batch for `CapturedStep`.

    Example:
        >>> import torch
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> config = EmbeddingBagConfig(name="tag", embedding_dim=4, num_embeddings=10, feature_names=["tags"])
        >>> bags = EmbeddingBagCollection(tables=[config])
        >>> ids = KeyedJaggedTensor(["tags"], torch.tensor([3, 5, 5]), lengths=torch.tensor([2, 1]))
        >>> why_not_captured(bags, ids)
        "an EmbeddingBagCollection reads the padding of 'tags'; use jfi.FusedEmbeddingBagCollection"
    """
    try:
        described = describe(batch)
    except UnsupportedBatch as unsupported:
        return str(unsupported)
    padded = {key for key, fixed in zip(described.keys, described.fixed_length(), strict=True) if not fixed}
    return next(filter(None, (why_module_not(module, padded) for module in model.modules())), None)


def why_module_not(module: nn.Module, keys: set[str], remote: frozenset[str] = frozenset()) -> str | None:
    """Returns why one module, without its children, cannot be captured; None if nothing is known.

    Args:
        module: a module of the model.
        keys: the padded keys.
        remote: sequence features whose rows lie on several ranks: their padding is behind the events of all.
    """
    kind = type(module).__name__
    if isinstance(module, ShardedModule):
        return f"the tables of a {kind} are sharded"
    if isinstance(module, _MANAGED):
        return f"a {kind} waits for the device; use jfi.modules.GrowingIds"
    if isinstance(module, EmbeddingCollectionInterface | EmbeddingBagCollectionInterface):
        if not isinstance(module, EmbeddingCollection | EmbeddingBagCollection):
            return f"a {kind} reads all keys at once, with the padding between them" if keys else None
        is_bag = isinstance(module, EmbeddingBagCollection) and not isinstance(module, FusedEmbeddingBagCollection)
        read = [key for table in module.embedding_bag_configs() for key in table.feature_names] if is_bag else []
        key = next((key for key in read if key in keys), None)
        return key and f"an {kind} reads the padding of '{key}'; use jfi.FusedEmbeddingBagCollection"
    if isinstance(module, JaggedEncoder) and keys:
        return "a JaggedEncoder has linear layers, whose gradients sum over all rows of a history"
    if isinstance(module, JaggedFeatureInteraction) and keys:
        return next(filter(None, (_why_group_not(module, group, remote) for group in module.groups)), None)
    return None


def _why_group_not(layer: JaggedFeatureInteraction, group: FeatureGroup, remote: frozenset[str]) -> str | None:
    """Returns why one group of a layer's features cannot be captured; None if nothing is known."""
    features = [feature.name for feature in group.features]
    names = ", ".join(features)
    if layer.project_history:
        return f"project_history of '{names}': the gradients of a projection sum over all rows of a history"
    if len(features) > 1 and not remote.issuperset(features):
        return f"the features {names} are read in one launch, with the padding between them; use a layer for each"
    rows = layer.num_queries * layer.num_heads
    if rows > SINGLE_TILE_ROWS:
        return f"'{names}' has {rows} query rows; kernels for more than {SINGLE_TILE_ROWS} take no padding"
    if sum(feature.num_buckets for feature in group.features) > TABLE_ROWS:
        return f"the bias of '{names}' has more than {TABLE_ROWS} buckets, and then a gradient by event"
    return None


def padding_ids(model: nn.Module) -> dict[str, int]:
    """Returns by key the id that pads its values: -1 where a collection skips it; other keys have 0.

    The padding's gradients are zeros.
    """
    fused = [x for x in model.modules() if isinstance(x, FusedEmbeddingCollection | FusedEmbeddingBagCollection)]
    return {key: -1 for module in fused for _, key, _ in lookups.names_of(module)}
