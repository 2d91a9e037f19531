"""Scores requests with what an artifact holds: encodes, looks embeddings up, calls the package of the dense part."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._inductor import aoti_load_package

from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError
from jfi.serving.fields import Field, Fields, Limits, Request, RequestReader
from jfi.serving.tables import Tables, load_tables

#: Slices of a joined tensor begin at multiples of this: kernels are compiled for addresses of 16 bytes.
_ALIGNMENT = 2
#: Pairs of rows of a request that take no longer than a call's overhead.
_SMALL_WORK = 2**16
_SEGMENTS = ("offsets", "owner", "places")


@dataclass(frozen=True)
class Inputs:
    """What the dense part reads, in its order.

    Args:
        history, users, candidates: keys of embeddings.
        positions: by name of a score bias that goes by an event's distance from the newest, the rows of its table.
        ages: names of score biases that go by the bucket of an event's age.
    """

    history: list[str]
    users: list[str]
    candidates: list[str]
    positions: dict[str, int]
    ages: list[str]

    @property
    def keys(self) -> list[str]:
        return [*self.history, *self.users, *self.candidates]


class Scorer:
    """An artifact in use.

    Args:
        path: of the artifact.
        tables_device: where the tables lie; the device of the dense part unless told otherwise.
        max_candidates, max_history: of a request; those of the artifact unless told otherwise.

    Raises:
        ArtifactError: it cannot be used, here or at all.
    """

    def __init__(
        self,
        path: Path,
        tables_device: str | None = None,
        max_candidates: int | None = None,
        max_history: int | None = None,
    ) -> None:
        self.info = info = artifact.read(path)
        _check_place(path, info, tables_device)
        self.device = torch.device(info["device"])
        fields = {part: [Field(**one) for one in of] for part, of in info["fields"].items()}
        vocabularies = artifact.read_json(path / artifact.VOCABULARIES)
        limits = Limits(
            max_candidates or info["limits"]["max_candidates"], max_history or info["limits"]["max_history"]
        )
        self.reader = RequestReader(Fields(**fields, vocabularies=vocabularies), limits)
        self.inputs = Inputs(**info["inputs"])
        self.tables = load_tables(
            path / artifact.TABLES,
            info["tables"],
            info["table_sizes"],
            info["table_of"],
            info["embedding_dim"],
            torch.device(tables_device or info["device"]),
        )
        self.package = aoti_load_package(str(path / artifact.MODEL))

    def score(self, requests: list[Request]) -> list[list[float]]:
        """The logits of each request's candidates."""
        if not self.info["padded"]:
            return self._score(requests)
        answers = {}
        for places in groups_alike(requests):
            answers |= zip(places, self._score([requests[place] for place in places]), strict=True)
        return [answers[place] for place in range(len(requests))]

    @torch.no_grad()
    def _score(self, requests: list[Request]) -> list[list[float]]:
        inputs = batch_inputs(requests, self.inputs, self.tables, self.device)
        scores = self.package(*inputs).cpu().numpy()
        ends = np.cumsum([request.num_candidates for request in requests])
        return [part.tolist() for part in np.split(scores, ends[:-1])]


def groups_alike(requests: list[Request]) -> list[list[int]]:
    """Places of requests to score together: padded to the longest, none has more padding than work of its own."""

    def work(group: list[int]) -> int:
        events = max(requests[place].num_events for place in group)
        return events * (events + max(requests[place].num_candidates for place in group))

    works = [work([place]) for place in range(len(requests))]
    groups: list[list[int]] = []
    for place in sorted(range(len(requests)), key=lambda place: -works[place]):
        # What is small is sooner padded than scored alone.
        if groups and work([*groups[-1], place]) <= max(2 * works[place], _SMALL_WORK):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def batch_inputs(requests: list[Request], inputs: Inputs, tables: Tables, device: torch.device) -> tuple:
    """Arguments of `ScoringModel.forward` for requests: a user each, and the candidates of all."""
    numbers = {f"ids/{key}": np.concatenate([request.ids[key] for request in requests]) for key in inputs.keys}
    for key in requests[0].counts:
        numbers[f"counts/{key}"] = np.concatenate([request.counts[key] for request in requests])
    events = np.array([request.num_events for request in requests])
    candidates = np.array([request.num_candidates for request in requests])
    for name, rows in inputs.positions.items():
        numbers[f"buckets/{name}"] = np.concatenate([_positions(request.num_events, rows) for request in requests])
    for name in inputs.ages:
        numbers[f"buckets/{name}"] = np.concatenate([request.ages for request in requests])
    for name, lengths in (("history", events), ("candidates", candidates)):
        numbers[f"{name}/offsets"] = np.append(0, np.cumsum(lengths))
        numbers[f"{name}/owner"] = np.repeat(np.arange(len(lengths)), lengths)
        numbers[f"{name}/places"] = np.arange(lengths.max())
    on_device = _move(numbers, device)

    embeddings = tables({key: on_device[f"ids/{key}"] for key in inputs.keys})
    for key in requests[0].counts:
        counts = on_device[f"counts/{key}"]
        embeddings[key] = torch.segment_reduce(embeddings[key], "sum", lengths=counts, unsafe=True, initial=0)
    dense = torch.from_numpy(np.concatenate([request.dense for request in requests])).to(device)
    segments = (on_device[f"{name}/{part}"] for name in ("history", "candidates") for part in _SEGMENTS)
    groups = ({key: embeddings[key] for key in keys} for keys in (inputs.history, inputs.users, inputs.candidates))
    buckets = {name: on_device[f"buckets/{name}"] for name in (*inputs.positions, *inputs.ages)}
    return *groups, dense, buckets, *segments


def _positions(num_events: int, rows: int) -> np.ndarray:
    """Buckets of the distance d from the newest event, floor(log2(d + 1))."""
    return np.minimum(np.frexp(np.arange(num_events, 0, -1.0))[1] - 1, rows - 1)


def _move(numbers: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Integers as int64 tensors on a device, in one copy."""
    starts, end = {}, 0
    for name, values in numbers.items():
        starts[name] = end
        end += -(-len(values) // _ALIGNMENT) * _ALIGNMENT
    joined = np.zeros(end, np.int64)
    for name, values in numbers.items():
        joined[starts[name] : starts[name] + len(values)] = values
    moved = torch.from_numpy(joined).to(device)
    return {name: moved[starts[name] : starts[name] + len(values)] for name, values in numbers.items()}


def _check_place(path: Path, info: dict, tables_device: str | None) -> None:
    made, here = info["versions"]["torch"], torch.__version__.split("+")[0]
    if made.split(".")[:2] != here.split(".")[:2]:
        raise ArtifactError(f"{path} was made with torch {made}, this is {here}; export again")
    if tables_device == "cuda" and not torch.cuda.is_available():
        raise ArtifactError("tables cannot lie on a GPU: there is none here")
    if info["device"] == "cuda":
        if not torch.cuda.is_available():
            raise ArtifactError(f"{path} was made for a GPU, and there is none; export with --device cpu")
        if (name := torch.cuda.get_device_name()) != info["gpu"]:
            raise ArtifactError(f"{path} was made for an {info['gpu']}, this is an {name}; export again")
