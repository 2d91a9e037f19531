"""The figures of semantic IDs as a picture."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from jfi.semantic_ids.quality import SIDQuality
from jfi.utils.figures import save_figure

_COLOR, _OTHER, _LIGHT = "#0b5394", "#cc4125", "#9ab3c9"


def draw_quality(quality: SIDQuality, source_names: list[str], title: str, path: Path) -> None:
    """Plots reconstruction, rates of the IDs, use of the digits and accuracy of the labels, as a PNG."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    errors, rates, digits, labels = figure.subplots(2, 2).flat
    names = ["all", *source_names]
    _bars(errors, names, [[quality.reconstruction_error, *quality.source_errors]], [_COLOR], [""])
    highest = max(1.0, quality.reconstruction_error, *quality.source_errors)
    errors.set(title="reconstruction error (share of the variance)", ylim=(0, 1.1 * highest))
    shown = {
        "distinct IDs\nby items": quality.no_collision_rate,
        "items with\nown ID": quality.single_rate,
        "entropy by\nlog2 items": quality.entropy / quality.max_entropy if quality.max_entropy else 1.0,
        "items with\ncontent": 1 - quality.unknown / quality.items,
    }
    _bars(rates, list(shown), [list(shown.values())], [_COLOR], [""])
    known = quality.items - quality.unknown
    rates.set(title=f"{known:,} items with content, {quality.distinct:,} distinct IDs", ylim=(0, 1.1))
    numbers = range(1, len(quality.perplexity) + 1)
    digits.bar(numbers, quality.perplexity, color=_COLOR, label="perplexity")
    digits.bar(numbers, quality.dead_codes, color=_OTHER, width=0.4, label="values that no item has")
    top = max(*quality.perplexity, *quality.dead_codes)
    digits.set(title="use of each digit's values", xlabel="digit", ylim=(0, 1.25 * top))  # the legend is above the bars
    digits.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    digits.legend(loc="upper right", ncols=2)
    if quality.labels:
        columns = [[getattr(one, kind) for one in quality.labels.values()] for kind in ("majority", "probe", "raw")]
        _bars(labels, list(quality.labels), columns, [_LIGHT, _COLOR, _OTHER], ["most frequent", "IDs", "content"])
        labels.set(title="accuracy of labels, read linearly from", ylim=(0, 1.1))
        labels.legend()
    else:
        labels.axis("off")
    figure.suptitle(title)
    save_figure(figure, path)


def _bars(axes, names: list[str], columns: list[list[float]], colors: list[str], labels: list[str]) -> None:
    """Groups of bars, each with its number."""
    width = 0.8 / len(columns)
    for i, (column, color, label) in enumerate(zip(columns, colors, labels, strict=True)):
        positions = [n + (i - (len(columns) - 1) / 2) * width for n in range(len(names))]
        bars = axes.bar(positions, column, width, color=color, label=label)
        axes.bar_label(bars, [f"{value:.1%}" for value in column], fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
