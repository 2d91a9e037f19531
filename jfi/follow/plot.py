"""The picture of a run that follows a log: metrics of rows before they are trained on, by hour and by day."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from jfi.follow.windows import WINDOWS
from jfi.utils.figures import save_figure, widen_axis

_TITLES = {"ne": "normalized entropy", "auc": "AUC", "rmse": "RMSE"}
_STYLES = {"hour": {"color": "#9ab3c9", "marker": "."}, "day": {"color": "#cc4125", "marker": "o", "markersize": 7}}
#: Least span of an axis, so that noise does not fill it.
_MIN_SPAN = 0.02


def draw_windows(log: Path, open_windows: Sequence[dict], path: Path) -> bool:
    """Plots NE and AUC, or RMSE, of each label by hour and by day of log time, as a PNG.

    Args:
        open_windows: metrics of the windows that have not ended.

    Returns:
        Whether there was something to plot.
    """
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    lines = [line for line in (*lines, *open_windows) if line.get("window") in _STYLES and line["rows"]]
    known = (name for line in lines for name, value in line.items() if value is not None)
    names = list(dict.fromkeys(name for name in known if name.split("_")[0] in _TITLES))
    if not names:
        return False
    figure = Figure(figsize=(11, 3.2 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), squeeze=False).flat, names, strict=True):
        metric, _, label = name.partition("_")
        for kind, style in _STYLES.items():
            own = [line for line in lines if line["window"] == kind and line.get(name) is not None]
            middle = [datetime.fromtimestamp(line["time"] + WINDOWS[kind] / 2, UTC) for line in own]
            axes.plot(middle, [line[name] for line in own], label=f"by {kind}", **style)
        locator = AutoDateLocator(tz=UTC)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))
        axes.set(title=_TITLES[metric] + (f" of {label}" if label else ""))
        widen_axis(axes, _MIN_SPAN)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("each row is scored before it is trained on; time of the log, UTC")
    save_figure(figure, path)
    return True
