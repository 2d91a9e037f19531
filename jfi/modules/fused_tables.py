"""The optimizer of a collection's tables, which steps the rows of a batch at the end of its backward pass.

A look-up is one autograd node for all tables of a width and a dtype. It sorts the ids in the forward pass; in the
backward pass it gets the gradients of everything that was looked up, and leaves them for the end of this pass, where
all look-ups of the collection make one step together: a row that several of them have read is stepped once, by the sum
of its gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jfi.ops.step_rows import RowOptimizer, SortedRows, flush_average, sort_rows, step_rows
from jfi.utils import compat
from jfi.utils.arguments import check_number, check_type, shown

#: By class of optimizer its name and the defaults of its options, which are those of the class.
_OPTIMIZERS: dict[type, tuple[str, dict[str, Any]]] = {
    torch.optim.SGD: ("sgd", {"lr": 1e-3, "weight_decay": 0.0}),
    torch.optim.Adagrad: ("adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    torch.optim.Adam: ("adam", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    torch.optim.AdamW: ("adamw", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}),
    RowWiseAdagrad: ("rowwise_adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
}
#: Names of the states that torch.optim and TorchRec give them.
_STATES = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
_AVERAGE = ("average", "averaged_at")
#: Backward passes within each other, as of reentrant checkpoints, whose look-ups are kept apart.
_NESTED = 8


class _Batch(NamedTuple):
    """A look-up's rows and gradients, kept until the end of the backward pass."""

    tables: tuple[str, ...]
    rows: SortedRows
    grads: tuple[Tensor | None, ...]
    sizes: list[int]


