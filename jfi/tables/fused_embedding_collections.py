"""TorchRec's embedding collections with a fused optimizer, which steps only the rows that a batch has read."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from jfi.modules import lookups, validation
from jfi.modules.jagged_pooling import pool
from jfi.modules.validation import require_keys
from jfi.tables.fused_tables import FusedTables
from jfi.tables.gather_rows import bound_ids, check_indices
from jfi.tables.growing_ids import initial_rows
from jfi.tables.id_counts import OutsideIds
from jfi.tables.table_rows import TableRows
from jfi.utils.arguments import check_device, check_module, check_type, shown

_DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)


class _FusedCollection(FusedOptimizerModule, nn.Module):
    """Base of both collections; a subclass has its TorchRec class as the next base."""

    _attribute: str  # name of the ModuleDict of the tables
    _config: type[BaseEmbeddingConfig]

    def __init__(
        self,
        tables: list[BaseEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        *,
        output_dtype: torch.dtype | None = None,
        ema_decay: float | None = None,
        stochastic_rounding: bool = True,
        device: torch.device | None = None,
    ) -> None:
        check_device("device", device)
        check_type("stochastic_rounding", stochastic_rounding, bool, "a bool")
        if not isinstance(tables, list | tuple) or not all(isinstance(one, self._config) for one in tables):
            raise TypeError(f"tables must be a list of {self._config.__name__}, got {shown(tables)}")
        if not tables:
            raise ValueError("tables must have at least one config, got none")
        for one in tables:
            if one.data_type not in _DATA_TYPES:
                raise ValueError(f"table '{one.name}' must have data_type FP32, FP16 or BF16, got {one.data_type}")
        output_dtype = torch.float32 if output_dtype is None else output_dtype
        if not isinstance(output_dtype, torch.dtype) or not output_dtype.is_floating_point:
            raise TypeError(f"output_dtype must be a floating torch.dtype or None, got {output_dtype!r}")
        super().__init__(tables=tables, device=device)
        for config in tables:
            # TorchRec makes a table of float16 of every type but FP32.
            if config.data_type == DataType.BF16:
                self._tables[config.name].to(torch.bfloat16)
        self._output_dtype = output_dtype
        self._lookups = [(name, key, table.name) for name, key, table in lookups.names_of(self)]
        self._id_keys = [key for _, key, _ in self._lookups]
        own = optimizer_type, optimizer_kwargs, ema_decay, None, f"{self._attribute}.", stochastic_rounding
        self._fused = FusedTables(self._tables, *own)
        self.outside_ids = (OutsideIds([table for _, _, table in self._lookups]),)
        self.outside_ids[0].on(self.device)

    @property
    def _tables(self) -> nn.ModuleDict:
        return getattr(self, self._attribute)

    @property
    def device(self) -> torch.device:
        """Returns the tables' device, where TorchRec's classes return that of the construction."""
        return next(self._tables.parameters()).device

    @property
    def fused_optimizer(self) -> FusedTables:
        """Returns the optimizer with its states by parameter name; its `step()` makes a deferred step."""
        return self._fused

    def freeze_rows(self, table: str, rows: Tensor) -> None:
        """Excludes rows of a table from steps, from the next look-up on.

        Args:
            table: name of the table.
            rows: [N] bool, True for rows that stay as they are; the tensor is kept and may be changed in place.
        """
        require_keys("tables", self._fused.weights, [table])
        check_type("rows", rows, Tensor, "a Tensor")
        weight = self._fused.weights[table]
        elsewhere = rows.is_meta or (rows.device != weight.device and not weight.is_meta)
        if rows.dtype != torch.bool or rows.shape != weight.shape[:1] or elsewhere:
            must = f"[{weight.shape[0]}] on {'any device with memory' if weight.is_meta else weight.device}"
            raise ValueError(f"rows must be bool of shape {must}, got {rows.dtype} {[*rows.shape]} on {rows.device}")
        self._fused.frozen[table] = rows

    def reset_rows(self, table: str, rows: Tensor, ids: Tensor | None = None) -> None:
        """Lets rows [M] of a table begin anew: new weights, states of zero, and averages that are the new weights.

        The weights follow from the raw ids [M] that the rows are of from now on, see `GrowingIds`; by default from the
        numbers of the rows.
        """
        require_keys("tables", self._fused.weights, [table])
        for argument, given in (("rows", rows), ("ids", ids := rows if ids is None else ids)):
            if given.dtype != torch.int64 or given.shape != (len(rows),):
                must = f"int64 of shape {[len(rows)]}"
                raise ValueError(f"{argument} must be {must}, got {given.dtype} of shape {[*given.shape]}")
        config = next(one for *_, one in lookups.names_of(self) if one.name == table)
        self._fused.reset_rows(table, rows, initial_rows(ids, config))

    def averages(self) -> dict[str, Tensor]:
        """Returns by table the moving average [N, D] of its weight up to now; later steps change these tensors.

        Raises:
            ValueError: the collection was made without `ema_decay`.
        """
        if self._fused.optimizer.ema_decay is None:
            raise ValueError("ema_decay must be given at construction for averages, got None")
        return self._fused.averages()

    def _over_averages(self, plain: nn.Module) -> nn.Module:
        """Returns TorchRec's collection with the averages as its weights."""
        for name, average in self.averages().items():
            getattr(plain, self._attribute)[name].weight = nn.Parameter(average, requires_grad=False)
        return plain

    def reset_parameters(self) -> None:
        """Draws the tables anew, with the optimizer's states at their beginning."""
        super().reset_parameters()
        if "_fused" in self.__dict__:  # TorchRec's constructor calls it too
            self._fused.reset()

    def _apply(self, fn: Callable, recurse: bool = True) -> "_FusedCollection":
        super()._apply(fn, recurse)
        self._fused.allocate_states()
        self.outside_ids[0].on(self.device)
        return self

    def _look_up(self, features: KeyedJaggedTensor) -> dict[str, TableRows]:
        are_readable = validation.check_ids("features", features, self._id_keys, sharded=True)
        weights, by_key = self._fused.weights, features.to_dict()
        processes = dist.get_world_size() if dist.is_initialized() and torch.is_grad_enabled() else 1
        if processes > 1 and any([weight.requires_grad for weight in weights.values()]):
            raise RuntimeError(
                f"{type(self).__name__} steps its tables in one process, got a process group of {processes}: use "
                "TorchRec's collection and DistributedModelParallel there, or torch.no_grad() to read the tables"
            )
        counts, found = self.outside_ids[0], {}
        ids, sizes = [by_key[key].values() for key in self._id_keys], [len(weights[table]) for table in counts.tables]
        if are_readable:
            for (_, key, table), own, size in zip(self._lookups, ids, sizes, strict=True):
                check_indices(f"features['{key}']", own, size, f"table '{table}'", int(by_key[key].lengths().sum()))
        else:
            ids = bound_ids(ids, sizes, counts.counts)
        by_table = zip(counts.tables, ids, strict=True)
        handles = self._fused.gradient_handles(weights, list(by_table), self._output_dtype)
        for (embedding, key, table), own, handle in zip(self._lookups, ids, handles, strict=True):
            parts = by_key[key].lengths_or_none(), by_key[key].offsets_or_none()
            found[embedding] = TableRows(weights[table].detach(), own, handle, *parts)
        return found

    def extra_repr(self) -> str:
        optimizer = self._fused.optimizer
        average = "" if optimizer.ema_decay is None else f", ema_decay={optimizer.ema_decay}"
        return f"optimizer={optimizer.name}, lr={self._fused.group['lr']}{average}"


