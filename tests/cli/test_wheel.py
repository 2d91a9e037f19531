"""The wheel is all that the command needs, also in an empty environment that is made as docs/get-started.md says."""

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/get-started.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Builds the wheel from a copy, where no files of earlier builds lie."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("jfi", "configs", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    built = subprocess.run([*build, folder / "dist", folder], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = (folder / "dist").glob("jfi-*.whl")
    return path


def test_the_wheel_has_the_command_the_configs_and_its_types(wheel, tmp_path):
    """It trains on a small table and scores it, in a folder without this repository."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "jfi/py.typed" in names and "jfi/configs/quickstart.yaml" in names
        assert [name for name in names if name.startswith(("tests", "configs", "benchmarks", "docs", "examples"))] == []
        for folder, pattern in (("docs", "*.md"), ("docs", "*.svg"), ("examples", "*.py"), ("examples", "deploy/*")):
            assert {f"jfi/{path.relative_to(ROOT)}" for path in (ROOT / folder).glob(pattern)} <= set(names)
        (entry,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "jfi = jfi.cli:main" in archive.read(entry).decode()
        archive.extractall(tmp_path / "site")
    with open(tmp_path / "clicks.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["who", "what", "when", "clicked"])
        writer.writerows([i % 20, i * 7 % 30, i * 60, i * 7 % 3 // 2] for i in range(600))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}

    def jfi(*arguments: object) -> str:
        command = [sys.executable, "-m", "jfi", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f": {tmp_path / 'site/jfi/docs/index.md'}\n" in jfi("--help")
    columns = ["--data.user", "who", "--data.item", "what", "--data.timestamp", "when", "--data.label", "clicked"]
    small = ["--training.epochs", "1", "--training.run_dir", "run", "--training.device", "cpu"]
    assert "run folder run" in jfi("train", "--data.interactions", "clicks.csv", *columns, *small)
    said = jfi("evaluate", "--run", "run", "--interactions", "clicks.csv", "--out", "metrics.json")
    assert said.splitlines()[1].split()[0] == "all"
    assert json.loads((tmp_path / "metrics.json").read_text())["overall"]["samples"] == 600


@pytest.fixture
def shell(wheel, tmp_path):
    """Returns what runs lines of a shell in a folder with the wheel alone, without this environment's packages."""
    shutil.copy(wheel, tmp_path)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PIP_RETRIES": "1"}  # where the page's index of torch is out of reach, pip asks it for each package
    search = [str(tmp_path / "venv/bin"), str(Path(sys.base_prefix) / "bin"), *os.environ["PATH"].split(os.pathsep)]
    environment["PATH"] = os.pathsep.join(one for one in search if one != str(Path(sys.prefix) / "bin"))

    def shell(lines: str, **keywords) -> subprocess.Popen:
        # Of one group, so that whatever it has started ends with it.
        return subprocess.Popen(
            ["bash", "-ec", lines], cwd=tmp_path, env=environment, text=True, start_new_session=True, **keywords
        )

    return shell


def said_by(process: subprocess.Popen, seconds: float) -> str:
    """Returns what a shell has printed when it has ended well."""
    said, error = process.communicate(timeout=seconds)
    assert process.returncode == 0, f"{said}\n{error}"
    print(said)
    return said


def blocks(section: str) -> list[str]:
    """Returns the commands of a section of the page, a text for each block."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


def write_clicks(path: Path, rows: int, begin: datetime) -> None:
    """Writes a table as the page describes it, in which each user likes two fifths of the items."""
    rng = random.Random(0)
    likes = {user: rng.sample(range(5), 2) for user in range(200)}
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "time", "clicked"])
        for number in range(rows):
            user, item = rng.randrange(200), rng.randrange(50)
            clicked = rng.random() < (0.7 if item % 5 in likes[user] else 0.15)
            time = begin + timedelta(minutes=5 * number)
            writer.writerow([user, item, time.strftime("%Y-%m-%d %H:%M:%S"), int(clicked)])


@contextmanager
def serving(shell, command: str):
    """Yields the address of a server on a free port, and stops it by SIGTERM."""
    server = shell(f"exec {command} --port 0 --drain-seconds 0", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        found = next(filter(None, (re.search(r"serving on (http://\S+);", line) for line in server.stdout)), None)
        assert found, f"the server ended with {server.wait()}"
        yield found[1]
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.stdout.close()
        server.wait()


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_a_wheel_and_a_table_to_served_scores(shell, tmp_path):
    """Takes some minutes, most of them to install torch."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    find = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path / "found"]
    found = subprocess.run([*find, "torchrec==1.9.2"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no package index: {found.stderr.strip().splitlines()[-1]}")
    for_cpu, for_cuda, *_ = blocks("Install")
    assert "[cpu," in for_cpu and "[cuda," in for_cuda
    said_by(shell(for_cuda if torch.cuda.is_available() else for_cpu, **pipes), 3000)

    write_clicks(tmp_path / "clicks.csv", 6000, datetime(2026, 1, 5, 18))
    write_clicks(tmp_path / "today.csv", 300, datetime(2026, 2, 4, 18))
    (tmp_path / "items.csv").write_text("item,category\n" + "".join(f"{i},category {i % 5}\n" for i in range(50)))
    train, score = blocks("The same by commands")
    artifact, request = blocks("Answer requests")
    assert said_by(shell(train, **pipes), 600).endswith("run folder runs/first\n")
    assert said_by(shell(score, **pipes), 600).endswith("wrote scores.csv\n")
    with open(tmp_path / "scores.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 300
    export, serve = artifact.splitlines()
    assert "wrote runs/first/artifact" in said_by(shell(export, **pipes), 900)
    with serving(shell, serve) as address:
        scores = json.loads(said_by(shell(request.replace("http://127.0.0.1:8000", address), **pipes), 60))["scores"]
    assert len(scores) == 2 and all(-20 < score < 20 for score in scores)
