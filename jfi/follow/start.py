"""Starts and resumes a run that follows a log."""

import glob
import hashlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from jfi.data import DataSchema
from jfi.data.batches.choose_events import load_policy
from jfi.data.io.paths import find_files
from jfi.follow.loop import Hook, LogPlace, LogTrainer
from jfi.follow.parts import Part, PartFolder, Parts, RefusedPart
from jfi.follow.rows import PartRows, Reading
from jfi.follow.state import LogState, open_state
from jfi.history_policies.policy import Policy
from jfi.serving import MAX_CANDIDATES
from jfi.serving.dataset_schema import schema_of_model
from jfi.serving.export import Export
from jfi.serving.publish import Publisher, PublishHook
from jfi.serving.schema import Limits
from jfi.state.stores import StoreUnavailableError
from jfi.training import ConfigError
from jfi.training.config import Config
from jfi.training.distributed.processes import Interrupted, World, join_world, stop_on_signals
from jfi.training.run.recorder import LineFile
from jfi.training.run.run_data import check_tables, learnt_files, load_schema, own_policy
from jfi.training.run.run_folder import RunFolder, writing_run
from jfi.training.run.run_position import check_config, last_progress
from jfi.utils.errors import InputError
from jfi.utils.files import temporary_folder, write_file

_log = logging.getLogger(__name__)
#: Seconds between two looks at the folder, and between two looks for a signal meanwhile.
_POLL, _TICK = 0.2, 0.1
#: Least seconds between two pictures.
_PICTURE = 60.0


