"""What a run keeps of its data: resume, export and prediction read it from the run, and changed data is refused."""

import dataclasses
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import torch
from data_configs import replace_data
from own_table import config_of, row, write_table
from test_run import assert_same_run, killed_after, killing_after, read_results
from worker import without_pictures

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.batches.dataset import Batches
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.summary import Summary
from jfi.training import ConfigError, OptimizerConfig, resume, train
from jfi.training.config_parser import load_config, save_config
from jfi.training.run.recorder import read_metrics
from jfi.training.run.saved_run import load_run

LOG_EVERY = 4

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_pictures():
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a table and a run of it."""
    folder = tmp_path_factory.mktemp("trained")
    write_table(folder / "table.csv", [row(i) for i in range(200)])
    with without_pictures():
        train(config_of(folder / "table.csv", folder / "run"))
    return folder


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A copy of the table and of the run, whose config names the copy."""
    shutil.copytree(trained, tmp_path / "copy")
    config = load_config(tmp_path / "copy/run/config.yaml")
    config.data.interactions = str(tmp_path / "copy/table.csv")
    save_config(config, tmp_path / "copy/run/config.yaml")
    return tmp_path / "copy"


def logits(run: Path, table: Path) -> torch.Tensor:
    """Of the rows of a table that the run's model scores, encoded as the run says."""
    saved = load_run(run)
    config = saved.config.data
    config.interactions = str(table)
    batch = load_dataset(config, saved.schema).batches("train", 1000)[0]
    with torch.no_grad():
        return saved.model(batch.dense_features, batch.sparse_features)


def test_the_run_holds_what_it_has_learnt(trained):
    run = load_run(trained / "run")
    learnt = load_dataset(run.config.data).schema
    assert run.schema.features == learnt.features
    assert {path.name for path in (trained / "run/data").iterdir()} == {
        *("schema.json", "vocabularies.parquet", "SHA256SUMS", "fingerprint.sha256")
    }
    assert not run.model.training


def test_scores_stay_when_items_are_renamed_or_rows_appended(trained, tmp_path):
    """Ids come from the run: another table of the same values gives the same scores, whatever else it holds."""
    before = logits(trained / "run", trained / "table.csv")
    write_table(
        tmp_path / "other.csv",
        [row(i) for i in range(200)] + [["new", "a", 90_000 + i, i % 2, "g9", 99, "z", 70] for i in range(60)],
    )
    assert torch.equal(logits(trained / "run", tmp_path / "other.csv")[: len(before)], before)


def exported(run: Path, monkeypatch) -> tuple:
    """The model and the schema of requests that `jfi export` compiles for a run."""
    seen = []
    made = SimpleNamespace(write=lambda path: "")
    monkeypatch.setattr("jfi.cli.export.Export", lambda model, schema, *_, **__: seen.append((model, schema)) or made)
    assert commands.call("export", "--run", run) == 0
    return seen[0]


@pytest.mark.parametrize("change", ["renamed", "grown", "gone"])
def test_export_reads_the_run_and_never_the_table(trained, copied, monkeypatch, change):
    model, schema = exported(trained / "run", monkeypatch)
    if change == "gone":
        (copied / "table.csv").unlink()
    else:
        rows = [row(i) for i in range(200)]
        rows = [["u1", "a", 0, 1, "g", 3, "z", 1], *rows] if change == "grown" else rows
        write_table(copied / "table.csv", [["z0" if value == "i0" else value for value in line] for line in rows])
    other, other_schema = exported(copied / "run", monkeypatch)
    assert schema == other_schema
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def edit_config(**data: object):
    def edit(folder: Path) -> None:
        config = load_config(folder / "run/config.yaml")
        config.data = replace_data(config.data, **data)
        save_config(config, folder / "run/config.yaml")

    return edit


def edit_rows(change):
    def edit(folder: Path) -> None:
        write_table(folder / "table.csv", change([row(i) for i in range(200)]))

    return edit


