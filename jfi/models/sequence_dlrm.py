"""DLRM with sequence features."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DenseArch, InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jfi.models.heads import Heads
from jfi.models.sequence_arch import AttentionPooling, SequenceArch, merged
from jfi.modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    GrowingIds,
    JaggedEncoder,
    JaggedFeatureInteraction,
    SemanticIDEmbedding,
    SequenceFeatureConfig,
    TimeBias,
    validation,
)
from jfi.modules.lookups import names_of
from jfi.modules.sequence_configs import check_features
from jfi.utils.arguments import (
    MAX_LAYERS,
    check_choice,
    check_int,
    check_keys,
    check_list_of_sizes,
    check_number,
    check_type,
)
from jfi.utils.context import not_scriptable
from jfi.utils.jagged import Timelines

Pooling = Literal["attention", "mean", "sum", "none"]

torch.fx.wrap("merged")


class SequenceDLRM(nn.Module):
    """TorchRec's DLRM with sequence features: each sample's target attends to its histories.

    DenseArch maps the dense features to a vector of embedding_dim. Sparse features become entries of that width, to
    which embeddings of another width are projected (events of histories are not: attention reads them as they are): one
    for each feature of the EmbeddingBagCollection, one for each feature of the EmbeddingCollection that is not a
    history (the sum of its embeddings), and one for each sequence feature. InteractionArch computes the dot products
    of all pairs, OverArch the logit. With `cross_layers` OverArch also reads the output of a cross network over all
    entries, which multiplies single elements of them with one another. See Naumov et al., "Deep Learning Recommendation
    Model for Personalization and Recommendation Systems" (2019), and Wang et al., "DCN V2" (2021).

    A target and its history share a table if one EmbeddingConfig lists both, such as
    `feature_names=["item", "history_item"]`. The target then has the same embedding as the events of the same id.

    `forward` has the signature of `torchrec.models.dlrm.DLRM.forward`, so `torchrec.models.dlrm.DLRMTrain` wraps it
    for training and for TorchRec's train pipelines. What it makes itself is on PyTorch's default device: construct it
    under `with torch.device("cuda"):`, or move it.

    Args:
        embedding_bag_collection: tables of the features that share none with a history, or None.
        embedding_collection: tables of the histories and of the features that share one with them, or None.
        sequence_features: the sequence features. Sequence keys are features of `embedding_collection`, target keys are
            features of either collection.
        dense_in_features: width of the dense features.
        dense_arch_layer_sizes: layer sizes of DenseArch; the last is embedding_dim, the width of every entry.
        over_arch_layer_sizes: layer sizes of OverArch, at least two; the last is 1.
        pooling: "attention" (JaggedFeatureInteraction), or an `AttentionPooling` with other settings; "mean" or "sum"
            (JaggedPooling) of the events' combined embeddings, one entry for each field if they are concatenated; or
            "none", which leaves the histories out.
        encoder: self-attention among the events of every sequence feature before they are pooled, or None. Its features
            have the names and the sequence keys of `sequence_features`, and biases for the self-attention.
        dropout: probability with which an element of an entry is zeroed in training.
        cross_layers: layers of the cross network, of rank embedding_dim; 0 for none.
        user_keys: keys of the collections that describe the user, of batches with timelines: see `forward`.
        semantic_ids: embeddings of semantic IDs, or None. Its keys are sequence keys, target keys or entries, as those
            of `embedding_collection` are.
        growing_ids: maps the ids of tables that grow, which the batch then has as raw ids; None if there are none. Its
            tables are tables of the collections, with the same keys and as many rows.
        heads: several outputs, or one on another scale than a logit's; see `Heads`. None for one logit. Of several, the
            first layer of OverArch is shared, and each output has the others for itself.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:

        >>> from torchrec import EmbeddingConfig
        >>> items = EmbeddingConfig(
        ...     name="item", embedding_dim=8, num_embeddings=10, feature_names=["item", "history_item"]
        ... )
        >>> model = SequenceDLRM(
        ...     None,
        ...     EmbeddingCollection(tables=[items]),
        ...     [SequenceFeatureConfig("taste", sequence_keys=["history_item"], target_keys=["item"])],
        ...     dense_in_features=4,
        ...     dense_arch_layer_sizes=[16, 8],
        ...     over_arch_layer_sizes=[16, 1],
        ...     pooling=AttentionPooling(num_heads=2),
        ... )
        >>> #                  sample 0    1       2
        >>> # "item"             [4]      [1]     [7]
        >>> # "history_item"     [7, 3]   []   [5, 1, 7]
        >>> ids = KeyedJaggedTensor(
        ...     keys=["item", "history_item"],
        ...     values=torch.tensor([4, 1, 7, 7, 3, 5, 1, 7]),
        ...     lengths=torch.tensor([1, 1, 1, 2, 0, 3]),
        ... )
        >>> model(torch.rand(3, 4), ids).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection | None,
        embedding_collection: EmbeddingCollection | None,
        sequence_features: list[SequenceFeatureConfig],
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        *,
        pooling: Pooling | AttentionPooling = "attention",
        encoder: JaggedEncoder | None = None,
        dropout: float = 0.0,
        cross_layers: int = 0,
        user_keys: list[str] | None = None,
        semantic_ids: SemanticIDEmbedding | None = None,
        growing_ids: GrowingIds | None = None,
        heads: Heads | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pooling, AttentionPooling):
            check_choice("pooling", pooling, get_args(Pooling))
            pooling = AttentionPooling() if pooling == "attention" else pooling
        if not isinstance(sequence_features, list) or sequence_features:
            check_features(sequence_features, "sequence_features")
        check_int("cross_layers", cross_layers, least=0, most=MAX_LAYERS)
        check_int("dense_in_features", dense_in_features)
        _check_layer_sizes(dense_arch_layer_sizes, over_arch_layer_sizes)
        check_number("dropout", dropout, lambda p: 0 <= p <= 1, "in [0, 1]")
        check_keys("user_keys", [] if user_keys is None else user_keys)
        _check_optional("embedding_bag_collection", embedding_bag_collection, EmbeddingBagCollectionInterface)
        _check_optional("embedding_collection", embedding_collection, EmbeddingCollectionInterface)
        _check_optional("encoder", encoder, JaggedEncoder)
        _check_optional("semantic_ids", semantic_ids, SemanticIDEmbedding)
        _check_optional("growing_ids", growing_ids, GrowingIds)
        _check_optional("heads", heads, Heads)
        embedding_dim = dense_arch_layer_sizes[-1]
        bags, singles = (names_of(collection) for collection in (embedding_bag_collection, embedding_collection))
        widths = {name: table.embedding_dim for name, _, table in bags + singles}
        bag_keys, keys = ([name for name, *_ in names] for names in (bags, singles))
        # TorchRec's collection has one width for all of its tables.
        if growing_ids is not None:
            _check_growing_ids(growing_ids, [table for *_, table in bags + singles])
        event_dim, events_of = embedding_dim, "the last of dense_arch_layer_sizes"
        if keys:
            event_dim, events_of = widths[keys[0]], "embedding_collection"
        if semantic_ids is not None:
            _check_semantic_ids(semantic_ids, keys, event_dim, events_of)
            keys = [*keys, *semantic_ids.feature_names]
            widths |= dict.fromkeys(semantic_ids.feature_names, event_dim)
        if shared := sorted(set(bag_keys) & set(keys)):
            raise ValueError(f"a feature must belong to one collection, got {shared} in both")
        history_keys = {key for feature in sequence_features for key in feature.sequence_keys}
        single_keys = [key for key in keys if key not in history_keys]
        if not bag_keys and not single_keys:
            raise ValueError("the collections must have a feature that is not a history, got none")

        features = sequence_features if pooling != "none" else []
        encoder_features = [] if encoder is None else encoder.features
        validation.require_keys("the collections of user_keys", bag_keys + single_keys, user_keys or [])
        for feature in features + encoder_features:
            validation.require_keys("embedding_collection", keys, feature.sequence_keys)
        for feature in features:
            validation.require_keys("the collections", bag_keys + single_keys, feature.target_keys)
        if encoder is not None:
            _check_encoder(encoder, features, event_dim, events_of)
        self.embedding_bag_collection = embedding_bag_collection
        self.embedding_collection = embedding_collection
        self.semantic_ids = semantic_ids
        self.growing_ids = growing_ids
        self._user_keys = user_keys or []
        options = embedding_dim, event_dim, pooling, encoder, self._user_keys
        self.sequence_arch = SequenceArch(features, bag_keys, single_keys, widths, *options)
        num_entries, biased = self.sequence_arch.num_entries, self.sequence_arch.features
        self._id_keys = [key for _, key, _ in bags + singles]
        self._id_keys += [] if semantic_ids is None else semantic_ids.feature_names
        self._id_keys += [key for feature in biased for key in feature.input_keys]
        #: Keys that a batch with timelines lacks.
        self._from_times = [feature.bias.key for feature in biased if isinstance(feature.bias, TimeBias)]
        self.dropout = nn.Dropout(dropout)
        self._dense_in_features = dense_in_features
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes)
        self.inter_arch = InteractionArch(num_entries)
        width, crossed = embedding_dim + num_entries + math.comb(num_entries, 2), (1 + num_entries) * embedding_dim
        self.cross_net = None
        if cross_layers:
            self.cross_net = LowRankCrossNet(crossed, cross_layers, low_rank=embedding_dim)
            width += crossed
        self.over_arch = (heads or Heads()).arch(width, over_arch_layer_sizes)

    __prepare_scriptable__ = not_scriptable("SequenceDLRM")

    def forward(
        self, dense_features: Tensor, sparse_features: KeyedJaggedTensor, timelines: Timelines | None = None
    ) -> Tensor:
        """Scores a batch.

        With `timelines` the B samples are rows of U <= B timelines: a user's events and `user_keys` are looked up once
        for all rows of a timeline, which see the events that are strictly older than themselves. TorchRec's collections
        take one number of samples for all keys, so the U timelines come first in the keys of events and in `user_keys`,
        whose samples U to B are empty. An encoder must be causal then, without a `bias`, which would be that of the
        newest row; it encodes an event with all that precede it in the timeline.

        Args:
            dense_features: [B, dense_in_features].
            sparse_features: ids with the keys of both collections and of the biases; with `timelines` without the
                bucket ids of a TimeBias.
            timelines: whose rows share events; None if no samples share any.

        Returns:
            Logits [B, 1] (of L outputs [B, L], see `heads`), as `torchrec.models.dlrm.DLRM` returns them.

        Raises:
            ValueError: a key is absent from `sparse_features`, or a history does not fit its feature's config; with
                `timelines` a bias or an encoder whose numbers are not the same for all rows of a timeline.
        """
        _check_dense(dense_features, self._dense_in_features)
        entries = self.dropout(self.sequence_arch(*self._look_up(sparse_features, timelines), timelines))
        return self.over_arch(interact(self.dense_arch(dense_features), entries, self.inter_arch, self.cross_net))

    @torch.no_grad()
    def attention_weights(
        self, dense_features: Tensor, sparse_features: KeyedJaggedTensor, timelines: Timelines | None = None
    ) -> dict[str, JaggedTensor]:
        """Returns by feature the weights [S, 1, num_heads] of its events, or of ragged targets' pairs.

        Args:
            dense_features: not read; the arguments are those of `forward`.
            sparse_features: as in `forward`.
            timelines: as in `forward`; the weights are then those of `JaggedFeatureInteraction.attention_weights`.

        Raises:
            ValueError: the model has another pooling than "attention", or no sequence feature.
        """
        if not isinstance(self.sequence_arch.pooling, JaggedFeatureInteraction):
            raise ValueError("attention_weights needs a model with pooling='attention' and a sequence feature")
        return self.sequence_arch.attention_weights(*self._look_up(sparse_features, timelines), timelines)

    def _look_up(
        self, ids: KeyedJaggedTensor, timelines: Timelines | None
    ) -> tuple[KeyedJaggedTensor, KeyedTensor | None, dict[str, JaggedTensor]]:
        _check_ids(ids, self._id_keys, self._from_times, self._user_keys, self._sharded(), timelines)
        if self.growing_ids is not None:
            ids = self.growing_ids(ids)
        bags = None if self.embedding_bag_collection is None else self.embedding_bag_collection(ids)
        embeddings = {} if self.embedding_collection is None else self.embedding_collection(ids)
        if self.semantic_ids is not None:
            embeddings = merged(embeddings, self.semantic_ids(ids))
        return ids, bags, embeddings

    def admit_ids(self) -> dict[str, Tensor]:
        """Gives rows to new ids by `GrowingIds.admit`, and lets these rows of the fused collections begin anew.

        Call it between two steps. Returns what `GrowingIds.admit` returns.

        Raises:
            ValueError: the model has no `growing_ids`, or as `GrowingIds.admit`.
        """
        if self.growing_ids is None:
            raise ValueError("admit_ids needs a model with growing_ids, got None")
        admitted = self.growing_ids.admit()
        for collection in (self.embedding_bag_collection, self.embedding_collection):
            if isinstance(collection, FusedEmbeddingCollection | FusedEmbeddingBagCollection):
                for table in collection.fused_optimizer.weights:
                    if table in admitted:
                        rows = admitted[table]
                        collection.reset_rows(table, rows, self.growing_ids.ids(table)[rows])
        return admitted

    def _sharded(self) -> bool:
        collections = (self.embedding_bag_collection, self.embedding_collection)
        present = [collection for collection in collections if collection is not None]
        kinds = EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
        return len(present) > 0 and not any(isinstance(collection, kinds) for collection in present)