class FusedEmbeddingCollection(_FusedCollection, EmbeddingCollection):
    """An EmbeddingCollection whose backward pass steps the rows that the batch has read.

    A step reads and writes the batch's distinct rows alone; nothing of the size of a gradient [N, D] is made.
    It has TorchRec's EmbeddingCollection as base: the same configs, the same names in `state_dict()`, and its
    optimizer's states have the names of `optimizer_type`, so that checkpoints load in both directions.

    At the end of `loss.backward()` the rows are stepped; `.grad` of the tables stays None, and an optimizer of the
    other parameters must leave the tables out. As with TorchRec's fused optimizers, only rows of the batch change, and
    two calls of `backward()` make two steps, also over one graph. All look-ups of one backward pass make one step: a
    row gets one step with the sum of its gradients, also as target and as history, or under several keys. A forward
    pass alone changes nothing, and `torch.no_grad()` spares it the sorting of ids; whether the module is in training or
    evaluation mode does not matter. A table whose weight does not require a gradient is not stepped.

    It trains in one process: each of several would step a separate copy, which raises an error, with and without
    DistributedDataParallel; DistributedModelParallel shards TorchRec's collections. A GradScaler's `step()` raises an
    error, since it unscales too late: use bfloat16. `fused_optimizer.state_dict()` has no rate: a scheduler has it.
    The rows of the output are read where they are first needed, see `TableRows`.

    Args:
        tables: as of EmbeddingCollection; of `data_type` FP32, FP16 or BF16. Sums, states and steps are computed in
            float32, and the new rows are rounded to the table's dtype, see `stochastic_rounding`.
        optimizer_type: torch.optim.SGD, Adagrad, Adam or AdamW, or torchrec.optim.RowWiseAdagrad.
        optimizer_kwargs: `lr`, `eps`, `betas`, `weight_decay`, those that the optimizer has, with its defaults. Adam's
            bias correction counts the steps of the collection. Weight decay is a penalty of the whole table in each
            step; a row gets that of all steps since its last one when it is stepped again, see `jfi.tables.step_rows`.
        output_dtype: of the embeddings; None means float32, as of EmbeddingCollection.
        ema_decay: decay of an exponential moving average of the tables, such as 0.999, which `averages()` returns;
            None for none.
        stochastic_rounding: whether new rows of FP16 and BF16 tables are rounded up or down at random, as by fbgemm,
            so that steps too small for the dtype add up; False rounds to nearest. Random bits are a hash of table, row,
            column and the number of the step, which is `step` in the optimizer's state, also in that of SGD.
        device: of the tables; after "meta" call `to_empty()` and `reset_parameters()`.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch
        >>> from jfi import FusedEmbeddingCollection
        >>> from torchrec import EmbeddingConfig, KeyedJaggedTensor
        >>> items = EmbeddingConfig(
        ...     name="item", embedding_dim=4, num_embeddings=10, feature_names=["item", "history_item"]
        ... )
        >>> tables = FusedEmbeddingCollection([items], torch.optim.Adagrad, {"lr": 0.1})
        >>> #                  sample 0    1
        >>> # "item"             [4]      [1]
        >>> # "history_item"    [1, 3]    []
        >>> ids = KeyedJaggedTensor(
        ...     keys=["item", "history_item"],
        ...     values=torch.tensor([4, 1, 1, 3]),
        ...     lengths=torch.tensor([1, 1, 2, 0]),
        ... )
        >>> before = tables.embeddings["item"].weight.detach().clone()
        >>> embeddings = tables(ids)
        >>> embeddings["history_item"].values().shape
        torch.Size([2, 4])
        >>> loss = embeddings["item"].values().sum() + embeddings["history_item"].values().sum()
        >>> loss.backward()
        >>> (tables.embeddings["item"].weight != before).any(dim=1).nonzero().flatten()
        tensor([1, 3, 4])
        >>> tables.fused_optimizer.param_groups[0]["lr"] = 0.05  # as a scheduler sets it
    """

    _attribute, _config = "embeddings", EmbeddingConfig
    embedding_configs: Callable[[], list[EmbeddingConfig]]

    def forward(self, features: KeyedJaggedTensor) -> dict[str, TableRows]:
        """Looks the ids up.

        Args:
            features: ids, int32 or int64. On a GPU it may have more ids than its lengths count, with the
                capacity of each key as `length_per_key`: ids that the lengths do not count must be -1, padding.

        Returns:
            By key the embeddings [S, D] with the key's lengths; a key that two tables have is named `key@table`.

        Raises:
            ValueError: an id outside of its table, an id of -1 that the lengths count included. It is found on the CPU,
                and on a GPU under `jfi.ops.validation()`, since reading ids there waits for the device. Otherwise it
                gives zeros on a GPU, without a gradient and a step, and `jfi.modules.outside_ids` counts it.
            RuntimeError: in a process group of several, with gradients enabled and tables that require them.
        """
        return self._look_up(features)

    def averaged(self) -> EmbeddingCollection:
        """Returns TorchRec's collection of the same names over the memory of `averages()`, for evaluation."""
        return self._over_averages(EmbeddingCollection(self.embedding_configs(), device=torch.device("meta")))


