"""A run as it lies in its folder: the model of its best epoch, and all that encodes other data for it."""

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from jfi.data import DataError, DataSchema
from jfi.data.batches.choose_events import load_policy
from jfi.data.io.paths import as_table
from jfi.data.prepared.fits import check_fits
from jfi.data.prepared.scoring import Sources
from jfi.data.prepared.sources import column_settings
from jfi.history_policies import Policy
from jfi.models import SequenceDLRM
from jfi.training.checkpoints.checkpoint import (
    DamagedCheckpointError,
    latest_checkpoint,
    load_checkpoint,
)
from jfi.training.config import Config, ConfigError, TrainingConfig
from jfi.training.metrics.calibration import Calibration
from jfi.training.metrics.unknown_values import UnknownShares
from jfi.training.model.build_model import build_model
from jfi.training.run.run_data import load_schema, own_policy
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import describe_changes, load_progress
from jfi.training.run.scores import Scores, check_out, check_results, metrics_of, scored

#: Sections and fields of the config that the scores of a run depend on, and those fields that they do not depend on.
_SCORES = ("data.", "model.", "encoder", "optimizer.ema_decay", "training.ranking")
_NOT_SCORES = ("data.batching", "data.max_timeline")


def _matters(field: str) -> bool:
    return field.startswith(_SCORES) and field not in _NOT_SCORES