def interact(dense: Tensor, entries: Tensor, inter_arch: nn.Module, cross_net: nn.Module | None) -> Tensor:
    """Returns the input of OverArch for `dense [B, embedding_dim]` and `entries [B, F, embedding_dim]`."""
    interactions = inter_arch(dense, entries)
    if cross_net is None:
        return interactions
    crossed = cross_net(torch.cat([dense.unsqueeze(1), entries], dim=1).flatten(1))
    return torch.cat([interactions, crossed], dim=1)


def _check_optional(argument: str, value: object, kind: type) -> None:
    check_type(argument, value, (kind, type(None)), f"a {kind.__name__.removesuffix('Interface')} or None")


def _check_layer_sizes(dense_arch: list[int], over_arch: list[int]) -> None:
    check_list_of_sizes("dense_arch_layer_sizes", dense_arch)
    if not dense_arch:
        raise ValueError(f"dense_arch_layer_sizes must hold at least one size, got {dense_arch}")
    check_list_of_sizes("over_arch_layer_sizes", over_arch)
    if len(over_arch) < 2 or over_arch[-1] != 1:
        must = "hold at least two sizes and end in 1, the logit"
        raise ValueError(f"over_arch_layer_sizes must {must}, got {over_arch}")


def _check_semantic_ids(semantic_ids: SemanticIDEmbedding, keys: list[str], width: int, of: str) -> None:
    if semantic_ids.embedding_dim != width:
        raise ValueError(f"semantic_ids must be as wide as {of}, {width}, got {semantic_ids.embedding_dim}")
    if shared := sorted(set(keys) & set(semantic_ids.feature_names)):
        raise ValueError(f"semantic_ids must have keys of its own, got {shared} of embedding_collection")


