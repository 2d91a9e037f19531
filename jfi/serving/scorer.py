"""Scores requests with an artifact: looks up their embeddings and runs the package of the dense part."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from jfi.history_policies.policy import Policy
from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError, Info
from jfi.serving.history_policy import RequestPolicy
from jfi.serving.published import Change
from jfi.serving.requests import Request, RequestReader
from jfi.serving.schema import Answer, Inputs, Limits, Schema, Served, check_finite
from jfi.serving.tables import Tables, load_tables
from jfi.state.events import EventReader
from jfi.state.retention import KEEP_ALL, Retention
from jfi.state.state import UserState, read_layout
from jfi.state.stores import Store, StoreUnavailableError
from jfi.utils.errors import InputError

T = TypeVar("T")
#: Slices of the one tensor that is copied begin at multiples of it: kernels are compiled for 16-byte alignment.
_ALIGNMENT = 2
#: Pairs of events and rows that take no longer than the overhead of a call.
_SMALL_WORK = 2**16
_SAID = {"logits": "logit", "probabilities": "probability", "calibrated": "calibrated probability"}
#: What a score can be.
OUTPUTS = tuple(_SAID)
_SEGMENTS = ("offsets", "owner", "positions")


@dataclass(frozen=True)
class StateSettings:
    """The state of users, and how it is used.

    Args:
        cold_if_unavailable: whether a request is scored without events if the store does not answer.
        max_late, is_logged: as of UserState.
    """

    store: Store
    cold_if_unavailable: bool = False
    max_late: float = 86400.0
    max_events: int = 10_000
    retention: Retention = KEEP_ALL
    is_logged: bool = False


class Scorer:
    """A loaded artifact.

    Args:
        tables_device: device of the embedding tables; None means the device of the dense part.
        max_candidates, max_history: limits of a request; None means those of the artifact.
        output: what a score of a binary label is, "logits", "probabilities", their sigmoids, or "calibrated", the
            sigmoids of a * logit + b with the artifact's calibration. Those of a regression are predictions always.
        sha256: of the artifacts that may be loaded, as `jfi.serving.artifact.sha256_of` gives it; None for any.
            Loading an artifact runs the machine code in it.
        state: of users, whose events stand for those that a request does not have; None without one.

    Raises:
        ArtifactError: the artifact is none of `sha256`, is damaged, or cannot be used on this machine; or `max_history`
            is more than its policy of histories was trained with, or than its state of users keeps; or `output` is one
            of probabilities for a regression, or "calibrated" without a calibration.
        ValueError: another `output`.
    """

    def __init__(
        self,
        path: Path,
        tables_device: str | None = None,
        max_candidates: int | None = None,
        max_history: int | None = None,
        output: str = OUTPUTS[0],
        sha256: Collection[str] | None = None,
        state: StateSettings | None = None,
    ) -> None:
        if output not in OUTPUTS:
            raise ValueError(f"output is {output!r}, must be one of {', '.join(OUTPUTS)}")
        info, sums = artifact.read(path, sha256)
        self.info = info
        artifact.check_environment(path, info, tables_device)
        self.device, self.inputs, policy = torch.device(info.device), info.inputs, None
        if info.schema.policy is not None:
            if all(one.kind != "age" for one in info.schema.event):
                raise ArtifactError(f"{path} is damaged: it has a policy, but no field of an event is its age")
            try:
                policy = RequestPolicy(Policy.load(path / artifact.POLICY), info.schema.policy)
            except ValueError as fault:
                raise ArtifactError(f"{path} has a policy that cannot be used: {fault}") from None
        if info.schema.statistics is not None and state is None:
            make = f"`jfi state load --run {info.run or 'RUN'} --state FOLDER`"
            raise ArtifactError(f"{path} reads statistics of the past: serve it with --state FOLDER, made by {make}")
        limits = _limits(path, info, max_candidates, max_history)
        self._settings = state
        described = None if state is None else _naming(path, lambda: read_layout(state.store).info)
        try:
            self.reader = RequestReader(info.schema, limits, policy, _SAID[output], described)
        except LookupError:
            raise ArtifactError(f"{path} is damaged: a field of {artifact.INFO} has no key") from None
        #: The events of users, and what reads those that are sent for them; both None without a state.
        self.state = self.events = None
        if state is not None:
            own = state.max_late, state.retention, state.is_logged
            self.state = _naming(path, lambda: UserState(state.store, self.reader, *own))
            self.events = EventReader(self.state.layout, state.max_events, clock=state.retention.clock)
        device = torch.device(tables_device or info.device)
        self.tables = load_tables(path / artifact.TABLES, info.quantization, info.tables, device)
        #: Which outputs are logits that become probabilities; None where none does.
        self._to_probability = None
        if output != "logits":
            is_logit = [task == "binary" for task in info.schema.tasks]
            if not any(is_logit):
                raise ArtifactError(f"{path} predicts numbers, which have no probabilities; serve it with logits")
            self._to_probability = torch.tensor(is_logit, device=self.device)
            scales = [[1.0, 0.0]] * len(is_logit) if output == "probabilities" else info.calibration
            if scales is None:
                raise ArtifactError(
                    f"output is calibrated, but {path} has no calibration, as of a run of an earlier version; "
                    "train its run again and export it, or choose probabilities"
                )
            self._slope, self._offset = torch.tensor(scales, device=self.device).unbind(1)
        self._load_package = partial(artifact.load_model, path, sums[artifact.MODEL])
        self.package = self._load_package()
        #: The constants of the package; None for those of the artifact.
        self._constants: dict[str, Tensor] | None = None
        self.identity = artifact.sha256_of(path)[:12]
        self.served = Served(self.identity, info.run, info.checkpoint, output)
        #: Number of the published version that scores, see `jfi.serving.published`; None of an artifact alone.
        self.version: int | None = None
        #: False from the begin of a change to its end: while it runs, and after one that could not be undone.
        self.is_whole = True
        self._check(path)

    def _check(self, path: Path) -> None:
        """Checks that fields, vocabularies, tables and labels fit each other, by requests without values."""
        schema = self.info.schema
        try:
            shapes = shapes_of(batch_inputs([self.example()], self.inputs, self.tables, self.device))
            if self.package.get_metadata().get(artifact.SHAPES) != shapes:
                raise ValueError(f"{artifact.MODEL} takes other inputs than {artifact.INFO} says")
            empty = {
                part: [{name: 0 if kind == "age" else None for name, kind in kinds.items()}]
                for part, kinds in self.reader.fields.items()
            }
            codec = {} if schema.codec is None else {"codec": schema.codec}
            self.score([self.reader(empty | {"user": empty["user"][0]} | codec)])
            for one in schema.user + schema.candidate + schema.event:
                count = len(schema.vocabularies.get(one.name, ())) if one.encoding() is None else 0
                if any(table.rows <= count and set(table.keys) & {*one.keys} for table in self.info.tables.values()):
                    raise ValueError(f"'{one.name}' has {count} values, and its table not as many rows")
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            what = error if isinstance(error, ValueError) else repr(error)
            raise ArtifactError(f"{path} is damaged: {what}") from None

    def example(self, ids: Mapping[str, int] | None = None) -> Request:
        """A request of one event and one candidate, whose ids are those of tables in `ids`, and unknown otherwise."""
        example = example_request(self.reader.schema, self.inputs, 1, 1)
        for table, number in (ids or {}).items():
            for key in example.ids.keys() & self.info.tables[table].keys:
                example.ids[key][:] = number
        return example

    def check_scores(self, ids: Mapping[str, int] | None = None) -> None:
        """Raises NotFiniteError if the score of an example is infinite or NaN."""
        check_finite(self.score([self.example(ids)])[0], self.version)

    def prepare(self, change: Change) -> Callable[[], None]:
        """Does what takes long of a change, in any thread, while `score` runs.

        Returns:
            what makes the scorer that of the published version, in place; call it between two calls of `score`, and
            before another change is prepared. It scores an example with the rows that have the largest values; after
            an error, or scores that are not finite, the scorer is as before, or answers no more: see `is_whole`.
        """
        rows_of_ids = {
            table: self.tables.rows[table].changed(rows, ids)
            for table, (rows, _, ids) in change.rows.items()
            if ids is not None
        }
        own = {table: (rows, values, rows_of_ids.get(table)) for table, (rows, values, _) in change.rows.items()}
        largest = change.largest_ids()

        def apply() -> None:
            tables, constants = self.tables if change.tables is None else change.tables, change.constants
            before = self.version, self.tables, self._constants
            kept = {table: (rows, *self.tables.read_rows(table, rows)) for table, (rows, _, _) in own.items()}
            try:
                self._become(change.version, tables, constants or self._constants, own)
                self.check_scores(largest)
            except Exception:
                self._become(*before, kept)
                raise

        return apply

    def _become(self, version: int | None, tables: Tables, constants: dict[str, Tensor] | None, rows: dict) -> None:
        """Makes the scorer that of a version, with `rows` of its tables replaced, as by FloatTables.write_rows."""
        self.is_whole = False
        if constants is not self._constants:  # first, since a fault of theirs is the likeliest
            self._constants = {}  # those of no version, until all are loaded
            if constants is None:
                self.package = self._load_package()
            else:
                self.package.load_constants(constants, check_full_update=False)
        self.tables, self._constants = tables, constants
        for table, own in rows.items():
            tables.write_rows(table, *own)
        self.served = msgspec.structs.replace(self.served, checkpoint=None if constants else self.info.checkpoint)
        self.version, self.is_whole = version, True

    def apply(self, change: Change) -> None:
        """Makes the scorer that of a published version, see `prepare`."""
        self.prepare(change)()

    def score(self, requests: list[Request]) -> list[Answer]:
        """The scores of each request's candidates, as `output` says; of several labels by name.

        Raises:
            StoreUnavailableError: the store of the users' events does not answer.
            InputError: the state of users is damaged.
            RuntimeError: a published version could not be applied whole; another scorer has to take its place.
        """
        if not self.is_whole:
            raise RuntimeError(f"a change of version {self.version} has failed; its model answers no more")
        for request in requests:
            request.version, request.model = self.version, self.served
        given, requests = requests, self._with_stored(requests)
        for request, whole in zip(given, requests, strict=True):
            request.filled = None if whole is request else whole
        if not self.info.padded:
            return self._score(requests)
        answers = {}
        for group in group_by_size(requests):
            answers |= zip(group, self._score([requests[i] for i in group]), strict=True)
        return [answers[i] for i in range(len(requests))]

    def _with_stored(self, requests: list[Request]) -> list[Request]:
        """The requests with what they read from the state, or without if it does not answer and that is allowed."""
        if self.state is None:
            return requests
        try:
            return self.state.fill(requests)
        except (StoreUnavailableError, InputError) as error:
            for request in requests:
                if request.stored is not None:
                    request.stored.mark_unavailable()
            if isinstance(error, InputError) or not self._settings.cold_if_unavailable:
                raise
        return self.state.fill(requests, is_available=False)

    @torch.no_grad()
    def _score(self, requests: list[Request]) -> list[Answer]:
        count = len(requests)
        if self.inputs.history and not any(request.num_events for request in requests):
            requests = [*requests, self.example()]  # the package reads row 0 of the events, so there must be one
        inputs = batch_inputs(requests, self.inputs, self.tables, self.device)
        scores = self.package(*inputs)
        if self._to_probability is not None:
            scores = (scores * self._slope + self._offset).sigmoid().where(self._to_probability, scores)
        scores, labels = scores.cpu().numpy(), self.info.schema.labels
        ends = np.cumsum([request.num_candidates for request in requests[:-1]], dtype=np.int64)
        parts = np.split(scores, ends)[:count]
        if not labels:
            return [part.tolist() for part in parts]
        return [dict(zip(labels, part.T.tolist(), strict=True)) for part in parts]


def _naming(path: Path, read: Callable[[], T]) -> T:
    """Reads a state of users; a fault names the artifact that cannot be served with it."""
    try:
        return read()
    except (KeyError, ValueError, StoreUnavailableError) as fault:
        raise ArtifactError(f"{path} cannot be served with this state of users: {fault}") from None


def example_request(schema: Schema, inputs: Inputs, events: int, candidates: int) -> Request:
    """A request whose ids, ages and dense features are all 0."""
    sizes = dict.fromkeys(inputs.history, events) | dict.fromkeys(inputs.users, 1)
    sizes |= dict.fromkeys(inputs.candidates, candidates)
    rows = schema.user + schema.candidate
    num_dense = sum(one.kind == "number" for one in rows)
    return Request(
        ids={key: np.zeros(size, np.int64) for key, size in sizes.items()},
        counts={one.keys[0]: np.ones(sizes[one.keys[0]], np.int64) for one in rows if one.kind == "categories"},
        ages=np.zeros(events, np.int64),
        dense=np.zeros((candidates, max(1, num_dense)), np.float32),
        num_events=events,
        num_candidates=candidates,
    )


def group_by_size(requests: list[Request]) -> list[list[int]]:
    """Groups of indices of requests to pad and score together, where padding at most doubles the work of a request."""

    def work(group: list[int]) -> int:
        events = max(requests[i].num_events for i in group)
        return events * (events + max(requests[i].num_candidates for i in group))

    works = [work([i]) for i in range(len(requests))]
    groups: list[list[int]] = []
    for i in sorted(range(len(requests)), key=lambda i: -works[i]):
        # Padding a small request costs less than another call.
        if groups and work([*groups[-1], i]) <= max(2 * works[i], _SMALL_WORK):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def batch_inputs(requests: list[Request], inputs: Inputs, tables: Tables, device: torch.device) -> tuple:
    """The arguments of `ScoringModel.forward` for a batch of requests, which is a user each."""
    numbers = {f"ids/{key}": _joined([request.ids[key] for request in requests]) for key in inputs.keys}
    for key in requests[0].counts:
        numbers[f"counts/{key}"] = _joined([request.counts[key] for request in requests])
    events = np.array([request.num_events for request in requests])
    candidates = np.array([request.num_candidates for request in requests])
    for key in inputs.buckets:
        numbers[f"buckets/{key}"] = _joined([request.ages for request in requests])
    for name, lengths in (("history", events), ("candidates", candidates)):
        numbers[f"{name}/offsets"] = np.append(0, np.cumsum(lengths))
        numbers[f"{name}/owner"] = np.repeat(np.arange(len(lengths)), lengths)
        numbers[f"{name}/positions"] = np.arange(lengths.max())
    on_device = _move(numbers, device)

    ids = {key: on_device[f"ids/{key}"] for key in inputs.keys}
    embeddings = tables({key: own for key, own in ids.items() if key not in inputs.semantic})
    embeddings |= {key: ids[key] for key in inputs.semantic}
    for key in requests[0].counts:
        counts = on_device[f"counts/{key}"]
        embeddings[key] = torch.segment_reduce(embeddings[key], "sum", lengths=counts, unsafe=True, initial=0)
    dense = torch.from_numpy(_joined([request.dense for request in requests])).to(device)
    segments = (on_device[f"{name}/{part}"] for name in ("history", "candidates") for part in _SEGMENTS)
    groups = ({key: embeddings[key] for key in keys} for keys in (inputs.history, inputs.users, inputs.candidates))
    buckets = {key: on_device[f"buckets/{key}"] for key in inputs.buckets}
    if not inputs.weights:
        return *groups, dense, buckets, *segments
    weights = [np.ones(one.num_events, np.float32) if one.weights is None else one.weights for one in requests]
    return *groups, dense, buckets, *segments, torch.from_numpy(np.concatenate(weights)).to(device)


def shapes_of(inputs: tuple) -> str:
    """Returns a text of the dtypes and the sizes that no batch changes, of the result of `batch_inputs`.

    Compiled code does not check them itself: a table of another width would have it read beyond the table.
    """

    def one(value: Tensor | dict[str, Tensor]) -> object:
        if isinstance(value, dict):
            return {key: one(tensor) for key, tensor in value.items()}
        return [str(value.dtype), *value.shape[1:]]

    return json.dumps([one(value) for value in inputs])


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _move(numbers: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Moves integer arrays to a device, as int64 tensors, in one copy."""
    starts, end = {}, 0
    for name, values in numbers.items():
        starts[name] = end
        end += -(-len(values) // _ALIGNMENT) * _ALIGNMENT
    # A GPU copies pinned memory while the host goes on, without a copy of the driver's in between.
    joined = torch.empty(end, dtype=torch.int64, pin_memory=device.type == "cuda")  # nobody reads what lies between
    array = joined.numpy()
    for name, values in numbers.items():
        array[starts[name] : starts[name] + len(values)] = values
    moved = joined.to(device, non_blocking=True)
    return {name: moved[starts[name] : starts[name] + len(values)] for name, values in numbers.items()}


def _limits(path: Path, info: Info, max_candidates: int | None, max_history: int | None) -> Limits:
    """The limits of a request, those of the artifact where None."""
    own = info.limits
    limits = Limits(max_candidates or own.max_candidates, max_history or own.max_history)
    if info.schema.policy is not None and limits.max_history > own.max_history:
        why = f"its policy goes by the newest {own.max_history} events of a history, as in training"
        raise ArtifactError(f"{path}: max_history is {limits.max_history}, must be at most {own.max_history}; {why}")
    return limits