#: What a column of probabilities can be.
PREDICTED = ("probabilities", "calibrated")
#: Files, folders or globs, as the config names them.
Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class BestEpoch:
    """Location of the parameters of a run's best epoch.

    Args:
        path: of the checkpoint.
        module, prefix: the parameter `name` of the model is saved under `prefix + name` of `module`, which is the
            average where the run has one.
        config: of the run.
        schema: of the run's data.
        name: of the run, for messages.
        calibration: see `jfi.training.metrics.calibration`; empty if the run has none.
        unknown: by column the share of the test split without a known value.
        newest: time of the newest row that the parameters were trained on.
    """

    path: Path
    module: str
    prefix: str
    config: Config
    schema: DataSchema
    name: str
    calibration: Calibration = field(default_factory=dict)
    unknown: dict[str, float] = field(default_factory=dict)
    newest: float = -math.inf

    @classmethod
    def of(cls, path: str | Path, setting: str = "run") -> "BestEpoch":
        """The best epoch of the run in the folder `path`; no table of the run is read.

        Args:
            path: the folder.
            setting: what gave the path, for messages.

        Raises:
            ConfigError: not a run folder, no epoch is finished, or its config has changed since.
            DataError: the schema is missing or damaged.
        """
        name = f"{setting} {path}"
        if not RunFolder(Path(path)).config.is_file():
            raise ConfigError(f"{name}: not a run folder, config.yaml is missing")
        run, config = RunFolder.open(path)
        last = latest_checkpoint(run.checkpoints)
        if last is None:
            raise ConfigError(f"{name}: the run has no checkpoint yet")
        try:
            progress = load_progress(last)
            best = run.checkpoints / progress.best_checkpoint
            is_finished = best.is_dir()
            if is_finished:
                newest = load_progress(best).newest  # a folder of the name of another checkpoint is refused
            changed = describe_changes(config, progress, _matters)
        except DamagedCheckpointError as fault:
            raise ConfigError(f"{name}: {fault}") from None
        if not is_finished:
            raise ConfigError(f"{name}: the run has not finished an epoch yet")
        if changed:
            raise ConfigError(f"{name}: {changed}")
        module, prefix = ("model", "") if config.optimizer.ema_decay is None else ("average", "module.")
        schema = load_schema(run)
        try:
            check_fits(schema, column_settings(config.data))
        except DataError as fault:
            raise ConfigError(f"{name}: {run.config.name}: {fault}") from fault
        return cls(best, module, prefix, config, schema, name, progress.calibration, progress.unknown, newest)

    def read(self, parameters: dict[str, torch.Tensor]) -> None:
        """Fills tensors with the parameters of their names, in place.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        try:
            load_checkpoint(self.path, {self.module: {self.prefix + name: p for name, p in parameters.items()}})
        except DamagedCheckpointError as fault:
            raise ConfigError(f"{self.name}: {fault}") from fault


@dataclass(frozen=True)
class SavedRun:
    """A trained run, loaded by `load_run`.

    Args:
        path: the run folder.
        config: the whole config, with absolute paths.
        schema: the keys of the model's batches and the encodings of their values.
        model: with the parameters of the best epoch, those that the run's test metrics are of; in evaluation mode.
        policy: which events of a history the model reads, or None for all.
        calibration: of the best epoch by label, see `jfi.training.metrics.calibration`; empty if the run has none.
        unknown: by column the share of the run's test split without a known value; a prediction with much more warns.
    """

    path: Path
    config: Config
    schema: DataSchema
    model: SequenceDLRM
    policy: Policy | None = None
    calibration: Calibration = field(default_factory=dict)
    unknown: dict[str, float] = field(default_factory=dict)

    def predict(
        self,
        interactions: Paths | pa.Table,
        *,
        history: Paths | pa.Table | None = None,
        users: Paths | None = None,
        items: Paths | None = None,
        semantic_ids: str | Path | None = None,
        out: str | Path | None = None,
        batch_size: int = 4096,
        output: str = PREDICTED[0],
    ) -> pa.Table | UnknownShares:
        """Scores every row of a table, with a label or without.

        A row's history is what its user did strictly before it, in `history` and in `interactions`. Users, items and
        values that training has not seen count as unknown. The column of the label may be missing.

        Args:
            interactions: the rows, a file, an Arrow table or a DataFrame with the columns of the run's interactions.
            history: the log before them; its rows are only part of histories.
            users: table of users; by default that of the run's config.
            items: table of items; by default that of the run's config.
            semantic_ids: file of the items' semantic IDs, of the run's codec; by default that of the run's config.
            out: file to write, .parquet or .csv, whole or not at all; memory stays bounded then.
            batch_size: rows per call of the model.
            output: what a probability is, "probabilities" for the sigmoid of the logit, or "calibrated".

        Returns:
            Without `out` the table of the results, in the order of the rows: the columns of the user, the item and the
            time, `score` (float32, the logit) and `probability`; of a regression `prediction`, on the label's scale. Of
            several labels each has columns of its own, which end in its name, such as `score_like`. With `out` the
            shares of rows without a known user, item or value; the metadata of the table's schema have them too.

        Raises:
            ConfigError: a wrong `out`, or one that is a file of a table that is read; or no calibration for `output`.
            ValueError: another `output`.
            DataError: a table is missing or malformed, as one line that names the place.

        Example::

            run = jfi.load_run("runs/20250101-120000")
            run.predict("today.parquet", history="clicks.parquet", out="scores.parquet")
        """
        out = check_out(out)
        tables = (interactions, history, users, items, semantic_ids)
        with self._scored(tables, (), None, batch_size, out, output) as scores:
            if out is None:
                return pa.Table.from_batches(list(scores.batches()))
            scores.write(out)
            return scores.unknown

    def evaluate(
        self,
        interactions: Paths | pa.Table,
        *,
        history: Paths | pa.Table | None = None,
        users: Paths | None = None,
        items: Paths | None = None,
        semantic_ids: str | Path | None = None,
        by: Sequence[str] = (),
        out: str | Path | None = None,
        batch_size: int = 4096,
        output: str = PREDICTED[0],
    ) -> dict:
        """Metrics of the labeled rows of a table: overall, by group, and the calibration.

        A run of implicit feedback needs no label: every row is a positive, its negatives are sampled as in training,
        and HR@k and NDCG@k are those that the run's `training.ranking` asks for. Rows whose item training does not know
        are left out, and a warning counts them.

        Args:
            interactions: the rows, as of `predict`.
            history: the log before them, as of `predict`.
            users: table of users, as of `predict`.
            items: table of items, as of `predict`.
            semantic_ids: file of the items' semantic IDs, as of `predict`.
            by: columns of the interactions; each of their values gets metrics of its own.
            out: file to write the scores to, as of `predict`, with the columns `by` too.
            batch_size: rows per call of the model.
            output: what a probability is, "probabilities" for the sigmoid of the logit, or "calibrated".

        Returns:
            As `jfi.training.run.scores.metrics_of`.

        Raises:
            ConfigError, DataError: as `predict`; also if no row has a label, or training knows no row's item.
        """
        out, by = check_out(out), [by] if isinstance(by, str) else by
        tables = (interactions, history, users, items, semantic_ids)
        with self._scored(tables, by, self.config.training, batch_size, out, output) as scores:
            metrics = metrics_of(scores, self.config.data, by)
            if out is not None:
                scores.write(out)
            return metrics

    def check_output(self, output: str) -> None:
        """Raises ValueError or ConfigError unless the run can give `output`, one of `PREDICTED`."""
        if output not in PREDICTED:
            raise ValueError(f"output is {output!r}, must be one of {', '.join(PREDICTED)}")
        if output != "calibrated":
            return
        if all(label.task == "regression" for label in self.schema.labels):
            raise ConfigError(
                f"output is calibrated, but run {self.path} predicts numbers, which have no probabilities"
            )
        if not self.calibration:
            raise ConfigError(
                f"output is calibrated, but run {self.path} has no calibration, like all runs of earlier versions; "
                "train it again, or choose probabilities"
            )

    def _scored(
        self,
        tables: tuple[Paths | pa.Table | None, ...],
        by: Sequence[str],
        evaluate: TrainingConfig | None,
        batch_size: int,
        out: Path | None,
        output: str,
    ) -> AbstractContextManager[Scores]:
        """The scores of `tables`, which are in the order of the fields of `Sources`."""
        self.check_output(output)
        config = column_settings(self.config.data)
        named = (None, None, config.users, config.items, config.semantic_ids)
        paths: list[Any] = [_source(given, own) for given, own in zip(tables, named, strict=True)]
        folder = None if out is None else out.parent
        sources = Sources(*paths)
        read = {f"--{name.replace('_', '-')}": source for name, source in vars(sources).items()}
        check_results({"--out": out}, read)
        options: dict[str, Any] = {"by": by, "evaluate": evaluate, "batch_size": batch_size, "folder": folder}
        options["calibration"] = self.calibration if output == "calibrated" else None
        options |= {"policy": self.policy, "expected": self.unknown}
        return scored(self.model, sources, self.schema, config, **options)


def _source(given: Any, own: str | list[str] | None) -> str | list[str] | pa.Table | None:
    """The files or the table that a caller gives, or else those of the config; DataFrames become tables."""
    if given is None or (isinstance(given, str | list | tuple) and not given):
        return own
    if isinstance(given, list | tuple):
        return [_source(one, own) for one in given]
    return str(given) if isinstance(given, str | os.PathLike) else as_table(given, "the table")


def load_run(path: str | Path, device: str | torch.device = "cpu", setting: str = "run") -> SavedRun:
    """The model of the best epoch of a run, and what the run has learnt from its data.

    It reads the run folder alone. The run's tables may have grown, moved or vanished.

    Args:
        path: the folder of a run.
        device: of the model.
        setting: what gave the path, for messages, such as an option of a command.

    Raises:
        ConfigError, DataError: not a run folder, no epoch is finished, or a file is damaged.

    Example::

        run = jfi.load_run("runs/20250101-120000")
        scores = run.predict("new.parquet")
    """
    best = BestEpoch.of(path, setting)
    model = build_model(best.config.model, best.config.encoder, best.schema)
    best.read(model.state_dict())
    policy = load_policy(own_policy(RunFolder(Path(path)), best.config).data)
    model = model.to(device).eval()
    return SavedRun(Path(path), best.config, best.schema, model, policy, best.calibration, best.unknown)
