"""FuxiCTR's models on our rows: the rows of our splits with our histories, trained by FuxiCTR's own code.

FuxiCTR (https://github.com/reczoo/FuxiCTR, Apache 2.0) is no dependency of jfi. It runs in an environment of its own,
as a process (`benchmarks.quality.fuxictr_training`), whose scores of the held-out rows come back to our metrics.
"""

import dataclasses
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from jfi.data import DataError, InteractionDataset
from jfi.data.schema.schema import FeatureSpec
from jfi.training.metrics.label_metrics import Predictions
from jfi.utils.errors import InputError

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "validation", "test")
#: What makes the peers' environment.
INSTALL = "python -m venv .venv-peers && .venv-peers/bin/pip install -r benchmarks/quality/requirements-peers.txt"


class PeerError(InputError):
    """FuxiCTR is missing or failed."""


@dataclass
class Field:
    """A field of the events, which the target has as well.

    Args:
        name: of the field, the key without `history_`.
        table: fields of one table share an embedding.
        vocab_size: all ids are below it: 0 is padding, 1 an unknown value, then the known ones, and last a target's id
            of a field that only events have.
    """

    name: str
    table: str
    vocab_size: int


@dataclass
class Context:
    """A categorical column of the user or of the context, with up to `width` values."""

    name: str
    table: str
    vocab_size: int
    width: int


@dataclass
class PeerRows:
    """The rows of a split, in the order (timestamp, user, item).

    Args:
        labels: `[N]` float32.
        users: `[N]` int64.
        dense: `[N, num_dense]` float32.
        context: by column `[N]`, or `[N, width]` padded with 0.
        target: by field `[N]`.
        events: by field `[S]`, the events of all histories, a history's oldest first.
        offsets: `[N + 1]` int64, the range of each row's events.
    """

    labels: np.ndarray
    users: np.ndarray
    dense: np.ndarray
    context: dict[str, np.ndarray]
    target: dict[str, np.ndarray]
    events: dict[str, np.ndarray]
    offsets: np.ndarray


def fields_of(dataset: InteractionDataset) -> tuple[list[Field], list[Context]]:
    """The fields of events and targets, and the columns of context."""
    fields, context = [], []
    for spec in dataset.features:
        if spec.role in ("history", "bucket"):
            fields.append(Field(_name(spec), spec.table or spec.key, spec.num_embeddings + 2))
        elif spec.role in ("user", "context"):
            context.append(Context(spec.key, spec.table, spec.num_embeddings + 2, 1))
    return fields, context


def _name(spec: FeatureSpec) -> str:
    return spec.key.removeprefix("history_")


