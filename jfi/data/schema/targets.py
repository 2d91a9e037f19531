"""Further inputs of the loss: further labels, and its weight."""

from collections.abc import Sequence

import numpy as np

from jfi.data.config import DataConfig, LabelConfig
from jfi.data.io.table import Table
from jfi.data.schema.labels import read_labels

WEIGHT = "weight"
#: Before the name of a label that is not the first.
LABEL = "label_"


def target_names(config: DataConfig) -> list[str]:
    """The names of the columns `[E]` float32 of `Events.targets`."""
    return [*([] if config.weight is None else [WEIGHT]), *_further_labels(config)]


def read_targets(table: Table, config: DataConfig, label: np.ndarray) -> dict[str, np.ndarray]:
    """The columns `target_names`, each `[N]` float32.

    Args:
        table: the interactions.
        config: the section `data`.
        label: `[N]`, the first label. A row without one is no sample, needs no weight, and gets 1.

    Raises:
        DataError: a column is absent, a weight is not positive and finite, or a label is malformed.
    """
    found = {}
    if config.weight is not None:
        values = table.numbers(config.weight).astype(np.float32)
        is_wrong = ~(np.isfinite(values) & (values > 0))
        if (wrong := is_wrong & ~np.isnan(label)).any():
            row = int(wrong.argmax())
            shown = "empty" if np.isnan(values[row]) else f"{table.numbers(config.weight)[row]:g}"
            raise table.fault(row, f"weight '{config.weight}' is {shown}, must be positive and finite")
        found[WEIGHT] = np.where(is_wrong, np.float32(1), values)
    for name, one in _further_labels(config).items():
        found[name] = read_labels(table, one.label, one.task)
    return found


def labels_of(config: DataConfig, label: np.ndarray, targets: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    """The column `[E]` of each of `config.trained_labels()`."""
    return (label, *(targets[name] for name in _further_labels(config)))


def _further_labels(config: DataConfig) -> dict[str, LabelConfig]:
    """Returns by the name of their column the trained labels but the first."""
    return {LABEL + one.name: one for one in config.trained_labels()[1:]}