def _check_growing_ids(growing_ids: GrowingIds, tables: list[BaseEmbeddingConfig]) -> None:
    by_name = {table.name: table for table in tables}
    for config in growing_ids.configs:
        of = f"growing_ids of table '{config.name}'"
        validation.require_keys("the collections of growing_ids", by_name, [config.name])
        table = by_name[config.name]
        if config.capacity != table.num_embeddings:
            raise ValueError(f"{of} must have the capacity {table.num_embeddings} of the table, got {config.capacity}")
        if set(config.feature_names) != set(table.feature_names):
            raise ValueError(f"{of} must have the keys {table.feature_names} of the table, got {config.feature_names}")


def _check_encoder(encoder: JaggedEncoder, features: list[SequenceFeatureConfig], width: int, of: str) -> None:
    if encoder.embedding_dim != width:
        raise ValueError(f"encoder must be as wide as {of}, {width}, got {encoder.embedding_dim}")
    names, encoded = [feature.name for feature in features], [feature.name for feature in encoder.features]
    if set(names) != set(encoded):
        raise ValueError(f"encoder must encode the sequence features that are pooled, {names}, got {encoded}")
    pooled = {feature.name: feature.sequence_keys for feature in features}
    for feature in encoder.features:
        if feature.sequence_keys != pooled[feature.name]:
            raise ValueError(
                f"encoder must read the sequence_keys {pooled[feature.name]} of feature '{feature.name}', "
                f"got {feature.sequence_keys}"
            )