def _padded(values: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """`[N, width]`: the first `width` ids of each row plus 1, and 0 where it has fewer."""
    out = np.zeros((len(lengths), width), np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = place < width
    out[row[kept], place[kept]] = values[kept] + 1
    return out


def peer_rows(dataset: InteractionDataset, split: str, batch_size: int = 4096) -> PeerRows:
    """The rows of a split with the histories of the dataset's own batches.

    An id is that of our batches plus 1, since FuxiCTR's 0 is padding. A multi-valued column has its first values in
    slots, for the target as for the events. A field that only events have, such as the rating or the age, has one id of
    its own in every target, so that the attention can tell it apart.
    """
    if dataset.is_implicit:
        raise DataError("FuxiCTR's models need a label; data.label is null")
    fields, context = fields_of(dataset)
    specs = {_name(spec): spec for spec in dataset.features if spec.role in ("history", "bucket")}
    items = {spec.column: spec for spec in dataset.features if spec.role == "item"}
    columns = [spec for spec in dataset.features if spec.role in ("user", "context")]
    slots = {name: 1 + max(s.slot or 0 for s in specs.values() if s.column == name) for name in items}
    parts: list[dict[str, np.ndarray]] = []
    for batch in dataset.batches(split, batch_size, batching="sample"):
        keyed = batch.sparse_features.to_dict()

        def values(key: str, keyed=keyed) -> tuple[np.ndarray, np.ndarray]:
            return keyed[key].values().numpy(), keyed[key].lengths().numpy()

        count = len(batch.labels)
        part = {"labels": batch.labels.numpy(), "users": batch.users.numpy()}
        part["dense"] = batch.dense_features.numpy()[:, : len(dataset.schema.dense_names)]
        for spec in columns:
            ids, lengths = values(spec.key)
            part[f"context.{spec.key}"] = _padded(ids, lengths, int(lengths.max(initial=1)))
        for name, spec in specs.items():
            ids, lengths = values(spec.key)
            part[f"events.{name}"], part["lengths"] = ids + 1, lengths
            item = items.get(spec.column)
            if item is None:
                part[f"target.{name}"] = np.full(count, spec.num_embeddings + 1)
            else:
                part[f"target.{name}"] = _padded(*values(item.key), slots[spec.column])[:, spec.slot or 0]
        parts.append(part)
    joined = {key: _join([part[key] for part in parts]) for key in parts[0]}
    return PeerRows(
        labels=joined["labels"],
        users=joined["users"],
        dense=joined["dense"],
        context={one.name: joined[f"context.{one.name}"] for one in context},
        target={one.name: joined[f"target.{one.name}"] for one in fields},
        events={one.name: joined[f"events.{one.name}"] for one in fields},
        offsets=np.append(0, np.cumsum(joined["lengths"])),
    )


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    if arrays[0].ndim == 2:
        width = max(one.shape[1] for one in arrays)
        arrays = [np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in arrays]
    return np.concatenate(arrays)


def write_rows(dataset: InteractionDataset, folder: Path) -> dict[str, PeerRows]:
    """Writes all splits and what `fuxictr_training` must know of them; returns the rows without their events."""
    folder.mkdir(parents=True, exist_ok=True)
    fields, context = fields_of(dataset)
    splits = {split: peer_rows(dataset, split) for split in SPLITS}
    for one in context:
        one.width = max(rows.context[one.name].shape[1] for rows in splits.values())
    for split, rows in splits.items():
        arrays = {"labels": rows.labels, "dense": rows.dense, "offsets": rows.offsets}
        for one in context:
            ids = rows.context[one.name]
            ids = np.pad(ids, ((0, 0), (0, one.width - ids.shape[1])))
            arrays[f"context.{one.name}"] = ids[:, 0] if one.width == 1 else ids
        for one in fields:
            kind = np.min_scalar_type(one.vocab_size)
            arrays[f"target.{one.name}"] = rows.target[one.name].astype(kind)
            arrays[f"events.{one.name}"] = rows.events[one.name].astype(kind)
        np.savez(folder / f"{split}.npz", **arrays)
        splits[split] = dataclasses.replace(rows, events={})
    meta = {
        "fields": [dataclasses.asdict(one) for one in fields],
        "context": [dataclasses.asdict(one) for one in context],
        "dense": [f"dense_{name}" for name in dataset.schema.dense_names],
        "max_history": dataset.schema.max_history,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return splits


@dataclass
class Peers:
    """Where FuxiCTR is.

    Args:
        python: the interpreter of the environment that has it.
        model_zoo: the folder with BST, DMIN and DMR, which the package on PyPI lacks; `fetch.py` downloads them.
    """

    python: Path = ROOT / ".venv-peers/bin/python"
    model_zoo: Path = ROOT / "data/quality/fuxictr/model_zoo"

    def check(self) -> None:
        """Raises PeerError, which names the command that helps, if the environment or the models are missing."""
        if not self.python.exists():
            raise PeerError(f"{self.python}: FuxiCTR's environment is missing; make it with: {INSTALL}")
        if not self.model_zoo.is_dir():
            command = "python -m benchmarks.quality.fetch --out data/quality fuxictr"
            raise PeerError(f"{self.model_zoo}: FuxiCTR's other models are missing; get them with: {command}")


def train_peer(
    model: str, folder: Path, splits: dict[str, PeerRows], peers: Peers, job: dict, seed: int, settings: dict
) -> dict:
    """Trains one of FuxiCTR's models on `write_rows`' folder, and returns our metrics of its scores and what it took.

    Args:
        model: name of the class.
        folder: that `write_rows` wrote.
        splits: what it returned.
        peers: where FuxiCTR is.
        job: `epochs`, `patience` and `batch_size`.
        seed: of parameters, dropout and the order of the rows.
        settings: arguments of the model.

    Raises:
        PeerError: the process failed; the message has the last 400 characters of its output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        names = {name: f"{scratch}/{name}" for name in ("job.json", "scores.npz", "result.json")}
        made = job | {
            "model": model,
            "model_zoo": str(peers.model_zoo),
            "folder": str(folder),
            "seed": seed,
            "settings": settings,
            "scores": names["scores.npz"],
            "result": names["result.json"],
        }
        Path(names["job.json"]).write_text(json.dumps(made))
        command = [str(peers.python), "-m", "benchmarks.quality.fuxictr_training", names["job.json"]]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
        if done.returncode:
            raise PeerError(f"{model} failed: {(done.stderr or done.stdout)[-400:]}")
        found = json.loads(Path(names["result.json"]).read_text())
        with np.load(names["scores.npz"]) as scores:
            for split in ("validation", "test"):
                found[split] = metrics(scores[split], splits[split].labels, splits[split].users)
    return found


def metrics(probability: np.ndarray, labels: np.ndarray, users: np.ndarray) -> dict[str, float]:
    """The metrics of jfi's training of predicted probabilities, `[N]` each."""
    seen = Predictions()
    # A sigmoid in float32 may have given 0 or 1, whose logits are infinite.
    logits = torch.logit(torch.from_numpy(probability.astype(np.float64)), eps=1e-7)
    seen.add(logits, torch.from_numpy(labels), torch.from_numpy(users))
    return seen.metrics()
