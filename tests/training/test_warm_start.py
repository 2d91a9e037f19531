"""A new run from the parameters of an old one: by value, not by id."""

import shutil
from pathlib import Path

import pytest
import torch
from data_configs import regression, replace_data
from own_table import config_of, new_row, row, write_table
from worker import without_pictures

from jfi.data import load_dataset
from jfi.training import Config, ConfigError, OptimizerConfig, resume, train
from jfi.training.config_parser import load_config, save_config
from jfi.training.distributed.processes import World
from jfi.training.loop.trainer import Trainer
from jfi.training.model.build_model import build_model, draw_tables, table_configs
from jfi.training.run.best_epoch import BestEpoch
from jfi.training.run.recorder import read_metrics
from jfi.training.run.run_position import RunPosition
from jfi.training.run.saved_run import load_run
from jfi.training.run.warm_start import check_warm_start

ITEMS = "embedding_collection.embeddings.item_id.weight"


@pytest.fixture(autouse=True)
def _no_pictures():
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    write_table(folder / "table.csv", [row(i) for i in range(200)])
    with without_pictures():
        train(config_of(folder / "table.csv", folder / "run"))
    return folder / "run"


@pytest.fixture
def grown(tmp_path) -> Path:
    """The table after a while: without item i3, and with an item and a user whose names sort before the others."""
    rows = [line for line in (row(i) for i in range(200)) if line[1] != "i3"]
    write_table(tmp_path / "grown.csv", [new_row(i - 90_000) for i in range(20)] + rows)
    return tmp_path / "grown.csv"


def fresh(config: Config) -> dict[str, torch.Tensor]:
    """The tables of the config's model as a run without a warm start draws them."""
    model = build_model(config.model, config.encoder, load_dataset(config.data).schema)
    tables = table_configs(model)
    draw_tables(model.state_dict(), tables, config.training.seed)
    return {name: value for name, value in model.state_dict().items() if name in tables}


@pytest.mark.parametrize("average", [None, 0.9])
def test_known_values_keep_their_rows_and_new_ones_get_fresh_rows(old, grown, tmp_path, average):
    config = config_of(grown, tmp_path / "run", seed=5)
    config.optimizer = OptimizerConfig(ema_decay=average)
    dataset = load_dataset(config.data)
    trainer = Trainer(config, dataset, World(), str(old))
    state, drawn, before = trainer.model.state_dict(), fresh(config), load_run(old)
    kept = before.model.state_dict()
    for column, name in (("item_id", ITEMS), ("user_id", "embedding_bag_collection.embedding_bags.user_id.weight")):
        values, values_before = (
            list(one.encodings.vocabularies[column].values) for one in (dataset.schema, before.schema)
        )
        assert values != values_before and set(values) - set(values_before)
        assert torch.equal(state[name][0], kept[name][0])  # the row of unknown values
        for i, value in enumerate(values, 1):
            if value in values_before:
                assert torch.equal(state[name][i], kept[name][values_before.index(value) + 1]), value
            else:
                assert torch.equal(state[name][i], drawn[name][i]), value
    for name in state.keys() - drawn.keys():
        assert torch.equal(state[name], kept[name]), name
    if average is not None:
        assert torch.equal(trainer.modules["average"].module.state_dict()[ITEMS], state[ITEMS])


def test_quantile_tables_are_copied_by_id_where_they_have_as_many_rows(old, grown, tmp_path, monkeypatch):
    name = "embedding_collection.embeddings.seconds.weight"
    config = config_of(grown, tmp_path / "run", seed=5)
    state = Trainer(config, load_dataset(config.data), World(), str(old)).model.state_dict()
    assert torch.equal(state[name], load_run(old).model.state_dict()[name])
    monkeypatch.setattr("jfi.data.prepared.stages.encode_columns.NUM_QUANTILES", 7)
    state = Trainer(config, load_dataset(config.data), World(), str(old)).model.state_dict()
    assert torch.equal(state[name], fresh(config)[name])


