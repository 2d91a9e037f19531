"""Lookups of a layer: from ids to embeddings by key, with what else its features read of the ids.

Call these functions through the module (`lookups.allow_no_samples`): torch.fx.wrap patches this module's globals, so
that TorchRec's tracers would trace into a function that is imported by name.
"""

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules.events import as_dict
from jfi.modules.id_counts import OutsideIds
from jfi.modules.sequence_configs import KeyBias, SequenceFeatureConfig, TimeBias, WeightBias
from jfi.modules.table_rows import RemoteRows, TableRows, bounded, parts_of, with_weights
from jfi.modules.validation import check_aligned, input_key, jagged_of, require_keys
from jfi.ops.rows_by_id import bounded_rows_by_id
from jfi.utils.arguments import check_type
from jfi.utils.context import is_traced, padding_state

#: Of floating-point or quantized tables.
Collections = EmbeddingCollectionInterface | ManagedCollisionEmbeddingCollection


def check_collection(
    collection: Collections, features: list[SequenceFeatureConfig], embedding_dim: int
) -> dict[str, str]:
    """Checks that a collection of a layer fits its features, and returns by key of its output that of the ids."""
    must = "an EmbeddingCollection of torchrec or torchrec.quant, a ManagedCollisionEmbeddingCollection or None"
    check_type("embedding_collection", collection, Collections, must)
    managed = isinstance(collection, ManagedCollisionEmbeddingCollection)
    embeddings = names_of(collection._embedding_collection if managed else collection)
    for *_, table in embeddings:
        if table.embedding_dim != embedding_dim:
            raise ValueError(
                f"embedding_collection must be embedding_dim={embedding_dim} wide, got {table.embedding_dim}"
            )
    names = {name: key for name, key, _ in embeddings}
    for feature in features:
        require_keys("embedding_collection", names, feature.sequence_keys)
    return names


def names_of(
    collection: EmbeddingBagCollectionInterface | EmbeddingCollectionInterface | None,
) -> list[tuple[str, str, BaseEmbeddingConfig]]:
    """Returns for each embedding of a collection its key, that of its ids, and its table.

    Where several tables read the same ids, the key is `<key of the ids>@<table>`.
    """
    if collection is None:
        return []
    is_bag = isinstance(collection, EmbeddingBagCollectionInterface)
    tables = collection.embedding_bag_configs() if is_bag else collection.embedding_configs()
    by_table = zip(tables, get_embedding_names_by_table(tables), strict=True)
    return [(name, key, table) for table, own in by_table for name, key in zip(own, table.feature_names, strict=True)]


@torch.fx.wrap
def allow_no_samples(ids: KeyedJaggedTensor) -> None:
    """Lets collections that are not sharded look up a batch of no samples.

    KeyedJaggedTensor.to_dict, which they begin with, fails at stride 0, so its cache is filled here.
    """
    if ids.stride() == 0:
        keys = ids.keys()
        ids._jt_dict = {key: ids[key] for key in keys}


def is_unobserved(collection: nn.Module, ids: KeyedJaggedTensor) -> bool:
    """Returns whether no hook and no tracer sees a call of the collection, so that it can be left out."""
    if not isinstance(ids, KeyedJaggedTensor) or is_traced():
        return False
    for module in (collection, *collection.embeddings.values()):
        backward = module._backward_hooks or module._backward_pre_hooks
        if module._forward_hooks or module._forward_pre_hooks or backward:
            return False
    return True


def is_read_by_id(collection: nn.Module, ids: KeyedJaggedTensor) -> bool:
    """Returns whether `look_up` replaces the collection: TorchRec's class, with dense gradients, on a GPU, untraced."""
    if type(collection) is not EmbeddingCollection:
        return False
    for table in collection.embeddings.values():
        if type(table.weight) is not nn.Parameter or not table.weight.is_cuda or table.sparse:
            return False
    # In a padded batch ids behind the last sample are 0, which is no padding.
    return is_unobserved(collection, ids) and not padding_state.is_padded


def look_up(
    collection: EmbeddingCollection, names: list[tuple[str, str, str]], ids: KeyedJaggedTensor, outside: OutsideIds
) -> dict[str, TableRows]:
    """Returns the collection's output as rows not read yet, with the same gradients; counts ids outside of tables.

    The names are those of each embedding, of its ids and of its table.
    """
    by_key, found, weights = ids.to_dict(), {}, {name: one.weight for name, one in collection.embeddings.items()}
    reads = [(key, f"table '{table}'", weights[table].shape[0]) for _, key, table in names]
    bounded_ids = bounded(by_key, reads, outside.on(ids.values().device))
    for (name, key, table), own in zip(names, bounded_ids, strict=True):
        # As the collection converts them, whatever the table's dtype.
        by_id = bounded_rows_by_id((weights[table],), (own,), torch.float32)
        parts = by_key[key].lengths_or_none(), by_key[key].offsets_or_none()
        found[name] = TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, *parts)
    return found


@torch.fx.wrap
def with_event_inputs(
    embeddings: dict[str, JaggedTensor],
    ids: KeyedJaggedTensor | None,
    features: list[SequenceFeatureConfig],
    id_keys: dict[str, str],
    argument: str = "ids",
) -> dict[str, JaggedTensor]:
    """Adds to an EmbeddingCollection's output what only its input has: weights, bucket ids and times of the events.

    Embeddings that are not read yet stay so.

    Args:
        embeddings: the output.
        ids: the input; None returns the output as it is.
        features: the features that read it.
        id_keys: by key of the output that of the ids where they differ otherwise than by TorchRec's `@<table>`.
        argument: name of `ids` in messages.
    """
    if ids is None:
        return embeddings
    if not isinstance(ids, KeyedJaggedTensor):
        check_type(argument, ids, KeyedJaggedTensor, "a KeyedJaggedTensor of ids")
    sequences, present = as_dict(embeddings), ids.keys()
    for feature in features:
        bias, relative, key = feature.bias, feature.relative_bias, feature.sequence_keys[0]
        # For targets with times TimeBias reads no ids; without times `check_inputs` requires these.
        if isinstance(bias, KeyBias) and not (isinstance(bias, TimeBias) and bias.key not in present):
            require_keys(argument, present, [bias.key])
            sequences[input_key(bias.key)] = ids[bias.key]
        if isinstance(relative, TimeBias):
            require_keys(argument, present, [relative.key])
            sequences[input_key(relative.key)] = ids[relative.key]
        if feature.weighted_values or isinstance(bias, WeightBias):  # reads_weights, without a call for each batch
            id_key = id_keys.get(key, key if key in present else key.rpartition("@")[0] or key)
            require_keys(argument, present, [id_key])
            name, events, own = f"{argument}['{id_key}']", jagged_of("sequences", sequences, key), ids[id_key]
            if own.weights_or_none() is None:
                raise ValueError(f"{name} must have weights, which feature '{feature.name}' reads, got none")
            check_aligned(name, own, key, events)
            sequences[key] = with_weights(events, own.weights())
    return sequences


def fetched(sequences: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Returns the mapping with the rows that lie on several ranks, for what cannot go to them."""
    if isinstance(sequences, KeyedJaggedTensor):
        return sequences  # which `read_events` refuses
    read = as_dict(sequences)
    for key, events in read.items():
        if isinstance(events, RemoteRows):
            read[key] = JaggedTensor(events.values(), **parts_of(events))
    return read
