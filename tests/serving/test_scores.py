"""Scores are the training model's, whatever they are batched with."""

import json
import platform
import re
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import commands
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from jfi.data import load_dataset
from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError
from jfi.serving.requests import Request
from jfi.serving.schema import Table
from jfi.serving.scorer import Scorer, group_by_size
from jfi.serving.tables import load_tables, save_tables
from jfi.training.run.saved_run import load_run
from jfi.utils.files import is_storage_fault

from .conftest import logits, rewriting

SAMPLES = 1000


@pytest.fixture(scope="module")
def samples(exported):
    """Of 1,000 training and test samples with a history: raw requests of one candidate, and the model's logits."""
    run = load_run(exported.run)
    model, config, dataset = run.model, run.config, load_dataset(run.config.data, run.schema)
    interactions, items = (pq.read_table(path) for path in (config.data.interactions, config.data.items))
    columns = {name: interactions.column(name).to_numpy() for name in interactions.column_names}
    category = items.column("category").to_numpy()
    order = np.lexsort((columns["item"], columns["timestamp"], columns["user"]))
    columns = {name: values[order] for name, values in columns.items()}
    events = dataset.arrays().events
    rows = np.concatenate([dataset.arrays().samples["test"], dataset.arrays().samples["train"]])
    rows = rows[events.histories(rows, dataset.schema.max_history)[1] > 0][:SAMPLES]
    requests = []
    for row, start, length in zip(rows, *events.histories(rows, dataset.schema.max_history), strict=True):
        history = range(start, start + length)
        item = int(columns["item"][row])
        requests.append(
            {
                "user": {},
                "history": [
                    {
                        "item": int(columns["item"][i]),
                        "category": int(category[columns["item"][i]]),
                        "rating": int(columns["rating"][i]),
                        "age": columns["timestamp"][row] - columns["timestamp"][i],
                    }
                    for i in history
                ],
                "candidates": [{"item": item, "category": int(category[item])}],
            }
        )
    with torch.no_grad():
        wanted = logits(model.eval(), dataset.batch_of(rows, events.item[rows]))
    return requests, wanted.numpy()


def scored(scorer: Scorer, requests: list[dict]) -> np.ndarray:
    return np.concatenate(scorer.score([scorer.reader(json.loads(json.dumps(request))) for request in requests]))


def test_scores_are_those_of_the_model(scorer, samples):
    requests, wanted = samples
    assert len(requests) == SAMPLES and wanted.std() > 0.01
    found = np.concatenate([scored(scorer, requests[i : i + 100]) for i in range(0, SAMPLES, 100)])
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_user_without_events_gets_the_scores_of_the_model(exported, scorer, samples, monkeypatch):
    run = load_run(exported.run)
    dataset = load_dataset(run.config.data, run.schema)
    rows, events = dataset.arrays().samples["train"], dataset.arrays().events
    rows = rows[events.histories(rows, dataset.schema.max_history)[1] == 0][:20]
    batch = dataset.batch_of(rows, events.item[rows])
    with torch.no_grad():
        wanted = logits(run.model.eval(), batch).numpy()
    ids = batch.sparse_features.to_dict()
    known = scorer.reader.schema.vocabularies

    def candidate(i: int) -> dict:
        found = {name: int(ids[name].values()[i]) for name in ("item", "category")}
        return {name: known[name][one - 1] if one else None for name, one in found.items()}

    requests = [{"user": {}, "history": [], "candidates": [candidate(i)]} for i in range(len(rows))]
    assert len(requests) == 20 and wanted.std() > 1e-4
    np.testing.assert_allclose(scored(scorer, requests), wanted, atol=1e-6)
    # Padding copies the first event, so the package must get one; without it memory outside would be read.
    given, package = [], scorer.package
    monkeypatch.setattr(scorer, "package", lambda *inputs: given.append(inputs) or package(*inputs))
    # Among users with events, and in a batch of its own.
    mixed = scored(scorer, [samples[0][0], *requests[:3], samples[0][1]])
    np.testing.assert_allclose(mixed, [samples[1][0], *wanted[:3], samples[1][1]], atol=1e-5)
    np.testing.assert_allclose(scored(scorer, requests[:1]), wanted[:1], atol=1e-5)
    assert min(len(rows) for inputs in given for rows in inputs[0].values()) == 1


def change_info(monkeypatch, **changes: object) -> None:
    """Artifacts have another content of artifact.json from now on."""

    def read(path: Path, *arguments: object, read=artifact.read) -> tuple[artifact.Info, dict]:
        info, sums = read(path, *arguments)
        return replace(info, **changes), sums

    monkeypatch.setattr(artifact, "read", read)


