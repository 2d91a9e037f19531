"""What a request to a model must hold, and how its values become the ids and numbers of training."""

from jfi.data import DataConfig, InteractionDataset
from jfi.data.config import AGE, HISTORY
from jfi.serving.fields import Field, Fields


def request_fields(config: DataConfig, dataset: InteractionDataset, reads_history: bool, reads_age: bool) -> Fields:
    """The fields of requests to a model of `dataset`.

    Args:
        config: that `dataset` was loaded with.
        dataset: whose keys the fields fill.
        reads_history: whether the model reads events, and
        reads_age: the bucket of their age.
    """
    events = []
    if reads_history:
        events = _categories(dataset, "history")
        for name in config.event_dense:
            keys = [spec.key for spec in dataset.features if spec.role == "history" and spec.column == name]
            events.append(Field(name, "quantile", keys, edges=dataset.learnt.edges[name].tolist()))
        if reads_age:
            events.append(Field(AGE, "age", num_buckets=config.num_age_buckets))
    vocabularies = {
        name: values.to_pylist()
        for name, values in dataset.learnt.vocabularies.items()
        if reads_history or name not in config.event_categorical
    }
    return Fields(
        _categories(dataset, "user") + _numbers(dataset, config.user_dense),
        _categories(dataset, "item") + _numbers(dataset, config.item_dense),
        events,
        vocabularies,
    )


def _categories(dataset: InteractionDataset, role: str) -> list[Field]:
    """The fields of a role's columns of values."""
    by_column: dict[str, list] = {}
    for spec in dataset.features:
        cut = role == "history" and spec.column in dataset.learnt.edges
        if spec.role == role and not cut:
            by_column.setdefault(spec.column, []).append(spec)
    fields = []
    for column, specs in by_column.items():
        several = "categories" if specs[0].multi_valued else "category"
        # Events have slots, whose keys are numbered.
        slots = role == "history" and specs[0].key != HISTORY + column
        fields.append(Field(column, "slots" if slots else several, [spec.key for spec in specs]))
    return fields


def _numbers(dataset: InteractionDataset, names: list[str]) -> list[Field]:
    moments = dataset.learnt.moments
    return [Field(name, "number", mean=moments[name][0], deviation=moments[name][1]) for name in names]
