"""Settings that follow from a table, its size and what pilots on it show: `training.preset: auto`.

A pilot is a training whose scores of the validation rows are kept and nothing else. Pilots decide what no size tells,
each part against the first pilot, which has the settings by size:

    content       with semantic IDs a pilot without the item's id; the id stays only if it makes the AUC better by more
                  than `evidence.ERRORS` standard errors, since content describes new items too
    labels        where the label is a threshold, such as `rating >= 4`, a pilot with `data.auxiliary_labels` of a
                  smaller and a greater one: the better AUC
    recency       a pilot with heads by recency in the place of those by position, which cost the same: the better AUC
    statistics    boosted trees of the pilot's scores and of `data.statistics`, on users that they were not fitted to;
                  statistics must gain more than `evidence.ERRORS` standard errors, since requests must then have them

docs/quality.md compares the preset with tuned settings on tables of 40,000 to 180,000 training samples. Larger tables
were not measured, so that from `_LARGE` samples on rates and batch size stay as they are, and there are no pilots.
"""

import dataclasses
from typing import Any

import numpy as np

from jfi.data import DataError, InteractionDataset, load_dataset
from jfi.data.config import AGE, HISTORY, STATISTICS
from jfi.data.io.blocks import iterate_tables
from jfi.training.config import Config, ConfigError
from jfi.training.distributed import World
from jfi.training.evidence import auc_gain, gain_of_columns
from jfi.training.metrics import Predictions
from jfi.training.pilot import pilot_scores, statistics_of, validation_rows
from jfi.training.saved_run import BestEpoch
from jfi.training.thresholds import rules_beside
from jfi.utils.operands import MAX_BUCKETS

#: Training samples from which on the rates and the batch size stay as they are.
_LARGE = 1_000_000
#: Training samples from which on embeddings are 64 wide.
_WIDE = 150_000
#: What `data.statistics` may become: of all rows, or of the user's own, where users meet items again.
_CHOICES = (["item", "user", "similar"], ["user", "user_item"])


def apply_preset(config: Config, dataset: InteractionDataset, world: World | None = None) -> tuple[Config, list[str]]:
    """The config with the settings that `training.preset` chooses, and lines that say which and why.

    A setting that is not at its default stays as it is. With `training.warm_start` those of the model,
    `data.statistics` and `data.auxiliary_labels` are the other run's, since the parameters must fit.

    Args:
        config: of a new run; the one that is returned has no preset, so that a resumed run has the same settings.
        dataset: of the run. Where the section `data` has changed, another one must be loaded.
        world: a single process, with the device that pilots run on; None for the CPU.

    Raises:
        ConfigError: a chosen setting does not fit another one, or `training.warm_start` is not a finished run.
        FloatingPointError, Interrupted: as of a training.
    """
    if config.training.preset is None:
        return config, []
    name, settings, lines = config.training.preset, _by_size(config, dataset.num_samples("train")), []
    other = None
    if config.training.warm_start is not None:
        other = BestEpoch.of(config.training.warm_start, "training.warm_start: run").config
        settings |= {key: _get(other, key.split(".")) for key in settings if key.startswith("model.")}
        settings["model.item_id"] = other.model.item_id
        if config.data.prepared is None:
            settings["data.statistics"] = other.data.statistics
            settings["data.auxiliary_labels"] = other.data.auxiliary_labels
        settings = _free(config, settings)
    else:
        settings = _free(config, settings)
        sized = _with(config, settings, name)
        found, lines = _by_pilots(config, sized, dataset, world or World())
        settings |= found
    if settings:
        chosen = ", ".join(f"{key}: {value}" for key, value in settings.items())
        taken = "" if other is None else f"; those of `model` and `data` are those of {config.training.warm_start}"
        lines = [*lines, f"training.preset chose {chosen}{taken}"]
    return _with(config, settings, name), lines


