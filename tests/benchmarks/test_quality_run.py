"""The comparison: which trainings are done, in what order, what is kept, and the table that comes of it."""

import dataclasses
import json
from functools import reduce

import pytest
import yaml
from synthetic_data import synthetic_data

from benchmarks.quality import __main__ as command
from benchmarks.quality import cost, page, run
from benchmarks.quality.fuxictr import Peers
from benchmarks.quality.models import DEFAULTS, MODELS, SETS, TRIALS, Model, grid
from benchmarks.quality.results import METRICS, Results, chosen, final_runs, summary
from benchmarks.quality.tables import TABLES, Table
from jfi.baselines import run_baselines
from jfi.cli.options import OptionError
from jfi.training.config_parser import parse_config

#: The AUC of a stand-in's training, by its only setting; the third is best on the validation rows.
VALIDATION = {1: 0.60, 2: 0.70, 3: 0.72, 4: 0.71}


class StandIn:
    """In place of a training: counts its calls, and stops as if by Ctrl-C after `lasts` of them."""

    def __init__(self, lasts: int = 1000) -> None:
        self.calls, self.lasts = [], lasts

    def __call__(self, task, name, settings, seed) -> dict:
        if len(self.calls) == self.lasts:
            raise KeyboardInterrupt
        self.calls.append((name, settings["a"], task.fold, seed))
        auc = VALIDATION[settings["a"]]
        test = dict.fromkeys(METRICS, 0.9 - auc / 10 + seed / 100 + task.fold / 1000) | {"loss": 0.5}
        validation = dict.fromkeys(METRICS, auc)
        took = {"train_seconds": 10.0 + seed, "epochs": 3, "best_epoch": 2, "parameters": 1234}
        return {"validation": validation, "test": test} | took


@pytest.fixture
def models():
    return {"first": Model("ours", {"b": 0}, grid(a=[1, 2, 3, 4])), "second": Model("ours", {}, grid(a=[1, 2, 3, 4]))}


def run_table(table, path, stand_in, models, tmp_path, names=("first", "second")):
    runners = {"ours": stand_in}
    run.run_table(table, Results(path), names, tmp_path, Peers(), runners, models)


def test_trials_then_the_chosen_settings_with_all_seeds(tmp_path, models):
    path, stand_in = tmp_path / "out/t.json", StandIn()
    run_table(TABLES["ml_latest_small"], path, stand_in, models, tmp_path, ["first"])
    assert stand_in.calls == [("first", a, 0, 0) for a in (1, 2, 3, 4)] + [("first", 3, 0, 1), ("first", 3, 0, 2)]
    cells = json.loads(path.read_text())["cells"]
    runs = final_runs(TABLES["ml_latest_small"])
    assert chosen(cells, "first", models["first"], runs) == {"b": 0, "a": 3}
    found = summary(cells, "first", models["first"], runs)
    assert found["runs"] == 3 and found["train_seconds"] == 11.0 and found["parameters"] == 1234
    assert found["auc"]["mean"] == pytest.approx(0.838) and found["auc"]["std"] == pytest.approx(0.01 * (2 / 3) ** 0.5)


def test_folds_are_trained_with_one_seed(tmp_path, models):
    stand_in = StandIn()
    run_table(TABLES["assistments2009"], tmp_path / "t.json", stand_in, models, tmp_path, ["first"])
    assert stand_in.calls[:4] == [("first", a, 0, 0) for a in (1, 2, 3, 4)]
    assert stand_in.calls[4:] == [("first", 3, fold, 0) for fold in range(1, 5)]


@pytest.mark.parametrize("lasts", [0, 3, 5, 6, 11])
def test_an_interrupted_comparison_goes_on(tmp_path, models, lasts):
    path, first, second = tmp_path / "t.json", StandIn(lasts), StandIn()
    table = TABLES["ml_latest_small"]
    with pytest.raises(KeyboardInterrupt):
        run_table(table, path, first, models, tmp_path)
    assert len(Results(path).cells) == lasts
    run_table(table, path, second, models, tmp_path)
    uninterrupted = StandIn()
    run_table(table, tmp_path / "whole.json", uninterrupted, models, tmp_path)
    assert first.calls + second.calls == uninterrupted.calls and len(uninterrupted.calls) == 12
    again = StandIn()
    run_table(table, path, again, models, tmp_path)
    assert again.calls == []


