"""The typed config of a training run: `data`, `model`, `encoder`, `optimizer`, `sharding` and `training`.

A YAML file sets any part of it, and the command line overrides any field (`--training.epochs 3`); see
`jfi.training.config_parser`. `jfi.training.model_config` has the sections between `data` and `training`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jfi.data import DataConfig
from jfi.data.setting_types import Count, Finite, Natural, NonNegative, Positive, Seed, check_bounds
from jfi.training.model_config import (
    ConfigError,
    EncoderConfig,
    ModelConfig,
    OptimizerConfig,
    ShardingConfig,
    event_width,
    require,
)

#: What may select the best epoch, by task; the first one does so by default.
MONITORS: dict[str, tuple[str, ...]] = {"binary": ("auc", "ne", "user_auc"), "regression": ("r2", "rmse", "mae")}


@dataclass
class TrainingConfig:
    """The training loop.

    Args:
        run_dir: folder of the run, new or empty. Null means `runs/<date>-<time>`.
        epochs: maximum number of epochs.
        batch_size: samples per step, over all processes under torchrun. Null is 512 up to 150,000 training samples, and
            1024 for more.
        gradient_accumulation_steps: number of parts of a batch whose gradients are computed one after another. Their
            sum is the gradient of the whole batch, up to rounding, and activations take the memory of one part;
            `batch_size`, steps, learning rates and clipping are those of the whole batch. Under torchrun each process
            has so many parts, and attention must go to the rows.
        admit_every: with a `capacity` of `data.features`, steps between two admissions, in which new values get rows of
            their tables; there are also some after steps 1, 2, 4 and so on below it, and before each evaluation.
        publish_every: with `jfi train --follow`, seconds between two versions of the model that are published in the
            run's folder `published`, from where `jfi serve --follow` applies them as they come; null publishes none.
            Needs `optimizer.ema_decay: null`. It may be changed later, as `publish_if`.
        publish_if: a rule such as `auc >= .7 or rows < 1000` on the scores of the hour of log time so far, each row
            scored before it was trained on: no version is published while it does not hold. Scores are `ne` and `auc`,
            `rmse` of a regression, and `rows`; of several labels such as `auc_like`. Null publishes always.
        eval_batch_size: samples per batch of evaluation, over all processes under torchrun.
        monitor: validation metric that selects the best epoch: `auc` (highest), `ne` (lowest), `user_auc` (AUC per
            user, highest), or one of those that `ranking` computes, such as `hr@10`, `ndcg@10` or `ndcg@10_full`
            (highest); of a regression `r2` (highest), `rmse` or `mae` (lowest); of several labels also that of one,
            such as `auc_like`, where `auc`, `ne`, `user_auc` and `r2` are means over the labels. `auto` is `auc`, or
            `r2` where no label is binary.
        eval_every: steps between evaluations on the validation split within an epoch, in addition to the one after each
            epoch; 0 for none. The parameters of the best evaluation are those of the run.
        patience: training stops after this number of evaluations without a better `monitor`; null never stops early.
        seed: seed of parameters, dropout, sample order and sampled negatives; in [0, 2**32).
        device: `auto` means cuda if there is a GPU, else cpu.
        precision: precision of the matrix products in training and in the run's own evaluation: `float32`, or
            `bfloat16`, under torch.autocast. Parameters, the loss and the optimizers' state are float32 in both; rows
            that are looked up are rounded to bfloat16 on a GPU. A run is exported, and scores tables, in float32.
        max_grad_norm: gradients of all parameters outside of the embedding tables are scaled down so that their norm,
            taken over all of them, is at most this; null does not clip. Rows of tables are not clipped: the backward
            pass updates them, and their gradients never exist together.
        cuda_graph: `auto` launches training steps on a GPU as CUDA graphs where that is possible: batches by sample, no
            encoder, not under torchrun. If not, a line names the reason; the line of an epoch says how many steps were
            captured. `always` also captures steps under torchrun, with `sharding.exchange: attention`, and refuses a
            run whose steps cannot be captured; `never` captures none.
        logger: where metrics go in addition to metrics.jsonl and TensorBoard: `wandb` or `mlflow`, by the loggers of
            Lightning with the environment variables of these trackers, or null for nowhere. Code can give any other
            logger, see `jfi.training.train`.
        checkpoint_every: steps between checkpoints within an epoch, in addition to the one after each epoch; 0 for
            none.
        warm_start: folder of a run to start from, or null: the parameters are those of its best epoch. A value that it
            knows keeps its row of the embedding table, a new one gets a fresh row. The columns, the model and the
            encoder must be the same. The optimizers start anew.
        rows_after: training samples are those newer than this time, in seconds since 1970; older rows are only events
            of histories. Null takes all. `auto` is null, or with `warm_start` the time of the newest row that the other
            run has trained on, so that no row is trained on twice; null again with `data.split: leave_one_out` or
            `user`, or if the other run's best evaluation lies within its first epoch.
        ranking: for implicit feedback, the items among which HR@k and NDCG@k rank a held-out positive: `sampled` items
            (100), `full` (these, and all items of training), or `none`. At most 1,000 positives of a split are ranked,
            spread evenly over it: each candidate is scored with the whole history.
    """

    run_dir: str | None = None
    epochs: Count = 10
    batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1
    admit_every: Count = 100
    publish_every: NonNegative | None = None
    publish_if: str | None = None
    eval_batch_size: Count = 4096
    monitor: str = "auto"
    eval_every: Natural = 0
    patience: Count | None = 2
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    max_grad_norm: Positive | None = None
    cuda_graph: Literal["auto", "always", "never"] = "auto"
    logger: Literal["wandb", "mlflow"] | None = None
    checkpoint_every: Natural = 0
    warm_start: str | None = None
    rows_after: Finite | Literal["auto"] | None = "auto"
    ranking: Literal["none", "sampled", "full"] = "sampled"
    #: Steps between two lines of training metrics: a line waits for the loss of a GPU, a step does not.
    log_every: ClassVar[int] = 50
    #: K of HR@k and NDCG@k, and the number of sampled items: as the literature has them most often.
    ranking_k: ClassVar[int] = 10
    ranking_samples: ClassVar[int] = 100
    #: The most positives of a split that are ranked; the standard error of HR@k is below 0.016 then.
    ranking_positives: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_bounds(self, "training.", ConfigError)
        parts, most = self.gradient_accumulation_steps, self.batch_size
        must = f"at most training.batch_size, {most}"
        require(most is None or parts <= most, "training.gradient_accumulation_steps", parts, must)

    def ranking_kinds(self) -> dict[Literal["sampled", "full"], str]:
        """Returns by kind of candidates that `ranking` asks for, how the names of its metrics end."""
        kinds: dict = {"none": {}, "sampled": {"sampled": ""}, "full": {"sampled": "", "full": "_full"}}
        return kinds[self.ranking]

    def ranking_metrics(self) -> list[str]:
        """The names of the metrics that `ranking` computes for implicit feedback."""
        return [f"{name}@{self.ranking_k}{end}" for end in self.ranking_kinds().values() for name in ("hr", "ndcg")]


@dataclass
class Config:
    """The whole config of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def as_dict(self) -> dict:
        """The fields as JSON and YAML can hold them: tables in memory are named by their SHA-256."""
        return dataclasses.asdict(dataclasses.replace(self, data=self.data.without_tables()))

    def __post_init__(self) -> None:
        for name in ("model", "encoder", "optimizer", "sharding", "training"):  # a field may have been set since
            check_bounds(getattr(self, name), f"{name}.", ConfigError)
        averages, every = self.optimizer.ema_decay, self.training.publish_every
        why = "null with training.publish_every: each step changes the averages of all rows"
        require(every is None or averages in (None, "auto"), "optimizer.ema_decay", averages, why)
        if (rule := self.training.publish_if) is not None:
            require(every is not None, "training.publish_if", rule, "null without training.publish_every")
            from jfi.data.schema.rules import parse_rule  # which imports pyarrow, and only a rule needs

            parse_rule(rule)
        several = isinstance(self.model.bias, list) and self.encoder.num_layers > 0 and self.model.pooling != "none"
        require(not several, "model.bias", self.model.bias, "one bias or null with encoder.num_layers")
        if self.data.batching == "user":
            self._check_shared()
        has_sids = self.data.semantic_ids is not None or self.data.prepared is not None
        how = self.model.semantic_ids
        require(has_sids or how == "digits", "model.semantic_ids", how, "digits without data.semantic_ids")
        crossed = next((name for name, cross in self.data.crosses().items() if self.data.item in cross), None)
        why = f"true with '{crossed}' of data.features, a cross of '{self.data.item}'"
        require(self.model.item_id or crossed is None, "model.item_id", self.model.item_id, why)
        self._check_widths()
        self._check_monitor()

    def _check_widths(self) -> None:
        """Checks the widths of the tables; `build_model` checks those of a prepared dataset again."""
        data, default = self.data, self.model.embedding_dim
        if self.model.pooling != "none":
            events = [data.item] if self.model.item_id else []
            events += [*data.names("item", "category"), *data.names("event"), *data.crosses()]
            width = event_width({name: data.feature(name).width or default for name in events}, default)
            heads = self.model.num_heads
            fits = self.encoder.num_layers == 0 or width % heads == 0
            must = f"a divisor of the width of events in data.features, {width}, with encoder.num_layers"
            require(fits, "model.num_heads", heads, must)

    def with_training(self, **changes: Any) -> "Config":
        """A copy with some fields of `training` changed."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **changes))

    @property
    def monitor(self) -> str:
        """The metric that `training.monitor` names."""
        tasks = {one.task for one in self.data.targets()}
        auto = MONITORS["binary" if "binary" in tasks else "regression"][0]
        return auto if self.training.monitor == "auto" else self.training.monitor

    def _check_monitor(self) -> None:
        monitor, ranked = self.training.monitor, self.training.ranking_metrics()
        labeled = not self.data.is_implicit
        if self.data.prepared is not None and not labeled and "@" not in monitor:
            return  # the labels are in the config of the run
        targets = self.data.targets()
        own = {one.name: MONITORS[one.task] for one in targets}
        known = [name for names in own.values() for name in names]
        if len(targets) > 1:
            known = [name for name in known if name not in ("rmse", "mae")]
            known += [f"{name}_{label}" for label, names in own.items() for name in names]
        known = [*dict.fromkeys(known), *([] if labeled else ranked)]
        why = "; see training.ranking" if "@" in monitor else ""
        if why and labeled:
            why = "; hr@k and ndcg@k are metrics of implicit feedback, and the data has labels"
        must = f"{', '.join(known[:-1])} or {known[-1]}{why}"
        require(monitor in ("auto", *known), "training.monitor", monitor, must)

    def _check_shared(self) -> None:
        """Checks that the samples of a user can share one timeline."""
        if self.encoder.num_layers and self.model.pooling != "none":
            why = "with data.batching: user, where encoded events are the same for all samples of a user"
            require(self.encoder.causal, "encoder.causal", self.encoder.causal, f"true {why}")
