"""All baselines of a dataset, each with its settings chosen on the validation split."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jfi.baselines import models
from jfi.baselines.features import Features
from jfi.baselines.models import BaselineResult, best, gradient_boosting, logistic_regression
from jfi.baselines.samples import Samples
from jfi.data import InteractionDataset
from jfi.events.groups import GROUPS
from jfi.training.config import ConfigError
from jfi.utils.display import Display


def run_baselines(
    dataset: InteractionDataset, seeds: Sequence[int] = (0,), monitor: str = "auc"
) -> dict[str, list[BaselineResult]]:
    """Returns a result of the first label for each seed, by baseline.

    With labels a seed changes nothing, so the results are computed once. Of implicit feedback it draws the training
    negatives, which are those of the first epoch of a run with this seed.

    Args:
        dataset: of a training run.
        seeds: at least one.
        monitor: the validation metric that settings are chosen by: "ne", or AUC for any other.

    Raises:
        ConfigError: that label is not binary.
        DataError: a file of a prepared dataset is damaged.

    Example:
        >>> import numpy as np
        >>> import pyarrow as pa
        >>> from jfi.data import DataConfig, load_dataset
        >>> rng = np.random.default_rng(0)
        >>> rows = {name: rng.integers(0, 2, 2000) for name in ("user_id", "item_id", "timestamp", "like")}
        >>> results = run_baselines(load_dataset(DataConfig(interactions=pa.table(rows), label="like")))
        >>> list(results)[:3], list(results["popularity by time"][0].settings)
        (['item mean', 'item + user mean', 'popularity by time'], ['half_life'])
    """
    if dataset.schema.labels[0].task != "binary":
        advice = "jfi compare leaves them out with --models none mean sum attention"
        raise ConfigError(f"baselines predict a binary label, got a regression; {advice}")
    results: dict[str, list[BaselineResult]] = {}
    for seed in seeds if dataset.is_implicit else seeds[:1]:
        with Display("baselines", None, ticking=True):
            begin = time.perf_counter()
            for name, fit in _fits(dataset, seed, monitor):
                now = time.perf_counter()
                results.setdefault(name, []).append(replace(fit, train_seconds=now - begin))
                begin = now
    if dataset.verification is not None:
        dataset.verification.check()
    return {name: runs if dataset.is_implicit else runs * len(seeds) for name, runs in results.items()}


def _fits(dataset: InteractionDataset, seed: int, monitor: str) -> Iterator[tuple[str, BaselineResult]]:
    samples = Samples.of(dataset, seed)
    features = Features.of(dataset, samples)
    numbers = features.numbers

    def choose(*options: list[str]) -> tuple[int, BaselineResult]:
        """The number and the fit of the columns that are best."""
        fits = [logistic_regression({name: numbers[name] for name in one}, samples) for one in options]
        chosen = best(fits, monitor)
        return fits.index(chosen), replace(chosen, settings={})

    names = (("past_item_rate", "past_recent_rate"), ("past_item_share", "past_popularity"))
    item, recent = names[dataset.is_implicit]
    yield "item mean", choose([item])[1]
    if not dataset.is_implicit:
        yield "item + user mean", choose([item, "past_user_rate"])[1]
    number, fit = choose(*([f"{recent}_{i}"] for i in range(1, len(features.half_lives) + 1)))
    yield "popularity by time", replace(fit, settings={"half_life": features.half_lives[number]})
    yield "co-occurrence", choose(GROUPS["similar"][dataset.is_implicit])[1]
    fits = (logistic_regression(numbers, samples, penalty) for penalty in models.PENALTIES)
    yield "logistic regression", best(fits, monitor)
    trials = itertools.product(models.LEAVES, models.LEAST_ROWS)
    boosted = (gradient_boosting(numbers, samples, *trial, features.categories) for trial in trials)
    yield "gradient boosting", best(boosted, monitor)
