"""Publishes a run that follows a log, for `jfi serve --follow`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from jfi.data import DataSchema
from jfi.follow.loop import LogTrainer
from jfi.history_policies.policy import Policy
from jfi.serving import MAX_CANDIDATES
from jfi.serving.dataset_schema import schema_of_model
from jfi.serving.export import Export
from jfi.serving.publish import Publisher, PublishHook
from jfi.serving.schema import Limits
from jfi.training import Config, ConfigError
from jfi.training.run.run_folder import RunFolder

#: Folder of a run for the versions.
PUBLISHED = "published"


@contextmanager
def publishing(
    run: RunFolder, config: Config, schema: DataSchema, policy: Policy | None
) -> Iterator[Callable[[LogTrainer], PublishHook] | None]:
    """Yields what makes the hook of `jfi.follow.start.follow`, or None if the run is not published.

    It publishes a whole version at once, then every `training.publish_every` seconds, until the block ends; none while
    `training.publish_if` does not hold for the hour of log time so far.

    Args:
        run: the run.
        config: of the run.
        schema: of the batches.
        policy: which events of a history the model reads, or None for all.
    """
    seconds, rule, stack = config.training.publish_every, config.training.publish_if, ExitStack()

    def make(trainer: LogTrainer) -> PublishHook:
        model, data, folder = trainer.model, config.data, run.path / PUBLISHED
        try:
            requests = schema_of_model(data, schema, model, config.model.pooling != "none", config.model.item_id)
            export = Export(
                model,
                requests,
                Limits(MAX_CANDIDATES, schema.max_history),
                policy=policy,
                run=run.path.resolve().name,
                trained=run.read_versions(),
            )
            publisher = Publisher(folder, export)
        except ValueError as fault:
            raise ConfigError(f"training.publish_every: {fault}") from fault
        stack.enter_context(closing(publisher))
        begin = trainer.place and trainer.place.named()
        hook = PublishHook(publisher, seconds, begin, publish_if=rule, scores=lambda: trainer.windows.metrics("hour"))
        if (number := hook.begin()) is not None:
            print(f"published version {number}: {folder}", flush=True)
        return hook

    with stack:
        yield None if seconds is None else make