def test_probabilities_are_the_sigmoids_of_logits(exported, scorer, samples, monkeypatch):
    other = Scorer(exported.path, output="probabilities")
    wanted = 1 / (1 + np.exp(-scored(scorer, samples[0][:20])))
    np.testing.assert_allclose(scored(other, samples[0][:20]), wanted, atol=1e-6)
    for one, answer in ((scorer, "a logit for"), (other, "a probability for")):
        assert answer in one.reader.json_schema()["description"]
    change_info(monkeypatch, schema=replace(scorer.info.schema, tasks=["regression"]))
    with pytest.raises(ArtifactError, match="predicts numbers, which have no probabilities"):
        Scorer(exported.path, output="probabilities")
    with pytest.raises(ValueError, match="output is 'odds', must be one of logits, probabilities, calibrated"):
        Scorer(exported.path, output="odds")


def test_calibrated_scores(exported, scorer, samples, monkeypatch):
    """The artifact has the run's a and b; without them the output is refused."""
    own = load_run(exported.run).calibration["label"]
    assert scorer.info.calibration == [(own["a"], own["b"])]
    change_info(monkeypatch, calibration=[[0.5, -1.0]])
    wanted = 1 / (1 + np.exp(-(0.5 * scored(scorer, samples[0][:20]) - 1)))
    other = Scorer(exported.path, output="calibrated")
    np.testing.assert_allclose(scored(other, samples[0][:20]), wanted, atol=1e-6)
    assert "a calibrated probability for" in other.reader.json_schema()["description"]
    change_info(monkeypatch, calibration=None)
    with pytest.raises(ArtifactError, match=r"output is calibrated, but .* has no calibration, as of"):
        Scorer(exported.path, output="calibrated")
    change_info(monkeypatch, schema=replace(scorer.info.schema, tasks=["regression"]))
    with pytest.raises(ArtifactError, match="predicts numbers, which have no probabilities"):
        Scorer(exported.path, output="calibrated")


def test_an_answer_does_not_depend_on_the_batch(scorer, samples):
    requests = samples[0][:40]
    wide = dict(requests[5], candidates=[requests[i]["candidates"][0] for i in range(40)])
    alone = [scored(scorer, [request]) for request in (*requests, wide)]
    np.testing.assert_allclose(scored(scorer, [*requests, wide]), np.concatenate(alone), atol=1e-5)


def test_a_long_history_is_cut_to_the_newest_events_as_in_training(scorer, samples):
    request = max(samples[0], key=lambda request: len(request["history"]))
    longer = dict(request, history=[{"item": 1, "category": 1, "rating": 1, "age": 9e9}] * 40 + request["history"])
    assert len(request["history"]) == scorer.reader.limits.max_history == scorer.info.limits.max_history
    assert scorer.reader.limits.max_candidates == scorer.info.limits.max_candidates != len(request["history"])
    np.testing.assert_array_equal(scored(scorer, [longer]), scored(scorer, [request]))


@pytest.fixture(scope="module")
def int8(exported, tmp_path_factory) -> Path:
    """What `--tables int8` writes; the package is the same as that of `exported`, so it is not compiled again."""
    path = tmp_path_factory.mktemp("int8") / "artifact"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "jfi.serving.export.write_package",
            lambda program, package, metadata: shutil.copy(exported.path / artifact.MODEL, package),
        )
        commands.run("export", "--run", exported.run, "--out", path, "--tables", "int8")
    return path


def test_int8_scores_are_near(int8, exported, scorer, samples):
    (info, _), (own, _) = artifact.read(int8), artifact.read(exported.path)
    assert info == replace(own, quantization="int8", checkpoint=None, exported=info.exported, versions=info.versions)
    assert (int8 / artifact.TABLES).stat().st_size < (exported.path / artifact.TABLES).stat().st_size
    requests, _ = samples
    small = Scorer(int8)
    found, wanted = scored(small, requests[:200]), scored(scorer, requests[:200])
    assert 0 < np.abs(found - wanted).max() < 0.02
    assert np.corrcoef(found, wanted)[0, 1] > 0.999


def test_int8_rows_are_within_half_a_step(tmp_path):
    weights = {"item": torch.randn(50, 8), "city": torch.randn(9, 6), "genre": torch.randn(20, 8)}
    described = {name: Table(*weight.shape, [f"of_{name}"]) for name, weight in weights.items()}
    save_tables(tmp_path / "tables", "int8", weights, described)
    tables = load_tables(tmp_path / "tables", "int8", described, torch.device("cpu"))
    found = tables({f"of_{name}": torch.arange(len(weight)) for name, weight in weights.items()})
    for name, weight in weights.items():
        step = (weight.amax(1) - weight.amin(1)) / 255
        assert ((found[f"of_{name}"] - weight).abs().amax(1) <= 0.51 * step + 1e-6).all()


