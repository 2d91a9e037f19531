"""Trains one of FuxiCTR's models on rows that `benchmarks.quality.fuxictr` wrote; runs in the peers' own environment.

    python -m benchmarks.quality.fuxictr_training job.json

The job, which benchmarks/quality/fuxictr.py writes, names the folder with the rows, the model, its settings and the
files for the result. Nothing here imports jfi, and nothing of FuxiCTR is copied: its models, its optimizer and its loop
with early stopping do the work, and this file gives them batches in the layout that they read.

FuxiCTR's models take one of two layouts. Those of model_zoo/LongCTR take (context, fields of events and target
together, mask); BST, DMIN and DMR take a dictionary of target fields and of sequence fields.
"""

import importlib.util
import json
import logging
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

#: Models whose attention reads the newest events from the end of the sequence, so that padding comes first. DIEN packs
#: its sequences for a GRU, for which padding must follow.
PADDED_BEHIND = ("DIEN",)
#: Models outside of model_zoo/LongCTR, which the PyPI package lacks, and their arguments for target and sequence.
BY_FIELD = {
    "BST": ("bst_target_field", "bst_sequence_field"),
    "DMIN": ("target_field", "sequence_field"),
    "DMR": ("target_field", "sequence_field"),
}


class Rows:
    """The rows of a split as arrays; ids are from 1, and 0 is padding."""

    def __init__(self, folder: Path, split: str, fields: list[str], context: list[str]) -> None:
        with np.load(folder / f"{split}.npz") as found:
            self.labels = torch.from_numpy(found["labels"])
            self.offsets = torch.from_numpy(found["offsets"])
            self.dense = torch.from_numpy(found["dense"])
            self.context = {name: torch.from_numpy(found[f"context.{name}"]) for name in context}
            self.target = {name: torch.from_numpy(found[f"target.{name}"].astype(np.int32)) for name in fields}
            self.events = {name: torch.from_numpy(found[f"events.{name}"].astype(np.int32)) for name in fields}

    def padded(self, rows: torch.Tensor, width: int, behind: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """By field the events of `rows` as `[B, width]`, and the mask of those that are no padding."""
        start, end = self.offsets[rows], self.offsets[rows + 1]
        places = torch.arange(width)
        place = start[:, None] + places if behind else end[:, None] - width + places
        mask = (place >= start[:, None]) & (place < end[:, None])
        place = place.clamp(0, max(int(self.offsets[-1]) - 1, 0))
        none = torch.zeros(1, dtype=torch.int32)
        events = {name: (ids if len(ids) else none)[place] * mask for name, ids in self.events.items()}
        return events, mask


class Batches:
    """An epoch of batches in the layout of the model; iterated anew for each epoch."""

    def __init__(self, rows: Rows, job: dict, meta: dict, shuffle: bool) -> None:
        self.rows, self.meta, self.shuffle = rows, meta, shuffle
        self.size = job["batch_size"] if shuffle else 4 * job["batch_size"]
        self.by_field = job["model"] in BY_FIELD
        self.behind = job["model"] in PADDED_BEHIND
        # SIM, ETA, SDIM and TWIN read this number of places from the end, also where all histories are shorter.
        self.narrowest = job["settings"].get("short_seq_len", 1)
        self.generator = torch.Generator().manual_seed(job["seed"])

    def __len__(self) -> int:
        return -(-len(self.rows.labels) // self.size)

    def __iter__(self) -> Iterator:
        count = len(self.rows.labels)
        order = torch.randperm(count, generator=self.generator) if self.shuffle else torch.arange(count)
        return map(self.batch, order.split(self.size))

    def batch(self, rows: torch.Tensor):
        context = {name: ids[rows] for name, ids in self.rows.context.items()}
        for number, name in enumerate(self.meta["dense"]):
            context[name] = self.rows.dense[rows, number]
        context["label"] = self.rows.labels[rows]
        target = {name: ids[rows] for name, ids in self.rows.target.items()}
        longest = int((self.rows.offsets[rows + 1] - self.rows.offsets[rows]).max())
        width = self.meta["max_history"] if self.by_field else max(self.narrowest, longest)
        events, mask = self.rows.padded(rows, width, self.behind)
        if self.by_field:
            return context | target | {f"history_{name}": ids for name, ids in events.items()}
        together = {name: torch.cat([ids, target[name][:, None]], dim=1).flatten() for name, ids in events.items()}
        return context, together, mask.float()


def feature_map(job: dict, meta: dict):
    """FuxiCTR's description of the columns, made here as its FeatureProcessor would make it of raw tables."""
    from fuxictr.features import FeatureMap

    features: OrderedDict[str, dict] = OrderedDict()
    tables: dict[str, str] = {}

    def add(name: str, table: str, size: int, kind: str = "categorical", **more: object) -> None:
        spec = {"type": kind, "source": "", "vocab_size": size, "padding_idx": 0, "oov_idx": 1, **more}
        if table in tables:
            spec["share_embedding"] = tables[table]
        tables.setdefault(table, name)
        features[name] = spec

    for one in meta["context"]:
        pooled = {"feature_encoder": "layers.MaskedAveragePooling()", "max_len": one["width"]}
        several = one["width"] > 1
        kind, more = ("sequence", pooled) if several else ("categorical", {})
        add(one["name"], one["table"], one["vocab_size"], kind, **more)
    for name in meta["dense"]:
        features[name] = {"type": "numeric", "source": ""}
    for one in meta["fields"]:
        add(one["name"], one["table"], one["vocab_size"], source="item")
    if job["model"] in BY_FIELD:
        for one in meta["fields"]:
            add(f"history_{one['name']}", one["table"], one["vocab_size"], "sequence", max_len=meta["max_history"])
    found = FeatureMap("rows", job["folder"])
    found.features, found.labels = features, ["label"]
    found.default_emb_dim = job["settings"]["embedding_dim"]
    found.num_fields = found.get_num_fields()
    found.set_column_index()
    return found


def model_class(job: dict):
    name = job["model"]
    if name not in BY_FIELD:
        return getattr(importlib.import_module(f"model_zoo.LongCTR.{name}"), name)
    path = Path(job["model_zoo"]) / name / "src" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"fuxictr_{name.lower()}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def train(job: dict) -> dict:
    """Trains with FuxiCTR's own loop; writes the scores of both held-out splits and returns what it took."""
    from fuxictr.pytorch.torch_utils import seed_everything

    folder = Path(job["folder"])
    meta = json.loads((folder / "meta.json").read_text())
    fields, context = ([one["name"] for one in meta[part]] for part in ("fields", "context"))
    parts = {split: Rows(folder, split, fields, context) for split in ("train", "validation", "test")}
    batches = {split: Batches(rows, job, meta, split == "train") for split, rows in parts.items()}
    seed_everything(job["seed"])
    settings = dict(job["settings"])
    if job["model"] in BY_FIELD:
        target, sequence = BY_FIELD[job["model"]]
        settings |= {target: [tuple(fields)], sequence: [tuple(f"history_{name}" for name in fields)]}
    with tempfile.TemporaryDirectory() as checkpoints:
        model = model_class(job)(
            feature_map(job, meta),
            gpu=0 if torch.cuda.is_available() else -1,
            task="binary_classification",
            optimizer="adam",
            loss="binary_crossentropy",
            metrics=["AUC"],
            monitor="AUC",
            monitor_mode="max",
            early_stop_patience=job["patience"],
            model_root=checkpoints,
            verbose=0,
            **settings,
        )
        Path(model.model_dir).mkdir(parents=True, exist_ok=True)
        evaluating = 0.0
        evaluate = model.evaluate

        def timed(*args: object, **kwargs: object):
            nonlocal evaluating
            begin = time.perf_counter()
            found = evaluate(*args, **kwargs)
            evaluating += time.perf_counter() - begin
            return found

        model.evaluate = timed
        begin = time.perf_counter()
        model.fit(batches["train"], epochs=job["epochs"], validation_data=batches["validation"])
        seconds = time.perf_counter() - begin - evaluating
        epochs = model._epoch_index + 1
        scores = {split: model.predict(batches[split]) for split in ("validation", "test")}
    np.savez(job["scores"], **scores)
    return {
        "train_seconds": seconds,
        "epochs": epochs,
        "best_epoch": epochs - model._stopping_steps,
        "parameters": sum(one.numel() for one in model.parameters() if one.requires_grad),
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["result"]).write_text(json.dumps(train(job)))


if __name__ == "__main__":
    main()
