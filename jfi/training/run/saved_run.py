"""A run as it lies in its folder: the model of its best epoch, and all that encodes other data for it."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from jfi.data import Batch, DataError, DataSchema
from jfi.data.batches.choose_events import load_policy
from jfi.data.batches.prefetch import loader_threads, prefetch
from jfi.data.io.paths import as_table
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.data.prepared.stages.column_files import new_map
from jfi.data.prepared.stages.sort import read_ids
from jfi.history_policies import Policy
from jfi.models import SequenceDLRM
from jfi.training.config import Config, ConfigError
from jfi.training.metrics.calibration import Calibration
from jfi.training.metrics.inspection import attention, permute_inputs
from jfi.training.metrics.ranking import RankedPositives
from jfi.training.metrics.unknown_values import UnknownShares
from jfi.training.model.build_model import build_model
from jfi.training.run.best_epoch import BestEpoch
from jfi.training.run.run_data import own_policy
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.scores import (
    Scores,
    check_out,
    check_results,
    labeled_rows,
    metrics_of,
    result_names,
    warn_of_empty_histories,
)
from jfi.utils.display import Display
from jfi.utils.files import naming, temporary_folder

Item = TypeVar("Item")
_log = logging.getLogger(__name__)
#: What a column of probabilities can be.
PREDICTED = ("probabilities", "calibrated")
#: Files, folders or globs, as the config names them.
Paths = str | Path | Sequence[str | Path]


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

    def __repr__(self) -> str:
        """Five lines: the folder, the data, the inputs, the labels and the model."""
        data, model, schema = self.config.data, self.config.model, self.schema
        parameters = sum(p.numel() for p in self.model.parameters())
        return "\n".join(
            [
                f"SavedRun({str(self.path)!r})",
                f"  data: {data.prepared or data.without_tables().interactions}",
                f"  inputs: {', '.join(spec.key for spec in schema.features)}; numbers {schema.dense_names}",
                f"  labels: {', '.join(f'{one.name} ({one.task})' for one in schema.labels)}",
                f"  model: {parameters:,} parameters, width {model.embedding_dim}, {model.pooling} over at most "
                f"{' and '.join(map(str, schema.histories.values()))} events",
            ]
        )

    def fingerprint(self) -> str:
        """Returns 16 digits that are the same for equal parameters of the model."""
        found = hashlib.blake2b(digest_size=8)
        for name, values in sorted(self.model.state_dict().items()):
            found.update(name.encode())
            found.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return found.hexdigest()

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
        memory: str | None = None,
    ) -> pa.Table | UnknownShares:
        """Scores every row of a table, with a label or without.

        With `data.null_ids: drop` in the run's config rows without a user or an item are left out, and counted.
        A row's history is what its user did strictly before it, in `history` and in `interactions`. Users, items and
        values that training has not seen count as unknown. The column of the label may be missing.

        Args:
            interactions: the rows, a file, an Arrow table or a DataFrame with the columns of the run's interactions.
            history: the log before them; its rows are only part of histories. A run with statistics takes its own
                interactions if there is none and the files are there.
            users: table of users; by default that of the run's config.
            items: table of items; by default that of the run's config.
            semantic_ids: file of the items' semantic IDs, of the run's codec; by default that of the run's config.
            out: file to write, .parquet or .csv, whole or not at all; memory stays bounded then.
            batch_size: rows per call of the model.
            output: what a probability is, "probabilities" for the sigmoid of the logit, or "calibrated".
            memory: most that sorting the tables holds in memory, such as "4GB"; None is half of what is free.

        Returns:
            Without `out` the table of the results, a DataFrame for a DataFrame of pandas, in the order of the rows: the
            columns of the user, the item and the time, `score` (float32, the logit) and `probability`; of a regression
            `prediction`, on the label's scale. Of several labels each has columns of its own, which end in its name,
            such as `score_like`. With `out` the shares of rows without a known user, item or value; the metadata of the
            table's schema have them too.

        Raises:
            ConfigError: a wrong `out`, or one that is a file of a table that is read; or no calibration for `output`.
            ValueError: another `output`.
            DataError: a table is missing or malformed, as one line that names the place.

        Example::

            run = jfi.load_run("runs/20250101-120000")
            run.predict("today.parquet", history="clicks.parquet", out="scores.parquet")
        """
        out, sources = check_out(out), self._sources(interactions, history, users, items, semantic_ids)
        with self._scored(sources, out, output, batch_size, memory) as scores:
            if out is None:
                return _as_given(pa.Table.from_batches(list(scores.batches())), interactions)
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
        importance: bool = False,
        memory: str | None = None,
    ) -> dict:
        """Metrics of the labeled rows of a table: overall, by group, and the calibration.

        A run of implicit feedback needs no label: every row is a positive, its negatives are sampled as in training,
        and HR@k and NDCG@k are those that the run's `training.ranking` asks for. Rows whose item training does not know
        are left out, and a warning counts them.

        Args:
            interactions, history, users, items, semantic_ids, batch_size, output, memory: as of `predict`.
            by: columns of the interactions; each of their values gets metrics of its own.
            out: file to write the scores to, as of `predict`, with the columns `by` too.
            importance: whether the metrics include, under this name, how far the AUC falls where an input is shuffled
                between rows, see `jfi.training.metrics.inspection`.

        Returns:
            As `jfi.training.run.scores.metrics_of`.

        Raises:
            ConfigError, DataError: as `predict`; also if no row has a label, or training knows no row's item.
        """
        if importance and self.config.data.is_implicit:
            raise DataError("importance: no row has a label")
        out, by = check_out(out), [by] if isinstance(by, str) else by
        sources = self._sources(interactions, history, users, items, semantic_ids)
        with self._scored(sources, out, output, batch_size, memory, by, evaluates=True) as scores:
            metrics = metrics_of(scores, self.config.data, by)
            if importance:
                weights = [one.weight for one in self.config.data.targets()]
                metrics["importance"] = permute_inputs(self.model, scores.rows, self.schema, weights, batch_size)
            if out is not None:
                scores.write(out)
            return metrics

    def attention(
        self,
        interactions: Paths | pa.Table,
        *,
        history: Paths | pa.Table | None = None,
        users: Paths | None = None,
        items: Paths | None = None,
        semantic_ids: str | Path | None = None,
        batch_size: int = 256,
        memory: str | None = None,
    ) -> pa.Table:
        """Returns the attention of each row's target to the events of its history, a row of the table for an event.

        Args:
            interactions: the rows, as of `predict`, like the arguments up to `semantic_ids`, and `memory`.
            batch_size: rows per call of the model.

        Returns:
            The columns `row`, the number of the row in `interactions`; `event`, 0 for the oldest one of its history;
            the event's `item` and `time` in seconds; of several histories the name of its `history`; and `weight_1` to
            `weight_<heads>`. The weights of a head sum to 1 over the events of a row and history. It is a DataFrame if
            pandas' were given.

        Raises:
            ValueError: the model does not pool by attention.
            DataError: as `predict`.
        """
        with self._read(self._sources(interactions, history, users, items, semantic_ids), memory) as (rows, folder):
            return _as_given(attention(self.model, rows, read_ids(folder, "item"), batch_size), interactions)

    @contextmanager
    def _read(
        self,
        sources: Sources,
        memory: str | None,
        by: Sequence[str] = (),
        are_positives: bool = False,
        folder: Path | None = None,
    ) -> Iterator[tuple[ScoringRows, Path]]:
        with temporary_folder(".jfi-", folder) as files:
            with naming(files):
                options: dict[str, Any] = {"policy": self.policy, "memory": memory}
                rows = ScoringRows(sources, files, self.schema, self.config.data, by, are_positives, **options)
            yield rows, files

    def check_output(self, output: str) -> None:
        """Raises ValueError or ConfigError unless the run can give `output`, one of `PREDICTED`."""
        if output not in PREDICTED:
            raise ValueError(f"output is {output!r}, must be one of {', '.join(PREDICTED)}")
        what = f"output is calibrated, but run {self.path}"
        if output == "calibrated" and all(label.task == "regression" for label in self.schema.labels):
            raise ConfigError(f"{what} predicts numbers, which have no probabilities")
        if output == "calibrated" and not self.calibration:
            raise ConfigError(f"{what} has no calibration; train it again, or choose probabilities")

    @contextmanager
    def _scored(
        self,
        sources: Sources,
        out: Path | None,
        output: str,
        batch_size: int,
        memory: str | None,
        by: Sequence[str] = (),
        evaluates: bool = False,
    ) -> Iterator[Scores]:
        """Scores every row of `sources.interactions`, but for those that `data.null_ids: drop` leaves out.

        Memory grows with the distinct values and the tables of users and items, and not with the rows. Temporary files,
        beside `out` where that is given, are a few times as large as the tables.

        Args:
            sources: what to score.
            out, output, batch_size, memory: as of `predict`.
            by: further columns of the interactions to keep, for groups.
            evaluates: whether some rows must have a label, which is checked before any is scored. Rows of implicit
                feedback are positives then, and negatives are scored too.
        """
        self.check_output(output)
        check_results({"--out": out}, {f"--{name.replace('_', '-')}": source for name, source in vars(sources).items()})
        config, labels = self.config.data, self.schema.labels
        for name in (config.user, config.item, config.timestamp, *by):
            if name in [own for label in labels for own in result_names(label, len(labels) > 1)]:
                raise DataError(f"column '{name}' has the name of a result; rename it")
        device, implicit = next(self.model.parameters()).device, evaluates and config.is_implicit
        folder = None if out is None else out.parent
        with self._read(sources, memory, by, implicit, folder) as (rows, files):
            if evaluates:
                count = len(labeled_rows(rows, config))  # before the model runs, which takes longest
                if implicit and count < rows.num_rows:
                    left_out = f"{rows.num_rows - count:,} of {rows.num_rows:,} rows"
                    _log.warning("left out %s, whose items training does not know", left_out)
            width = () if len(labels) == 1 else (len(labels),)
            with naming(files):
                score = new_map(files / "score.npy", np.float32, (rows.num_rows, *width))
                user = new_map(files / "user.npy", np.int64, rows.num_rows)
                positives = RankedPositives(rows, files, config, self.config.training) if implicit else None
            unknown = UnknownShares(0, {})
            total = rows.num_rows + (0 if positives is None else positives.num_samples)
            with Display("predict", total, unit="rows" if positives is None else "samples") as display:

                def run(assemble: Callable[[Item], Batch], items: Iterable[Item]) -> Iterator[torch.Tensor]:
                    ahead: Any = prefetch(assemble, items, device, loader_threads(device))
                    with closing(ahead):
                        for batch in ahead:
                            with torch.inference_mode():
                                logits = self.model(batch.dense_features, batch.sparse_features, batch.timelines)
                            logits = logits.float().reshape(len(logits), *width)[: len(batch.labels)]
                            display.update(len(logits))
                            yield logits

                if rows.dataset is not None:
                    samples = rows.dataset.arrays().samples["rows"]
                    if not rows.has_history:
                        warn_of_empty_histories(rows.dataset)
                    batches = rows.dataset.batches("rows", batch_size, pin_memory=device.type == "cuda")
                    for number, logits in enumerate(run(batches.__getitem__, range(len(batches)))):
                        chosen = batches.order.part(number, 0, 1).samples
                        score[rows.rows[chosen]] = logits.cpu().numpy()
                        user[rows.rows[chosen]] = rows.dataset.arrays().events.user[samples[chosen]]
                    unknown = UnknownShares.of(rows.dataset, "rows")
                if positives is not None:
                    positives.score(rows, run, batch_size, device)
            unknown.warn(self.unknown)
            calibration = self.calibration if output == "calibrated" else None
            yield Scores(rows, score, labels, user, unknown, positives, calibration)

    def _sources(self, *tables: Paths | pa.Table | None) -> Sources:
        """Returns the files of the tables, which are in the order of the fields, or of those of the run's config."""
        config = self.config.data
        named = (None, None, config.users, config.items, config.semantic_ids)
        paths: list[Any] = [_source(given, own) for given, own in zip(tables, named, strict=True)]
        return Sources(*paths).find(config)


def _as_given(table: pa.Table, given: Any) -> Any:
    """Returns a DataFrame of pandas where one was given."""
    return table.to_pandas() if type(given).__module__.split(".")[0] == "pandas" else table


def _source(given: Any, own: str | list[str] | None) -> str | list[str] | pa.Table | None:
    """The files or the table that a caller gives, or else those of the config; DataFrames become tables."""
    if given is None:
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
    named = own_policy(RunFolder(Path(path)), best.config).data.policy
    policy, model = None if named is None else load_policy(named), model.to(device).eval()
    return SavedRun(Path(path), best.config, best.schema, model, policy, best.calibration, best.unknown)