def with_value(column: int, value):
    return edit_rows(lambda rows: [[*line[:column], value(line[column]), *line[column + 1 :]] for line in rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_value(3, lambda label: 1 - label), "; restore it"),
        (with_value(1, lambda item: "z0" if item == "i0" else item), "; restore it"),
        (with_value(5, lambda price: 100 * price), "; restore it"),
        (with_value(6, lambda tags: "a"), "; restore it"),
        (with_value(2, lambda time: 2 * time), "; restore it"),
        (
            edit_rows(lambda rows: rows + [row(i) for i in range(200, 260)]),
            ": it has 260 rows, 60 more than the run",
        ),
        (edit_rows(lambda rows: rows[:-50]), ": it has 150 rows, 50 fewer than the run was started with"),
        (
            edit_config(fractions=[0.7, 0.2, 0.1]),
            ": train has 140 samples instead of 160, validation has 40 samples instead of 20",
        ),
        (edit_config(split="leave_one_out"), ": train has 188 samples"),
        (edit_config(label="clicked == 0"), "; restore it"),
    ],
)
def test_resume_is_refused_where_the_data_has_changed_and_says_what(copied, change, message):
    change(copied)
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as fault:
        resume(copied / "run", config_changed="accept")
    text = str(fault.value)
    assert text.startswith(f"--resume {copied / 'run'}: the data {copied / 'table.csv'} has changed{message}")
    assert text.endswith("restore it, or go on with --data-changed accept") and "\n" not in text
    assert "remove that checkpoint" not in text
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def test_resume_goes_on_with_changed_data_where_it_is_accepted(copied, monkeypatch, capsys):
    edit_rows(lambda rows: rows + [["new", "never seen", 90_000 + i, i % 2, "g9", 9, "z", 1] for i in range(100)])(
        copied
    )
    config = load_config(copied / "run/config.yaml")
    save_config(config.with_training(epochs=3), copied / "run/config.yaml")
    vocabularies = (copied / "run/data/vocabularies.parquet").read_bytes()
    for options, code in (([], 2), (["--data-changed", "accept"], 0), ([], 0)):
        command = ["train", "--resume", copied / "run", "--config-changed", "accept", *options]
        assert commands.call(*command) == code, capsys.readouterr().err
    out = capsys.readouterr().out
    summary = Summary.load(copied / "run/summary.json")
    assert out.count("data: 300 rows, 7 users") == 1 and str(summary) in out and summary.rows == 300
    # Once before the training on the new data, and at the end of this and of any later resume.
    assert out.count("the metrics of epochs 1, 2 are of the data before") == 3
    # Once, since the rows that were held out before are not newer than those that are held out now.
    assert "may have trained on them" not in out
    # The third epoch was on the new rows, with the old vocabulary; what is accepted once is not refused again.
    assert [r["epoch"] for r in read_metrics(copied / "run/metrics.jsonl") if r["split"] == "validation"] == [1, 2, 3]
    assert (copied / "run/data/vocabularies.parquet").read_bytes() == vocabularies


@pytest.mark.parametrize("change", ["data", "monitor"])
def test_the_best_epoch_and_patience_begin_again_where_metrics_are_of_other_data_or_another_monitor(
    copied, monkeypatch, capsys, change
):
    """Two epochs had an AUC above that of any later one; with a patience of 1 the second has ended the run."""
    shutil.rmtree(copied / "run")
    settings = {"epochs": 5, "patience": 1, "monitor": "auc"}
    values = iter([0.9, 0.8, 0.7, 0.5, 0.6, 0.4, 0.3])
    monkeypatch.setattr("jfi.training.metrics.label_metrics.auc", lambda *_: next(values))
    assert train(config_of(copied / "table.csv", copied / "run", **settings)).best_epoch == 1
    if change == "data":
        edit_rows(lambda rows: rows + [row(i) for i in range(200, 260)])(copied)
        result = resume(copied / "run", data_changed="accept")
    else:
        monkeypatch.setattr("jfi.training.metrics.label_metrics.normalized_entropy", lambda *_: 1 + next(values))
        edit_training(copied, monitor="ne")
        monkeypatch.setattr("jfi.training.metrics.label_metrics.auc", lambda *_: 0.5)
        result = resume(copied / "run", config_changed="accept")
    line = f"{'the data' if change == 'data' else 'training.monitor'} changed after epoch 1, the best so far"
    assert capsys.readouterr().out.count(line) == 1
    assert (result.best_epoch, result.epochs) == ((4, 5) if change == "data" else (3, 4))
    assert f"{26 if change == 'data' else 20} samples" in str(load_run(copied / "run").calibration)


def test_rows_to_validate_and_test_on_that_training_has_seen_are_counted(copied, capsys):
    edit_training(copied, epochs=3)
    edit_rows(lambda rows: rows[:150])(copied)  # it was trained on the first 160
    resume(copied / "run", config_changed="accept", data_changed="accept")
    assert "warning: 15 rows of validation and 15 rows of test are not newer than" in capsys.readouterr().out
    edit_training(copied, epochs=4)
    edit_rows(lambda rows: [row(i) for i in range(180)])(copied)
    resume(copied / "run", config_changed="accept", data_changed="accept")
    # The rows 144 to 179 are held out, of which it was trained on those before 160.
    assert "warning: 16 rows of validation and 0 rows of test are not newer than" in capsys.readouterr().out