class FusedEmbeddingBagCollection(_FusedCollection, EmbeddingBagCollection):
    """An EmbeddingBagCollection whose backward pass steps the rows that the batch has read.

    It is to EmbeddingBagCollection what `FusedEmbeddingCollection` is to EmbeddingCollection; see there.

    Args:
        tables: as of EmbeddingBagCollection, pooled by sum or mean.
        optimizer_type: as of FusedEmbeddingCollection.
        optimizer_kwargs: as there.
        is_weighted: whether an embedding is multiplied by its id's weight. A weighted mean divides by the number of
            ids, as in fbgemm.
        output_dtype: of the pooled embeddings; None means float32.
        ema_decay: as of FusedEmbeddingCollection.
        stochastic_rounding: as there.
        device: as there.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch
        >>> from jfi import FusedEmbeddingBagCollection
        >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
        >>> tags = EmbeddingBagConfig(name="tag", embedding_dim=4, num_embeddings=10, feature_names=["tags"])
        >>> bags = FusedEmbeddingBagCollection([tags], torch.optim.Adam, {"lr": 0.01})
        >>> ids = KeyedJaggedTensor(["tags"], torch.tensor([3, 5, 5]), lengths=torch.tensor([2, 0, 1]))
        >>> pooled = bags(ids)
        >>> pooled["tags"].shape
        torch.Size([3, 4])
        >>> pooled.values().sum().backward()
    """

    _attribute, _config = "embedding_bags", EmbeddingBagConfig
    is_weighted: Callable[[], bool]
    embedding_bags: nn.ModuleDict
    embedding_bag_configs: Callable[[], list[EmbeddingBagConfig]]

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        *,
        is_weighted: bool = False,
        output_dtype: torch.dtype | None = None,
        ema_decay: float | None = None,
        stochastic_rounding: bool = True,
        device: torch.device | None = None,
    ) -> None:
        check_type("is_weighted", is_weighted, bool, "a bool")
        super().__init__(
            tables,
            optimizer_type,
            optimizer_kwargs,
            output_dtype=output_dtype,
            ema_decay=ema_decay,
            stochastic_rounding=stochastic_rounding,
            device=device,
        )
        self._is_weighted = is_weighted
        self._by_mean = {c.name for c in tables if self.embedding_bags[c.name].mode == "mean"}

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks the ids up and pools them.

        Args:
            features: as of `FusedEmbeddingCollection.forward`, with weights if the collection is weighted.

        Returns:
            [B, D] by key; a bag without ids gives zeros. A key that two tables have is named `key@table`.

        Raises:
            ValueError, RuntimeError: as `FusedEmbeddingCollection.forward`.
        """
        found, by_key, pooled = self._look_up(features), features.to_dict(), []
        if self._is_weighted and features.weights_or_none() is None:
            raise ValueError("features must have weights, since is_weighted is True, got none")
        for embedding, key, table in self._lookups:
            weights = by_key[key].weights() if self._is_weighted else None
            pooled.append(pool(key, found[embedding], weights, table in self._by_mean).to(self._output_dtype))
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._lengths_per_embedding,
            values=process_pooled_embeddings(
                pooled, reorder_inverse_indices(features.inverse_indices_or_none(), self._id_keys)
            ),
        )

    def averaged(self) -> EmbeddingBagCollection:
        """Returns TorchRec's collection over the averages, see `FusedEmbeddingCollection.averaged`."""
        configs, weighted = self.embedding_bag_configs(), self.is_weighted()
        return self._over_averages(EmbeddingBagCollection(configs, weighted, device=torch.device("meta")))