def test_another_protocol_makes_the_cells_anew(tmp_path, models, monkeypatch):
    path = tmp_path / "t.json"
    run_table(TABLES["ml_latest_small"], path, StandIn(), models, tmp_path)
    monkeypatch.setattr(run, "protocol", lambda table, model: "another")
    stand_in = StandIn()
    run_table(TABLES["ml_latest_small"], path, stand_in, models, tmp_path, ["first"])
    assert len(stand_in.calls) == 6
    assert {(cell["model"], cell["protocol"] == "another") for cell in Results(path).cells} == {
        ("first", True),
        ("second", False),
    }


def test_processes_that_share_a_file_keep_each_others_cells(tmp_path, models, monkeypatch):
    path, table = tmp_path / "t.json", TABLES["ml_latest_small"]
    run_table(table, path, StandIn(), models, tmp_path)
    monkeypatch.setattr(run, "protocol", lambda table, model: "another")
    first, second = Results(path), Results(path)
    for results, name in ((first, "first"), (second, "second")):
        run.run_table(table, results, [name], tmp_path, Peers(), {"ours": StandIn()}, models)
    cells = Results(path).cells
    assert [cell["model"] for cell in cells] == ["first"] * 6 + ["second"] * 6
    assert {cell["protocol"] for cell in cells} == {"another"}


def test_the_protocol_depends_on_rows_and_training():
    def of(name: str, kind: str) -> str:
        return run.protocol(TABLES[name], Model(kind, {}, [{}]))

    names = [of(name, kind) for name in TABLES for kind in run.RUNNERS]
    assert len(set(names)) == len(names) and names == [of(name, kind) for name in TABLES for kind in run.RUNNERS]


def test_the_page_shows_other_finished_models_by_validation_auc(tmp_path, models):
    path = tmp_path / "assistments2009.json"
    run_table(TABLES["assistments2009"], path, StandIn(), models, tmp_path, ["first"])
    with pytest.raises(KeyboardInterrupt):
        run_table(TABLES["assistments2009"], path, StandIn(5), models, tmp_path, ["second"])
    shown = page.others("assistments2009", tmp_path, models).splitlines()
    assert shown[0] == "| model | validation AUC | test AUC | test NE | AUC per user | training | parameters |"
    assert shown[2] == "| jfi first | 0.7200 | 0.8300 ± 0.0014 | 0.8300 ± 0.0014 | 0.8300 ± 0.0014 | 10 s | 1,234 |"
    assert "over 5 folds" in shown[-1] and "4 trials" in shown[-1]
    assert not any("second" in line for line in shown), "its final trainings are not all done"
    with pytest.raises(FileNotFoundError):
        page.others("movielens_100k", tmp_path, models)