def _by_size(config: Config, samples: int) -> dict[str, Any]:
    """Returns by key what suits a table of so many training samples."""
    settings: dict[str, Any] = {"model.cross_layers": 2, "model.dropout": 0.1}
    settings["model.embedding_dim"] = 64 if samples >= _WIDE else 32
    if config.model.pooling == "attention":
        by_age = config.data.batching == "sample" or config.data.num_age_buckets <= MAX_BUCKETS
        biases = [*([HISTORY + AGE] if by_age else []), "position"]
        settings["model.bias"] = biases[0] if config.encoder.num_layers or len(biases) == 1 else biases
    if samples < _LARGE:
        settings |= {"optimizer.average": 0.98, "training.batch_size": 512 if samples < _WIDE else 1024}
        for group, rate in (("dense", 0.01), ("embeddings", 0.1)):
            # A rate suits one optimizer: Adam's for the tables is another than Adagrad's.
            if getattr(config.optimizer, group).name == getattr(_DEFAULT.optimizer, group).name:
                settings[f"optimizer.{group}.learning_rate"] = rate
    return settings


def _by_pilots(
    config: Config, sized: Config, dataset: InteractionDataset, world: World
) -> tuple[dict[str, Any], list[str]]:
    """Returns by key what pilots choose, and a line for each part that was tried, or could not be."""
    samples = dataset.num_samples("train")
    if samples >= _LARGE:
        return {}, [f"training.preset tried no parts: {samples:,} training samples, {_LARGE:,} or more"]
    targets = config.data.targets()
    if len(targets) > 1 or targets[0].task != "binary":
        return {}, ["training.preset tried no parts: they are compared by the AUC of a single label"]
    parts, lines = _Parts(config, sized, dataset, world), []
    settings: dict[str, Any] = {}
    for part in (parts.content, parts.labels, parts.recency, parts.statistics):
        found, line = part()
        settings |= found
        lines += [] if line is None else [f"training.preset: {line}"]
    return settings, lines


