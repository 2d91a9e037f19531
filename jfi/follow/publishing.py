"""Publishes a run that follows a log, for `jfi serve --follow`."""

from collections.abc import Callable
from pathlib import Path

from jfi.data import DataSchema
from jfi.follow.loop import Follower
from jfi.history_policies.policy import Policy
from jfi.serving import MAX_CANDIDATES
from jfi.serving.dataset_schema import read_counters, schema_of_model
from jfi.serving.publish import Publisher, PublishHook
from jfi.serving.schema import Limits
from jfi.training import Config, ConfigError
from jfi.training.run.run_folder import RunFolder

#: Folder of a run for the versions, without `training.publish_to`.
PUBLISHED = "published"


def publishing(
    run: RunFolder, config: Config, schema: DataSchema, policy: Policy | None
) -> Callable[[Follower], PublishHook] | None:
    """Returns what makes the hook of `jfi.follow.start.follow`, or None if the run is not published.

    It publishes a whole version at once, then every `training.publish_every` seconds.

    Args:
        run: the run.
        config: of the run.
        schema: of the batches.
        policy: which events of a history the model reads, or None for all.
    """
    seconds = config.training.publish_every
    if seconds is None:
        return None

    def make(trainer: Follower) -> PublishHook:
        model, data = trainer.model, config.data
        try:
            publisher = Publisher(
                Path(config.training.publish_to or run.path / PUBLISHED),
                model,
                schema_of_model(data, schema, config.model, model),
                Limits(MAX_CANDIDATES, schema.max_history),
                policy=policy,
                past=read_counters(data, schema) if data.statistics_columns() else None,
                run=run.path.resolve().name,
                trained=run.read_versions(),
            )
            place = trainer.place and trainer.place.named()
            publisher.publish(place)
        except ValueError as fault:
            raise ConfigError(f"training.publish_every: {fault}") from fault
        return PublishHook(publisher, seconds, place)

    return make