def test_a_finished_run_says_that_there_is_nothing_to_train_and_which_metrics_are_of_earlier_data(copied, capsys):
    resume(copied / "run")
    out = capsys.readouterr().out
    assert "nothing to train: epoch 2 was the last one; for more, raise training.epochs in " in out
    assert "the data before" not in out
    edit_rows(lambda rows: rows[:150])(copied)
    resume(copied / "run", data_changed="accept")
    out = capsys.readouterr().out
    assert out.count("nothing to train") == out.count("the metrics of epochs 1, 2 are of the data before") == 1
    log = read_metrics(copied / "run/metrics.jsonl")
    assert log[-1]["data"] != log[0]["data"]


def test_a_run_that_patience_has_ended_names_it(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jfi.training.metrics.label_metrics.auc", lambda *_: 0.5)
    train(config_of(trained / "table.csv", tmp_path / "run", epochs=5, patience=1))
    assert "nothing to train" not in capsys.readouterr().out
    assert resume(tmp_path / "run").epochs == 2
    assert "nothing to train: training.patience has ended the run after epoch 2; for more, raise it in " in (
        capsys.readouterr().out
    )


@pytest.fixture
def begun(copied, monkeypatch) -> Path:
    """The table, and a run of it that was killed behind 4 of the 5 batches of its first epoch, of which it saved 3."""
    shutil.rmtree(copied / "run")
    config = config_of(copied / "table.csv", copied / "run", epochs=1, checkpoint_every=3)
    killed_after(4, config, monkeypatch)
    return copied


def edit_training(folder: Path, **settings: object) -> None:
    config = load_config(folder / "run/config.yaml").with_training(**settings)
    save_config(config, folder / "run/config.yaml")


def last_step(folder: Path) -> int:
    (step,) = [r["step"] for r in read_metrics(folder / "run/metrics.jsonl") if r["split"] == "validation"]
    return step


def test_an_epoch_that_has_begun_starts_anew_where_accepted_data_has_other_batches(begun, capsys):
    edit_rows(lambda rows: rows[:60])(begun)
    resume(begun / "run", data_changed="accept")
    lines = [line for line in capsys.readouterr().out.splitlines() if "anew" in line]
    assert len(lines) == 1 and lines[0].startswith(
        "epoch 1 starts anew after 3 batches, with the weights so far: the number of training samples was 160 and is 48"
    )
    assert last_step(begun) == 3 + 2  # two batches of the 48 training rows


def test_an_epoch_that_started_anew_is_resumed_to_the_same_bits(begun, tmp_path, capsys, monkeypatch):
    edit_training(begun, batch_size=16)
    shutil.copytree(begun / "run", tmp_path / "whole")
    resume(tmp_path / "whole", config_changed="accept")
    assert "training.batch_size was 32 and is 16" in capsys.readouterr().out
    with killing_after(5, monkeypatch):
        resume(begun / "run", config_changed="accept")
    capsys.readouterr()
    resume(begun / "run")
    assert "anew" not in capsys.readouterr().out
    assert last_step(begun) == 3 + 10
    assert_same_run(begun / "run", tmp_path / "whole")


def test_an_epoch_by_user_starts_anew_where_other_events_cut_its_timelines(copied, monkeypatch, capsys):
    """The samples of training stay, and rows without a label come before them."""
    shutil.rmtree(copied / "run")
    config = config_of(copied / "table.csv", copied / "run", epochs=1, checkpoint_every=3)
    data = dataclasses.replace(config.data, batching="user", max_history=2)
    killed_after(4, dataclasses.replace(config, data=data), monkeypatch)
    rows = [row(i) for i in range(200)]
    write_table(copied / "table.csv", [*([*line[:3], "", *line[4:]] for line in rows[:30]), *rows])
    resume(copied / "run", data_changed="accept")
    lines = [line for line in capsys.readouterr().out.splitlines() if "anew" in line]
    assert len(lines) == 1 and "the number of training samples" not in lines[0]
    assert "the SHA-256 of the events' users and times was" in lines[0]


def test_an_accepted_change_that_leaves_the_batches_alone_continues_the_epoch(begun, capsys):
    edit_training(begun, patience=3)
    edit_rows(lambda rows: [[*line[:5], 2 * line[5], *line[6:]] for line in rows])(begun)
    resume(begun / "run", config_changed="accept", data_changed="accept")
    assert "anew" not in capsys.readouterr().out and last_step(begun) == 5


@pytest.mark.parametrize("options", [["--data-changed", "accept"], ["--resume", "run", "--training.epochs", "3"]])
def test_options_that_do_not_go_together_are_refused(options, monkeypatch, capsys):
    assert commands.call("train", *options) == 2
    assert capsys.readouterr().err.startswith("error: --")


def test_another_order_of_the_rows_and_another_format_are_no_change(copied):
    edit_rows(lambda rows: rows[::-1])(copied)
    resume(copied / "run", config_changed="accept")
    (copied / "table.csv").rename(copied / "other.csv")
    edit_config(interactions=str(copied / "other.csv"))(copied)
    resume(copied / "run", config_changed="accept")


def test_a_run_resumes_from_any_working_directory(copied, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(copied)
    train(config_of(Path("table.csv"), Path("relative"), epochs=1))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(copied / "relative/config.yaml").data.interactions == str(copied / "table.csv")
    resume(copied / "relative")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: shutil.rmtree(data), r"data/schema\.json: no such file"),
        (lambda data: (data / "SHA256SUMS").unlink(), r"data/SHA256SUMS is missing"),
        (lambda data: (data / "vocabularies.parquet").write_bytes(b"x"), r"vocabularies\.parquet is damaged"),
        (lambda data: (data / "fingerprint.sha256").unlink(), r"fingerprint\.sha256 is missing"),
        (lambda data: (data / "fingerprint.sha256").write_text("{}"), r"fingerprint\.sha256 is damaged"),
    ],
)
def test_a_run_without_its_schema_is_refused_in_one_line(copied, damage, message):
    damage(copied / "run/data")
    with pytest.raises(DataError, match=message) as fault:
        resume(copied / "run", config_changed="accept")
    assert "\n" not in str(fault.value)


