"""Settings that follow from a table's size: `training.preset: auto`.

docs/quality.md compares them with tuned settings on three tables of 80,000 to 180,000 training samples. Larger tables
were not measured, so that from `_LARGE` samples on the rates and the batch size stay as they are.
"""

import dataclasses
from typing import Any

from jfi.data import InteractionDataset
from jfi.data.config import AGE, HISTORY
from jfi.plan import MOST_BUCKETS
from jfi.training.config import Config, ConfigError
from jfi.training.saved_run import BestEpoch

#: Training samples from which on the rates and the batch size stay as they are.
_LARGE = 1_000_000
#: Training samples from which on embeddings are 64 wide.
_WIDE = 150_000


def apply_preset(config: Config, dataset: InteractionDataset) -> tuple[Config, list[str]]:
    """The config with the settings that `training.preset` chooses, and those as text, such as `model.cross_layers: 2`.

    A setting that is not at its default stays as it is. With `training.warm_start` those of the model are the other
    run's, since the parameters must fit.

    Args:
        config: of a new run; the one that is returned has no preset, so that a resumed run has the same settings.
        dataset: of the run.

    Raises:
        ConfigError: a chosen setting does not fit another one, or `training.warm_start` is not a finished run.
    """
    if config.training.preset is None:
        return config, []
    sections = {name: getattr(config, name) for name in ("data", "model", "encoder", "optimizer", "training")}
    settings, chosen = _choose(config, dataset.num_samples("train")), {}
    if config.training.warm_start is not None:
        other = BestEpoch.of(config.training.warm_start, "training.warm_start: run").config
        settings |= {key: _get(other, key.split(".")) for key in settings if key.startswith("model.")}
    for key, value in settings.items():
        section, *path = key.split(".")
        if _get(sections[section], path) == _get(getattr(_DEFAULT, section), path) != value:
            chosen[key] = value
    try:
        for key, value in chosen.items():
            section, *path = key.split(".")
            sections[section] = _set(sections[section], path, value)
        sections["training"] = dataclasses.replace(sections["training"], preset=None)
        config = dataclasses.replace(config, **sections)
    except ConfigError as fault:
        raise ConfigError(f"training.preset: {config.training.preset} does not fit: {fault}") from fault
    return config, [f"{key}: {value}" for key, value in chosen.items()]


def _choose(config: Config, samples: int) -> dict[str, Any]:
    """By key what suits a table of so many training samples."""
    settings: dict[str, Any] = {"model.cross_layers": 2, "model.dropout": 0.1}
    settings["model.embedding_dim"] = 64 if samples >= _WIDE else 32
    if config.model.pooling == "attention":
        by_age = config.data.batching == "sample" or config.data.num_age_buckets <= MOST_BUCKETS
        biases = [*([HISTORY + AGE] if by_age else []), "position"]
        settings["model.bias"] = biases[0] if config.encoder.num_layers or len(biases) == 1 else biases
    if samples < _LARGE:
        settings |= {"optimizer.average": 0.98, "training.batch_size": 512 if samples < _WIDE else 1024}
        for group, rate in (("dense", 0.01), ("embeddings", 0.1)):
            # A rate suits one optimizer: Adam's for the tables is another than Adagrad's.
            if getattr(config.optimizer, group).name == getattr(_DEFAULT.optimizer, group).name:
                settings[f"optimizer.{group}.learning_rate"] = rate
    return settings


_DEFAULT = Config()


def _get(section: object, path: list[str]) -> Any:
    for name in path:
        section = getattr(section, name)
    return section


def _set(section: Any, path: list[str], value: object) -> Any:
    """A copy of the section with another value."""
    name, *rest = path
    return dataclasses.replace(section, **{name: _set(getattr(section, name), rest, value) if rest else value})