class FusedTables:
    """The optimizer and its states of the tables of one collection.

    Args:
        tables: modules by table name, each with a `weight` [N, D].
        optimizer_type: torch.optim.SGD, Adagrad, Adam or AdamW, or TorchRec's RowWiseAdagrad.
        options: `lr`, `eps`, `betas`, `weight_decay`, those that the optimizer has.
        average: decay of a moving average of the weights, or None.
        states: by table the optimizer's states, to use their memory; None makes them.

    Raises:
        ValueError, TypeError: another optimizer, or an option of a wrong name or value.
    """

    def __init__(
        self,
        tables: nn.ModuleDict,
        optimizer_type: type,
        options: dict[str, Any],
        average: float | None,
        states: dict[str, tuple[Tensor, ...]] | None = None,
    ) -> None:
        name, options = _checked(optimizer_type, options, average)
        beta1, beta2 = options.get("betas", (0.0, 0.0))
        eps = options.get("eps", 0.0)
        self.optimizer = RowOptimizer(name, eps, beta1, beta2, options["weight_decay"], average)
        self.group = ParameterGroup(options)
        self.step = torch.zeros((), dtype=torch.int64)
        self._tables = tables
        self._states: dict[str, tuple[Tensor, ...]] = states or {}
        #: By backward pass what its look-ups have left.
        self._pending: dict[int, list[_Batch]] = {}
        #: Whether the step waits for a later backward pass, and what those before it have left.
        self._deferring, self._deferred = False, []
        #: By table the rows that no step changes, [N] bool.
        self.frozen: dict[str, Tensor] = {}
        self._averages_begun = False
        #: On a GPU, the stream on which ids are sorted, and when it has sorted those of the last look-up.
        self._sort_stream: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._sorting = False
        self.follow()

    def __getstate__(self) -> dict[str, object]:
        """Returns the state of a copy, which makes a stream for itself."""
        return self.__dict__ | {"_sort_stream": None, "_sorting": False, "_pending": {}, "_deferred": []}

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Returns the weight [N, D] of each table by name."""
        return {name: table.weight for name, table in self._tables.items()}

    def follow(self) -> None:
        """Moves the states to where the weights are. Off the meta device they begin anew."""
        for name, weight in self.weights.items():
            rows, dtype = weight.shape[0], _wide(weight.dtype)
            sizes = [(rows,) if self.optimizer.name == "rowwise_adagrad" else weight.shape] * len(self._own_states)
            kinds = [(size, dtype) for size in sizes]
            if self.optimizer.average is not None:
                kinds += [(weight.shape, dtype), ((rows,), torch.int32)]
            states = self._states.get(name)
            if states is None or (states and states[0].is_meta and not weight.is_meta):
                self._states[name] = tuple(torch.zeros(s, dtype=d, device=weight.device) for s, d in kinds)
            elif states and not weight.is_meta:
                self._states[name] = tuple(x.to(weight.device, d) for x, (_, d) in zip(states, kinds, strict=True))
        self.frozen = {name: rows.to(self.weights[name].device) for name, rows in self.frozen.items()}
        if self._tables:
            weight = next(iter(self.weights.values()))
            if not weight.is_meta:
                self.step = self.step.to(weight.device)
                self.group.learning_rate = self.group.learning_rate.to(weight.device, _wide(weight.dtype))

    def reset(self) -> None:
        """Begins anew: states of zeros, no steps."""
        for state in self._states.values():
            for one in state:
                one.zero_()
        self.step.zero_()
        self._averages_begun = False

    @property
    def _own_states(self) -> tuple[str, ...]:
        return _STATES[self.optimizer.name]

    def named_states(self, table: str) -> dict[str, Tensor]:
        """Returns the states of a table by the names of the optimizer's class; they share memory with these."""
        names = self._own_states + (() if self.optimizer.average is None else _AVERAGE)
        if not names:
            return {}
        states = dict(zip(names, self._states[table], strict=True))
        if self.optimizer.name == "rowwise_adagrad":
            states["sum"] = states["sum"].view(-1, 1)
        return {"step": self.step, **states}

    def averages(self) -> dict[str, Tensor]:
        """Returns by table the moving average of its weight [N, D]; the tensors that the steps change.

        A row's average is that of the step at which it was last stepped; `flush_averages` brings all to the present.
        """
        self._begin_averages()
        return {name: states[-2] for name, states in self._states.items()}

    def flush_averages(self) -> None:
        """Brings the averages of all rows to the present."""
        for name, average in self.averages().items():
            at = self._states[name][-1]
            flush_average(self.weights[name].detach(), average, at, self.optimizer.average, self.step)

    def loaded(self) -> None:
        """Called after the states were loaded."""
        self._averages_begun = int(self.step) > 0

    def _begin_averages(self) -> None:
        """An average begins as the weight, which may have been drawn or loaded after the construction."""
        if self.optimizer.average is None or self._averages_begun:
            return
        for name, weight in self.weights.items():
            self._states[name][-2].copy_(weight.detach())

    def look_up(self, ids: list[tuple[str, Tensor]], dtype: torch.dtype | None) -> list[Tensor]:
        """Returns the `rows` of a TableRows for each table and its ids [S]."""
        weights = self.weights
        looked_up: list[Tensor | None] = [None] * len(ids)
        if torch.is_grad_enabled():
            for tables in self._groups(weights):
                indices = [i for i, (table, _) in enumerate(ids) if table in tables]
                if not indices:
                    continue
                sizes = [len(ids[i][1]) for i in indices]
                rows = self._sorted([ids[i] for i in indices], tables, weights)
                own = _LookUp.apply(self, tables, rows, sizes, dtype, *[weights[name] for name in tables])
                for i, one in zip(indices, own, strict=True):
                    looked_up[i] = one
        for i, (table, rows) in enumerate(ids):
            if looked_up[i] is None:
                weight = weights[table]
                looked_up[i] = weight.new_zeros((), dtype=dtype).expand(len(rows), weight.shape[1])
        return looked_up

    def _groups(self, weights: dict[str, nn.Parameter]) -> list[tuple[str, ...]]:
        """Returns the tables that are trained, those of a width and a dtype together."""
        groups: dict[tuple, list[str]] = {}
        for name, weight in weights.items():
            if weight.requires_grad:
                groups.setdefault((weight.shape[1], weight.dtype), []).append(name)
        return [tuple(group) for group in groups.values()]

    def _sorted(self, ids: list[tuple[str, Tensor]], tables: tuple[str, ...], weights: dict) -> SortedRows:
        """Sorts `_global_rows`, on a GPU on a side stream: nothing needs them before the end of the backward pass."""
        first = ids[0][1]
        if not first.is_cuda:
            return self._global_rows(ids, tables, weights)
        current = torch.cuda.current_stream(first.device)
        if self._sort_stream is None:
            self._sort_stream = torch.cuda.Stream(first.device), torch.cuda.Event()
        stream, done = self._sort_stream
        stream.wait_stream(current)
        for _, rows in ids:
            rows.record_stream(stream)
        with torch.cuda.stream(stream):
            found = self._global_rows(ids, tables, weights)
            done.record(stream)
        self._sorting = True
        # This memory belongs to the side stream, which waits for the step that reads it before it is used again.
        return found

    def wait_sorted(self) -> None:
        """The current stream waits for the ids of all look-ups, if they are sorted on another one."""
        if self._sorting:
            torch.cuda.current_stream(self.step.device).wait_event(self._sort_stream[1])
            self._sorting = False

    def _global_rows(self, ids: list[tuple[str, Tensor]], tables: tuple[str, ...], weights: dict) -> SortedRows:
        """Returns the ids as sorted rows of all `tables`, one below the other; padding and frozen rows come last."""
        first, total = {}, 0
        for name in tables:
            first[name] = total
            total += weights[name].shape[0]
        numbered = []
        for name, rows in ids:
            if total >= 2**31 - 1:
                rows = rows.long()
            left_out = rows < 0
            if name in self.frozen:
                left_out = left_out | self.frozen[name][rows.clamp(min=0)]
            numbered.append(torch.where(left_out, total, rows + first[name] if first[name] else rows))
        numbered = numbered[0] if len(numbered) == 1 else torch.cat(numbered)
        return sort_rows(numbered, total)

    def after_backward(self, batch: _Batch) -> None:
        """Leaves a look-up's gradients for one step at the end of the backward pass that is running."""
        task = compat.current_backward()
        if task not in self._pending:
            for stale in sorted(self._pending)[: -_NESTED + 1]:  # of passes that raised
                del self._pending[stale]
            self._pending[task] = []
            compat.call_after_backward(partial(self._finish, task))
        self._pending[task].append(batch)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes within make no step: that of the first one afterwards is by all their gradients together."""
        self._deferring = True
        try:
            yield
        except BaseException:
            self._deferred = []
            raise
        finally:
            self._deferring = False

    def _finish(self, task: int) -> None:
        batches = self._deferred + self._pending.pop(task)
        self._deferred = batches if self._deferring else []
        if not self._deferring:
            self._step(batches)

    def step_deferred(self) -> None:
        """Makes the step of backward passes whose step waits, if any does."""
        batches, self._deferred = self._deferred, []
        if batches:
            self._step(batches)

    @torch.no_grad()
    def _step(self, batches: list[_Batch]) -> None:
        weights = self.weights
        if any([weight.grad is not None for weight in weights.values()]):
            raise RuntimeError(
                "the tables of a fused collection have a gradient besides that of their look-ups, which would be lost: "
                "no loss may read their weights, and no DistributedDataParallel may hold them"
            )
        if self.optimizer.average is not None:
            self._begin_averages()
            self._averages_begun = True
        self.step += 1
        self.wait_sorted()
        by_tables: dict[tuple[str, ...], list[_Batch]] = {}
        for batch in batches:
            by_tables.setdefault(batch.tables, []).append(batch)
        for tables, own in by_tables.items():
            batch = own[0] if len(own) == 1 else _joined(own, sum(weights[name].shape[0] for name in tables))
            step_rows(
                [weights[name].detach() for name in tables],
                [self._states[name] for name in tables],
                batch.rows,
                list(batch.grads),
                batch.sizes,
                self.optimizer,
                self.group.learning_rate,
                self.step,
            )
            torch.autograd.graph.increment_version([weights[name] for name in tables])


class _LookUp(torch.autograd.Function):
    """Maps weights to the `rows` of what is looked up; their gradients go into the step, none to the weights."""

    @staticmethod
    def forward(
        ctx,
        owner: FusedTables,
        tables: tuple[str, ...],
        rows: SortedRows,
        sizes: list[int],
        dtype: torch.dtype | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.tables, ctx.sizes = owner, tables, sizes
        ctx.save_for_backward(*rows)
        zero = weights[0].new_zeros((), dtype=dtype)
        return tuple([zero.expand(size, weights[0].shape[1]) for size in sizes])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[None, ...]:
        rows = SortedRows(*ctx.saved_tensors)
        if any([grad is not None for grad in grads]):
            ctx.owner.after_backward(_Batch(ctx.tables, rows, grads, ctx.sizes))
        return (None,) * (5 + len(ctx.tables))


class ParameterGroup(dict):
    """The options of the optimizer; writing "lr" writes the tensor that the steps read."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.learning_rate = torch.tensor(float(options["lr"]))
        super().__init__(options)

    def __setitem__(self, key: str, value: object) -> None:
        if key in ("weight_decay", "eps", "betas") and value != self[key]:
            raise ValueError(f"{key} of a fused collection is given at its construction, {self[key]}; got {value}")
        super().__setitem__(key, value)
        if key == "lr":
            self.learning_rate.fill_(float(value))

    def __reduce__(self) -> tuple:
        return _restored_group, (dict(self), self.learning_rate)

    def update(self, *args: object, **kwargs: object) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def _restored_group(options: dict[str, Any], learning_rate: Tensor) -> ParameterGroup:
    group = ParameterGroup(options)
    group.learning_rate = learning_rate
    return group


