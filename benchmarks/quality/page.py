"""The tables of docs/quality.md, from the results of `python -m benchmarks.quality`.

Nothing here is chosen by a test metric: rows are in a fixed order or in that of validation AUC.
"""

from pathlib import Path

from benchmarks import table as markdown
from benchmarks.quality.models import MODELS, TRIALS, Model
from benchmarks.quality.results import METRICS, Results, final_runs, summary
from benchmarks.quality.tables import TABLES, Table

RESULTS = Path(__file__).parents[1] / "results/quality"
TITLES = {"auc": "test AUC", "ne": "test NE", "user_auc": "AUC per user"}
KINDS = {"ours": "jfi", "fuxictr": "FuxiCTR", "baseline": "hand-made features:"}
#: The comparison: from the least to the most that a model sees, without tuning.
COMPARED = {
    "item mean": "item mean",
    "popularity by time": "popularity by time",
    "logistic regression": "logistic regression",
    "gradient boosting": "gradient boosting",
    "no histories": "library defaults, no histories",
    "mean pooling": "library defaults, mean pooling",
    "sum pooling": "library defaults, sum pooling",
    "attention": "library defaults, no statistics",
    "statistics only": "library defaults, statistics only",
    "mean and statistics": "library defaults, mean pooling and statistics",
    "attention and statistics": "library defaults",
}
_ALL = "attention and statistics"
MISSING = "not measured"


def quality(name: str, folder: Path = RESULTS, models: dict[str, Model] = MODELS) -> str:
    """The comparison of a table and its best models as Markdown; a table without results has a line for each too."""
    return render(TABLES[name], _cells(name, folder), models)


def others(name: str, folder: Path = RESULTS, models: dict[str, Model] = MODELS) -> str:
    """The finished models of a table that are not in the comparison, as Markdown.

    Raises:
        FileNotFoundError: there is no result of the table.
    """
    if not (folder / f"{name}.json").exists():
        raise FileNotFoundError(folder / f"{name}.json")
    return render_others(TABLES[name], _cells(name, folder), models)


def overview(folder: Path = RESULTS) -> str:
    """Test AUC of the comparison and of the best model of ours, a line a table."""
    lines = [["table", *COMPARED, "best of jfi"]]
    for name, table in TABLES.items():
        found = summaries(table, _cells(name, folder), MODELS)
        shown = [found.get(one) for one in [*COMPARED.values(), best(found, "ours", MODELS)]]
        lines.append([table.title, *(f"{one['auc']['mean']:.4f}" if one else "-" for one in shown)])
    return f"{markdown.as_markdown(lines)}\n\nMean test AUC; \\- is {MISSING} yet."


def gains(folder: Path = RESULTS) -> str:
    """What attention adds to the test AUC of mean pooling, a line a table, and the lengths of its histories."""
    titles = ["over mean pooling, without statistics", "over mean pooling, with statistics", "over statistics alone"]
    lines = [["table", "events of a history", "histories with the target", *titles]]
    pairs = [("attention", "mean pooling"), *((_ALL, one) for one in ("mean and statistics", "statistics only"))]
    for name, table in TABLES.items():
        found = summaries(table, _cells(name, folder), MODELS)
        auc = {title: found[model]["auc"]["mean"] for title, model in COMPARED.items() if model in found}
        shown = [f"{auc[more] - auc[less]:+.4f}" if {more, less} <= auc.keys() else "-" for more, less in pairs]
        if table.events:  # else not counted yet
            lines.append([table.title, f"{table.events:g}", f"{table.repeated:.0%}", *shown])
    return markdown.as_markdown(lines)


def _cells(name: str, folder: Path) -> list[dict]:
    return Results(folder / f"{name}.json").cells


def summaries(table: Table, cells: list[dict], models: dict[str, Model]) -> dict[str, dict]:
    """The results of the finished models, the best by mean validation AUC first."""
    found = {name: summary(cells, name, model, final_runs(table)) for name, model in models.items()}
    return dict(sorted(((name, one) for name, one in found.items() if one), key=lambda one: -one[1]["validation_auc"]))


def best(found: dict[str, dict], kind: str, models: dict[str, Model]) -> str | None:
    """The model of a kind with the best validation AUC; `found` has it first."""
    return next((name for name in found if models[name].kind == kind), None)


def render(table: Table, cells: list[dict], models: dict[str, Model]) -> str:
    """As `quality`, of cells."""
    found = summaries(table, cells, models)
    kinds = KINDS | {"ours": "jfi defaults:"}
    rows = [(f"{kinds[models[name].kind]} {title}", name) for title, name in COMPARED.items() if name in models]
    ours, peer = best(found, "ours", models), best(found, "fuxictr", models)
    rows += [(f"best of {KINDS[models[one].kind]}: {one}", one) for one in (ours, peer) if one]
    lines = [_row(title, found.get(name)) for title, name in rows]
    lines += [[title, "", f"{auc:.4f}", "", "", "", ""] for title, auc in table.known.items()]
    used = {name for _, name in rows if name in found}
    note = "The best of a kind has the highest validation AUC of all its measured rows."
    return _page(table, lines, cells, used, note)


def render_others(table: Table, cells: list[dict], models: dict[str, Model]) -> str:
    """As `others`, of cells."""
    found = {name: one for name, one in summaries(table, cells, models).items() if name not in COMPARED.values()}
    lines = [_row(f"{KINDS[models[name].kind]} {name}", one) for name, one in found.items()]
    note = f"Rows are in the order of validation AUC; settings are the best of {TRIALS} trials by validation AUC."
    return _page(table, lines, cells, set(found), note)


def _page(table: Table, lines: list[list[str]], cells: list[dict], used: set[str], note: str) -> str:
    runs = len(final_runs(table))
    what = f"{runs} folds" if len(table.folds) > 1 else f"{runs} seeds"
    header = ["model", "validation AUC", *TITLES.values(), "training", "parameters"]
    made = f"Mean and standard deviation over {what}. {note} {where([c for c in cells if c['model'] in used])}"
    return f"{markdown.as_markdown([header, *lines])}\n\n{made}".rstrip()


def _row(title: str, one: dict | None) -> list[str]:
    """A line of a model; of one that is not measured a line that says so."""
    if one is None:
        return [title, MISSING, *[""] * 5]
    figures = [f"{one['validation_auc']:.4f}", *(_figure(one[metric]) for metric in METRICS)]
    parameters = "" if one["parameters"] is None else f"{one['parameters']:,}"
    return [title, *figures, f"{one['train_seconds']:.0f} s", parameters]


def _figure(found: dict[str, float]) -> str:
    """Mean and standard deviation; the mean alone of what no seed changes."""
    return f"{found['mean']:.4f}" + (f" ± {found['std']:.4f}" if found["std"] > 1e-9 else "")


def where(cells: list[dict]) -> str:
    def listed(key: str) -> str:
        return ", ".join(dict.fromkeys(str(cell[key]) for cell in cells))

    if not cells:
        return ""
    threads = listed("threads")
    return f"{listed('device')}, threads {threads}, torch {listed('torch')}, commit {listed('commit')}."
