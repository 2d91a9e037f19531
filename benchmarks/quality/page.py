"""The tables of docs/quality.md, from the results of `python -m benchmarks.quality`."""

from pathlib import Path

from benchmarks import table as markdown
from benchmarks.quality.models import MODELS, TRIALS, Model
from benchmarks.quality.results import METRICS, Results, final_runs, summary
from benchmarks.quality.tables import TABLES, Table

RESULTS = Path(__file__).parents[1] / "results/quality"
TITLES = {"auc": "test AUC", "ne": "test NE", "user_auc": "AUC per user"}
KINDS = {"ours": "jfi", "fuxictr": "FuxiCTR", "baseline": "hand-made features:"}


def quality(name: str, folder: Path = RESULTS, models: dict[str, Model] = MODELS) -> str:
    """The models of a table, best first, as Markdown.

    Raises:
        FileNotFoundError: there is no result of the table.
    """
    table, path = TABLES[name], folder / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(path)
    return render(table, Results(path).cells, models)


def render(table: Table, cells: list[dict], models: dict[str, Model]) -> str:
    """As `quality`, of cells."""
    runs = final_runs(table)
    found = {name: summary(cells, name, model, runs) for name, model in models.items()}
    done = [name for name, one in found.items() if one]
    lines = [["model", *TITLES.values(), "training", "parameters"]]
    entries = []
    for name in done:
        one = found[name]
        figures = [_figure(one[metric]) for metric in METRICS]
        title = f"{KINDS[models[name].kind]} {name}"
        parameters = "" if one["parameters"] is None else f"{one['parameters']:,}"
        entries.append((one["auc"]["mean"], [title, *figures, f"{one['train_seconds']:.0f} s", parameters]))
    entries += [(auc, [f"{other} (published)", f"{auc:.4f}", "", "", "", ""]) for other, auc in table.published.items()]
    lines += [line for _, line in sorted(entries, key=lambda entry: -entry[0])]
    what = f"{len(runs)} folds" if len(table.folds) > 1 else f"{len(runs)} seeds"
    note = f"Mean and standard deviation over {what}; settings are the best of {TRIALS} trials on the validation rows."
    return f"{markdown.as_markdown(lines)}\n\n{note} {where([c for c in cells if c['model'] in done])}".rstrip()


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