class FusedTablesOptimizer(FusedOptimizer):
    """The states and the learning rate of a collection's tables by parameter name; a step is made in the backward pass.

    `zero_grad()` does nothing, and neither does `step()` unless the step of a backward pass waits, see `defer_steps`.
    `state_dict()` and `load_state_dict()` have the names and shapes of the optimizer's class, and with `average` two
    more: `average` and `averaged_at`.

    Args:
        tables: of the collection.
        prefix: of the parameter names, such as "embeddings".
    """

    def __init__(self, tables: FusedTables, prefix: str) -> None:
        self._fused, self._prefix = tables, prefix
        super().__init__(self.params, self.state, self.param_groups)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return {f"{self._prefix}.{name}.weight": weight for name, weight in self._fused.weights.items()}

    @params.setter
    def params(self, params: object) -> None: ...

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        states = {weight: self._fused.named_states(name) for name, weight in self._fused.weights.items()}
        return {weight: named for weight, named in states.items() if named}

    @state.setter
    def state(self, state: object) -> None: ...

    @property
    def param_groups(self) -> list[ParameterGroup]:
        self._fused.group["params"] = list(self._fused.weights.values())
        return [self._fused.group]

    @param_groups.setter
    def param_groups(self, groups: object) -> None: ...

    def step(self, closure: Callable | None = None) -> None:
        """Makes the step that waits, if one does."""
        self._fused.step_deferred()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Does nothing: the states always exist."""

    def post_load_state_dict(self) -> None:
        self._fused.loaded()


def _joined(batches: list[_Batch], num_rows: int) -> _Batch:
    """Merges several look-ups of the same tables."""
    rows = []
    for batch in batches:
        unsorted = torch.empty_like(batch.rows.rows)
        unsorted[batch.rows.order.long()] = batch.rows.rows
        rows.append(unsorted)
    grads = tuple(grad for batch in batches for grad in batch.grads)
    sizes = [size for batch in batches for size in batch.sizes]
    return _Batch(batches[0].tables, sort_rows(torch.cat(rows), num_rows), grads, sizes)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _checked(optimizer_type: type, options: dict[str, Any], average: float | None) -> tuple[str, dict[str, Any]]:
    """Checks an optimizer; returns its name, and all its options."""
    if not isinstance(optimizer_type, type) or optimizer_type not in _OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
        got = getattr(optimizer_type, "__name__", shown(optimizer_type))
        raise ValueError(f"optimizer_type must be one of {known}, got {got}")
    check_type("optimizer_kwargs", options, dict, "a dict of options")
    name, defaults = _OPTIMIZERS[optimizer_type]
    if unknown := sorted(map(str, options.keys() - defaults.keys())):
        raise ValueError(f"optimizer_kwargs of {optimizer_type.__name__} must be of {sorted(defaults)}, got {unknown}")
    options = defaults | options
    betas = options.pop("betas", None)
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"optimizer_kwargs['{key}'] must be a float, got {type(value).__name__}")
        if not 0 <= value < float("inf"):
            raise ValueError(f"optimizer_kwargs['{key}'] must be 0 or more and finite, got {value}")
    if betas is not None:
        is_pair = isinstance(betas, list | tuple) and len(betas) == 2
        if not is_pair or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"optimizer_kwargs['betas'] must be two numbers in [0, 1), got {shown(betas)}")
        options["betas"] = tuple(betas)
    if average is not None:
        check_number("average", average, lambda x: 0 < x < 1, "between 0 and 1, or None")
    return name, options