@torch.fx.wrap
def _check_dense(dense_features: Tensor, width: int) -> None:
    check_type("dense_features", dense_features, Tensor, "a Tensor")
    validation.check_dense("dense_features", dense_features)
    if dense_features.dim() != 2 or dense_features.size(1) != width or not dense_features.is_floating_point():
        got = f"{dense_features.dtype} of shape {list(dense_features.shape)}"
        raise ValueError(f"dense_features must be floating of shape [B, {width}], got {got}")


@torch.fx.wrap
def _check_ids(
    ids: KeyedJaggedTensor,
    keys: list[str],
    from_times: list[str],
    user_keys: list[str],
    sharded: bool,
    timelines: Timelines | None,
) -> None:
    needed = keys if timelines is None else [key for key in keys if key not in from_times]
    validation.check_ids("sparse_features", ids, needed, sharded)
    if timelines is None:
        return
    if not isinstance(timelines, Timelines):
        raise TypeError(f"timelines must be Timelines or None, got {type(timelines).__name__}")
    rows, count = ids.stride(), timelines.count
    if count > rows:
        raise ValueError(f"timelines must be at most {rows}, the samples of sparse_features, got {count}")
    if not validation.may_read(timelines.row_offsets):
        return
    last = int(timelines.row_offsets[-1])
    if last != rows:
        raise ValueError(f"timelines.row_offsets must end at {rows}, the samples of sparse_features, got {last}")
    for key in sorted({*ids.keys()} & {*user_keys}):
        if ids[key].lengths()[count:].any():
            raise ValueError(
                f"sparse_features['{key}'] must be empty after the first {count} samples, which are those of the "
                "timelines: it describes the user"
            )
