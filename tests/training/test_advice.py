"""Advice of messages can be followed: options, settings and commands that they name exist, and are typed."""

import ast
import dataclasses
import fnmatch
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import commands
import numpy as np
import pyarrow as pa
import pytest
from own_table import HEADER, config_of, row, write_table
from worker import without_pictures

import jfi
from jfi import cli
from jfi.cli import options, train
from jfi.cli.settings import parser
from jfi.data import FeatureConfig
from jfi.data.labels import LabelWindow
from jfi.data.prepared import scoring
from jfi.data.prepared.stages import sort as external_sort
from jfi.data.prepared.stages.sort import sort_batches
from jfi.training import Config
from jfi.training.config_parser import load_config, parse_config, save_config

ROOT = Path(jfi.__file__).parent
#: Options of other programs that messages name.
FOREIGN = {"--nproc_per_node", "--max_restarts", "--no-deps", "--always", "--version"}
#: By start of a module's path the commands whose messages it makes, the longest start first; others are of any command.
COMMANDS_OF = {
    "cli/configs": ["config"],
    "cli/semantic_ids": ["semantic-ids"],
    **{f"cli/{name}.py": [name] for name in ("compare", "evaluate", "export", "policy", "predict", "prepare", "state")},
    "cli/serve.py": ["serve"],
    "cli/train.py": ["train"],
    "data/prepared/scoring": ["predict", "evaluate"],
    "follow": ["train"],
    "follow/feed": ["serve"],
    "semantic_ids": ["semantic-ids"],
    "serving/export": ["export"],
    "serving/request_log": ["audit", "serve"],
    "training/distributed/processes": ["train"],
    "training/loop": ["train"],
    "training/run/run_position": ["train"],
    "training/run/state": ["train"],
    "training/start": ["train"],
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*(?:\.\w+)*(?![\w-]*=)")
SETTING = re.compile(r"(?<![\w./-])(?:data|model|encoder|optimizer|sharding|training)\.[a-z*][a-z_*]*(?:\.[a-z_]+)*")
#: A command in backquotes, or at the end of a text after a colon.
COMMAND = re.compile(r"`jfi ([a-z][^`]+)`|(?<!error): jfi ([a-z][^;]+)$")
#: Files and attributes that look like settings.
NO_SETTINGS = ["data.mdb", "model.pt", "model.named_parameters"]
#: Needs more than a megabyte.
LARGE = pa.RecordBatch.from_pydict({"row": np.arange(500_000)})


@cache
def messages() -> list[tuple[str, str]]:
    """The texts of jfi that are no docstrings, after their module's path; what is put into one is `{}`."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        apart = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
        formatted = [one for one in nodes if isinstance(one, ast.JoinedStr)]
        apart |= {id(part) for one in formatted for part in ast.walk(one) if part is not one}
        name = path.relative_to(ROOT).as_posix()
        for one in (one for one in formatted if id(one) not in apart):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in one.values)
            found.append((name, text))
        for one in nodes:
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in apart:
                found.append((name, one.value))
    return found


@cache
def settings() -> list[str]:
    def leaves(section: object, prefix: str) -> Iterator[str]:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name, None)
            yield f"{prefix}{field.name}"
            if dataclasses.is_dataclass(value):
                yield from leaves(value, f"{prefix}{field.name}.")

    entries = [f"data.features.{field.name}" for field in dataclasses.fields(FeatureConfig)]
    windows = [f"data.label.{field.name}" for field in dataclasses.fields(LabelWindow)]
    return [*leaves(Config(), ""), *entries, *windows]


@cache
def known_options(command: str) -> set[str]:
    takes_settings = command not in options.PARSERS
    own = parser(command) if takes_settings else options.PARSERS[command]()
    found = {option for action in own._actions for option in action.option_strings}
    return found | {"--config", *(f"--{setting}" for setting in settings())} if takes_settings else found


def exists(setting: str) -> bool:
    """Whether it is one, or an entry of one that takes any names, such as model.pretrained.genres."""
    known = settings()
    free = ("model.pretrained.", "data.header.")
    return setting.startswith(free) or any(fnmatch.fnmatch(one, setting) for one in known)


def test_settings_that_messages_name_exist():
    found = {(name, one) for name, text in messages() for one in SETTING.findall(text)}
    assert len(found) > 100
    assert sorted(pair for pair in found if pair[1] not in NO_SETTINGS and not exists(pair[1])) == []


def test_options_that_messages_name_are_those_of_their_command():
    wrong, count = [], 0
    for name, text in messages():
        starts = [start for start in COMMANDS_OF if name.startswith(start)]
        given = COMMANDS_OF[max(starts, key=len)] if starts else list(cli.COMMANDS)
        # A text may name the command whose option it means.
        other = [one for one in cli.COMMANDS if f"jfi {one}" in text]
        other += ["export"] if "export with" in text else []
        for option in set(OPTION.findall(text)) - FOREIGN:
            count += 1
            if not any(option in known_options(command) for command in (other or given)):
                wrong.append((name, option, text))
    assert count > 100
    assert wrong == []


def test_commands_that_messages_name_are_parsed():
    found = {(name, one or other) for name, text in messages() for one, other in COMMAND.findall(text)}
    assert len(found) > 5
    for name, text in found:
        command, *rest = shlex.split(text)
        assert command in cli.COMMANDS, (name, text)
        assert [one for one in rest if one.startswith("--") and one not in known_options(command)] == [], (name, text)


@pytest.fixture(autouse=True)
def _no_pictures():
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a table, a config of it and a run of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    write_table(folder / "table.csv", [row(i) for i in range(200)])
    config = config_of(folder / "table.csv", folder / "run", epochs=1)
    save_config(config, folder / "config.yaml")
    with without_pictures():
        jfi.training.train(config)
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def fault(capsys, *arguments: object) -> str:
    """The line of a command that is refused."""
    assert commands.call(*arguments) == 2
    return capsys.readouterr().err.splitlines()[-1]


def change_config(run: Path, *_: object) -> None:
    save_config(load_config(run / "config.yaml").with_training(patience=7), run / "config.yaml")


def change_data(run: Path, trained: Path) -> None:
    write_table(run.parent / "table.csv", [row(i) for i in range(190)])
    config = load_config(run / "config.yaml")
    config.data.interactions = str(run.parent / "table.csv")
    save_config(config, run / "config.yaml")


@pytest.mark.parametrize("changes", [[change_config], [change_data], [change_config, change_data]])
def test_advice_on_changes_is_typed(trained, run, capsys, changes):
    for change in changes:
        change(run, trained)
    arguments = ["train", "--resume", run]
    for _ in changes:
        arguments += re.search(r"(--\S+-changed) (accept)$", fault(capsys, *arguments)).groups()
    assert commands.call(*arguments) == 0


def test_advice_on_a_folder_that_is_not_empty_is_typed(trained, run, capsys):
    given = ["--config", trained / "config.yaml", "--training.run_dir", run]
    assert "--resume" not in fault(capsys, "compare", *given)
    advice = re.search(r"continue with (--resume) (.*)$", fault(capsys, "train", *given))
    assert commands.call("train", *advice.groups()) == 0


def test_advice_of_a_followed_run_is_typed(trained, run, tmp_path, capsys):
    """What --follow refuses is not advised."""
    (tmp_path / "parts").mkdir()
    following = ["train", "--resume", run, "--follow", tmp_path / "parts", "--until-idle"]
    assert commands.call(*following) == 0
    change_config(run)
    line = fault(capsys, *following)
    assert "training.patience was null and is 7; restore it" in line
    assert {*OPTION.findall(line)} <= {*train.WITH_FOLLOW}


def test_advice_on_configs_and_prepared_datasets_is_typed(trained, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copied = re.search("jfi (config copy quickstart)$", fault(capsys, "train", "--config", "configs/quickstart.yaml"))
    assert commands.call(*copied[1].split()) == 0
    advice = re.search(r"train with: jfi train (--config) (quickstart.yaml)$", capsys.readouterr().out).groups()
    assert parse_config(advice)[0].data.interactions == "data/quickstart/interactions.parquet"
    assert commands.call("prepare", "--config", trained / "config.yaml", "--out", "new") == 0
    option, folder = re.search(r"train with (--data.prepared) (\S+)$", capsys.readouterr().out).groups()
    write_table(tmp_path / "other.csv", [["z", *row(i)[1:]] for i in range(100)])
    resuming = ["train", "--resume", run, "--data-changed", "accept", option]
    other = ["--data.interactions", "other.csv"]
    assert commands.call("prepare", "--config", trained / "config.yaml", *other, "--out", "b") == 0
    assert "`jfi prepare --run`" in fault(capsys, *resuming, "b")
    assert commands.call("prepare", "--run", run, *other, "--out", "c") == 0
    assert commands.call(*resuming, "c") == commands.call(*resuming, folder) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", b"user_id,item_id\n\xff,1\n", "is not UTF-8"),
        ("r.csv", b"\xff\xfeu\0s\0", "is not UTF-8"),
        ("r.csv", b'user_id,item_id\n"u,1\n', "is never closed"),
        ("r.csv", f"{HEADER}\n,i,1,0,g,1,a,2\n".encode(), "empty 'user_id'"),
        ("r.csv", b"u1,i1,3\nu2,i2,4\n", "no column"),
        ("r.data", b"u1,i1,3\n", "unknown file type"),
        ("folder", None, "needs more memory"),
    ],
)
def test_a_table_to_score_gets_no_advice_that_is_for_a_config(
    trained, tmp_path, monkeypatch, capsys, name, content, message
):
    path = tmp_path / name
    if content is None:
        path = trained / "table.csv"
        monkeypatch.setattr(external_sort, "free_memory", lambda: 0)
        monkeypatch.setattr(external_sort, "_MIN_MEMORY", 1 << 20)
        monkeypatch.setattr(scoring, "sort_rows", lambda *_: list(sort_batches([LARGE] * 2, ["row"], None, tmp_path)))
    else:
        path.write_bytes(content)
    line = fault(capsys, "predict", "--run", trained / "run", "--interactions", path, "--out", tmp_path / "out.csv")
    assert message in line
    assert [*SETTING.findall(line), *COMMAND.findall(line)] == []
    assert {*OPTION.findall(line)} <= known_options("predict")
