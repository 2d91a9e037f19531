"""All baselines of a dataset, each with its settings chosen on the validation split."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jfi.baselines.features import Features, Smoothing
from jfi.baselines.models import LEAST_ROWS, LEAVES, PENALTIES, Fit, best, gradient_boosting, logistic_regression
from jfi.baselines.samples import Samples
from jfi.data import InteractionDataset
from jfi.training.config import ConfigError
from jfi.utils.display import Display

#: Rows of smoothing, and half-lives as parts of the training split's time span.
SMOOTHING, HALF_LIVES = (1.0, 3.0, 10.0, 30.0, 100.0), (1 / 64, 1 / 16, 1 / 4, 1.0)


@dataclass(frozen=True)
class BaselineResult:
    """The metrics of a baseline on both held-out splits.

    Args:
        settings: what was chosen on the validation split.
        validation, test: the metrics of `jfi.training.metrics.label_metrics`.
        train_seconds: of choosing and fitting, with the features that no earlier baseline has needed.
    """

    settings: dict[str, float]
    validation: dict[str, float]
    test: dict[str, float]
    train_seconds: float


def run_baselines(
    dataset: InteractionDataset, seeds: Sequence[int] = (0,), monitor: str = "auc"
) -> dict[str, list[BaselineResult]]:
    """Returns a result for each seed, by baseline.

    With labels a seed changes nothing, so the results are computed once. Of implicit feedback it draws the training
    negatives, which are those of the first epoch of a run with this seed.

    Args:
        dataset: of a training run.
        seeds: at least one.
        monitor: the validation metric that settings are chosen by: "ne", or AUC for any other.

    Of several labels they predict the first one.

    Raises:
        ConfigError: that label is not binary.
        DataError: a file of a prepared dataset is damaged.

    Example:
        >>> from jfi.data import DataConfig, SyntheticConfig, load_dataset
        >>> synthetic = SyntheticConfig(num_users=60)
        >>> dataset = load_dataset(DataConfig(source="synthetic", synthetic=synthetic))
        >>> results = run_baselines(dataset)
        >>> list(results)[:3], list(results["item mean"][0].settings)
        (['item mean', 'item + user mean', 'popularity by time'], ['item_smoothing'])
    """
    if dataset.schema.labels[0].task != "binary":
        raise ConfigError("baselines predict a binary label, got data.task: regression")
    results: dict[str, list[BaselineResult]] = {}
    for seed in seeds if dataset.is_implicit else seeds[:1]:
        with Display("baselines", None, ticking=True):
            begin = time.perf_counter()
            for name, fit in _fits(dataset, seed, monitor):
                now = time.perf_counter()
                result = BaselineResult(fit.settings, fit.validation, fit.test, now - begin)
                results.setdefault(name, []).append(result)
                begin = now
    if dataset.verification is not None:
        dataset.verification.check()
    return {name: runs if dataset.is_implicit else runs * len(seeds) for name, runs in results.items()}


def _fits(dataset: InteractionDataset, seed: int, monitor: str) -> Iterator[tuple[str, Fit]]:
    samples = Samples.of(dataset, seed)
    features = Features(dataset, samples)

    def choose(columns, options: Iterable[Smoothing], names: dict[str, str]) -> tuple[Smoothing, Fit]:
        """The best smoothing and its fit, whose settings are the fields `names` of the smoothing."""
        tried = [(option, logistic_regression(columns(option), samples)) for option in options]
        option, fit = max(tried, key=lambda one: one[1].value(monitor))
        return option, replace(fit, settings={title: getattr(option, name) for name, title in names.items()})

    smoothing = Smoothing(item=10.0, user=10.0, half_life=features.span / 10)
    item, user = {"item": "item_smoothing"}, {"user": "user_smoothing"}
    smoothing, fit = choose(features.item, (replace(smoothing, item=rows) for rows in SMOOTHING), item)
    yield "item mean", fit
    if not dataset.is_implicit:
        options = (replace(smoothing, user=rows) for rows in SMOOTHING)
        smoothing, fit = choose(features.item_and_user, options, item | user)
        yield "item + user mean", fit
    options = (replace(smoothing, half_life=features.span * part) for part in HALF_LIVES)
    smoothing, fit = choose(features.popularity, options, item | {"half_life": "half_life"})
    yield "popularity by time", fit
    yield "co-occurrence", choose(features.co_occurrence, [smoothing], {} if dataset.is_implicit else user)[1]
    columns = features.all(smoothing)
    fits = (logistic_regression(columns, samples, penalty) for penalty in PENALTIES)
    yield "logistic regression", best(fits, monitor)
    trials = itertools.product(LEAVES, LEAST_ROWS)
    yield "gradient boosting", best((gradient_boosting(columns, samples, *trial) for trial in trials), monitor)
