"""Plots of a run: the curves of its metrics, and the attention of a few test samples."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.data import Batch, DataSchema, InteractionDataset
from jfi.models import SequenceDLRM
from jfi.training.run.recorder import DATA
from jfi.utils.figures import is_drawable, save_figure, widen_axis

_SPLIT_COLORS = {"train": "#9ab3c9", "validation": "#0b5394", "test": "#cc4125"}
_PANELS = 4
_EVENTS = 12
_PICK_FROM = 256
_TITLE_WIDTH = 34
#: Least span of a curve's axis, in nats, NE or AUC, so that a single epoch's noise does not fill it.
_MIN_SPAN = 0.02
_SPANS = (("years", 31_557_600), ("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1))


def draw_curves(log: list[dict], monitor: str, path: Path) -> None:
    """Plots four metrics over the epochs, with the best epoch and its test metrics, as a PNG.

    They are loss, NE, AUC and AUC per user, or those of a regression. Where another metric selects the best epoch, it
    replaces the last one. A dotted line is where the data has changed.

    Args:
        log: the lines of metrics.jsonl.
        monitor: the metric that selected the best epoch.
        path: the file to write.
    """
    ends, test = [record for record in log if record["split"] == "validation"], log[-1]
    # Each epoch has its own number of steps: data that has grown, or another batch size, changes it.
    steps, epochs = ([0, *(end[key] for end in ends)] for key in ("step", "epoch"))
    changed = [a["epoch"] for a, b in pairwise(ends) if a.get(DATA, b.get(DATA)) != b.get(DATA)]
    known = {"loss": "loss (nats)", "ne": "normalized entropy", "auc": "AUC", "user_auc": "AUC per user"}
    if not known.keys() <= test.keys():
        known = {"loss": "loss", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}
    titles = {name: title for name, title in known.items() if name in test}
    if monitor not in titles:
        titles = dict(list(titles.items())[:3])
        titles[monitor] = monitor.replace("ndcg", "NDCG").replace("hr", "HR")
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(2, 2).flat, titles.items(), strict=False):
        for split, marker in (("train", ""), ("validation", "o")):
            records = [r for r in log if r["split"] == split and r.get(metric) is not None]
            if records:
                x, y = np.interp([r["step"] for r in records], steps, epochs), [r[metric] for r in records]
                marker = marker or ("." if len(x) == 1 else "")  # a line needs two points
                axes.plot(x, y, color=_SPLIT_COLORS[split], marker=marker, markersize=5, label=split)
        axes.axvline(test["epoch"], color="0.8", linestyle="--", zorder=0)
        for number, epoch in enumerate(changed):
            axes.axvline(epoch, color="0.5", linestyle=":", zorder=0, label="" if number else "data changed")
        if test[metric] is not None:
            label = f"test {test[metric]:.4f}"
            star = {"color": _SPLIT_COLORS["test"], "markersize": 14, "label": label, "zorder": 1.5}  # behind the lines
            axes.plot(test["epoch"], test[metric], "*", **star)
        axes.set(title=title, xlabel="epoch")
        axes.set_xlim(0, epochs[-1] * 1.03)
        widen_axis(axes, _MIN_SPAN)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:  # AUC per user is NaN if no user has both labels
            axes.legend()
    figure.suptitle(
        f"best epoch by validation {monitor}: {test['epoch']:.4g} (dashed); the star is the test with its parameters"
    )
    save_figure(figure, path)


@dataclass
class _Sample:
    """A test sample: its target, and of its L events, oldest first, titles, other texts, and weights [L, H].

    `history` is the name of one of several, else ""; `entropies` are those of the sample's batch, see `_entropies`.
    """

    title: str
    label: float
    score: float
    history: str
    events: list[tuple[str, str]]
    weights: torch.Tensor
    entropies: torch.Tensor


def draw_attention(
    model: SequenceDLRM, dataset: InteractionDataset, device: torch.device, path: Path | None
) -> str | None:
    """Plots what a few test samples of different users attended to, as a PNG.

    A panel shows the events of a sample's longest history with the largest weights, each bar split by head; the weights
    of all events of the history sum to 1. The samples are spread evenly over the test split, and are preferably those
    with as many events as a panel shows. If none of the samples looked at has an event, no file is written.

    Args:
        model: a trained model.
        dataset: the dataset with the test split.
        device: of the model.
        path: the file to write, or None. With sharded tables every process must call this; all but one pass None.

    Returns:
        A line about the entropy of the weights of the samples' batches; None if no history of them has two events.
    """
    samples = _pick(model.eval(), dataset, device)
    if not samples or path is None:
        return None
    figure = Figure(figsize=(17, 10), layout="constrained")
    for axes, sample in zip(figure.subplots(2, _PANELS // 2, squeeze=False).flat, samples, strict=False):
        _draw_sample(axes, sample)
    heads = samples[0].weights.shape[1]
    keys = [Patch(color=f"C{head}", label=f"head {head + 1}") for head in range(heads)]
    keys.append(Line2D([], [], color="0.3", linestyle=":", label="equal weights"))
    figure.legend(handles=keys, loc="outside lower center", ncols=heads + 1)
    figure.suptitle("Attention of the target to the events of its history: weight by head", fontsize=14)
    save_figure(figure, path, dpi=100)
    entropies = torch.cat([sample.entropies for sample in samples])
    if not len(entropies):
        return None
    return f"attention of test samples: {entropies.mean().item():.2f} of the entropy of equal weights, mean over heads"


def _draw_sample(axes: Axes, sample: _Sample) -> None:
    heads = sample.weights.shape[1]
    order = sample.weights.sum(1).argsort(descending=True)[:_EVENTS].flip(0)
    left = torch.zeros(len(order))
    for head in range(heads):
        width = sample.weights[order, head] / heads
        axes.barh(range(len(order)), width, left=left, color=f"C{head}")
        left += width
    # parse_math=False: a price such as $5 is no formula.
    labels = [f"{_short(title)}, {' '.join(rest.split())}" for title, rest in (sample.events[i] for i in order)]
    axes.set_yticks(range(len(order)), labels, fontsize=9, parse_math=False)
    count, of = len(sample.events), f" of {sample.history}" if sample.history else ""
    axes.axvline(1 / count, color="0.3", linestyle=":")
    axes.set_xlabel("weight, mean over heads", loc="right")
    axes.set_xlim(left=0)
    shown = left.sum().item()
    axes.set_title(
        f"target: {_short(sample.title)} (label {sample.label:g}, predicted {sample.score:.2f})\n"
        f"{len(order)} of {count} events{of}, {shown:.0%} of the weight",
        loc="right",  # extends over the long tick labels
        fontsize=11,
        parse_math=False,
    )
    axes.spines[["top", "right"]].set_visible(False)


@torch.no_grad()
def _pick(model: SequenceDLRM, dataset: InteractionDataset, device: torch.device) -> list[_Sample]:
    samples: list[_Sample] = []
    users: set[int] = set()
    batches = dataset.batches("test", _PICK_FROM, batching="sample")
    for panel in range(_PANELS):
        batch = batches[panel * len(batches) // _PANELS]
        lengths = _lengths(dataset.schema, batch).amax(0).tolist()
        new = [row for row, user in enumerate(batch.users.tolist()) if user not in users and lengths[row] > 0]
        if not new:
            continue
        row = next((row for row in new if lengths[row] >= _EVENTS), max(new, key=lengths.__getitem__))
        users.add(batch.users[row].item())
        samples.append(_describe(model, dataset.schema, batch, row, device))
    return samples


def _describe(model: SequenceDLRM, schema: DataSchema, batch: Batch, row: int, device: torch.device) -> _Sample:
    batch_there = batch.to(device)  # before to_dict, which caches tensors that `to` would not move
    ids = {key: values.to_dense()[row].tolist() for key, values in batch.sparse_features.to_dict().items()}
    inputs = batch_there.dense_features, batch_there.sparse_features
    longest = int(_lengths(schema, batch)[:, row].argmax())
    age = schema.features[len(schema.encoded) + longest]
    # The heads of all features of the history, which have the same events.
    found = list(model.attention_weights(*inputs).values())
    found = found[longest * len(found) // len(schema.histories) :][: len(found) // len(schema.histories)]
    weights = torch.cat([one.to_dense()[row] for one in found], dim=2).mean(1).float().cpu()
    item_columns = {spec.column for spec in schema.features if spec.role == "item"}
    of_events = [spec for spec in schema.features if spec.history == age.history and spec is not age]
    fields = [spec for spec in of_events if spec.column not in item_columns]
    items = next((spec.key for spec in of_events if spec.column == schema.item_key), None)
    events = []
    for event, bucket in enumerate(ids[age.key]):
        shown = [
            f"{field.column} {_value(schema, field.column, ids[field.key][event])}"
            for field in fields
            # A slot that is empty, since the event has fewer values, is left out.
            if ids[field.key][event] or field.slot is None
        ]
        title = age.history if items is None else _title(schema, ids[items][event])
        events.append((title, ", ".join([*shown, _age(bucket)])))
    label, score = batch.labels[row].flatten()[0].item(), model(*inputs)[row].flatten()[0]
    return _Sample(
        title=_title(schema, ids[schema.item_key][0]),
        label=label,
        score=(torch.sigmoid(score) if schema.labels[0].task == "binary" else score).item(),
        history=age.history if len(schema.histories) > 1 else "",
        events=events,
        weights=weights,
        entropies=torch.cat([_entropies(one) for one in found]),
    )


def _lengths(schema: DataSchema, batch: Batch) -> torch.Tensor:
    """The lengths `[histories, B]` of the histories."""
    return torch.stack([batch.sparse_features[one.key].lengths() for one in schema.features[len(schema.encoded) :]])


def _entropies(weights: JaggedTensor) -> torch.Tensor:
    """The mean entropy of the weights [S, T, H] over log n, of the samples with n >= 2 events."""
    p, lengths = weights.values().float().flatten(1), weights.lengths().long()
    entropies = torch.segment_reduce(-torch.xlogy(p, p), "sum", lengths=lengths, axis=0)
    several = lengths > 1
    return entropies[several].mean(1) / lengths[several].log()


def _title(schema: DataSchema, item: int) -> str:
    """The item's title; the name and value of its column where there is none, or none that the fonts can show."""
    value = f"{schema.item_key} {_value(schema, schema.item_key, item)}"
    title = schema.titles[item] if schema.titles else value
    return title if is_drawable(title) else value


def _short(title: str) -> str:
    title = " ".join(title.split())
    return title if len(title) <= _TITLE_WIDTH else title[: _TITLE_WIDTH - 1] + "…"


def _value(schema: DataSchema, column: str, number: int) -> str:
    """The table's value for an id, the range of a quantile, else #id.

    It is "unknown" if it is missing or training did not see it.
    """
    if not number:
        return "unknown"
    if column in schema.encodings.vocabularies:
        return schema.encodings.vocabularies[column].values[number - 1]
    edges = schema.encodings.edges.get(column, ())
    if not len(edges):
        return f"#{number}"
    if number == 1:
        return f"< {edges[0]:.4g}"
    return f">= {edges[-1]:.4g}" if number > len(edges) else f"{edges[number - 2]:.4g} to {edges[number - 1]:.4g}"


def _age(bucket: int) -> str:
    """The age of a bucket of `history_age`, which begins at 2^(bucket - 1) seconds."""
    seconds = 2.0 ** max(0, bucket - 1)
    unit, length = next((unit, length) for unit, length in _SPANS if seconds >= length)
    return f"{seconds / length:.0f}+ {unit} ago"
