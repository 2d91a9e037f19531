"""Scores of the rows of a table, and their metrics, in bounded memory."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from jfi.data import DataConfig, DataError, DataSchema
from jfi.data.column_files import new_map
from jfi.data.paths import find_files
from jfi.data.scoring import ScoringParts, Source, Sources
from jfi.display import Display
from jfi.files import naming, temporary_folder, writing_file
from jfi.models import SequenceDLRM
from jfi.training.config import ConfigError
from jfi.training.metrics import Predictions

SCORE, PROBABILITY = "score", "probability"
SUFFIXES = (".parquet", ".csv")
_NO_LABEL = "no row to evaluate has a label"


@dataclass(frozen=True)
class Scores:
    """The scored rows of a table; valid while the `scored` block lasts.

    Args:
        parts: the rows; their keys are read from disk.
        score: `[N]` float32, the logits, in the order of the table; the map of a file.
        user: `[N]` int64, equal for rows of one user; the map of a file.
    """

    parts: ScoringParts
    score: np.ndarray
    user: np.ndarray

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The key columns, `score` (the logit) and `probability`, in the order of the table."""
        start = 0
        for keys in self.parts.key_batches():
            score = np.array(self.score[start : start + len(keys)])
            start += len(keys)
            probability = torch.from_numpy(score).double().sigmoid().float().numpy()
            columns = [*keys.columns, pa.array(score), pa.array(probability)]
            yield pa.record_batch(columns, [*keys.schema.names, SCORE, PROBABILITY])

    def write(self, out: Path) -> None:
        """Writes a Parquet or CSV file, whole or not at all."""
        with writing_file(out) as unfinished:
            writer = None
            try:
                for batch in self.batches():
                    if writer is None:
                        kind = pa.csv.CSVWriter if out.suffix == ".csv" else pa.parquet.ParquetWriter
                        writer = kind(str(unfinished), batch.schema)
                    writer.write_batch(batch)
            finally:
                if writer is not None:
                    writer.close()


@contextmanager
def scored(
    model: SequenceDLRM,
    sources: Sources,
    schema: DataSchema,
    config: DataConfig,
    *,
    by: Sequence[str] = (),
    labeled: bool = False,
    batch_size: int = 4096,
    folder: Path | None = None,
) -> Iterator[Scores]:
    """Scores every row of `sources.interactions`.

    Memory is bounded by the rows of some 500,000 interactions, the tables of users and items, and 12 bytes a row of
    file cache. Temporary files in `folder` are about as large as the tables.

    Args:
        model: in evaluation mode.
        sources: what to score.
        schema: of the run.
        config: the section `data` of the run.
        by: further columns of the interactions to keep, for groups.
        labeled: whether some rows must have a label, which is checked before any is scored.
        batch_size: rows per call of the model.
        folder: where temporary files go; None for the system's folder.

    Raises:
        DataError: a table is missing or malformed, or has no label where one is needed.
    """
    for name in (config.user, config.item, config.timestamp, *by):
        if name in (SCORE, PROBABILITY):
            raise DataError(f"column '{name}' has the name of a result; rename it")
    device = next(model.parameters()).device
    if labeled and config.label is None:
        raise DataError(f"{_NO_LABEL}: every row is a positive (data.label is null)")
    with temporary_folder(".jfi-", folder) as files:
        with naming(files):
            parts = ScoringParts(sources, files, schema, config, by)
            if labeled:
                labeled_rows(parts, config)  # before the model runs, which takes longest
            score = new_map(files / "score.npy", np.float32, parts.num_rows)
            user = new_map(files / "user.npy", np.int64, parts.num_rows)
        users = 0
        with Display("predict", parts.num_rows, unit="rows") as display:
            for part in parts:
                start, last = 0, 0
                for batch in part.dataset.batches("rows", batch_size):
                    rows = part.rows[start : start + len(batch.users)]
                    start += len(rows)
                    here = batch.to(device)
                    with torch.inference_mode():
                        score[rows] = model(here.dense_features, here.sparse_features).squeeze(-1).float().cpu().numpy()
                    user[rows] = users + batch.users.numpy()
                    last = max(last, int(batch.users.max()) + 1)
                    display.update(len(rows))
                users += last
        yield Scores(parts, score, user)


