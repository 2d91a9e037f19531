"""A training that leaves nothing behind but the scores of the validation rows, and what those rows are."""

import numpy as np
import torch

from jfi.data import InteractionDataset
from jfi.data.batches.events import Events
from jfi.data.features.statistics import make_statistics
from jfi.data.prepared.splits import SPLITS
from jfi.training.config import Config
from jfi.training.distributed import World
from jfi.training.interrupt import stop_on_signals
from jfi.training.loop import Trainer
from jfi.training.metrics import Predictions
from jfi.training.recorder import SilentRecorder


def pilot_scores(config: Config, dataset: InteractionDataset, world: World) -> Predictions:
    """The predictions of the validation rows by the best epoch of a training with this config.

    No file is written and no test row is read as a sample.

    Args:
        config: of the training.
        dataset: of `config.data`.
        world: a single process.

    Raises:
        ConfigError: the config does not fit the dataset.
        FloatingPointError: the loss is not finite.
        Interrupted: SIGINT or SIGTERM.
    """
    # Ranking among sampled items would take long; the AUC decides in its place.
    monitor = config.training.monitor if config.training.monitor == "ne" else "auc"
    trainer = _Pilot(config.with_training(monitor=monitor, checkpoint_every=0, warm_start=None), dataset, world)
    trainer.load_pretrained()
    return trainer.scores()


class _Pilot(Trainer):
    def scores(self) -> Predictions:
        best = None
        with stop_on_signals() as stop, torch.autograd.set_multithreading_enabled(False):
            while not self.progress.finished(self.config.training):
                self._train_epoch(None, SilentRecorder(), stop)
                found = self._predict("validation", None, stop)
                if self.progress.end_epoch(found.metrics(), self.config.monitor):
                    best = found
        return best


def validation_rows(dataset: InteractionDataset, batch_size: int) -> np.ndarray:
    """`[N]` int64, the events of the validation samples, in the order in which they are evaluated."""
    order = dataset.batches("validation", batch_size).order
    samples = np.concatenate([order.part(number, 0, 1).samples for number in range(order.num_batches)])
    return dataset.draw("validation", samples)[0]


def statistics_of(dataset: InteractionDataset, names: list[str], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns by column the statistics `[N]` float64 of the events `rows`, made as if there were no test rows.

    Args:
        dataset: a table with labels; its events are read into memory.
        names: of `data.statistics`.
        rows: `[N]` int64, none of them of the test split.
    """
    events = dataset.arrays().events
    kept = np.asarray(events.split) != SPLITS.index("test")
    history = None
    if events.rows is not None:
        is_event = np.zeros(len(events), bool)
        is_event[events.rows] = True
        history = np.flatnonzero(is_event[kept])
    columns = [getattr(events, name)[kept] for name in ("user", "item", "time", "label", "split")]
    made = make_statistics(Events(*columns, history), names, dataset.schema.max_history)
    place = (np.cumsum(kept) - 1)[rows]
    return {name: values[place] for name, values in made.items()}