def test_the_comparison_chooses_on_validation_and_says_what_is_missing(tmp_path):
    def training(validation: float, test: float):
        kept = {"train_seconds": 1.0, "epochs": 1, "best_epoch": 1, "parameters": 5}
        found = {"validation": dict.fromkeys(METRICS, validation), "test": dict.fromkeys(METRICS, test)}
        return lambda task, name, settings, seed: found | kept

    models = {
        "library defaults, no statistics": Model("ours", {}, [{}]),
        "library defaults": Model("ours", {"b": 1}, [{}]),
        "lucky": Model("ours", {"b": 2}, [{}]),
        "gradient boosting": Model("baseline", {}, [{}]),
    }
    table, results = TABLES["assistments2009"], Results(tmp_path / "assistments2009.json")
    given = {"library defaults, no statistics": (0.8, 0.7), "lucky": (0.7, 0.9), "gradient boosting": (0.9, 0.6)}
    for name, figures in given.items():
        runners = dict.fromkeys(run.RUNNERS, training(*figures))
        run.run_table(table, results, [name], tmp_path, Peers(), runners, models)
    shown = page.quality("assistments2009", tmp_path, models).splitlines()
    assert [line.split(" |")[0] for line in shown[2:9]] == [
        "| hand-made features: gradient boosting",
        "| jfi defaults: attention",
        "| jfi defaults: attention and statistics",
        "| best of jfi: library defaults, no statistics",
        "| DKT (published)",
        "| DKVMN (published)",
        "| NPA (published)",
    ]
    assert shown[4] == "| jfi defaults: attention and statistics | not measured |  |  |  |  |  |"
    assert shown[5].startswith("| best of jfi: library defaults, no statistics | 0.8000 | 0.7000 |"), (
        "not the best test AUC"
    )
    nothing = page.quality("impressions", tmp_path).splitlines()
    assert sum("not measured" in line for line in nothing) == len(page.COMPARED)
    assert "| true logit, the ceiling |  | 0.79" in "\n".join(nothing)
    lines = page.overview(tmp_path).splitlines()
    assert len(lines) == 2 + len(TABLES) + 2 and "gradient boosting" in lines[0]
    assert lines[2].count("| - ") == len(page.COMPARED) + 1
    assert "| 0.7" not in lines[4], "settings of another kind are not those of the library's defaults"
    lines = page.gains(tmp_path).splitlines()
    counted = [table for table in TABLES.values() if table.events]
    assert len(lines) == 2 + len(counted) and all(line.endswith("| - | - | - |") for line in lines[2:])


def test_the_cost_is_that_of_the_first_epoch_beyond_boosting(tmp_path):
    def of(model: str, size: int | None, auc: list[float], seconds: list[float]) -> dict:
        key = {"table": "movielens_100k", "model": model, "size": size, "device": "CPU"}
        return key | {"auc": auc, "seconds": seconds}

    path = tmp_path / "cost.json"
    assert cost.draw(path) is None, "there are no results"
    runs = [of("boosting", None, [0.75], [6.0]), of("mean", 16, [0.751, 0.753], [2.0, 4.0])]
    runs.append(of("attention", 64, [0.75, 0.755, 0.76], [3.0, 6.0, 9.0]))
    where = {"cpu": "A CPU", "device": "A CPU", "torch": "2", "commit": "abc", "procs": 1}
    path.write_text(json.dumps({"environment": where, "runs": runs}))
    picture, _, *lines = cost.page(path).splitlines()
    assert picture == cost.PICTURE
    assert lines[2].endswith("| boosting |  | CPU | 6.0 in all | 0.7500 |  |  |")
    assert lines[3].endswith("| mean | 16 | CPU | 2.0 | 0.7530 | 2 of 2 | - |")
    assert lines[4].endswith("| attention | 64 | CPU | 3.0 | 0.7600 | 3 of 3 | 6.0 |")
    assert "1 trainings at a time, on a thread of A CPU. torch 2" in lines[-1]
    assert cost.draw(path).stat().st_size > 10_000


def test_the_defaults_that_are_compared_are_the_librarys():
    config, given = parse_config(["--data.interactions=x.csv"])[0], {}
    for name in DEFAULTS:
        section, *rest = name.split(".")
        given[name] = reduce(getattr, rest, getattr(config, section))
    assert given == DEFAULTS
    for table in TABLES.values():
        text = yaml.safe_load((run.ROOT / table.config).read_text())
        text.pop("data")
        chosen = {f"{section}.{key}": value for section, one in text.items() for key, value in one.items()}
        deeper = {f"{name}.{key}" for name, one in chosen.items() if isinstance(one, dict) for key in one}
        assert deeper | {name for name, one in chosen.items() if not isinstance(one, dict)} <= DEFAULTS.keys()
    assert set(page.COMPARED.values()) <= MODELS.keys()
    assert list(SETS["defaults"]) == [name for name in page.COMPARED.values() if name in SETS["defaults"]]


def test_a_model_that_a_table_does_not_allow_is_left_out(tmp_path, capsys):
    table, results = TABLES["ml_latest_small_implicit"], Results(tmp_path / "t.json")
    models = {"one": Model("ours", {"data.negatives": 0}, [{}])}
    run.run_table(table, results, ["one"], tmp_path, Peers(), models=models)
    assert "one: left out; data.negatives is 0; without a label it must be at least 1" in capsys.readouterr().out
    assert results.cells == []