class _Parts:
    """The parts that pilots decide: each method returns the settings that it chooses and why, None if it is not free.

    Args:
        config: as given.
        sized: with the settings by size.
        dataset: of the run.
        world: with the device.
    """

    def __init__(self, config: Config, sized: Config, dataset: InteractionDataset, world: World) -> None:
        self._config, self._sized, self._dataset, self._world = config, sized, dataset, world
        self._first: Predictions | None = None

    def content(self) -> tuple[dict[str, Any], str | None]:
        crossed = any(self._config.data.item in cross for cross in self._config.data.crosses().values())
        if self._dataset.schema.codec is None or not self._config.model.item_id or crossed:
            return {}, None
        without = self._pilot({"model.item_id": False})
        gain = auc_gain(*(one.logits[0].numpy() for one in (without, self._base())), self._labels())
        shown = f"with the item's id beside its content {gain}"
        if gain.counts:
            return {}, f"model.item_id: true stays: {shown}"
        self._sized, self._first = _with(self._sized, {"model.item_id": False}, "auto"), without
        return {"model.item_id": False}, f"model.item_id: false: {shown}"

    def labels(self) -> tuple[dict[str, Any], str | None]:
        data = self._config.data
        if data.auxiliary_labels:
            return {}, None
        for reason, holds in (
            ("they are beside data.label", self._dataset.is_implicit),
            ("a prepared dataset has its own", data.prepared is not None),
            ("the synthetic table has one label", data.source != "table"),
        ):
            if holds:
                return {}, f"data.auxiliary_labels: none: {reason}"
        # Where to cut follows from the values of all rows, those of validation and test among them.
        rules = rules_beside(data.label, (table for _, table in iterate_tables(data)))
        if not rules:
            return {}, f"data.auxiliary_labels: none: '{data.label}' is no threshold with several values on a side"
        chosen = {"data.auxiliary_labels": rules}
        try:
            made = load_dataset(_with(self._sized, chosen, "auto").data)
        except DataError as fault:  # such as a rule that holds in no training row
            return {}, f"data.auxiliary_labels: none: {fault}"
        helped = self._pilot(chosen, made)
        gain = auc_gain(*(one.logits[0].numpy() for one in (self._base(), helped)), self._labels())
        if gain.after > gain.before:
            return chosen, f"data.auxiliary_labels: {rules}: {gain}"
        return {}, f"data.auxiliary_labels: none: {rules}: {gain}"

    def recency(self) -> tuple[dict[str, Any], str | None]:
        by_position, model = self._sized.model.bias, self._sized.model
        if self._config.model.bias is not None or not isinstance(by_position, list) or model.num_heads < 2:
            return {}, None
        biases = ["recency" if bias == "position" else bias for bias in by_position]
        recent = self._pilot({"model.bias": biases})
        gain = auc_gain(*(one.logits[0].numpy() for one in (self._base(), recent)), self._labels())
        shown = f"heads by recency in the place of those by position: {gain}"
        if gain.after > gain.before:
            return {"model.bias": biases}, f"model.bias: {biases}: {shown}"
        return {}, f"model.bias: {by_position}: {shown}"

    def statistics(self) -> tuple[dict[str, Any], str | None]:
        data = self._config.data
        if data.statistics:
            return {}, None
        made = {column for names in STATISTICS.values() for column in names}
        for reason, holds in (
            ("they need data.label", self._dataset.is_implicit),
            ("a prepared dataset makes none", data.prepared is not None),
            ("the table has such columns", not made.isdisjoint(data.columns())),
        ):
            if holds:
                return {}, f"data.statistics: none: {reason}"
        base, rows = self._base(), validation_rows(self._dataset, self._sized.training.eval_batch_size)
        columns = statistics_of(self._dataset, sorted({name for names in _CHOICES for name in names}), rows)
        tried = []
        for names in _CHOICES:
            made = np.column_stack(
                [columns[name] for name in dataclasses.replace(data, statistics=names).statistics_columns()]
            )
            gain = gain_of_columns(base.logits[0].numpy(), made, self._labels(), base.users[0].numpy())
            if gain is None:
                return {}, "data.statistics: none: too few validation rows to compare them on"
            tried.append((gain, names))
        gain, names = max(tried, key=lambda one: one[0].after)
        shown = f"{names} on top of the model's scores: {gain}"
        if gain.counts:
            return {"data.statistics": names}, f"data.statistics: {shown}"
        return {}, f"data.statistics: none: {shown}"

    def _base(self) -> Predictions:
        if self._first is None:
            self._first = self._pilot({})
        return self._first

    def _pilot(self, settings: dict[str, Any], dataset: InteractionDataset | None = None) -> Predictions:
        return pilot_scores(_with(self._sized, settings, "auto"), dataset or self._dataset, self._world)

    def _labels(self) -> np.ndarray:
        return self._base().labels[0].numpy()


_DEFAULT = Config()


def _free(config: Config, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns those of the settings that the config leaves at their default, and that have another value."""
    return {
        key: value
        for key, value in settings.items()
        if _get(config, key.split(".")) == _get(_DEFAULT, key.split(".")) != value
    }


def _with(config: Config, settings: dict[str, Any], preset: str) -> Config:
    """The config with other settings and without a preset.

    Raises:
        ConfigError: a setting does not fit another one.
    """
    sections = {name: getattr(config, name) for name in ("data", "model", "encoder", "optimizer", "training")}
    try:
        for key, value in settings.items():
            section, *path = key.split(".")
            sections[section] = _set(sections[section], path, value)
        sections["training"] = dataclasses.replace(sections["training"], preset=None)
        return dataclasses.replace(config, **sections)
    except ConfigError as fault:
        raise ConfigError(f"training.preset: {preset} does not fit: {fault}") from fault


def _get(section: object, path: list[str]) -> Any:
    for name in path:
        section = getattr(section, name)
    return section


def _set(section: Any, path: list[str], value: object) -> Any:
    """A copy of the section with another value."""
    name, *rest = path
    return dataclasses.replace(section, **{name: _set(getattr(section, name), rest, value) if rest else value})
