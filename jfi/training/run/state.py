"""The state of a run: all that the next step depends on, how it begins, and its checkpoints.

A checkpoint has the parameters, the optimizer, the random generators and the running sums, and in `RunPosition` the
position in the epoch, the best epoch and the length of metrics.jsonl. Under torchrun a process has its shards of the
tables.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from jfi.data import InteractionDataset
from jfi.data.prepared.summary import date_of
from jfi.training.checkpoints.checkpoint import (
    DamagedCheckpointError,
    checkpoint_name,
    keep_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from jfi.training.checkpoints.tensor_files import MismatchedCheckpointError
from jfi.training.config import Config, ConfigError
from jfi.training.defaults import resolve_defaults
from jfi.training.distributed.processes import World
from jfi.training.distributed.sharding import shard_model
from jfi.training.model.build_model import build_model, build_optimizer, draw_tables, table_configs
from jfi.training.model.ema import ModelAverage
from jfi.training.model.parameter_groups import Groups
from jfi.training.model.pretrained import fill_rows, load_pretrained
from jfi.training.run.best_epoch import BestEpoch
from jfi.training.run.recorder import Recorder
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import RunPosition, last_progress, load_progress
from jfi.training.run.warm_start import warm_start

#: Seconds between two looks for a signal while the files of a dataset are verified.
_TICK = 0.1


def newer_samples(config: Config, dataset: InteractionDataset, world: World) -> InteractionDataset:
    """Returns the dataset with the training samples that `training.rows_after` leaves."""
    after = config.training.rows_after
    if after in (None, "auto"):
        return dataset
    newer = dataset.newer_than(after)
    counts = " of ".join(f"{one.num_samples('train'):,}" for one in (newer, dataset))
    line = f"training.rows_after: {counts} training samples are newer than {date_of(after) or after}"
    if not newer.num_samples("train"):
        raise ConfigError(f"{line}; name a table with newer rows, or set training.rows_after: null")
    world.say(f"{line}; older rows are only events of histories")
    return newer


class RunState:
    """The model, the optimizer and the progress of one run.

    Args:
        config: the whole config.
        dataset: the dataset of `config.data`.
        world: the processes of the run.
        warm: the run to start from, `training.warm_start` of a new run.

    Raises:
        ConfigError: the config does not fit the dataset, the processes or the run to start from.
    """

    def __init__(self, config: Config, dataset: InteractionDataset, world: World, warm: str | None = None):
        #: The line is about what the config has left open.
        newer = newer_samples(config, dataset, world)
        decay = None
        if warm is not None:
            decay = BestEpoch.of(warm, "training.warm_start: run").config.optimizer.embeddings.decay
        config, self.defaults_line = resolve_defaults(config, newer, world, decay)
        self.config = config
        #: Whether a new run starts from another one.
        self.warm = warm is not None
        self.dataset = dataset = newer
        self.world = world
        self.device = world.device
        self.progress = RunPosition(world_size=world.size if world.launched else 0)
        self.groups = Groups(world, None)
        torch.manual_seed(config.training.seed)
        fused = None if world.launched else config.optimizer
        # Attention runs in the dtype of the rows. A CPU has no faster products of bfloat16.
        in_halves = config.training.precision == "bfloat16" and self.device.type == "cuda"
        output_dtype = torch.bfloat16 if in_halves else None
        device, every = torch.device("meta"), config.training.admit_every
        model = build_model(config.model, config.encoder, dataset.schema, device, fused, output_dtype, every)
        #: Maps raw ids to the rows of tables that grow, or None.
        self.growing = model.growing_ids
        tables, unsharded = table_configs(model), model.state_dict().keys()
        if world.launched:
            self.model, self.optimizer, self.groups = shard_model(model, config, world)
            self._reseed()
        else:
            for module in (model.embedding_bag_collection, model.embedding_collection):
                if module is not None:
                    module.to_empty(device=self.device)
            self.model = model.to(self.device)
            self.optimizer = build_optimizer(config.optimizer, self.model, config.training.max_grad_norm)
        draw_tables(self.model.state_dict(), tables, config.training.seed)
        # By table the rows that come from another run, `[rows]` bool.
        self._warm: dict[str, Tensor] = {}
        if warm is not None:
            # Sharded tables have state that counts steps, which starts anew.
            state = {name: value for name, value in self.model.state_dict().items() if name in unsharded}
            self._warm = warm_start(warm, state, tables, dataset.schema)
            counts = ", ".join(f"{name} {int(rows.sum())}/{len(rows)}" for name, rows in self._warm.items())
            world.say(f"warm start from {warm}: rows of known ids: {counts}")
        names = {table.name: name for name, table in tables.items()}
        self._table_configs = tables
        #: By column the name of its table's parameter.
        self._tables = {one.column: names[one.table] for one in dataset.schema.features if one.table in names}
        #: By column which rows of its table no step changes, `[rows]` bool, the same in every process.
        self._frozen = {
            column: torch.zeros(tables[self._tables[column]].num_embeddings, dtype=torch.bool, device=self.device)
            for column, pretrained in config.model.pretrained.items()
            if pretrained.frozen and column in self._tables
        }
        self.modules: dict[str, nn.Module] = {"model": self.model}
        if config.optimizer.ema_decay is not None:
            self.modules["average"] = ModelAverage(self.model, config.optimizer.ema_decay)
        # Summed loss, summed label and number of the samples since the last line of the log.
        self.window = torch.zeros(3, dtype=torch.float64, device=self.device)

    def load_pretrained(self) -> None:
        """Fills the tables of a new run with the embeddings of `model.pretrained`, but for rows that started warm.

        Raises:
            ConfigError: a file is missing or malformed, or its column has no table.
        """
        for column, pretrained in self.config.model.pretrained.items():
            if column not in self._tables:
                raise ConfigError(f"model.pretrained.{column}: the model has no table of this column")
            table = self._table_configs[self._tables[column]]
            width = table.embedding_dim
            rows, vectors = load_pretrained(column, pretrained, self.dataset.schema, width, self.world)
            new = ~self._warm[table.name][rows] if table.name in self._warm else slice(None)
            fill_rows(self.model.state_dict()[self._tables[column]], rows[new], vectors[new])
            if column in self._frozen:
                self._frozen[column][rows.to(self.device)] = True
        self._freeze_rows()

    def _freeze_rows(self) -> None:
        model = self.model.module if self.world.launched else self.model
        for column, rows in self._frozen.items():
            collection, _, table, _ = self._tables[column].rsplit(".", 3)
            model.get_submodule(collection).freeze_rows(table, rows)

    def restore(self, run: RunFolder, best: bool = False) -> None:
        """Loads the last complete checkpoint of `run`, if there is one.

        Args:
            run: the run.
            best: whether to load the tensors of the best epoch's checkpoint, with the progress of the last one.

        Raises:
            ConfigError: progress.json or the tensors are missing or damaged, metrics.jsonl is shorter than at the
                checkpoint, or only one of this process and the run was started by torchrun.
        """
        path, progress = self.world.on_first(lambda: last_progress(run))
        if path is None:
            return
        if bool(progress.world_size) != self.world.launched:
            how = "with" if progress.world_size else "without"
            raise ConfigError(f"--resume {run.path}: the run was started {how} torchrun; resume it {how} torchrun")
        for _, optimizer in self.optimizer.optimizers:
            if isinstance(optimizer, KeyedOptimizerWrapper):  # fused optimizers always have their states
                optimizer.init_state()  # a step with zero gradients, which allocates the state
                optimizer.zero_grad(set_to_none=True)
        same_world = progress.world_size == self.progress.world_size
        self.progress = msgspec.structs.replace(progress, world_size=self.progress.world_size)
        state = self._state()
        if not same_world:
            del state["random"]
        path = run.checkpoints / progress.best_checkpoint if best else path
        try:
            load_checkpoint(path, state, self.world)
        except DamagedCheckpointError as fault:
            raise ConfigError(f"--resume {run.path}: {fault}; remove that checkpoint to continue without it") from None
        except MismatchedCheckpointError as fault:
            raise ConfigError(
                f"--resume {run.path}: {fault}; if another version of jfi has written it, start a new run with "
                "training.warm_start"
            ) from None
        best = run.checkpoints / progress.best_checkpoint
        if progress.best_step and best != path:
            verify_checkpoint(best, self.world)  # now, rather than at the end of the training
            self.world.on_first(lambda: load_progress(best))
        try:
            self._load_modules(state)
        except RuntimeError as fault:  # of several lines, of which the last one names the tensor
            raise ConfigError(f"--resume {run.path}: {str(fault).splitlines()[-1].strip()}") from None
        if self.growing is not None and not self.world.is_first:
            self.growing.forget_recorded()  # the first process has what all have recorded
        whole = self.optimizer.state_dict()
        for name, loaded in state["optimizer"]["state"].items():
            whole["state"][name] |= loaded
            if "stepped_at" not in loaded and "stepped_at" in whole["state"][name]:
                whole["state"][name]["stepped_at"].fill_(int(loaded.get("step", 0)))
        self.optimizer.load_state_dict(whole)
        self._freeze_rows()
        if self.world.is_first:
            self.window = state["window"]
        if not same_world:
            self._reseed()
            return
        random = state["random"][str(self.world.rank)]
        torch.set_rng_state(random["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.device)

    def check_data(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Checks the files of a prepared dataset, which a process of each host verifies; all call it together.

        Args:
            meanwhile: called again and again until all files are verified; None does not wait for that.

        Raises:
            DataError: a file is damaged.
        """
        world, verification, seconds = self.world, self.dataset.verification, 0.0 if meanwhile is None else _TICK
        if self.dataset.folder is None:
            return
        while world.max(int(not world.on_each_host(lambda: verification is None or verification.check(seconds)))):
            if meanwhile is None:
                return
            meanwhile()

    def load_best(self, run: RunFolder, meanwhile: Callable[[], None]) -> None:
        """Loads the parameters of the best epoch; `meanwhile` is as of `check_data`.

        Raises:
            DataError: a file of the dataset, of which the test metrics are, is damaged.
        """
        self.check_data(meanwhile)
        best = self._module_state()
        load_checkpoint(run.checkpoints / self.progress.best_checkpoint, best, self.world)
        self._load_modules(best)

    def save(self, run: RunFolder, recorder: Recorder | None, meanwhile: Callable[[], None] | None = None) -> None:
        """Writes a checkpoint, and removes those but this one and that of the best epoch.

        Args:
            run: the run.
            recorder: of its metrics; None for a process that writes none, and where they stay as they are.
            meanwhile: as of `check_data`; None, after a signal, does not wait until the dataset's files are verified.

        Raises:
            FloatingPointError: training has diverged; nothing is written.
            DataError: a file of the dataset is damaged; nothing is written.
        """
        self.check_data(meanwhile)
        progress = self.progress
        self.groups.average(progress.step)
        with self._all_recorded():
            state = self._state()
            self.check_finite(state["window"][0].item())
            if recorder is not None:
                progress.log_length, progress.log_sha256 = recorder.file.length(), recorder.file.sha256()
            progress.config = self.config.as_dict()
            name = checkpoint_name(progress.epoch, progress.batch)
            try:
                save_checkpoint(run.checkpoints, name, state, msgspec.structs.asdict(progress), self.world)
            except FloatingPointError as fault:  # the last step's update, which no loss has shown yet
                self.check_finite(math.nan, str(fault))
        best = progress.best_checkpoint
        self.world.on_first(lambda: keep_checkpoints(run.checkpoints, {name, best}))

    @contextmanager
    def _all_recorded(self) -> Iterator[None]:
        """Gathers recorded new ids on every rank for the checkpoint; afterwards only rank 0 keeps them."""
        if self.growing is not None:
            self.growing.gather_recorded()
        yield
        if self.growing is not None and not self.world.is_first:
            self.growing.forget_recorded()

    def check_finite(self, loss: float, fault: str = "") -> None:
        """Raises FloatingPointError if training has diverged."""
        if fault or not math.isfinite(loss):
            raise FloatingPointError(
                f"{fault or f'the loss is {loss}'} at step {self.progress.step}; lower the learning rates "
                "(optimizer.*.learning_rate)"
            )

    @property
    def evaluated(self) -> nn.Module:
        return self.modules["average"].module if "average" in self.modules else self.model

    def _reseed(self) -> None:
        """Seeds the random generator of this rank, by the step where it starts."""
        origin = self.config.training.seed, self.world.rank, self.progress.step
        torch.manual_seed(int(np.random.SeedSequence(origin).generate_state(1)[0]))

    def _module_state(self) -> dict:
        return {name: module.state_dict() for name, module in self.modules.items()}

    def _load_modules(self, state: dict) -> None:
        for name, module in self.modules.items():
            module.load_state_dict(state[name])

    def _optimizer_state(self) -> dict:
        state = self.optimizer.state_dict()
        for one in state["state"].values():
            one.pop("average", None)  # in the state of the module "average"
        return state

    def _state(self) -> dict:
        random = {"cpu": torch.get_rng_state()}  # of this rank; other tensors are shards or equal on all ranks
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            **self._module_state(),
            "optimizer": self._optimizer_state(),
            "random": {str(self.world.rank): random},
            "window": self.world.sum(self.window),
            **({"frozen": self._frozen} if self._frozen else {}),
        }
