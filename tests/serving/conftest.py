"""One tiny run, trained and exported once: compiling is what takes long."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import torch
from filelock import FileLock  # torch requires it

from examples import synthetic_tables
from jfi.data import Batch
from jfi.models import SequenceDLRM
from jfi.serving.scorer import Scorer
from jfi.serving.server.events import write_answer
from jfi.training import train
from jfi.training.config_parser import parse_config
from jfi.utils.files import SUMS, sha256_of, write_sums, writing_folder

ROOT = Path(__file__).parents[2]
TINY = [
    *["--data.max_history", "30", "--model.embedding_dim", "8", "--model.num_heads", "2"],
    *["--model.dense_arch", "[8]", "--model.over_arch", "[8]", "--encoder.num_layers", "1"],
    *["--encoder.causal", "true", "--encoder.relative_bias", "distance"],
    *["--training.device", "cpu", "--training.epochs", "1", "--training.batch_size", "64"],
]


def logits(model: SequenceDLRM, batch: Batch) -> torch.Tensor:
    """[B], of the model that was trained."""
    return model(batch.dense_features, batch.sparse_features).squeeze(-1)


@contextmanager
def one_thread() -> Iterator[None]:
    """For work this small several threads only wait for one another, the longer the busier the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory, worker_id) -> SimpleNamespace:
    """`run`, a run folder, and `path`, its artifact, made by the commands that the documentation shows.

    One for all workers of the test run: the first that asks makes it, in the folder that theirs are in.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "serving"
    with FileLock(f"{folder}.lock"), one_thread():
        if not (folder / "run/artifact").exists():
            export_tiny(folder)
    return SimpleNamespace(run=folder / "run", path=folder / "run/artifact")


@pytest.fixture(scope="session")
def published(exported, tmp_path_factory, worker_id):
    """Published versions of the tiny run in training, one folder for all workers, as `exported` is."""
    from .publishing import Published, publish_some

    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "published"
    with FileLock(f"{folder}.lock"), one_thread():
        if not (folder / "wanted.json").exists():
            publish_some(exported.run, folder)
    return Published(folder)


def export_tiny(folder: Path) -> None:
    synthetic_tables.write(folder / "tables", synthetic_tables.taste(num_users=80, num_items=60, mean_length=20))
    tables = [f"--data.{name}={folder}/tables/{name}.parquet" for name in ("interactions", "items")]
    overrides = ["--config", str(ROOT / "configs/quickstart.yaml"), *tables, *TINY]
    train(parse_config([*overrides, "--training.run_dir", str(folder / "run")])[0])
    commands.run("export", "--run", folder / "run")


@contextmanager
def rewriting(path: Path, source: Path) -> Iterator[Path]:
    """The folder of a copy of an artifact, to change files in it; then it gets right checksums and the name `path`."""
    with writing_folder(path) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SUMS))
        yield folder
        write_sums(folder, {file.name: sha256_of(file) for file in folder.iterdir()})


@pytest.fixture(scope="session")
def scorer(exported) -> Scorer:
    return Scorer(exported.path)


@pytest.fixture
def log(caplog):
    """What the server logs, as one text, as `jfi serve` sets it up."""
    server = pytest.importorskip("jfi.serving.server.app")
    quiet = logging.getLogger("aiohttp.server")
    quiet.addFilter(server.without_traceback)
    with caplog.at_level(logging.INFO, "jfi.serving"):
        yield lambda: caplog.text
    quiet.removeFilter(server.without_traceback)


def as_sent(scores: list[float]) -> list[float]:
    """Scores as a client reads them: the shortest texts of their float32."""
    return json.loads(write_answer({"scores": scores}))["scores"]


@pytest.fixture
def request_body() -> dict:
    """A request to the exported model, with three events and two candidates."""
    return {
        "user": {},
        "history": [
            {"item": 3, "category": 3, "rating": 5, "age": 90000},
            {"item": "7", "category": "7", "rating": 1, "age": 3600.5},
            {"item": 41, "category": 1, "rating": None, "age": 60},
        ],
        "candidates": [{"item": 3, "category": 3}, {"item": "never seen", "category": None}],
    }


@pytest.fixture(autouse=True)
def _random_projections(random_projections):
    pass
