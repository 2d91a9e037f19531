"""The optimizer of a collection's tables, which steps the rows of a batch at the end of its backward pass.

A look-up is one autograd node for all tables of a width and a dtype. In the backward pass it gets the gradients of all
rows that it read and keeps them for the end of this pass, where all look-ups of the collection make one step together:
a row that several of them have read is stepped once, by the sum of its gradients. On a GPU ids are sorted during the
forward pass, on a side stream.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.optim.fused import FusedOptimizer

from jfi.tables.backward_passes import BackwardPasses
from jfi.tables.changed_rows import ChangedRows
from jfi.tables.gather_rows import EventRows, rows_without_memory
from jfi.tables.optimizer_options import OPTIMIZERS, ParameterGroup, ScalerCheck, checked_options
from jfi.tables.side_stream import SideStream
from jfi.tables.step_rows import RowOptimizer, SortedRows, flush_average, rounding_seed, sort_rows, step_rows
from jfi.utils import compat


class _Batch(NamedTuple):
    """A look-up of some tables and its gradients, kept until the step."""

    tables: tuple[str, ...]
    rows: tuple[Tensor, ...]  # global rows [n] in the order of the batch; on a GPU then those sorted, and their order
    sizes: list[int]
    grads: Sequence[Tensor | None]


def _refusal(name: str) -> Callable[..., None]:
    """Returns the setter of an attribute that nothing but the constructor of TorchRec's class sets."""
    text = f"{name} of a fused collection's optimizer cannot be replaced; use load_state_dict or param_groups[0]['lr']"

    def refuse(self: "FusedTables", _: object) -> None:
        if "defaults" in self.__dict__:
            raise AttributeError(text)

    return refuse