def test_a_warm_run_begins_where_the_old_one_was(old, tmp_path, monkeypatch, capsys):
    """On the same data, its first validation after hardly any learning is that of the old run's best epoch."""
    config = config_of(old.parent / "table.csv", tmp_path / "run", epochs=1, warm_start="run", rows_after=None)
    config.optimizer.dense.learning_rate = config.optimizer.embeddings.learning_rate = 1e-9
    monkeypatch.chdir(old.parent)
    result = train(config)
    saved = load_config(tmp_path / "run/config.yaml")
    assert saved.training.warm_start == str(old)
    assert f"warm start from {old}: rows of known ids: user_id 7/7" in capsys.readouterr().out
    wanted = resume(old)
    assert result.validation == pytest.approx(wanted.validation, abs=1e-5)
    assert result.start["test"] == pytest.approx(wanted.test, abs=1e-5)
    assert read_metrics(tmp_path / "run/metrics.jsonl")[0]["auc"] == result.start["validation"]["auc"]


def test_a_warm_run_trains_on_rows_that_the_old_one_has_not_trained_on(old, tmp_path, monkeypatch, capsys):
    """Also one that starts from it, and with a resume after the old run has vanished."""
    rows = [row(i) for i in range(400)]
    write_table(tmp_path / "grown.csv", rows)
    shutil.copytree(old, tmp_path / "old")
    seen, forward = [], Trainer._forward

    def spy(trainer, batch):
        seen.append(len(batch.labels) if trainer.model.training else 0)
        return forward(trainer, batch)

    monkeypatch.setattr(Trainer, "_forward", spy)
    config = config_of(tmp_path / "grown.csv", tmp_path / "run", epochs=1, warm_start=str(tmp_path / "old"))
    config.optimizer.dense.learning_rate = config.optimizer.embeddings.learning_rate = 1e-9
    result = train(config)
    # The old run has trained on 160 of its 200 rows, this one's training split has 320 of 400.
    assert sum(seen) == 160
    date = "1970-01-01T02:39:00+00:00"
    out = capsys.readouterr().out
    assert (
        f"training.rows_after: auto takes rows newer than {date}, the newest row that the run of training.warm_start "
        "has trained on\n" in out
    )
    line = f"training.rows_after: 160 of 320 training samples are newer than {date}; older rows are only events of "
    assert f"{line}histories" in out
    assert "training has not improved on the run of training.warm_start" in out
    assert load_config(tmp_path / "run/config.yaml").training.rows_after == rows[159][2]
    old_metrics = load_run(old).evaluate(str(tmp_path / "grown.csv"))  # of all rows, most of which it has seen
    assert old_metrics["overall"]["samples"] == 400 and result.start.keys() == {"validation", "test"}
    shutil.rmtree(tmp_path / "old")
    seen.clear()
    saved = load_config(tmp_path / "run/config.yaml").with_training(epochs=2)
    save_config(saved, tmp_path / "run/config.yaml")
    again = resume(tmp_path / "run", config_changed="accept")
    assert sum(seen) == 160 and again.start == result.start
    write_table(tmp_path / "later.csv", [row(i) for i in range(500)])
    later = config_of(tmp_path / "later.csv", tmp_path / "later", epochs=1, warm_start=str(tmp_path / "run"))
    seen.clear()
    train(later)
    assert sum(seen) == 80
    with pytest.raises(ConfigError, match=r"training\.rows_after: 0 of 320 training samples are newer than .*; name a"):
        train(config_of(tmp_path / "grown.csv", tmp_path / "none", warm_start=str(tmp_path / "later")))
    assert not (tmp_path / "none").exists()


def test_a_time_of_the_config_is_not_called_that_of_the_old_run(old, tmp_path, capsys):
    config = config_of(old.parent / "table.csv", tmp_path / "run", warm_start=str(old), rows_after=row(99)[2])
    lines, settled = check_warm_start(old, config)
    assert (lines, settled.training.rows_after) == ([], row(99)[2])
    trainer = Trainer(config, load_dataset(config.data), World(), str(old))
    decay = load_config(old / "config.yaml").optimizer.embeddings.weight_decay
    assert decay > 0 and trainer.config.optimizer.embeddings.weight_decay == decay
    line = "training.rows_after: 60 of 160 training samples are newer than 1970-01-01T01:39:00+00:00; older rows are"
    assert line in capsys.readouterr().out


def test_the_batch_size_goes_by_the_newer_samples(old, tmp_path, monkeypatch):
    monkeypatch.setattr("jfi.training.defaults._LARGE", 100)
    for after, size in ((None, 1024), (row(99)[2], 512)):
        config = config_of(old.parent / "table.csv", tmp_path / "run", batch_size=None, rows_after=after)
        assert Trainer(config, load_dataset(config.data), World()).config.training.batch_size == size