@contextmanager
def defer_steps(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients: backward passes within step no table of the model's fused collections.

    The first backward pass after the block that reads a collection, or else `step()` of its `fused_optimizer`, makes
    one step of its tables, by the gradients of all passes, as one batch of all their samples would. Until then the
    gradients of the rows that were looked up stay in memory; activations do not. An error within the block drops them.

    Args:
        model: with any number of fused collections, or none.

    Example:

        >>> import torch
        >>> from torchrec import EmbeddingConfig, KeyedJaggedTensor
        >>> from jfi.modules import FusedEmbeddingCollection, defer_steps
        >>> tables = [EmbeddingConfig(name="t", embedding_dim=2, num_embeddings=3, feature_names=["item"])]
        >>> model = FusedEmbeddingCollection(tables, torch.optim.SGD, {"lr": 1.0})
        >>> def loss(ids):
        ...     return model(KeyedJaggedTensor(["item"], torch.tensor(ids), lengths=torch.tensor([len(ids)])))[
        ...         "item"].values().sum()
        >>> before = model.embeddings["t"].weight.clone()
        >>> with defer_steps(model):
        ...     loss([0, 1]).backward()
        >>> loss([1]).backward()
        >>> (before - model.embeddings["t"].weight.detach()).round().tolist()
        [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]
    """
    check_module("model", model)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _FusedCollection):
                stack.enter_context(module._fused.deferring())
        yield