class FusedTables(FusedOptimizer):
    """The optimizer of the tables of one collection; a step is made in the backward pass.

    `zero_grad()` does nothing, and neither does `step()` unless the step of a backward pass waits, see `defer_steps`.
    `param_groups` are one group of all tables: its "lr" may be set; the rest is refused.
    `state_dict()` and `load_state_dict()` have the names and shapes of the optimizer's class, and with `ema_decay`
    `average` and `flushed_at`, with it or a weight decay `stepped_at`. SGD with stochastic rounding has `step`.

    Args:
        tables: modules by table name, each with a `weight` [N, D].
        optimizer_type: torch.optim.SGD, Adagrad, Adam or AdamW, or TorchRec's RowWiseAdagrad.
        options: `lr`, `eps`, `betas`, `weight_decay`, those that the optimizer has.
        ema_decay: decay of an exponential moving average of the weights, or None.
        states: by table the optimizer's states, to use their memory; None makes them.
        prefix: of the parameter names, such as "embeddings.".
        stochastic_rounding: whether new weights in half precision are rounded stochastically, else to nearest.

    Raises:
        ValueError, TypeError: another optimizer, or an option of a wrong name or value.
    """

    def __init__(
        self,
        tables: nn.ModuleDict,
        optimizer_type: type,
        options: dict[str, Any],
        ema_decay: float | None,
        states: dict[str, tuple[Tensor, ...]] | None = None,
        prefix: str = "",
        stochastic_rounding: bool = True,
    ) -> None:
        options = checked_options(optimizer_type, options, ema_decay)
        name, sums, _ = OPTIMIZERS[optimizer_type]
        beta1, beta2 = options.get("betas", (0.0, 0.0))
        self.optimizer = RowOptimizer(name, options.get("eps", 0.0), beta1, beta2, options["weight_decay"], ema_decay)
        known = {name: one.default for name, one in signature(optimizer_type).parameters.items()} | options
        averages = ("average",) if ema_decay is not None else ()
        self._names = (*sums, *averages, *(("stepped_at",) if averages or options["weight_decay"] else ()))
        self.group = ParameterGroup(options, {name: known[name] for name in known if name not in ("params", "lr")})
        self.steps, self._flushed_at = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        self._tables, self._prefix, self.stochastic_rounding = tables, prefix, stochastic_rounding
        self._states: dict[str, tuple[Tensor, ...]] = states or {}
        #: Running backward passes with their look-ups, and those of finished ones that are not stepped yet.
        self._running, self._deferring = BackwardPasses(), False
        self._finished: list[_Batch] = []
        self.frozen: dict[str, Tensor] = {}  # by table the rows that no step changes, [N] bool
        #: Marks of the rows that steps change, see `track_changes`; None without them.
        self.changed: ChangedRows | None = None
        #: On a GPU, where ids are sorted, and whether steps are made there too.
        self._side: SideStream | None = None
        self._steps_beside = False
        self.allocate_states()
        super().__init__(self.params, self.state, self.param_groups)

    _step_supports_amp_scaling = property(ScalerCheck.refuse)  # a GradScaler looks for it first

    def __getstate__(self) -> dict[str, object]:
        """Returns the state of a copy, which makes a stream for itself."""
        own = {name: x for name, x in self.__dict__.items() if name != "step"}  # a scheduler's wrapper, of this object
        return own | {"_side": None, "_running": None, "_finished": []}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Takes the state as it is: `torch.optim.Optimizer` would wrap `step` by a profiler's."""
        self.__dict__.update(state, _running=BackwardPasses())

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Returns the weight [N, D] of each table by name."""
        return {name: table.weight for name, table in self._tables.items()}

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return {f"{self._prefix}{name}.weight": weight for name, weight in self.weights.items()}

    params = params.setter(_refusal("params"))

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        found = {}
        for name, weight in self.weights.items():
            states = dict(zip(self._names, self._states[name], strict=True))
            if self.optimizer.name == "rowwise_adagrad":
                states["sum"] = states["sum"].view(-1, 1)
            if "average" in states:
                states["flushed_at"] = self._flushed_at
            if states or (self.stochastic_rounding and weight.dtype.itemsize == 2):
                found[weight] = {"step": self.steps, **states}
        return found

    state = state.setter(_refusal("state"))

    @property
    def param_groups(self) -> tuple[ParameterGroup]:
        self.group.data["params"] = list(self.weights.values())
        return (self.group,)

    param_groups = param_groups.setter(_refusal("param_groups"))
    add_param_group = _refusal("param_groups")

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Does nothing: the states always exist."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads states, which may have or lack those of rounding and of weight decay, `step` and `stepped_at`.

        Without `stepped_at` all rows count as last stepped at `step`.
        """
        own, found, optional = self.state_dict()["state"], {}, {"step", "stepped_at"}
        for name, states in state_dict["state"].items():
            known = own.get(name, {})
            if not known and states.keys() <= optional:
                continue
            found[name] = {key: one for key, one in states.items() if key != "stepped_at" or key in known}
            if "stepped_at" in known and "stepped_at" not in states:
                found[name]["stepped_at"] = torch.full_like(known["stepped_at"], int(states.get("step", 0)))
        found |= {name: one for name, one in own.items() if name not in found and one.keys() <= optional}
        super().load_state_dict({**state_dict, "state": found})

    def allocate_states(self) -> None:
        """Makes the states, zeros, or moves them to the weights' device; behind the meta device they begin anew."""
        for name, weight in self.weights.items():
            rows, dtype = weight.shape[:1], _wide(weight.dtype)
            sums = rows if self.optimizer.name == "rowwise_adagrad" else weight.shape
            others = {"average": (weight.shape, dtype), "stepped_at": (rows, torch.int32)}
            kinds = [others.get(one, (sums, dtype)) for one in self._names]
            states = self._states.get(name)
            if states is None or (states and states[0].is_meta and not weight.is_meta):
                self._states[name] = tuple([torch.zeros(s, dtype=d, device=weight.device) for s, d in kinds])
            elif not weight.is_meta:
                self._states[name] = tuple([x.to(weight.device, d) for x, (_, d) in zip(states, kinds, strict=True)])
            if name in self.frozen and not weight.is_meta:
                self.frozen[name] = self.frozen[name].to(weight.device)
        if not weight.is_meta:
            self.steps, self._flushed_at = self.steps.to(weight.device), self._flushed_at.to(weight.device)
            self.group.learning_rate = self.group.learning_rate.to(weight.device, _wide(weight.dtype))

    def reset(self) -> None:
        """Sets the states and the number of steps to zero."""
        for states in self._states.values():
            for state in states:
                state.zero_()
        self.steps.zero_()
        self._flushed_at.zero_()

    def track_changes(self) -> ChangedRows:
        """Marks from now on the rows that steps change. A step that is captured later has it in its graph."""
        self.changed = self.changed or ChangedRows()
        return self.changed

    @torch.no_grad()
    def reset_rows(self, table: str, rows: Tensor, values: Tensor) -> None:
        """Lets rows [M] of a table begin anew with values [M, D]: without states, and without a past in the average."""
        if self._finished:
            raise RuntimeError(f"rows of table '{table}' must be reset after the step, got a backward pass without one")
        weight = self.weights[table]
        weight[rows] = values.to(weight.dtype)
        for state in self._states[table]:
            state[rows] = 0
        if self.changed is not None:
            self.changed.mark({table: len(weight)}, rows)

    def averages(self) -> dict[str, Tensor]:
        """Returns by table the moving average [N, D] of its weight up to now; later steps change these tensors."""
        found = {}
        for name, (*_, average, at) in self._states.items():
            weight, decay = self.weights[name].detach(), self.optimizer.ema_decay
            flush_average(weight, average, at, self._flushed_at, decay, self.steps)
            found[name] = average
        self._flushed_at.copy_(self.steps)
        return found

    def gradient_handles(
        self, weights: dict[str, nn.Parameter], ids: list[tuple[str, Tensor]], dtype: torch.dtype | None
    ) -> list[Tensor]:
        """Returns for each table and its ids [S] a tensor [S, D] without memory, whose gradient the step takes.

        An id of -1 is none. The gradients are of the dtype, or of that of the table if it is None.
        """
        handles, groups = [], {}
        if self._side is not None and self._side.kept:
            self._side.wait()
        if compat.current_backward() != -1:  # a checkpoint computes a part of the forward pass again
            self._running.current(self._finish).recomputes = True
        for i, (table, rows) in enumerate(ids):
            weight, handle = weights[table], None
            if weight.requires_grad and torch.is_grad_enabled():
                groups.setdefault((weight.shape[1], weight.dtype), {})[i] = table, rows
            else:
                handle = rows_without_memory(weight, dtype, len(rows))
            handles.append(handle)
        for kind, group in groups.items():
            # Frozen ones too: batches that accumulate with and without them number the rows alike.
            tables = {name: x for name, x in weights.items() if (x.shape[1], x.dtype) == kind}
            _, counted = zip(*group.values(), strict=True)
            rows, sizes = self._global_rows([*group.values()], tables), [*map(len, counted)]
            zero = next(iter(tables.values())).new_zeros((), dtype=dtype)
            made = tuple([zero.expand(size, kind[0]) for size in sizes])
            made = EventRows.apply(made, partial(self._keep, tuple(tables), sizes), rows, *tables.values())
            for i, handle in zip(group, made, strict=True):
                handles[i] = handle
        return handles

    def _global_rows(self, ids: list[tuple[str, Tensor]], tables: dict[str, nn.Parameter]) -> tuple[Tensor, ...]:
        """Returns the `rows` of a _Batch; a GPU sorts them on a side stream: nothing needs them before the step."""
        device = ids[0][1].device
        if device.type != "cuda":
            return self._numbered(ids, tables)[:1]
        if self._side is None:
            self._side = SideStream(device)
        for _, rows in ids:
            rows.record_stream(self._side.stream)
        with self._side.work():
            rows, total = self._numbered(ids, tables)
            return rows, *sort_rows(rows, total)

    @contextmanager
    def stepping_beside(self) -> Iterator[None]:
        """Makes the steps of the block on a side stream; the end of the block and later look-ups wait for them.

        So a dense optimizer runs meanwhile. Nothing but new look-ups may read the tables between a backward pass and
        the end of the block. On a CPU the block changes nothing.
        """
        self._steps_beside = self.steps.is_cuda
        try:
            yield
        except BaseException:
            if self._side is not None and torch.cuda.is_current_stream_capturing():
                self._side.forget()  # nothing of a capture that fails ever runs
            raise
        finally:
            self._steps_beside = False
            if self._side is not None:
                self._side.wait()

    def _keep_sorted(self, batches: list[_Batch]) -> None:
        """Lets nothing overwrite the rows, which are memory of the side stream, before this stream's step reads them.

        The sort of the next batch waits for this stream, but torch gives the same stream to others as well, such as the
        copies of later batches.
        """
        if self._side is None or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self.steps.device)
        for batch in batches:
            for rows in batch.rows:
                rows.record_stream(current)

    def _numbered(self, ids: list[tuple[str, Tensor]], tables: dict[str, nn.Parameter]) -> tuple[Tensor, int]:
        """Returns the ids [n] as global rows, and the number of all rows, which stands for padding and frozen rows."""
        first, total, numbered = {}, 0, []
        for name, weight in tables.items():
            first[name] = total
            total += weight.shape[0]
        for name, rows in ids:
            if total >= 2**31 - 1:
                rows = rows.long()
            left_out = rows < 0
            if name in self.frozen:
                left_out = left_out | self.frozen[name][rows.clamp(min=0)]
            numbered.append(torch.where(left_out, total, rows + first[name] if first[name] else rows))
        return numbered[0] if len(numbered) == 1 else torch.cat(numbered), total

    def _keep(
        self,
        tables: tuple[str, ...],
        sizes: list[int],
        grads: Sequence[Tensor | None],
        rows: tuple[Tensor, ...],
        *_: object,
    ) -> tuple[None, ...]:
        """Keeps a look-up and its gradients for one step at the end of the running backward pass; weights get none."""
        self._running.current(self._finish).kept.append(_Batch(tables, rows, sizes, grads))
        return (None,) * len(tables)

    def _finish(self, batches: list[_Batch]) -> None:
        """Steps the look-ups of a backward pass that has ended, unless steps are deferred."""
        self._finished += batches
        if batches and not self._deferring:
            self.step()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Makes no step of backward passes within: that of the first one afterwards is by all their gradients."""
        outer, self._deferring = self._deferring, True
        try:
            yield
        except BaseException:
            self._finished = []
            raise
        finally:
            self._deferring = outer

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Makes one step of all backward passes that have finished since the last step, if any has."""
        batches, self._finished = self._finished, []
        if not batches:
            return
        with self._side.work(*batches) if self._steps_beside else nullcontext():
            self._step(batches)

    def _step(self, batches: list[_Batch]) -> None:
        weights = self.weights
        if any([weight.grad is not None for weight in weights.values()]):
            raise RuntimeError(
                "the tables of a fused collection have a gradient besides that of their look-ups, which would be lost: "
                "no loss may read their weights, and no DistributedDataParallel may hold them"
            )
        self.steps += 1
        ScalerCheck.has_stepped = True
        if self._side is not None:
            self._side.wait()
        self._keep_sorted(batches)
        by_tables: dict[tuple[str, ...], list[_Batch]] = {}
        for batch in batches:
            by_tables.setdefault(batch.tables, []).append(batch)
        for names, own in by_tables.items():
            tables = {name: weights[name] for name in names}
            rows, *is_sorted = own[0].rows if len(own) == 1 else [torch.cat([batch.rows[0] for batch in own])]
            total = sum([weight.shape[0] for weight in tables.values()])
            in_order = SortedRows(*is_sorted) if is_sorted else sort_rows(rows, total)
            if self.changed is not None:
                self.changed.mark({name: len(weight) for name, weight in tables.items()}, in_order.rows)
            step_rows(
                [weight.detach() for weight in tables.values()],
                [self._states[name] for name in names],
                in_order,
                [grad for batch in own for grad in batch.grads],
                [size for batch in own for size in batch.sizes],
                self.optimizer,
                self.group.learning_rate,
                self.steps,
                seeds=self._rounding_seeds(tables) if self.stochastic_rounding else None,
                flushed_at=self._flushed_at if self.optimizer.ema_decay is not None else None,
            )
            torch.autograd.graph.increment_version([weight for weight in tables.values() if weight.requires_grad])

    def _rounding_seeds(self, tables: dict[str, nn.Parameter]) -> list[tuple[int, int]]:
        firsts = accumulate([0, *map(len, tables.values())])
        return [(first, rounding_seed(name)) for name, first in zip(tables, firsts, strict=False)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
