"""The `jfi` command: its help is quick and true, and the configs are bundled."""

import operator
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import commands
import pytest
import yaml

from jfi import cli
from jfi.cli.settings import ALL
from jfi.training import Config
from jfi.training.config_parser import parse_config

ROOT = Path(__file__).parents[2]
WITH_CONFIG = ("train", "prepare", "compare", "policy")


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join)
def test_help_imports_no_large_package(arguments):
    script = "import sys; from jfi import cli\ntry:\n    cli.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    script += "large = {'torch', 'numpy', 'pyarrow'} & sys.modules.keys()\nassert not large, large"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: jfi"), done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_the_overview_names_every_command(capsys):
    assert commands.call() == 0
    text = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if f"\n  {name} " not in text] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "unknown command tran; did you mean 'train'?"),
        (["train", "--resum", "x"], "unknown option --resum; did you mean '--resume'?"),
        (["prepare", "--data.labels.name", "x"], "unknown option --data.labels.name; did you mean '--data.labels'?"),
        (["compare", "--training.epochs", "few"], "--training.epochs: got 'few', must be an integer of at least 1"),
        (["train", "--config", "wrong.yaml"], "wrong.yaml:2: unknown key model.pool; did you mean 'model.pooling'?"),
        *(
            ([*name.split(), "--data.lable", "x"], "unknown option --data.lable; did you mean '--data.label'?")
            for name in ("train", "prepare", "compare", "policy --out x.json")
        ),
    ],
)
def test_what_is_wrong_is_refused_before_torch_is_imported(arguments, message, tmp_path):
    (tmp_path / "wrong.yaml").write_text("model:\n  pool: mean\n")
    script = "import sys; from jfi import cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2 False\n", f"error: {message}\n")


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_the_settings_of_the_short_help_exist_and_have_these_defaults(name, capsys):
    assert commands.call(name, "--help") == 0
    text = capsys.readouterr().out.partition(" names:\n")[2].partition("\n\n")[0]
    found = re.findall(r"--(\S+) .*? \(default: ([^)]*)\)(?= --|$)", " ".join(text.split()))
    assert len(found) == len(re.findall(r"^  --", text, re.MULTILINE)) > 10
    for setting, default in found:
        assert operator.attrgetter(setting)(Config()) == yaml.safe_load(default), setting


def test_the_help_of_options_has_their_defaults(capsys):
    for name in cli.COMMANDS:
        with suppress(SystemExit):
            commands.call(name, "--help")
    text = " ".join(capsys.readouterr().out.split())
    for shown in ("for a free one (default: 8000)", "is left out (default: 86400)", "per seed (default: 0)"):
        assert shown in text
    assert "(default: None)" not in text and re.search(r"\(default: [^)]*\) \(default", text) is None


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_all_settings_and_the_own_options_of_the_short_help_are_in_the_long_one(name, capsys):
    commands.call(name, "--help")
    own = re.search(r"\noptions:\n(.*?)\n\n", capsys.readouterr().out, re.DOTALL)[1]
    assert commands.call(name, ALL) == 0
    text = capsys.readouterr().out
    assert [option for option in re.findall(r"^  (--[\w-]+)", own, re.MULTILINE) if option not in text] == []
    assert "--sharding.type" in text and "--data.max_history" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tain"], "unknown command tain; did you mean 'train'?"),
        (["config", "copy"], "jfi config copy: name a config; known: dwell,"),
        (["config", "list", "dwell"], "jfi config list: takes no dwell"),
        (["config", "copy", "quickstrat"], "jfi config copy: got 'quickstrat'; did you mean 'quickstart'?"),
        (["config", "remove"], "action: invalid choice: 'remove'"),
        (["compare", "--models"], "--models: expected at least one argument"),
    ],
)
def test_wrong_commands_are_one_line(arguments, message, capsys):
    assert commands.call(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("sys.modules['pyarrow'] = None", "error: no module named pyarrow, which jfi needs: pip install 'jfi[cpu,"),
        (
            "import importlib.metadata as m; f = m.version; m.version = lambda p: '0' if p == 'torchrec' else f(p)",
            "error: torch 2.",
        ),
    ],
)
def test_a_package_that_is_missing_or_does_not_fit_is_one_line(fault, line):
    script = f"import sys; {fault}; from jfi.cli import main; sys.exit(main(['train', '--data.interactions', 'x.csv']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count("\n") == 1, done.stderr


def test_configs_are_listed_and_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.call("config", "list") == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    known = (ROOT / "configs").rglob("*.yaml")
    assert sorted(names) == sorted(path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in known)
    for name in names:
        assert commands.call("config", "copy", name) == 0
        parse_config(["--config", f"{Path(name).name}.yaml"])
    assert commands.call("config", "copy", "quickstart") == 2
    assert capsys.readouterr().err == "error: quickstart.yaml: exists already; name a new file\n"
    assert commands.call("config", "copy", "quickstart", "other.yaml") == 0
    assert Path("other.yaml").read_bytes() == (ROOT / "configs/quickstart.yaml").read_bytes()


def test_a_copied_config_says_what_makes_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.call("config", "copy", "quickstart") == 0
    line = "make its table with: python (-m .* quickstart); train with: jfi (train --config quickstart.yaml)$"
    made, trained = re.search(line, capsys.readouterr().out).groups()
    subprocess.run([sys.executable, *made.split(), "--num_users", "30"], check=True)
    small = ["--training.epochs", "1", "--training.device", "cpu", "--training.run_dir", "run"]
    assert commands.call(*trained.split(), *small) == 0 and "\nrun folder run\n" in capsys.readouterr().out
