"""Further inputs of the loss: further labels, and its weight."""

from collections.abc import Sequence

import numpy as np

from jfi.data.config import DataConfig, LabelConfig
from jfi.data.errors import DataError
from jfi.data.labels import read_labels
from jfi.data.table import Table

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


def check_target(name: str, values: np.ndarray, config: DataConfig, file: str, start: int) -> None:
    """Checks a column `target_names` or the first label, "label", that another program has written.

    Args:
        name: of the column.
        values: `[N]` float32.
        config: the section `data`.
        file: for messages.
        start: the row of the first value.

    Raises:
        DataError: a value cannot be there, as one line that names the row.
    """
    if name == WEIGHT:
        right, must = np.isfinite(values) & (values > 0), "positive and finite"
    else:
        further = _further_labels(config)
        task = further[name].task if name in further else config.task
        right = np.isnan(values) | (np.isfinite(values) if task == "regression" else (values == 0) | (values == 1))
        must = "finite or missing" if task == "regression" else "0, 1 or missing"
    if not right.all():
        raise DataError(f"{file}: row {start + int((~right).argmax())} of the events: '{name}' is not {must}")


def labels_of(config: DataConfig, label: np.ndarray, targets: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    """The column `[E]` of each of `config.trained_labels()`."""
    return (label, *(targets[name] for name in _further_labels(config)))


def _further_labels(config: DataConfig) -> dict[str, LabelConfig]:
    """Returns by the name of their column the trained labels but the first."""
    return {LABEL + one.name: one for one in config.trained_labels()[1:]}
