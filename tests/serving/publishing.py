"""A model that trains and its publisher, for the tests of published versions."""

import copy
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jfi.data import load_dataset
from jfi.models import SequenceDLRM
from jfi.serving.artifact import INFO
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export
from jfi.serving.publish import Publisher
from jfi.serving.published import ARTIFACT, MANIFEST, path_of
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.serving.version_chain import VersionChain
from jfi.training.model.build_model import build_model
from jfi.training.run.saved_run import load_run
from jfi.utils.files import SUMS, sha256_of, write_file, write_sums


class Trainee:
    """The model of a run, in training again, by Adam for its dense part; the same from each call on."""

    def __init__(self, run: Path, fused: bool = True, ema_decay: float | None = None) -> None:
        self._run, saved = run, load_run(run)
        config = saved.config
        optimizer = replace(config.optimizer, ema_decay=ema_decay) if fused else None
        self.model: SequenceDLRM = build_model(config.model, config.encoder, saved.schema, optimizer=optimizer)
        self.model.load_state_dict(saved.model.state_dict())
        tables = {id(p) for part in self.collections for p in part.parameters()}
        dense = [p for p in self.model.parameters() if id(p) not in tables]
        self._optimizer = torch.optim.Adam(dense, lr=1e-2)
        self._batches = itertools.cycle(list(load_dataset(config.data).batches("train", 8))[:40])
        reads_age = any(feature.bias_key is not None for feature in self.model.sequence_arch.features)
        self.schema = schema_of(config.data, saved.schema, True, reads_age)
        self.limits = Limits(1000, saved.schema.max_history)

    def with_plain_tables(self) -> "Trainee":
        return Trainee(self._run, fused=False)

    def with_averages(self) -> "Trainee":
        return Trainee(self._run, ema_decay=0.9)

    @property
    def collections(self) -> list[torch.nn.Module]:
        both = self.model.embedding_bag_collection, self.model.embedding_collection
        return [one for one in both if one is not None]

    def train(self, steps: int = 1) -> None:
        for batch in itertools.islice(self._batches, steps):
            self._optimizer.zero_grad()
            found = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
            torch.nn.functional.binary_cross_entropy_with_logits(
                found, (found.detach() > 0).logical_not().float()
            ).backward()
            self._optimizer.step()

    def publisher(self, folder: Path, **how: object) -> Publisher:
        return Publisher(folder, Export(self.model, self.schema, self.limits), **how)

    def export(self) -> Export:
        """The model as it is now."""
        return Export(copy.deepcopy(self.model), self.schema, self.limits)


def publish_some(run: Path, folder: Path) -> None:
    """Publishes an artifact, three deltas, a snapshot and a delta; writes what `Published` reads."""
    trainee = Trainee(run)
    publisher, fresh, positions = trainee.publisher(folder / "versions", compact_every=3, compact_ratio=9.0), {}, {}
    for steps in (0, 1, 3, 2, 5):
        trainee.train(steps)
        number = publisher.publish(log_position={"steps": steps})
        positions[number] = {"steps": steps}
        if number in (3, 6):  # compiling is what takes long
            trainee.export().write(path := folder / f"fresh-{number}")
            fresh[number] = scores(Scorer(path))
    write_file(folder / "wanted.json", json.dumps({"fresh": fresh, "positions": positions}))


class Published:
    """What `publish_some` has written: the folder, and by version the scores of fresh exports and log positions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "versions"
        wanted = json.loads((folder / "wanted.json").read_text())
        self.fresh, self.positions = (
            {int(key): one for key, one in wanted[name].items()} for name in ("fresh", "positions")
        )


def bodies() -> list[dict]:
    """Requests that read different rows of all tables."""
    return [
        {
            "user": {},
            "history": [
                {"item": i + j, "category": (i + j) % 5, "rating": 3, "age": 60.0 * j + 1} for j in range(i % 7)
            ],
            "candidates": [{"item": 3 * i + j, "category": j % 5} for j in range(1 + i % 4)],
        }
        for i in range(20)
    ]


def scores(scorer: Scorer) -> list:
    """The scores of `bodies`, which all say the version."""
    requests = [scorer.reader(body) for body in bodies()]
    assert {request.version for request in requests} == {None}
    found = scorer.score(requests)
    assert {request.version for request in requests} == {scorer.version}
    return found


def follow(chain: VersionChain, scorer: Scorer) -> Scorer:
    """Applies all steps that there are."""
    while (step := chain.next(scorer.is_whole)) is not None:
        try:
            scorer = step.apply_to(scorer)
        except Exception as error:
            chain.refuse(step, error)
        else:
            chain.done(step)
    return scorer


def add(folder: Path, source: Path, number: int) -> None:
    """Adds a version of another folder, at once, as a publisher does."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(path_of(source, number), folder / "unfinished")
    (folder / "unfinished").rename(path_of(folder, number))


def damage(path: Path) -> None:
    """Changes a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, content: str | None = None, **changes: object) -> None:
    """Changes fields of a version's manifest, and gives it right checksums."""
    manifest = path / MANIFEST
    manifest.write_text(content or json.dumps(json.loads(manifest.read_text()) | changes))
    write_sums(path, {one.name: sha256_of(one) for one in path.iterdir() if one.is_file() and one.name != SUMS})


def new_base(folder: Path, source: Path, number: int, **info: object) -> None:
    """Adds a whole version whose artifact differs in artifact.json."""
    path = path_of(folder, number)
    shutil.copytree(path_of(source, 1), folder / "unfinished")
    own = folder / "unfinished" / ARTIFACT
    (own / INFO).write_text(json.dumps(json.loads((own / INFO).read_text()) | info))
    write_sums(own, {one.name: sha256_of(one) for one in own.iterdir() if one.name != SUMS})
    rewrite(folder / "unfinished", version=number, base=sha256_of(own / SUMS), base_version=number)
    (folder / "unfinished").rename(path)


def huge(path: Path) -> None:
    """Finite numbers whose products are not."""
    tensors = load_file(path)
    float32 = {name: one for name, one in tensors.items() if one.is_floating_point()}
    save_file(tensors | {name: torch.full_like(one, 3e38) for name, one in float32.items()}, path)
    rewrite(path.parent)


def half_applied(monkeypatch: pytest.MonkeyPatch, number: int, can_be_undone: bool = False) -> None:
    """Makes applying a version fail, after its constants have been written, and what undoes it unless it can be."""
    become, has_failed = Scorer._become, []

    def other(self: Scorer, version: int, tables: object, constants: object, rows: dict) -> None:
        if version == number or (self in has_failed and not can_be_undone):
            has_failed.append(self)
            rows = {"no table": next(iter(rows.values()))}
        become(self, version, tables, constants, rows)

    monkeypatch.setattr(Scorer, "_become", other)
