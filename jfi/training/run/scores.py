"""Scores of the rows of a table, and their metrics, in bounded memory."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from jfi.data import DataConfig, DataError, InteractionDataset
from jfi.data.io.blocks import find_table
from jfi.data.prepared.scoring import ScoringRows, Source
from jfi.data.prepared.summary import count_lengths, describe_lengths
from jfi.data.schema.schema import LabelSpec
from jfi.training.config import ConfigError
from jfi.training.metrics.calibration import Calibration, calibrate
from jfi.training.metrics.label_metrics import Predictions
from jfi.training.metrics.ranking import RankedPositives
from jfi.training.metrics.unknown_values import UnknownShares
from jfi.utils.files import writing_file

_log = logging.getLogger(__name__)

SCORE, PROBABILITY, PREDICTION = "score", "probability", "prediction"
SUFFIXES = (".parquet", ".csv")


@dataclass(frozen=True)
class Scores:
    """The scored rows of a table; valid while the temporary files of a prediction are there.

    Args:
        rows: the rows; their keys are read from disk.
        score: `[N]` float32, or of L labels `[N, L]`, the logits or predictions, in the order of the table; the map of
            a file.
        labels: the L labels.
        user: `[N]` int64, equal for rows of one user; the map of a file.
        unknown: shares of the rows without a known user, item or value.
        positives: against sampled negatives, where implicit feedback is evaluated.
        calibration: applied to probabilities and metrics, not to `score`; None for none.
    """

    rows: ScoringRows
    score: np.ndarray
    labels: list[LabelSpec]
    user: np.ndarray
    unknown: UnknownShares
    positives: RankedPositives | None = None
    calibration: Calibration | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The key columns, and the columns `result_names` of each label, in the order of the table.

        Under `unknown` the metadata of their schema have `UnknownShares.shares` as JSON.
        """
        start, metadata = 0, {"unknown": json.dumps(self.unknown.shares)}
        for keys in self.rows.key_batches():
            score = np.array(self.score[start : start + len(keys)]).reshape(len(keys), len(self.labels))
            start += len(keys)
            columns, names = list(keys.columns), list(keys.schema.names)
            calibrated = self.calibrated(torch.from_numpy(score).double())
            for label, own, used in zip(self.labels, score.T, calibrated.T, strict=True):
                columns.append(pa.array(np.ascontiguousarray(own)))
                if label.task == "binary":
                    columns.append(pa.array(used.sigmoid().float().numpy()))
                names += result_names(label, len(self.labels) > 1)
            yield pa.record_batch(columns, names, metadata=metadata)

    def calibrated(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of probabilities, from those of the model, `[N]` or `[N, L]`."""
        return logits if self.calibration is None else calibrate(logits, self.labels, self.calibration)

    def write(self, out: Path) -> None:
        """Writes a Parquet or CSV file, whole or not at all."""
        with writing_file(out) as unfinished:
            first = next(batches := self.batches())  # there is one without rows too
            if out.suffix == ".csv":
                writer = pa.csv.CSVWriter(str(unfinished), first.schema)
            else:
                writer = pa.parquet.ParquetWriter(str(unfinished), first.schema, write_page_checksum=True)
            with writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)


def result_names(label: LabelSpec, is_one_of_many: bool) -> list[str]:
    """The columns that a table of results has of a label.

    >>> result_names(LabelSpec("like"), True), result_names(LabelSpec("label", "regression"), False)
    (['score_like', 'probability_like'], ['prediction'])
    """
    names = [SCORE, PROBABILITY] if label.task == "binary" else [PREDICTION]
    return [f"{name}_{label.name}" for name in names] if is_one_of_many else names


def check_out(out: str | Path | None, option: str = "--out") -> Path | None:
    """The path of a file to write.

    Raises:
        ConfigError: its suffix is neither .parquet nor .csv, its folder is missing, or it is a folder.
    """
    if out is None:
        return None
    out = Path(out)
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{option} {out}: the name must end in {' or '.join(SUFFIXES)}")
    check_place(option, out)
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
            # With a delimiter files of any name are listed: which are read, the config of the run says.
            files = find_table(source, option, DataConfig(delimiter=","))
            for file in [one for one in files if one.table is None]:
                names[os.path.realpath(file.path)] = file.setting if file.is_configured else option
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


def labeled_rows(rows: ScoringRows, config: DataConfig) -> np.ndarray:
    """`[M]` int64, the rows that have a label; of implicit feedback, the positives whose item training knows.

    Raises:
        DataError: none has; of implicit feedback, training knows no row's item.
    """
    labels = rows.labels if rows.labels.ndim == 2 else rows.labels[:, None]
    found = np.flatnonzero(~np.isnan(labels[:, 0]))
    if not len(found) and config.is_implicit:
        raise DataError("no row to evaluate has an item that training knows")
    for one, values in zip(config.targets(), labels[found].T, strict=True):
        if np.isnan(values).all():
            raise DataError(rows.no_label or f"no row to evaluate has a label: label '{one.label}'")
    return found


def metrics_of(scores: Scores, config: DataConfig, by: Sequence[str] = ()) -> dict:
    """Metrics of the labeled rows: overall, by the values of each column of `by`, and the calibration.

    Of implicit feedback they are of the positives whose item training knows and of their sampled negatives, which are
    in the group of their positive; the ranks are those of positives spread evenly over the table.

    Of several labels, a row is labeled if it has the first one. All that `overall` and `by` have of a label ends in its
    name, as in `jfi.training.metrics.label_metrics`, and `deciles` are by label.

    Returns:
        `rows`, `labeled`, `unknown` (by column the share of rows without a known value), `overall` (the metrics of
        `jfi.training.metrics.label_metrics` with `samples`, `mean_label`, `mean_prediction` and `calibration`, the mean
        prediction over the mean label; of implicit feedback also `ranked`, the number of positives that are ranked, and
        the metrics that `training.ranking` asks for), `deciles` (the same but the metrics, by tenth of the prediction),
        and `by`, by column a list of the overall metrics of each `value`, most samples first. A metric that is not
        defined, such as the AUC of equal labels, is None.

    Raises:
        DataError: no row has a label.
    """
    labels, positives = scores.rows.labels, scores.positives
    weights = [one.weight for one in config.targets()]
    rows = labeled_rows(scores.rows, config)
    logits = torch.from_numpy(np.array(scores.score[rows])).double()
    label, user = torch.from_numpy(labels[rows]).double(), torch.from_numpy(np.array(scores.user[rows]))
    of, ranked = torch.arange(len(rows)), torch.empty(0, dtype=torch.int64)  # each sample's and ranked positive's row
    if positives is not None:
        negatives, ranked = torch.from_numpy(np.array(positives.negatives)), torch.from_numpy(positives.ranked)
        of = torch.cat([of, of.repeat_interleave(positives.per_positive)])
        logits, label = torch.cat([logits, negatives.double()]), torch.cat([label, torch.zeros(len(negatives))])
        user = user[of]
    logits = scores.calibrated(logits)

    def metrics(chosen: torch.Tensor | slice, positions: torch.Tensor | slice) -> dict:
        found = _metrics(logits[chosen], label[chosen], user[chosen], scores.labels, weights)
        return found if positives is None else found | _finite(positives.ranking(positions))

    everything = slice(None)
    result = {"rows": len(labels), "labeled": len(rows), "unknown": scores.unknown.shares}
    result["overall"] = metrics(everything, everything)
    deciles = {
        one.name: _deciles(*(x if x.dim() == 1 else x[:, index] for x in (logits, label)), one)
        for index, one in enumerate(scores.labels)
    }
    result["deciles"] = deciles if len(deciles) > 1 else deciles[scores.labels[0].name]
    result["by"] = {}
    for name in by:
        values = pa.chunked_array([batch.column(name) for batch in scores.rows.key_batches()])
        groups = values.cast(pa.string()).combine_chunks().take(pa.array(rows)).dictionary_encode("encode")
        group = torch.from_numpy(groups.indices.to_numpy().astype(np.int64))
        count = len(groups.dictionary)
        records = [
            {"value": value, **metrics(chosen, positions)}
            for value, chosen, positions in zip(
                groups.dictionary.to_pylist(), _members(group[of], count), _members(group[ranked], count), strict=True
            )
        ]
        result["by"][name] = sorted(records, key=lambda record: -record["samples"])
    return result


def _members(group: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The members of each of `count` groups, ascending."""
    return torch.argsort(group, stable=True).split(torch.bincount(group, minlength=count).tolist())


def _deciles(logits: torch.Tensor, labels: torch.Tensor, spec: LabelSpec) -> list[dict]:
    present = ~labels.isnan()
    logits, labels = logits[present], labels[present]
    order = torch.argsort(logits, stable=True)
    return [_means(logits[tenth], labels[tenth], spec) for tenth in order.tensor_split(10) if len(tenth)]


def _metrics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    users: torch.Tensor,
    specs: Sequence[LabelSpec],
    weights: Sequence[float],
) -> dict:
    found = _finite(Predictions([logits], [labels], [users]).metrics(specs, weights))
    if len(specs) == 1:
        return {**_means(logits, labels, specs[0]), **found}
    means = {"samples": len(labels)}
    for index, spec in enumerate(specs):
        present = ~labels[:, index].isnan()
        own = _means(logits[present, index], labels[present, index], spec)
        means |= {f"{name}_{spec.name}": value for name, value in own.items()}
    return means | found


def _means(logits: torch.Tensor, labels: torch.Tensor, spec: LabelSpec) -> dict:
    predictions = logits.sigmoid() if spec.task == "binary" else logits
    prediction, label = predictions.mean().item(), labels.mean().item()
    means = {"mean_prediction": prediction, "mean_label": label}
    if spec.task == "binary":
        means["calibration"] = prediction / label if label > 0 else math.nan
    return {"samples": len(labels), **_finite(means)}


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """JSON has neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def warn_of_empty_histories(dataset: InteractionDataset) -> None:
    """Logs a warning where most rows have no history, since the log before them is likely to be missing."""
    arrays = dataset.arrays()
    lengths = describe_lengths(*count_lengths(arrays.events, arrays.samples), dataset.schema.max_history)
    if lengths["empty"] > 0.5 and any(spec.role == "history" for spec in dataset.features):
        _log.warning("%.1f%% of the rows have no history: is the log before them missing?", 100 * lengths["empty"])
