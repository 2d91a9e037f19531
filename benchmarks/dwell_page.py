"""The table and the picture of docs/dynamic_histories.md, from results of `python -m benchmarks.dwell`."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.figures import OURS, PAPER, PEERS
from benchmarks.table import as_markdown

RESULTS = Path(__file__).parent / "results/cpu/dwell.json"
PICTURE = RESULTS.with_suffix(".png")
#: Ways to remove events: the start of the arms' names, what it is, and its colour.
WAYS = {
    "policy": ("the policy", OURS),
    "random": ("at random", PEERS[0]),
    "oldest": ("the oldest", PEERS[1]),
    "cap": ("one cap for all", PEERS[2]),
}
REMOVALS = tuple(f"{way}-{share}" for share in (30, 50) for way in WAYS)
BOOSTS = ("short for all", "long for the active", "weights for the active")


def read(path: Path = RESULTS) -> list[dict]:
    """The cells that were measured with the config as it is.

    Raises:
        FileNotFoundError: there are none.
    """
    cells = [cell for cell in json.loads(path.read_text()) if not cell["overrides"]]
    if not any(cell["arm"] == "full" for cell in cells):
        raise FileNotFoundError(f"{path}: no training with the full history")
    return cells


class Arms:
    """Cells by arm, compared seed by seed.

    Args:
        cells: of `read`.
    """

    def __init__(self, cells: list[dict]) -> None:
        self._cells: dict[str, dict[int, dict]] = {}
        for cell in cells:
            self._cells.setdefault(cell["arm"], {})[cell["seed"]] = cell

    def __contains__(self, name: str) -> bool:
        return name in self._cells

    def of(self, name: str, value: Callable[[dict], float]) -> list[float]:
        """The values of an arm's cells that have one."""
        return [value(cell) for cell in self._cells.get(name, {}).values()]

    def pairs(
        self, name: str, other: str, value: Callable[[dict], float | None], of: Callable[[float, float], float]
    ) -> list[float]:
        """`of(own, other)` of the values of both arms, for each seed that both have."""
        one, two = self._cells.get(name, {}), self._cells.get(other, {})
        found = [(value(one[seed]), value(two[seed])) for seed in one if seed in two]
        return [of(a, b) for a, b in found if a is not None and b is not None]


def ne(cell: dict) -> float:
    return cell["test"]["ne"]


def rate(name: str) -> Callable[[dict], float | None]:
    return lambda cell: cell.get(f"{name}_per_second")


def less(a: float, b: float) -> float:
    return a - b


def percent(a: float, b: float) -> float:
    """By how many per cent a is more than b."""
    return 100 * (a / b - 1)


def shown(values: list[float], form: str, unit: str = "") -> str:
    """The mean, and with several values their standard deviation; nothing of none."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}{unit}"


def table(cells: list[dict]) -> str:
    """What each arm reads, its NE and its speed beside the full history's; and the paper's figures beside ours."""
    arms = Arms(cells)
    lines = [["arm", "seeds", "events removed", "NE", "NE, change from full", "samples/s", "requests/s"]]
    for name in ("full", *REMOVALS, *BOOSTS):
        if name not in arms:
            continue
        values = arms.of(name, ne)
        row = [name, str(len(values)), shown(removed(arms, name), ".1f", " %"), shown(values, ".4f")]
        if name == "full":
            row[2] = "none"
            row += ["", *(shown(known(arms, name, rate(one)), ",.0f") for one in ("samples", "requests"))]
        else:
            row.append(shown(arms.pairs(name, "full", ne, less), "+.4f"))
            for one in ("samples", "requests"):
                row.append(shown(arms.pairs(name, "full", rate(one), percent), "+.1f", " %"))
        lines.append(row)
    where, root = cells[0], Path(__file__).parents[1]
    commits = ", ".join(dict.fromkeys(cell["commit"] for cell in cells))
    place = f"{where['device']}, {where['threads']} threads, torch {where['torch']}, commit {commits}"
    note = (
        "Means and standard deviations over the seeds; differences to the full history seed by seed. "
        f"{place}, {where['date'][:10]}."
    )
    picture = f"![NE against the events kept, by the way of removal](../{PICTURE.relative_to(root)})"
    return f"{as_markdown(lines)}\n\n{note}\n\n{against_the_paper(arms)}\n\n{picture}"


def known(arms: Arms, name: str, value: Callable[[dict], float | None]) -> list[float]:
    return [one for one in arms.of(name, value) if one is not None]


def removed(arms: Arms, name: str) -> list[float]:
    """The share of the training histories' events that an arm removes, in per cent, by seed."""
    return [-one for one in arms.pairs(name, "full", lambda cell: cell["events"], percent)]


#: Of a figure that the trainings do not have: the page's text says what was measured apart from them.
_ABSENT = "not measured with these trainings; see below"


def against_the_paper(arms: Arms) -> str:
    """A line for each figure of the paper's abstract."""
    lines = [["", "paper", "here"]]
    for title, paper, one in (("training", "+1.15 %", "samples"), ("inference", "+1.8 %", "requests")):
        parts = []
        for name in ("policy-30", "policy-50"):
            speed = shown(arms.pairs(name, "full", rate(one), percent), "+.1f", " %")
            if speed:
                parts.append(f"{speed} with {shown(removed(arms, name), '.1f', ' %')} of the events removed")
        lines.append([f"removal: {title} throughput", paper, "; ".join(parts) or _ABSENT])
    gains = []
    for name, other, title in (
        (BOOSTS[2], "full", "with weights beside the full history"),
        (BOOSTS[1], BOOSTS[0], "with the long history beside the short one for all"),
    ):
        change = shown(arms.pairs(name, other, ne, percent), "+.3f", " %")
        gains += [f"{change} {title}"] if change else []
    lines.append(["boosting the active: NE", "0.033 better", "; ".join(gains) or _ABSENT])
    speed = shown(arms.pairs(BOOSTS[1], "full", rate("requests"), percent), "+.1f", " %")
    beside = f"{speed} beside the long history for all" if speed else _ABSENT
    lines.append(["boosting the active: inference QPS", "+4.2 %", beside])
    return as_markdown(lines)


def draw(cells: list[dict], path: Path = PICTURE) -> None:
    """NE against the share of events kept: a line for each way to remove them, with the spread over the seeds."""
    arms = Arms(cells)
    full = arms.of("full", ne)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.axhspan(*band(full), color=PAPER, alpha=0.25, linewidth=0, label="full history, its spread over the seeds")
    axes.axhline(statistics.mean(full), color=PAPER, linewidth=1)
    for way, (title, colour) in WAYS.items():
        names = [name for name in REMOVALS if name.startswith(f"{way}-") and name in arms]
        if not names:
            continue
        kept = [100.0, *(100 - statistics.mean(removed(arms, name)) for name in names)]
        values = [full, *(arms.of(name, ne) for name in names)]
        spread = [statistics.stdev(one) if len(one) > 1 else 0 for one in values]
        means = [statistics.mean(one) for one in values]
        axes.errorbar(kept, means, spread, color=colour, marker="o", markersize=4, capsize=3, label=f"removed: {title}")
    axes.invert_xaxis()
    axes.set_xlabel("events kept, % of the full histories'")
    axes.set_ylabel("test NE, lower is better")
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    where = cells[0]
    seeds = f"{len(full)} seed{'s' if len(full) > 1 else ''}"
    axes.set_title(f"Synthetic log with dwell, {seeds}, {where['device']}, {where['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def band(values: list[float]) -> tuple[float, float]:
    """One standard deviation below and above the mean."""
    mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return mean - spread, mean + spread
