"""Results of several models on the same splits: a table, and a file."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from jfi.utils.files import write_file

COLUMNS = {"auc": "AUC", "ne": "NE", "user_auc": "AUC per user"}


class Compared(Protocol):
    """Figures that a model is compared by: metrics of both held-out splits, and the time of training."""

    validation: dict[str, float]
    test: dict[str, float]
    train_seconds: float


def summarize(results: Sequence[Compared]) -> dict:
    """Mean and population standard deviation over the seeds; NaN where a metric is not defined.

    The AUC per user is not where no user has both labels in a split, as with `split: leave_one_out`.
    """
    summary: dict = {"train_seconds": statistics.fmean(r.train_seconds for r in results)}
    for split in ("validation", "test"):
        for metric in COLUMNS:
            values = [getattr(r, split)[metric] for r in results]
            deviation = statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan
            summary[f"{split}_{metric}"] = {"mean": statistics.fmean(values), "std": deviation}
    return summary


def table(summaries: Mapping[str, dict], seeds: int) -> str:
    """The comparison as text, one line for each model; `summaries` are results of `summarize`."""
    width = 2 + max(map(len, ("test split", *summaries)))
    lines = ["test split".ljust(width) + "".join(f"{title:>18s}" for title in COLUMNS.values()) + "   training"]
    for name, summary in summaries.items():
        cells = [summary[f"test_{metric}"] for metric in COLUMNS]
        text = [f"{c['mean']:.4f}" + (f" ± {c['std']:.4f}" if seeds > 1 else "") for c in cells]
        cells = "".join(f"{cell:>18s}" for cell in text)
        lines.append(f"{name.ljust(width)}{cells}{summary['train_seconds']:9.0f} s")
    return "\n".join(lines)


def write_record(path: Path, record: dict) -> None:
    """Writes JSON, whole or not at all; a number that is not finite becomes null."""
    write_file(path, json.dumps(_finite(record), indent=1) + "\n")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
