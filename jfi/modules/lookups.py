"""Helpers of a layer beside its look-up: names of the embeddings, and what else its features read of the ids.

Call these functions through the module (`lookups.with_event_inputs`): torch.fx.wrap patches this module's globals, so
that TorchRec's tracers would trace into a function that is imported by name.
"""

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules.events import as_dict
from jfi.modules.sequence_configs import SequenceFeatureConfig, TimeBias
from jfi.modules.validation import check_aligned, input_key, jagged_of, require_keys
from jfi.tables.table_rows import RemoteRows, parts_of, with_weights
from jfi.utils.arguments import check_type


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
def with_event_inputs(
    embeddings: dict[str, JaggedTensor],
    ids: KeyedJaggedTensor | None,
    features: list[SequenceFeatureConfig],
    argument: str = "ids",
) -> dict[str, JaggedTensor]:
    """Adds to an EmbeddingCollection's output what only its input has: weights, bucket ids and times of the events.

    Embeddings that are not read yet stay so.

    Args:
        embeddings: the output.
        ids: the input; None returns the output as it is.
        features: the features that read it.
        argument: name of `ids` in messages.
    """
    if ids is None:
        return embeddings
    if not isinstance(ids, KeyedJaggedTensor):
        check_type(argument, ids, KeyedJaggedTensor, "a KeyedJaggedTensor of ids")
    sequences, present = as_dict(embeddings), ids.keys()
    for feature in features:
        key, has_ages = feature.sequence_keys[0], isinstance(feature.bias, TimeBias)
        for input_of in feature.input_keys:
            # For targets with times TimeBias reads no ids; without times `check_inputs` requires these.
            if input_of in present or not (has_ages and input_of == feature.bias_key):
                require_keys(argument, present, [input_of])
                sequences[input_key(input_of)] = ids[input_of]
        if feature.reads_weights:
            id_key = key if key in present else key.rpartition("@")[0] or key  # TorchRec's `<id_key>@<table>`
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