def test_a_run_that_was_killed_before_it_wrote_what_it_learnt_starts_again(trained, tmp_path):
    config = config_of(trained / "table.csv", tmp_path / "run")
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run/config.yaml")
    resume(tmp_path / "run")
    assert read_results(tmp_path / "run/metrics.jsonl") == read_results(trained / "run/metrics.jsonl")
    for name in ("schema.json", "SHA256SUMS", "fingerprint.sha256"):
        assert (tmp_path / "run/data" / name).read_bytes() == (trained / "run/data" / name).read_bytes()


def test_what_is_no_run_is_not_loaded(copied, tmp_path):
    with pytest.raises(ConfigError, match=r"^run \S+: not a run folder, config\.yaml is missing$"):
        load_run(tmp_path)
    edit_config(item_categorical=[])(copied)
    with pytest.raises(ConfigError, match=r"^run \S+: config\.yaml has changed since .*: data\.features was"):
        load_run(copied / "run")
    shutil.rmtree(copied / "run/checkpoints")
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        load_run(copied / "run")


def test_every_epoch_has_its_own_order_and_its_own_negatives(trained, tmp_path, monkeypatch):
    """The trainer passes the epoch on; the held-out splits stay the same."""
    config = config_of(trained / "table.csv", tmp_path / "run", epochs=3, batch_size=40)
    config.data.label = None
    config.data = replace_data(config.data, event_categorical=["tags"])
    dataset = load_dataset(config.data)
    seen: dict[str, list[tuple]] = {"train": [], "validation": []}
    batches = dataset.batches

    def recording(split, *arguments, **settings):
        plain = batches(split, *arguments, **settings)

        def make_and_record(number):  # by one thread, in order
            batch = plain[number]
            if split in seen:
                seen[split].append(
                    (batch.users.tolist(), batch.labels.tolist(), batch.sparse_features["item_id"].values().tolist())
                )
            return batch

        return Batches(plain.order, make_and_record)

    monkeypatch.setattr(dataset, "batches", recording)
    train(config, dataset)
    per_epoch = len(seen["train"]) // 3
    epochs = [seen["train"][i * per_epoch : (i + 1) * per_epoch] for i in range(3)]
    flat = [[list(itertools.chain(*parts)) for parts in zip(*epoch, strict=True)] for epoch in epochs]
    for a, b in itertools.combinations(flat, 2):
        assert a[0] != b[0]  # another order
        negatives = [sorted(item for item, label in zip(x[2], x[1], strict=True) if not label) for x in (a, b)]
        assert negatives[0] != negatives[1]
        positives = [sorted(item for item, label in zip(x[2], x[1], strict=True) if label) for x in (a, b)]
        assert positives[0] == positives[1]
    held_out = len(seen["validation"]) // 3
    assert seen["validation"][:held_out] == seen["validation"][held_out : 2 * held_out]