def test_rows_after_a_best_evaluation_within_the_first_epoch_are_not_lost(old, tmp_path, monkeypatch):
    """Its parameters have seen only part of the rows: a run that starts from it takes all rows again."""
    end = RunPosition.end_evaluation

    def worse(progress, epoch, metrics, monitor, calibration):
        end(progress, epoch, {**metrics, monitor: -epoch}, monitor, calibration)

    monkeypatch.setattr(RunPosition, "end_evaluation", worse)
    for name, after, found, rows in (("a", None, None, "all rows"), ("b", 0.0, 0.0, "rows newer than 1970-01-01")):
        options = {"epochs": 1, "eval_every": 2, "monitor": "auc", "rows_after": after}
        train(config_of(old.parent / "table.csv", tmp_path / name, **options))
        assert BestEpoch.of(tmp_path / name).epoch == 0.4
        new = config_of(old.parent / "table.csv", tmp_path / "new", warm_start=str(tmp_path / name))
        (line,), settled = check_warm_start(tmp_path / name, new)
        assert settled.training.rows_after == found
        assert line.startswith(f"training.rows_after: auto takes {rows}")
        assert line.endswith("lies within its first epoch, which has seen only part of its rows")


@pytest.mark.parametrize("split", ["leave_one_out", "user"])
def test_rows_after_takes_all_rows_of_splits_by_user(old, tmp_path, split):
    config = config_of(old.parent / "table.csv", tmp_path / "run", warm_start=str(old))
    config.data = replace_data(config.data, split=split)
    line = f"training.rows_after: auto takes all rows, since with data.split: {split} new rows of a user may be older"
    lines, settled = check_warm_start(old, config)
    assert (lines, settled.training.rows_after) == ([f"{line} than rows of another"], None)


def test_a_warm_run_resumes_without_the_old_one(old, tmp_path):
    config = config_of(old.parent / "table.csv", tmp_path / "run", epochs=1, warm_start=str(old), rows_after=None)
    train(config)
    config = load_config(tmp_path / "run/config.yaml").with_training(epochs=2, warm_start=str(tmp_path / "vanished"))
    save_config(config, tmp_path / "run/config.yaml")
    assert resume(tmp_path / "run", config_changed="accept").epochs == 2


def without(**lists):
    return lambda config: setattr(config, "data", replace_data(config.data, **lists))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: setattr(c.model, "over_arch", [4]),
            r"'over_arch\.\S+' has shape \[4, \d+\], in \S+ it has \[8, \d+\]",
        ),
        (lambda c: setattr(c.model, "embedding_dim", 16), "'\w+' is 16 wide, in .* 8"),
        (lambda c: setattr(c.encoder, "num_layers", 1), r"has no 'sequence_arch\.encoder\S+'; use the same model"),
        (
            lambda c: setattr(c, "data", replace_data(c.data, item_categorical=[])),
            "'genre' is an input that this run lacks, but not",
        ),
        (
            lambda c: setattr(c, "data", replace_data(c.data, item_dense=[])),
            "'number price' is an input that this run lacks",
        ),
        (lambda c: setattr(c.training, "warm_start", "/nowhere"), "run /nowhere: not a run folder"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_in_one_line_and_nothing_is_written(old, tmp_path, change, message):
    config = config_of(old.parent / "table.csv", tmp_path / "run", warm_start=str(old), rows_after=None)
    change(config)
    with pytest.raises(ConfigError, match=f"^training.warm_start: .*{message}.*$"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("model", "embedding_dim", 16), ("encoder", "num_layers", 1), ("data", "labels", regression("clicked"))],
)
def test_another_model_is_refused_before_the_tables_are_read(old, tmp_path, section, name, value):
    config = config_of(tmp_path / "no table", tmp_path / "run", warm_start=str(old))
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=r"^training\.warm_start: "):
        train(config)


def test_a_warm_run_that_died_before_its_first_checkpoint_begins_warm(old, tmp_path, monkeypatch):
    config = config_of(old.parent / "table.csv", tmp_path / "run", epochs=1, warm_start=str(old), rows_after=None)
    begun = []

    def die(trainer, *_):
        begun.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", die)
    for start in (lambda: train(config), lambda: resume(tmp_path / "run")):
        with pytest.raises(KeyboardInterrupt):
            start()
    for name, value in begun[0].items():
        torch.testing.assert_close(begun[1][name], value, rtol=0, atol=0)