def test_every_model_has_as_many_trials_and_a_runner():
    assert all(model.kind in run.RUNNERS for model in MODELS.values())
    assert all(model.trials == [{}] or len(model.trials) == TRIALS for model in MODELS.values())
    assert Model("ours", {}, [{}]).trials == [{}]  # nothing to tune
    with pytest.raises(ValueError, match="trials has 1 entries; it must have 4, or one empty one"):
        Model("ours", {}, [{"a": 1}])


@pytest.mark.slow
def test_our_trials_are_fields_of_the_config(tmp_path):
    task = run.Task(TABLES["movielens_100k"], 0, tmp_path, tmp_path, Peers())
    for model in MODELS.values():
        if model.kind == "ours":
            for trial in model.trials:
                task.config(model.settings | trial)
    config = task.config({"model.pooling": "mean", "model.over_arch": [16], "optimizer.dense.learning_rate": 0.5})
    assert (config.model.pooling, config.model.over_arch, config.optimizer.dense.learning_rate) == ("mean", [16], 0.5)


def test_one_of_our_models_trains(tmp_path):
    section = dataclasses.asdict(synthetic_data(num_users=40, num_items=30))
    settings = {"data": section, "training": {"epochs": 2}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    task = run.Task(Table("Tiny", str(tmp_path / "config.yaml"), [{}]), 0, tmp_path, tmp_path, Peers())
    found = run.run_ours(task, "ours", {"model.pooling": "mean"}, 1)
    assert found["epochs"] == 2 and found["best_epoch"] in (1, 2) and 0 < found["test"]["ne"] < 2
    assert found["parameters"] > 1000 and found["train_seconds"] > 0


def test_baselines_are_those_of_the_package(tmp_path):
    section = dataclasses.asdict(synthetic_data(num_users=40, num_items=30))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": section}))
    table = Table("Tiny", str(tmp_path / "config.yaml"), [{}])
    names = [name for name, model in MODELS.items() if model.kind == "baseline"]
    results = Results(tmp_path / "tiny.json")
    run.run_table(table, results, names, tmp_path, Peers())
    expected = run_baselines(
        run.Task(table, 0, tmp_path, tmp_path, Peers()).dataset(parse_config(["--config", table.config])[0])
    )
    assert set(names) == set(expected)
    found = {name: summary(results.cells, name, MODELS[name], final_runs(table)) for name in names}
    for name in names:
        assert found[name]["auc"] == {"mean": pytest.approx(expected[name][0].test["auc"]), "std": pytest.approx(0)}
    shown = page.render(table, results.cells, MODELS).splitlines()
    assert shown[5].startswith("| hand-made features: gradient boosting | 0.") and shown[5].endswith("s |  |")


def test_models_are_named_one_by_one_or_by_set(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "run_table", lambda table, results, names, *rest: asked.append(names))
    names = ["defaults", "item mean", "item + user mean", "library defaults"]
    command.main(["--tables", "ml_latest_small_implicit", "impressions", "--out", str(tmp_path), "--models", *names])
    assert asked == [[*SETS["defaults"], "item mean"], [*SETS["defaults"], "item mean", "item + user mean"]]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(OptionError, match="--models: unknown 'DINN'"):
        command.main(["--models", "DINN", "--out", str(tmp_path)])
    with pytest.raises(OptionError, match="--tables: unknown 'movielens'"):
        command.main(["--tables", "movielens", "--out", str(tmp_path)])


def test_a_config_has_no_statistics_unless_its_settings_name_some(tmp_path):
    """Cells were trained so before `auto` was the default; their settings and protocols stay as they are."""
    task = run.Task(TABLES["movielens_100k"], 0, tmp_path, tmp_path, Peers())
    for settings, wanted in (
        ({}, []),
        ({"data.statistics": "auto"}, "auto"),
        ({"data.statistics": ["item"]}, ["item"]),
    ):
        assert task.config(settings).data.statistics == wanted
