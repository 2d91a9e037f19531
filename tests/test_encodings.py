"""Commands on data with names in other scripts, where neither the locale nor stdout can encode them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = """
data:
  interactions: {folder}/table.csv
  items: {folder}/items.csv
  user: пользователь
  item: товар
  timestamp: время
  label: нравится == да
  title: название
  features:
    - {{name: каталог, of: item}}
    - {{name: место, of: event}}
  dwell: секунды
  surface: место
model: {{embedding_dim: 8, num_heads: 2, dense_arch: [8], over_arch: [8]}}
training: {{epochs: 1, batch_size: 32, device: cpu, run_dir: {folder}/run}}
"""
#: Runs commands in one process.
COMMANDS = """
import json, locale, sys
from jfi import cli
assert locale.getencoding() not in ("utf-8", "UTF-8")
for arguments in json.loads(sys.stdin.buffer.read()):
    print("--", arguments[0], flush=True)
    assert cli.main(arguments) == 0, arguments
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def test_stdout_escapes_what_it_cannot_encode():
    script = "from jfi.utils.exit_codes import begin_command; begin_command(); print('caf\\xe9 \\u043a')"
    for encoding, wanted in (
        ("ascii", b"caf\\xe9 \\u043a"),
        ("latin-1", b"caf\xe9 \\u043a"),
        ("utf-8", "café к".encode()),
    ):
        for errors in ("", ":strict"):
            env = os.environ | {"PYTHONIOENCODING": encoding + errors}
            ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True)
            assert ended.stdout == wanted + b"\n"


def test_every_command_takes_names_that_its_output_cannot_encode(tmp_path):
    table = ["пользователь,товар,время,нравится,место,секунды"]
    for i in range(300):
        liked, place = ("да", "нет")[i % 2], ("лента", "поиск")[i % 3 // 2]
        table.append(f"ю{i % 9},т{i * 7 % 11},{60 * i},{liked},{place},{i % 40}")
    (tmp_path / "table.csv").write_text("\n".join(table) + "\n", encoding="utf-8")
    items = ["товар,каталог,название", *(f"т{i},{['книги', '茶'][i % 2]},Чай №{i} 茶" for i in range(11))]
    (tmp_path / "items.csv").write_text("\n".join(items) + "\n", encoding="utf-8")
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    config, new = ["--config", str(tmp_path / "config.yaml")], ["--interactions", str(tmp_path / "table.csv")]
    run = ["--run", str(tmp_path / "run")]
    commands = [
        ["train", *config],
        ["train", "--resume", str(tmp_path / "run")],
        ["prepare", *config, "--out", str(tmp_path / "prepared")],
        ["compare", *config, "--training.run_dir", str(tmp_path / "baselines"), "--models", "baselines"],
        ["evaluate", *run, *new, "--out", str(tmp_path / "metrics.json"), "--by", "место", "товар"],
        ["predict", *run, *new, "--out", str(tmp_path / "scores.csv")],
        ["policy", *config, "--remove", "0.3", "--out", str(tmp_path / "policy.json")],
        [
            *["semantic-ids", "--items", str(tmp_path / "items.csv"), "--item", "товар", "--text", "название"],
            *["--categorical", "каталог", "--codec", "rq", "--levels", "2", "--codebook-size", "2"],
            *["--out", str(tmp_path / "sids.parquet")],
        ],
    ]
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps(commands),
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | ASCII,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii() and ended.stderr.isascii()
    assert "место".encode("ascii", "backslashreplace").decode() in ended.stdout
    assert (tmp_path / "scores.csv").read_text("utf-8").splitlines()[1].split(",")[:2] == ['"ю0"', '"т0"']
    groups = json.loads((tmp_path / "metrics.json").read_text("utf-8"))["by"]["место"]
    assert {group["value"] for group in groups} == {"лента", "поиск"}