def test_a_loaded_run_has_the_parameters_of_its_best_epoch_and_their_average(trained, tmp_path, monkeypatch):
    """Where the first of two epochs is best, the loaded model has the test metrics that the run ended with."""
    config = config_of(trained / "table.csv", tmp_path / "run")
    config.optimizer = OptimizerConfig(ema_decay=0.8)
    areas = iter([0.9, 0.6, 0.7])
    with monkeypatch.context() as patch:
        patch.setattr("jfi.training.metrics.label_metrics.auc", lambda *_: next(areas))
        result = train(config)
    assert result.best_epoch == 1
    dataset = load_dataset(config.data)
    batch = dataset.batches("test", 1000)[0]
    losses = []
    for run in (tmp_path / "run", trained / "run"):
        with torch.no_grad():
            found = load_run(run).model(batch.dense_features, batch.sparse_features).squeeze(-1)
        losses.append(torch.nn.functional.binary_cross_entropy_with_logits(found, batch.labels).item())
    assert losses[0] == pytest.approx(result.test["loss"], abs=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-4


def test_resume_refuses_a_dataset_that_was_prepared_again_with_other_settings(trained, tmp_path):
    own = config_of(trained / "table.csv", tmp_path / "run", epochs=1)
    prepare_dataset(own.data, tmp_path / "prepared")
    train(dataclasses.replace(own, data=DataConfig(prepared=str(tmp_path / "prepared"))))
    shutil.rmtree(tmp_path / "prepared")
    prepare_dataset(dataclasses.replace(own.data, max_slots=3), tmp_path / "prepared")
    with pytest.raises(ConfigError, match=r"data\.max_slots was \d+, but .* was prepared again with 3"):
        resume(tmp_path / "run")


def test_a_run_goes_on_with_a_table_that_has_grown_and_is_prepared_again(trained, tmp_path, monkeypatch, capsys):
    own, run = config_of(trained / "table.csv", tmp_path / "run", epochs=1), tmp_path / "run"
    prepare_dataset(own.data, tmp_path / "first")
    train(dataclasses.replace(own, data=DataConfig(prepared=str(tmp_path / "first"))))
    config = load_config(run / "config.yaml")
    save_config(config.with_training(epochs=2), run / "config.yaml")
    write_table(tmp_path / "grown.csv", [row(i) for i in range(230)])
    grown = ["--data.interactions", tmp_path / "grown.csv"]
    refused = ["--data.max_slots", 3, "--out", tmp_path / "grown"]
    assert commands.call("prepare", "--run", run, *grown, *refused) == 2
    message = f"error: --run {run}: data.max_slots is 3, but the run was started with 8"
    assert capsys.readouterr().err.splitlines()[-1] == message and not (tmp_path / "grown").exists()
    assert commands.call("prepare", "--run", run, *grown, "--out", tmp_path / "grown") == 0
    out = capsys.readouterr().out
    assert "data: 230 rows" in out
    assert "grown is written; train with --data.prepared" in out

    resumed = ["--resume", run, "--config-changed", "accept", "--data.prepared", tmp_path / "grown"]
    assert commands.call("train", *resumed) == 2
    refused = f"the data {tmp_path / 'grown'} has changed: it has 230 rows, 30 more than the run was started with"
    assert refused in capsys.readouterr().err
    assert load_config(run / "config.yaml").data.prepared == str(tmp_path / "first")
    assert commands.call("train", *resumed, "--data-changed", "accept") == 0
    data = load_config(run / "config.yaml").data
    assert (data.prepared, data.interactions) == (str(tmp_path / "grown"), str(tmp_path / "grown.csv"))
    assert resume(run).epochs == 2  # it is the run's data from now on

    # A dataset with other vocabularies, or settings, is none that the run can go on with.
    prepare_dataset(dataclasses.replace(own.data, interactions=str(tmp_path / "grown.csv")), tmp_path / "new")
    with pytest.raises(
        DataError, match=r"was prepared with other .* prepare the tables again with `jfi prepare --run`$"
    ):
        resume(run, prepared=tmp_path / "new", data_changed="accept")
    prepare_dataset(dataclasses.replace(own.data, max_slots=3), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"data\.max_slots was 8, but .* was prepared again with 3"):
        resume(run, prepared=tmp_path / "other", data_changed="accept")
