"""A policy as text and as a picture: segments, and relevance by surface and dwell."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jfi.history_policies.policy import Policy, SegmentReport, SurfaceReport
from jfi.utils.figures import save_figure, widen_axis

_COLOR = "#0b5394"
#: Surfaces that are drawn, those with the most events.
_MOST = 8
#: Least span of the axis of log-odds, so that noise does not fill it.
_MIN_SPAN = 1.0


def describe(policy: Policy) -> str:
    """The policy as lines for a terminal.

    A surface has a column for each bin of dwell, headed by where the bin begins, and one for unknown dwell. A segment
    has the log-odds of a conversion there less its own overall, in parentheses where such events are removed.
    """
    lines = [f"segment{'':16}users        events  conversions  removed  longest history"]
    for one in policy.segment_reports:
        rate = one.conversions / max(1, one.events)
        cap = "any" if one.cap is None else f"{one.cap:,}"
        boosted = ", boosted" if one.boosted else ""
        lines.append(f"{one.name:18}{one.users:10,}{one.events:14,}{rate:13.2%}{one.removed:9.1%}  {cap}{boosted}")
    lines.append(f"the newest {policy.newest} events of a history stay, whatever their cell")
    lines += policy.notes
    for g, surface in enumerate(policy.surfaces):
        heads = ["0", *(_seconds(edge) for edge in policy.edges[g]), "unknown"]
        lines += ["", f"{surface}: seconds from{'':5}" + "".join(f"{head:>9}" for head in heads)]
        width = len(f"{surface}: seconds from{'':5}")
        for report in policy.surface_reports[g :: len(policy.surfaces)]:
            cells = [
                "" if not events else f"{odds:+.2f}" if keep else f"({odds:+.2f})"
                for odds, keep, events in zip(report.log_odds, report.keep, report.events, strict=True)
            ]
            lines.append(f"{report.segment:{width}}" + "".join(f"{cell:>9}" for cell in cells))
            share = f"{_share(report):.2f} %" if report.entropy else "nothing"
            model = "no model"
            if report.slope is not None:
                model = f"log-odds = {report.intercept:.2f} {report.slope:+.2f} log(1 + dwell)"
            lines.append(f"{'':{width}}  mutual information of dwell and conversion: {share} of the entropy; {model}")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _share(report: SurfaceReport) -> float:
    """The information of dwell about a conversion, in percent of its entropy."""
    return 100 * report.information / report.entropy if report.entropy else 0.0


def draw_policy(policy: Policy, title: str, path: Path) -> None:
    """Plots log-odds by dwell on each surface, and how much dwell tells there, a column for each segment, as a PNG.

    A filled mark is a bin whose events stay, a hollow one a bin that is removed; a dotted line is the logistic model.
    The marks at the right are events of unknown dwell. Of more than 8 surfaces those with the most events are drawn.
    """
    count, surfaces = len(policy.segment_reports), len(policy.surfaces)
    events = [sum(sum(one.events) for one in policy.surface_reports[g::surfaces]) for g in range(surfaces)]
    shown = sorted(np.argsort(-np.array(events), kind="stable")[:_MOST].tolist())
    figure = Figure(figsize=(max(7.0, 5.5 * count), 7.5), layout="constrained")
    axes = figure.subplots(2, count, squeeze=False, sharex="row", sharey="row", height_ratios=[3, 1 + len(shown) / 6])
    borders = [edge for g in shown for edge in policy.edges[g] if edge > 0] or [1.0]
    unknown = max(borders) * 8
    for k, segment in enumerate(policy.segment_reports):
        reports = [policy.surface_reports[k * surfaces + g] for g in shown]
        for color, (g, report) in enumerate(zip(shown, reports, strict=True)):
            _draw_surface(axes[0, k], report, segment, np.array(policy.edges[g]), unknown, f"C{color}")
        rate = segment.conversions / max(1, segment.events)
        axes[0, k].set_title(
            f"{segment.name}: {segment.users:,} users, {segment.events:,} events\n"
            f"{rate:.1%} with a conversion, {segment.removed:.0%} removed{', boosted' if segment.boosted else ''}",
            fontsize=11,
        )
        axes[0, k].axhline(0, color="0.8", zorder=0)
        axes[0, k].set(xscale="log", xlabel="dwell (seconds)")
        axes[0, k].set_xlim(right=unknown * 2.5)
        axes[0, k].grid(alpha=0.3)
        _draw_information(axes[1, k], reports)
    widen_axis(axes[0, 0], _MIN_SPAN)
    left, right = axes[0, 0].get_xlim()
    for one in axes[0]:
        for minor in (False, True):  # none where dwell is unknown
            ticks = [tick for tick in one.get_xticks(minor=minor) if left <= tick < unknown / 2.5]
            one.set_xticks(ticks, minor=minor, **({"labels": []} if minor else {}))
        one.set_xlim(left, right)
        one.axvline(unknown / 2.5, color="0.6", linewidth=0.8)
        one.text(unknown, one.get_ylim()[0], "unknown", ha="center", va="bottom", fontsize=8, color="0.4")
    axes[0, 0].set_ylabel("log-odds of a conversion\nless the segment's")
    axes[1, 0].set_yticks(range(len(shown)), [policy.surfaces[g] for g in shown])
    axes[1, 0].invert_yaxis()
    style = {"linestyle": "", "color": "0.3", "marker": "o"}
    marks = [Line2D([], [], **style, label="stays"), Line2D([], [], **style, markerfacecolor="white", label="removed")]
    names = [Line2D([], [], color=f"C{i}", label=policy.surfaces[g]) for i, g in enumerate(shown)]
    model = [Line2D([], [], color="0.3", linestyle=":", label="logistic model (points are shrunk)")]
    figure.legend(handles=[*names, *marks, *model], loc="outside lower center", ncols=min(6, len(names) + 3))
    figure.suptitle(title, fontsize=14, parse_math=False)
    save_figure(figure, path)


def _draw_surface(
    axes: Axes, report: SurfaceReport, segment: SegmentReport, edges: np.ndarray, unknown: float, color: str
) -> None:
    odds, keep, events = (np.array(one) for one in (report.log_odds, report.keep, report.events))
    # A bin is drawn in its middle, the first and the last one half as far again from their edge.
    positive = np.maximum(edges, 1e-3)
    middles = np.sqrt(positive[1:] * positive[:-1])
    positions = np.concatenate([positive[:1] / 1.5, middles, positive[-1:] * 1.5, [unknown]])
    if not len(edges):
        positions = np.array([1.0, unknown])
    some = events > 0
    known = some[:-1]
    axes.plot(positions[:-1][known], odds[:-1][known], color=color, linewidth=1.2)
    for chosen, face in ((some & keep, color), (some & ~keep, "white")):
        axes.plot(positions[chosen], odds[chosen], "o", color=color, markerfacecolor=face, markersize=6)
    if report.slope is not None and not segment.is_global and len(edges):
        seconds = np.geomspace(positions[0], positions[-2], 50)
        rate = segment.conversions / segment.events
        model = report.intercept + report.slope * np.log1p(seconds) - np.log(rate / (1 - rate))
        axes.plot(seconds, model, color=color, linestyle=":", linewidth=1.2)


def _draw_information(axes: Axes, reports: list[SurfaceReport]) -> None:
    shares = [_share(report) for report in reports]
    bars = axes.barh(np.arange(len(reports)), np.maximum(shares, 0), 0.6, color=_COLOR)
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], fontsize=8, padding=2)
    axes.set_xlabel("information of dwell about a conversion (% of its entropy)")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