def check_out(out: str | Path | None) -> Path | None:
    """The path of a file to write.

    Raises:
        ConfigError: its suffix is neither .parquet nor .csv, its folder is missing, or it is a folder.
    """
    if out is None:
        return None
    out = Path(out)
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"--out {out}: the name must end in {' or '.join(SUFFIXES)}")
    check_place("--out", out)
    return out


def check_results(written: Mapping[str, str | Path | None], read: Mapping[str, Source | None]) -> None:
    """Checks that no file to write is another one, or a file of a table that is read.

    Args:
        written: by option the file to write.
        read: by option the files of a table, or a table in memory.

    Raises:
        ConfigError: it is, as one line that names both.
        DataError: a table is missing.
    """
    names: dict[str, str] = {}
    for option, source in read.items():
        if source is not None and not isinstance(source, pa.Table):
            names |= {os.path.realpath(file.path): option for file in find_files(source, option)}
    for option, path in written.items():
        if path is None:
            continue
        other = names.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"{option} {path}: {other} names this file too; name a new one")


def check_place(option: str, path: Path) -> None:
    """Raises ConfigError unless a file can be written at `path`, which `option` names."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; name a file")


def labeled_rows(parts: ScoringParts, config: DataConfig) -> np.ndarray:
    """`[M]` int64, the rows that have a label.

    Raises:
        DataError: none has.
    """
    rows = np.flatnonzero(~np.isnan(parts.labels))
    if not len(rows):
        raise DataError(f"{_NO_LABEL}: label '{config.label}'")
    return rows


def metrics_of(scores: Scores, config: DataConfig, by: Sequence[str] = ()) -> dict:
    """Metrics of the labeled rows: overall, by the values of each column of `by`, and the calibration.

    Returns:
        `rows`, `labeled`, `overall` (the metrics of `jfi.training.metrics` with `samples`, `mean_label`,
        `mean_prediction` and `calibration`, the mean prediction over the mean label), `deciles` (the same but the
        metrics, by tenth of the prediction), and `by`, by column a list of the overall metrics of each `value`, most
        samples first. A metric that is not defined, such as the AUC of equal labels, is None.

    Raises:
        DataError: no row has a label.
    """
    labels = scores.parts.labels
    rows = labeled_rows(scores.parts, config)
    logits = torch.from_numpy(np.array(scores.score[rows])).double()
    label, user = torch.from_numpy(labels[rows]).double(), torch.from_numpy(np.array(scores.user[rows]))
    result = {"rows": len(labels), "labeled": len(rows), "overall": _metrics(logits, label, user)}
    order = torch.argsort(logits, stable=True)
    result["deciles"] = [_means(logits[tenth], label[tenth]) for tenth in order.tensor_split(10) if len(tenth)]
    result["by"] = {}
    for name in by:
        values = pa.chunked_array([batch.column(name) for batch in scores.parts.key_batches()])
        groups = values.cast(pa.string()).combine_chunks().take(pa.array(rows)).dictionary_encode("encode")
        group = torch.from_numpy(groups.indices.to_numpy().astype(np.int64))
        order = torch.argsort(group, stable=True)
        sizes = torch.bincount(group, minlength=len(groups.dictionary)).tolist()
        records = [
            {"value": value, **_metrics(logits[chosen], label[chosen], user[chosen])}
            for value, chosen in zip(groups.dictionary.to_pylist(), order.split(sizes), strict=True)
        ]
        result["by"][name] = sorted(records, key=lambda record: -record["samples"])
    return result


def _metrics(logits: torch.Tensor, labels: torch.Tensor, users: torch.Tensor) -> dict:
    return {**_means(logits, labels), **_finite(Predictions([logits], [labels], [users]).metrics())}


def _means(logits: torch.Tensor, labels: torch.Tensor) -> dict:
    prediction, label = logits.sigmoid().mean().item(), labels.mean().item()
    calibration = prediction / label if label > 0 else math.nan
    means = {"mean_prediction": prediction, "mean_label": label, "calibration": calibration}
    return {"samples": len(labels), **_finite(means)}


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """JSON has neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
