"""A model that trains and its publisher, for the tests of published versions."""

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import torch

from jfi.data import load_dataset
from jfi.models import SequenceDLRM
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import export
from jfi.serving.publish import Publisher
from jfi.serving.schema import Limits
from jfi.training.model.build_model import build_model
from jfi.training.run.saved_run import load_run


class Trainee:
    """The model of a run, in training again, by Adam for its dense part; the same from each call on."""

    def __init__(self, run: Path) -> None:
        saved = load_run(run)
        config = saved.config
        optimizer = replace(config.optimizer, ema_decay=None)
        self.model: SequenceDLRM = build_model(config.model, config.encoder, saved.schema, optimizer=optimizer)
        self.model.load_state_dict(saved.model.state_dict())
        tables = {id(p) for part in self.collections for p in part.parameters()}
        dense = [p for p in self.model.parameters() if id(p) not in tables]
        self._optimizer = torch.optim.Adam(dense, lr=1e-2)
        self._batches = itertools.cycle(list(load_dataset(config.data).batches("train", 8))[:40])
        reads_age = any(feature.bias_key is not None for feature in self.model.sequence_arch.features)
        self.schema = schema_of(config.data, saved.schema, True, reads_age)
        self.limits = Limits(1000, saved.schema.max_history)

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
        return Publisher(folder, self.model, self.schema, self.limits, **how)

    def export(self, path: Path) -> Path:
        """An artifact of the model as it is now."""
        export(path, copy.deepcopy(self.model), self.schema, self.limits)
        return path