def test_tables_get_the_rights_of_other_files_and_a_full_disk_is_a_fault_of_the_storage(tmp_path):
    weights, path = {"item": torch.randn(5000, 8)}, tmp_path / "tables"
    (tmp_path / "other").touch()
    save_tables(path, "float32", weights, {})
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'") as caught:
            save_tables(path, "float32", weights, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_storage_fault(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_artifact_that_this_machine_cannot_run_is_refused(tmp_path, scorer):
    info = replace(scorer.info, device="cuda", gpu="H100")
    with pytest.raises(ArtifactError, match="was exported for a GPU, but there is none here"):
        artifact.check_environment(tmp_path, info, None)
    with pytest.raises(ArtifactError, match="there is no GPU here"):
        artifact.check_environment(tmp_path, scorer.info, "cuda")
    with pytest.raises(ArtifactError, match=r"was exported with torch 1\.0\.0"):
        artifact.check_environment(tmp_path, replace(scorer.info, versions={"torch": "1.0.0"}), None)
    here, newer = artifact.cpu_instructions(), "avx1024_new"
    artifact.check_environment(tmp_path, replace(scorer.info, cpu=here[:-1]), None)
    with pytest.raises(
        ArtifactError, match=f"was exported on a CPU with {newer}, which this one lacks or does not name; export on"
    ):
        artifact.check_environment(tmp_path, replace(scorer.info, cpu=[*here, newer]), None)


@pytest.mark.parametrize(
    ("line", "known"),
    [
        (
            "flags\t\t: fpu mmx sse4_2 sse4a ssse3 md_clear avx2 fma bmi1 hypervisor\n",
            ["avx2", "bmi1", "fma", "sse4_2", "sse4a", "ssse3"],
        ),
        ("Features\t: fp asimd crc32 sve2 bf16\n", ["asimd", "bf16", "sve2"]),
        ("model name : none\n", []),
    ],
)
def test_the_instructions_of_a_cpu(tmp_path, line, known):
    """Only those for which a compiler emits code; a kernel's or a hypervisor's flags differ between equal CPUs."""
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\nprocessor : 1\n{line}")
    assert artifact.cpu_instructions(tmp_path / "cpuinfo") == [platform.machine(), *known]
    assert artifact.cpu_instructions(tmp_path / "absent") == [platform.machine()]


def test_an_artifact_names_its_cpu(exported, scorer):
    assert scorer.info.cpu == artifact.cpu_instructions()


def test_int8_tables_without_torchrec_are_refused_by_one_line(int8, monkeypatch):
    absent = "torchrec.quant.embedding_modules"
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ArtifactError) as refused:
        Scorer(int8)
    reason = f"has int8 tables, which need TorchRec, but {absent} is missing; export with --tables float32"
    assert str(refused.value) == f"{int8} {reason}"


def test_requests_that_are_padded_together_are_alike():
    sizes = [(2000, 1000), (2, 2), (2000, 900), (200, 100), (1, 1), (1900, 1000)]  # (events, candidates)
    empty = {"ids": {}, "counts": {}, "ages": None, "dense": np.zeros((0, 0))}
    requests = [Request(**empty, num_events=events, num_candidates=candidates) for events, candidates in sizes]
    # The last three are too small for it to matter.
    assert group_by_size(requests) == [[0, 2, 5], [3, 1, 4]]
    assert group_by_size([]) == []


def without_keys(info: dict) -> None:
    info["schema"]["candidate"][0]["keys"] = []


def renamed_key(info: dict) -> None:
    info["schema"]["candidate"][0]["keys"] = ["other"]


def renamed_field(info: dict) -> None:
    info["schema"]["event"][0]["name"] = "other"


def named_labels(info: dict) -> None:
    info["schema"] |= {"labels": ["a", "b"], "tasks": ["binary", "binary"]}


def renamed_table(info: dict) -> None:
    info["tables"]["item"]["keys"][0] = "other"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (artifact.INFO, without_keys, "a field of artifact.json has no key"),
        (artifact.INFO, renamed_key, "KeyError('"),
        (artifact.INFO, renamed_field, "KeyError('other')"),
        (artifact.INFO, named_labels, "zip()"),
        (artifact.INFO, renamed_table, "KeyError('"),
        (artifact.VOCABULARIES, lambda known: known.update(other=known.pop("item")), "KeyError('item')"),
        (artifact.VOCABULARIES, lambda known: known["item"].append("one more"), "'item' has 61 values"),
    ],
)
def test_names_that_do_not_fit_each_other_are_found_at_loading(exported, tmp_path, name, change, message):
    path = tmp_path / "forged"
    with rewriting(path, exported.path) as folder:
        tree = json.loads((folder / name).read_text())
        change(tree)
        (folder / name).write_text(json.dumps(tree))

    with pytest.raises(ArtifactError, match=f"^{path} is damaged: {re.escape(message)}[^\n]*$"):
        Scorer(path)
