"""Publishes a run that follows a log, for `jfi serve --follow`."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from jfi.data import DataSchema
from jfi.follow.loop import LogTrainer
from jfi.history_policies.policy import Policy
from jfi.serving import MAX_CANDIDATES
from jfi.serving.dataset_schema import schema_of_model
from jfi.serving.export import Export
from jfi.serving.publish import Publisher, PublishHook
from jfi.serving.schema import Limits
from jfi.training import ConfigError
from jfi.training.run.run_folder import RunFolder

#: Folder of a run for the versions.
PUBLISHED = "published"


@contextmanager
def publishing(run: RunFolder, trainer: LogTrainer, schema: DataSchema, policy: Policy | None) -> Iterator[PublishHook]:
    """Yields a hook that publishes a whole version at once, then every `training.publish_every` seconds.

    None is published while `training.publish_if` does not hold for the hour of log time so far.

    Args:
        run: the run.
        trainer: of the run.
        schema: of the batches.
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
