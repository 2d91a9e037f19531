"""Launched runs whose processes send bfloat16, or are groups that average their tables."""

import dataclasses
from pathlib import Path

import pytest
import torch
from launched import assert_same_metrics, environment, free_port, in_two_processes, job, tiny, write_tables
from worker import without_pictures

from jfi.training import Config, train
from jfi.training.distributed.processes import join_world
from jfi.training.loop.trainer import Trainer
from jfi.training.run.recorder import read_metrics
from jfi.training.run.run_data import load_shared, save_data
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.saved_run import load_run

LOG_EVERY, REPLICATE_BELOW = 1, 10

STEPS, STOP_AT = 21, 7
SETTINGS = {
    "halves": {"communication": "bfloat16"},
    "groups": {"group_size": 1},
    "stopped": {"group_size": 1},
}


def configured(folder: Path, name: str, **sharding: object) -> Config:
    config = tiny(folder, name, "rowwise_adagrad", "row_wise", epochs=1)
    return dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, **sharding))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups")
    write_tables(path)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """The folder of the run of one process."""
    with without_pictures():
        train(configured(folder, "alone"))
    return folder / "alone"


@pytest.fixture(scope="module")
def outcomes(folder, alone):
    """By job what both ranks say of it, beside the run of one process."""
    jobs = {name: job(folder, configured(folder, name, **settings)) for name, settings in SETTINGS.items()}
    jobs["stopped"]["stop_at"] = STOP_AT
    jobs["resumed"] = {"port": free_port(), "resume": str(folder / "stopped")}
    jobs["differ"] = job(folder, configured(folder, "differ"), differ={"batch_size": 41, "eval_batch_size": 32})
    jobs["indivisible"] = job(folder, configured(folder, "indivisible", group_size=3))
    return dict(zip(jobs, zip(*in_two_processes(folder, list(jobs.values())), strict=True), strict=True))


def losses(folder: Path, name: str) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / name / "metrics.jsonl") if line["split"] == "train"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_send_halves_and_average(folder):
    def on_gpu(name: str, **sharding: object) -> Config:
        return configured(folder, f"gpu-{name}", **sharding).with_training(device="cuda")

    train(on_gpu("alone"))
    configs = {name: on_gpu(name, **settings) for name, settings in SETTINGS.items() if name != "stopped"}
    outcomes = in_two_processes(folder, [job(folder, config) for config in configs.values()])
    plain = losses(folder, "gpu-alone")
    assert losses(folder, "gpu-halves") == pytest.approx(plain, abs=0.02)
    assert losses(folder, "gpu-groups") == pytest.approx(plain, abs=0.1)
    for place in (1, 2):
        assert outcomes[0][place]["sums"] == outcomes[1][place]["sums"]


@pytest.mark.slow
def test_halves_round_what_is_sent(folder, outcomes):
    plain, halves = losses(folder, "alone"), losses(folder, "halves")
    assert 0 < abs(halves[0] - plain[0]) < 1e-4  # of values of 0.1 and 8 bits
    assert halves == pytest.approx(plain, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["groups", "groups-rarely"])
def test_groups_learn_apart_and_average(folder, outcomes, name):
    plain, grouped = losses(folder, "alone"), losses(folder, name)
    assert grouped[0] == pytest.approx(plain[0], abs=1e-6)
    assert abs(grouped[1] - plain[1]) > 1e-4
    assert grouped == pytest.approx(plain, abs=0.1)
    first, second = (outcome["sums"] for outcome in outcomes[name])
    assert first == second
    assert all(value != 0 for value in first.values())
    assert losses(folder, "groups")[:2] != losses(folder, "groups-rarely")[:2]


@pytest.mark.slow
def test_a_run_in_groups_goes_on_where_it_stopped(folder, outcomes):
    assert [outcome["begun_at"] for outcome in outcomes["resumed"]] == [STOP_AT] * 2
    assert [outcome["end"][:18] for outcome in outcomes["stopped"]] == ["stopped by SIGTERM"] * 2
    assert_same_metrics(folder / "stopped", folder / "groups", steps=STEPS)


@pytest.mark.slow
def test_one_process_loads_a_run_in_groups(folder, outcomes):
    state = load_run(folder / "groups").model.state_dict()
    (_, sums) = outcomes["groups"]
    for name, value in sums["sums"].items():
        assert state[name].sum().item() == pytest.approx(value, abs=1e-4), name


@pytest.mark.slow
def test_processes_that_were_started_otherwise_are_refused(folder, outcomes):
    changes = "training.batch_size was 40 and is 41, training.eval_batch_size was 31 and is 32"
    line = f"process 1 was started with other settings than process 0: {changes}"
    assert [outcome["end"] for outcome in outcomes["differ"]] == [line] * 2
    assert not (folder / "differ").exists()


@pytest.mark.slow
def test_groups_of_another_size_are_refused(folder, outcomes):
    line = "sharding.group_size: got 3, must be a divisor of the number of processes, 2"
    assert [outcome["end"] for outcome in outcomes["indivisible"]] == [line] * 2
    assert not (folder / "indivisible").exists()


@pytest.fixture
def one_launched(monkeypatch):
    for name, value in environment(0, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def test_ids_of_owner_ranks_are_pipelined(folder, alone, one_launched):
    config = configured(folder, "pipelined", exchange="attention")
    with join_world("cpu") as world:
        dataset = load_shared(config.data, world)
        trainer = Trainer(config, dataset, world)
        trainer.pipeline = trainer._make_pipeline()
        with pytest.MonkeyPatch.context() as patch, without_pictures():
            patch.setattr("jfi.data.Batch.pin_memory", lambda batch: batch)
            run = RunFolder.create(config)
            save_data(run, dataset)
            trainer.fit(run)
        names = {id(module): name for name, module in trainer.model.module.named_modules()}
        pipelined = {names[id(module)] for module in trainer.pipeline._pipelined_modules}
    assert pipelined == {"embedding_bag_collection", "embedding_collection"}
    assert_same_metrics(folder / "pipelined", alone, steps=STEPS)