def follow(
    run_dir: str | Path,
    folder: str | Path | Parts,
    *,
    tables: Mapping[str, Any] | None = None,
    until_idle: bool = False,
    checkpoint_seconds: float = 0.0,
    late_seconds: float = 86400.0,
    refused_to: str | Path | None = None,
    hook: Callable[[LogTrainer], Hook] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Trains a run that has ended on a log that grows, part by part, each scored before it is trained on.

    The parts are Parquet files with the columns of the run's interactions, in the order of their names. Their rows are
    trained in the order of (time, user, item). Histories and statistics of the past are those of the run's own
    interactions and of all parts before. Which rows count is decided as by a server with a state, see
    `jfi.state.user_rows`: a row that comes again counts once; a late row is trained on and joins its user's history at
    its time; one that is more than `late_seconds` older than its user's newest row is left out.

    Args:
        run_dir: folder of a run of `jfi train` that has ended; its best epoch is where the first part begins.
        folder: of the parts, or another source of them.
        tables: as of `jfi.training.resume`.
        until_idle: whether to end when no further part is there, instead of waiting for one.
        checkpoint_seconds: least time between two checkpoints, which lie at ends of parts; it changes no bit.
        late_seconds: see above.
        refused_to: folder that parts which are refused are moved to, each beside a file with the reason; None stops at
            the first one.
        hook: makes an object that is called after each step and each part, from the run as it begins; None publishes
            the run if `training.publish_every` asks for it.
        clock: seconds that only grow; another one in tests.

    Returns:
        The number of parts that were trained on.

    Raises:
        ConfigError, DataError: a fault in a setting, the run or a part; the run is at the end of the part before.
        FloatingPointError: training has diverged; the run is at its last checkpoint.
        OSError: the storage of the run is full or fails; so is that of published versions, when all else has ended.
        Interrupted: SIGINT or SIGTERM; the run is at the end of a part, in the middle of one at its last checkpoint.
    """
    for name, value in (("checkpoint", checkpoint_seconds), ("late", late_seconds)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name}-seconds: got {value}, must be a number of at least 0")
    if folder == "":
        raise ConfigError("--follow: got '', must be a folder of Parquet files")
    run, config = RunFolder.open(run_dir, tables)
    run.check_links()
    with join_world(config.training.device) as world:
        if world.launched:
            raise ConfigError("--follow: a run under torchrun cannot follow a log; start it without torchrun")
        parts = PartFolder(Path(folder)) if isinstance(folder, str | Path) else folder
        if refused_to is not None:
            _check_refused_to(refused_to, parts)
        with writing_run(run.path, world):
            check_config(run, config, ", since --follow goes on with the run's own")
            _check(run, config)
            if isinstance(parts, PartFolder):
                _check_folder(parts.folder, config)
            following = _Following(run, config, world, parts, late_seconds, checkpoint_seconds, clock)
            following.refused_to = None if refused_to is None else Path(refused_to)
            return following.go(until_idle, hook)


def _check(run: RunFolder, config: Config) -> None:
    """Raises ConfigError if the run cannot follow a log."""
    name = f"--resume {run.path}"
    path, progress = last_progress(run)
    if path is None or not progress.best_step or (not progress.follow and not progress.finished(config.training)):
        raise ConfigError(f"{name}: the run has not ended; --follow begins where it ends, so go on without it first")
    if progress.world_size:
        raise ConfigError(f"{name}: the run was started with torchrun; --follow needs one without")
    if config.data.is_implicit:
        raise ConfigError(f"{name}: data.label is null, and --follow draws no negatives; name a label")
    if config.data.is_raw_log:
        what = "data.samples and labels with a window (within) are of tables; --follow makes none"
        raise ConfigError(f"{name}: {what}; train a new run on the grown log")
    if config.data.histories:
        what = "data.histories has several, and the state of --follow has one"
        raise ConfigError(f"{name}: {what}; train a new run on the grown log")
    for table in ("users", "items"):  # as the command line names them
        if (paths := getattr(config.data, table)) is not None:
            find_files(paths, f"data.{table}", config.data.delimiter)
    if config.training.cuda_graph == "always":
        raise ConfigError(f"{name}: training.cuda_graph is always, and steps of --follow run eagerly; set auto")


def _check_folder(folder: Path, config: Config) -> None:
    """Raises ConfigError if files of the folder of parts are, or would be, interactions of the run."""
    inside = folder.resolve()
    for name in ("interactions", "validation", "test"):
        source = getattr(config.data, name)
        for path in source if isinstance(source, list | tuple) else [source] if source else []:
            for one in (Path(found).resolve() for found in (path, *glob.glob(path, recursive=True))):
                if inside.is_relative_to(one) or (one.parent == inside and one.suffix == ".parquet"):
                    what = f"has files of data.{name}, {path}; name a folder of later parts alone"
                    raise ConfigError(f"--follow {folder}: {what}")


def _check_refused_to(folder: str | Path, parts: Parts) -> None:
    if folder == "" or not isinstance(parts, PartFolder) or Path(folder).resolve() == parts.folder.resolve():
        raise ConfigError(f"--refused-to: got '{folder}', must be a folder beside the folder of parts")


#: Folder of a run for the versions.
PUBLISHED = "published"


@contextmanager
def publishing(run: RunFolder, trainer: LogTrainer, schema: DataSchema, policy: Policy | None) -> Iterator[PublishHook]:
    """Yields a hook that publishes a whole version at once, then every `training.publish_every` seconds.

    None is published while `training.publish_if` does not hold for the hour of log time so far.

    Args:
        policy: which events of a history the model reads, or None for all.
    """
    config, folder = trainer.config, run.path / PUBLISHED
    model, seconds, rule = config.model, config.training.publish_every, config.training.publish_if
    try:
        requests = schema_of_model(config.data, schema, trainer.model, model.pooling != "none", model.item_id)
        limits, name = Limits(MAX_CANDIDATES, schema.max_history), run.path.resolve().name
        export = Export(trainer.model, requests, limits, policy=policy, run=name, trained=run.read_versions())
        publisher = Publisher(folder, export)
    except ValueError as fault:
        raise ConfigError(f"training.publish_every: {fault}") from fault
    with closing(publisher):
        begin = trainer.place and trainer.place.named()
        hook = PublishHook(publisher, seconds, begin, publish_if=rule, scores=lambda: trainer.windows.metrics("hour"))
        if (number := hook.begin()) is not None:
            print(f"published version {number}: {folder}", flush=True)
        yield hook


class _Following:
    """A run, its state of the log, and its place in it."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        world: World,
        parts: Parts,
        late_seconds: float,
        checkpoint_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.run, self._parts, self._seconds, self._clock = run, parts, checkpoint_seconds, clock
        self._config, self._folder, self._drawn = config, run.path / "follow", clock()
        self._log = self._folder / "metrics.jsonl"
        schema, settings = load_schema(run), config.data.resolved()
        named = own_policy(run, config).data.policy
        policy = None if named is None else load_policy(named)
        self._reading = Reading(settings, schema, policy, late_seconds)
        #: Folder for parts that are refused, see `follow`, and their number.
        self.refused_to: Path | None = None
        self._refused = 0
        self.trainer = LogTrainer(config, schema, world, self._reading, clock)
        #: What continues the run, after --resume.
        self._resume: object = f"{run.path} --follow {parts.folder}" if isinstance(parts, PartFolder) else run.path

    def go(self, until_idle: bool, hook: Callable[[LogTrainer], Hook] | None) -> int:
        """Follows the log, and returns the number of parts that were trained on."""
        trainer, state_folder = self.trainer, self._folder / "state"
        if not state_folder.exists():
            check_tables(self.run, self._config, "restore it, and write later rows to a part of the log")
        begins = not last_progress(self.run)[1].follow
        trainer.restore(self.run, best=begins)
        trainer.progress.files = learnt_files(self.run)
        place = self._saved = trainer.place
        self._folder.mkdir(exist_ok=True)
        trained = _read_log(self._log, place)
        self._parts.check(
            Part(one["part"], Path(one["part"]), one["size"], one["modified"], one["sha256"]) for one in trained
        )
        count, self._since = len(trained), self._clock()
        try:
            with ExitStack() as stack:
                state = stack.enter_context(closing(open_state(state_folder, self._config.data, self._reading.schema)))
                if hook is not None:
                    trainer.hook = hook(trainer)
                elif self._config.training.publish_every is not None:
                    own = publishing(self.run, trainer, self._reading.schema, self._reading.policy)
                    trainer.hook = stack.enter_context(own)
                self._follow(state, trained, until_idle)
        except StoreUnavailableError as error:  # such as a full disk
            raise OSError(f"{state_folder}: {error}") from error
        return (trainer.place.parts if trainer.place else 0) - count

    def _follow(self, state: LogState, trained: list[dict], until_idle: bool) -> None:
        """Adds to the state what it lacks, and follows the log from the place of the run on."""
        trainer, place = self.trainer, self.trainer.place
        with (
            closing(LineFile(self._log, place.log_length if place else 0)) as trainer.lines,
            stop_on_signals(self._resume, trainer.world) as check,
            torch.autograd.set_multithreading_enabled(False),
        ):
            self._catch_up(state, trained, check)
            trained.clear()  # it is as long as the log
            try:
                while (is_trained := self._go_on(state, check)) or not until_idle:
                    if not is_trained:
                        self._wait(check)
            except (InputError, Interrupted):
                # In the middle of a part the run goes back to its last checkpoint; a part's fault has changed nothing.
                if not trainer.is_within_part:
                    self._end(state)
                raise
            else:
                self._end(state)
            finally:
                self._draw()

    def _go_on(self, state: LogState, check: Callable[[], None]) -> bool:
        """Trains on the next part; returns whether there was one."""
        trainer = self.trainer
        check()
        try:
            name = self._parts.next(trainer.place.part if trainer.place else "")
            if name is not None:
                print(_describe(trainer.run_part(self._parts.part(name), state, check)), flush=True)
        except RefusedPart as fault:
            if self.refused_to is None:
                raise
            self._move(fault)
            return True
        if self._clock() - self._since >= self._seconds:
            self._checkpoint(state)
        return name is not None

    def _move(self, fault: RefusedPart) -> None:
        """Moves a part that was refused, after its reason is written; an older one of its name stays."""
        self.refused_to.mkdir(parents=True, exist_ok=True)
        path, number = self.refused_to / fault.path.name, 2
        while path.exists():
            path, number = self.refused_to / f"{fault.path.name}-{number}", number + 1
        write_file(path.with_name(f"{path.name}.reason.txt"), f"{fault}\n")
        shutil.move(fault.path, path)
        self._refused += 1
        _log.warning("refused part %s since the start: %s; moved to %s", self._refused, fault, path)

    def _checkpoint(self, state: LogState) -> None:
        if self.trainer.place != self._saved:
            self.trainer.checkpoint(self.run, state)
            self._saved, self._since = self.trainer.place, self._clock()
            if self._since - self._drawn >= _PICTURE:
                self._draw()

    def _end(self, state: LogState) -> None:
        """Writes a checkpoint at the end of the last part, and publishes what is not published yet."""
        self._checkpoint(state)
        if self.trainer.hook is not None:
            self.trainer.hook.close()

    def _draw(self) -> None:
        from jfi.follow.plot import draw_windows  # only pictures need matplotlib

        windows = [self.trainer.windows.metrics(kind) for kind in ("hour", "day")]
        draw_windows(self._log, windows, self._folder / "metrics.png")
        self._drawn = self._clock()

    def _wait(self, check: Callable[[], None]) -> None:
        end = time.monotonic() + _POLL
        while time.monotonic() < end:
            check()
            if self.trainer.hook is not None:
                self.trainer.hook.while_waiting()
            time.sleep(_TICK)

    def _catch_up(self, state: LogState, trained: list[dict], check: Callable[[], None]) -> None:
        """Adds to the state the parts that the checkpoint has and the state lacks, without training on them."""
        last, at = trained[-1]["part"] if trained else "", state.place.part
        if at == last:
            return
        if at > last:
            what = f"the state of the log is at {at}, and the last checkpoint at {last or 'the begin'}"
            raise ConfigError(f"{self.run.path}: {what}; remove {self._folder / 'state'} to make it anew")
        for line in trained:
            if line["part"] <= at:
                continue
            check()
            part = self._parts.part(line["part"])
            if part.sha256 != line["sha256"] and not part.may_differ:
                raise ConfigError(f"{part.path}: was changed after it was trained on; restore it")
            with temporary_folder(".jfi-") as folder:
                rows = PartRows(part, state, replace(self._reading, late_seconds=line["late_seconds"]), folder)
                state.end_part(part.name, rows.newest)
            state.commit()


def _read_log(path: Path, place: LogPlace | None) -> list[dict]:
    """Returns the lines of the parts that a run has trained on, in their order.

    Raises:
        ConfigError: the file is not what it was at the checkpoint.
    """
    if place is None:
        return []
    content = path.read_bytes()[: place.log_length] if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != place.log_sha256:
        raise ConfigError(f"{path}: the first {place.log_length} bytes are not those at the checkpoint; restore it")
    return [line for line in map(msgspec.json.decode, content.splitlines()) if "part" in line]


def _describe(line: dict) -> str:
    """Returns a line about a part."""
    counts = [f"{line['rows']:,} rows"]
    names = {"repeated": "repeated", "late": "late", "late_labels": "with a label that came late"}
    names["too_old"] = "too old and left out"
    counts += [f"{line[name]:,} {text}" for name, text in names.items() if line[name]]
    own, so_far = (
        [f"{name} {line[name]:.4f}" for name in metrics if line.get(name) is not None]
        for metrics in (("ne", "auc", "rmse"), ("all_ne", "all_auc"))
    )
    if not line["labeled"]:
        own = ["no labeled row"]
    elif not own:
        own = [f"loss {line['loss']:.4f}", *(["no AUC: the labels are all equal"] if "auc" in line else [])]
    return f"{line['part']}: {', '.join(counts)}; {', '.join([*own, *so_far])}"
