import dataclasses
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import commands
import numpy as np
import pytest

from jfi.cli.options import OptionError, OptionParser, at_least_zero
from jfi.data import DataConfig, FeatureConfig
from jfi.data.config import LabelConfig
from jfi.training import Config, ConfigError
from jfi.training.config import ModelConfig, TrainingConfig
from jfi.training.config_parser import load_config, parse_config, save_config
from jfi.training.model_config import PretrainedConfig
from jfi.utils.exit_codes import run_command

ROOT = Path(__file__).parents[2]


def parse(*arguments: str) -> Config:
    return parse_config(arguments)[0]


def fault(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_file_and_overrides(yaml_file):
    path = yaml_file("model:\n  num_heads: 2\n  over_arch: [8]\noptimizer:\n  dense:\n    learning_rate: 1e-4\n")
    # The command line takes precedence, in any order.
    config = parse("--model.num_heads", "8", "--config", path, "--model.pooling=mean", "--training.patience", "null")
    assert (config.model.num_heads, config.model.over_arch, config.model.pooling) == (8, [8], "mean")
    assert config.optimizer.dense.learning_rate == 1e-4
    assert config.training.patience is None
    assert config.model.embedding_dim == Config().model.embedding_dim


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_that_come_along_are_read(path):
    """An unknown key is refused, so each of theirs is known."""
    config = parse("--config", str(path))
    assert config.encoder.num_layers == (2 if path.stem == "encoder" else 0)


def test_every_section_overrides():
    config = parse(
        *["--data.max_history", "7", "--data.fractions", "[0.5,0.25,0.25]"],
        *["--encoder.num_layers", "2", "--encoder.causal", "true", "--training.seed", "3"],
    )
    assert (config.encoder.num_layers, config.encoder.causal) == (2, True)
    assert config.data.max_history == 7
    assert config.data.fractions == [0.5, 0.25, 0.25]
    assert config.training.seed == 3


def test_saved_config_is_the_same_config(tmp_path):
    config = parse("--model.bias", "history_age", "--data.interactions", "a.csv", "--training.patience", "null")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


#: Each is something else, or a part of a document, where it is read as YAML without quotes.
TEXTS = ["#clicks", "#", "~", "null", "NULL", "no", "true", "7", "007", "-1", "1e-3", ".5", "0x1F", "1_000", "12:30:45"]
TEXTS += ["2026-01-01", "2026-13-45", ".inf", "[a, b]", "[a", "{a: b}", "a: b", "- a", "'a'", '"', "*a", "&a b", "!a"]
TEXTS += ["%a", "@a", "", " a ", "a\nb", "|", ">", "=", "<<", "?", "a #b", "é\u2028", "[" * 60, "[" * 9999]


def config_of_texts(shift: int) -> Config:
    """A config with a text of `TEXTS` in each setting that takes any."""
    texts = itertools.islice(itertools.cycle(TEXTS), shift, None)
    names = [f.name for f in dataclasses.fields(DataConfig) if f.type in (str, str | None, str | list[str] | None)]
    data = {name: next(texts) for name in names if name not in ("encoding", "prepared")}
    features = [FeatureConfig(next(texts), "item", separator=next(texts), default=next(texts)) for _ in range(2)]
    data |= {"features": [*features, FeatureConfig(next(texts), "event", cross=[next(texts)])]}
    data |= {"labels": [LabelConfig(next(texts), next(texts))]}
    data |= {"missing_values": [*itertools.islice(texts, 9)], "header": {"items": [next(texts), next(texts)]}}
    pretrained = {next(texts): PretrainedConfig(next(texts))}
    own = {"run_dir": next(texts), "warm_start": next(texts)}
    return Config(DataConfig(**data), ModelConfig(pretrained=pretrained), training=TrainingConfig(**own))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {epochs: '5'}", r":1: training\.epochs: got '5' in quotes, must be an integer of at least 1$"),
        ("data:\n  features:\n    - {name: a}", r":3: data\.features\[0\] lacks of$"),
        ("model:\n  pretrained:\n    a: {frozen: false}", r":3: model\.pretrained\.a lacks path$"),
        ("data:\n  features: *x", r":2: not YAML: found undefined alias 'x'$"),
        ("data:\n  features: &x [*x]", r": over 100,000 values, which no config is$"),
        ("data:\n  user: u\nmodel:\n  embedding_dim: 30", r":4: model\.num_heads: got 4, must be a divisor of embeddi"),
        ("model:\n  num_heads: 4\n  embedding_dim: 30", r":2: model\.num_heads: got 4, must be a divisor of embeddi"),
        ("encoder:\n  relative_bias: distance", r":2: encoder\.causal: got False, must be true with encoder\.rela"),
        ("training:\n  monitor: loss", r":2: training\.monitor: got 'loss', must be auc"),
    ],
)
def test_a_fault_of_a_file_names_its_line(yaml_file, text, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(yaml_file(text))}{message}"):
        parse("--config", yaml_file(text))


def test_a_fault_of_an_option_names_no_line_of_a_file(yaml_file):
    path = yaml_file("data:\n  features: [{name: a, of: item}]\nmodel:\n  num_heads: 4")
    for arguments, message in (
        (["--model.num_heads", "3"], r"^model\.num_heads: got 3, must be a divisor of embedding_dim$"),
        (["--data.features", "[{name: b}]"], r"^data\.features\[0\] lacks of$"),
        (
            ["--data.features", "[{name: b, of: item"],
            r"^--data\.features: got '\[{name: b, of: item', which is not YAML: ",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            parse("--config", path, *arguments)


@pytest.mark.parametrize("shift", [0, 14, 28])
def test_any_text_of_a_setting_is_the_same_text_after_it_was_saved(tmp_path, shift):
    config = config_of_texts(shift)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("text", ["::", "-", "?", "[]", "{}", "!", "status: paid", "[x]", "a == 1 # c", "2026-11-29"])
def test_a_text_of_an_option_may_look_like_yaml(text, tmp_path):
    config = parse(f"--data.label={text}", "--data.delimiter", text, "--data.interactions", "a.csv")
    assert (config.data.label, config.data.delimiter) == (text, text)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("text", ["1e3", "12e45678", "nan", "inf", "1970-01-01", "a\x85b", "0x1f", "yes", "~", ""])
def test_a_text_is_read_as_it_was_saved(text, tmp_path, yaml_file):
    training = TrainingConfig(run_dir=text)
    config = Config(DataConfig(interactions="a.csv", missing_values=[text]), training=training)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_an_unquoted_date_is_a_text(yaml_file):
    path = yaml_file("data: {interactions: a.csv, missing_values: [1970-01-01]}\ntraining: {run_dir: 2026-11-29}")
    config = parse("--config", path)
    assert (config.data.missing_values, config.training.run_dir) == (["1970-01-01"], "2026-11-29")


@pytest.mark.parametrize("text", ["{<<: 5}", "{<<: [5]}"])
def test_a_wrong_merge_key_is_one_line(text, yaml_file):
    assert "config.yaml:1: training: expected a mapping" in fault("--config", yaml_file(f"training: {text}"))


def test_a_setting_with_a_space_is_no_value_of_the_option_before_it():
    parser = OptionParser()
    parser.add_argument("--seeds", nargs="+", type=int)
    arguments = ["--data.interactions", "a.csv", "--seeds", "0", "1", "--data.title=a b"]
    config, own = parse_config(arguments, parser)
    assert (config.data.title, own.seeds) == ("a b", [0, 1])


def test_numbers_of_numpy_are_saved(tmp_path):
    config = Config(DataConfig("a.csv"), training=TrainingConfig(max_grad_norm=np.float64(2.5)))
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").training.max_grad_norm == 2.5


@pytest.mark.parametrize("text", ["a #b", " a ", "|", "%a", "@a", "[a", "&a b", "*a", "!a", "2026-13-45", "", "-1"])
def test_an_option_takes_a_text_as_it_is_written(text):
    assert parse("--data.title", text).data.title == parse(f"--data.title={text}").data.title == text


def test_a_quoted_text_is_a_text_and_a_list_of_texts_takes_what_is_written(yaml_file):
    written = 'title: \'#t\', history: "null", label: no, missing_values: [NULL, no, -1, 1e3, "~"], weight: null'
    expected = {"title": "#t", "history": "null", "label": "no", "missing_values": ["NULL", "no", "-1", "1e3", "~"]}
    options = [x for part in ("title: '#t'", 'history: "null"', "label: no") for x in f"--data.{part}".split(": ")]
    options += ["--data.missing_values", '[NULL, no, -1, 1e3, "~"]', "--data.weight", "null", "--data.delimiter", "#"]
    for arguments in (["--config", yaml_file(f"data: {{{written}, delimiter: '#'}}")], options):
        data = parse(*arguments).data
        assert {name: getattr(data, name) for name in expected} == expected
        assert (data.weight, data.delimiter) == (None, "#")
    message = fault("--config", yaml_file('training: {monitor: "null"}'))
    assert "got null" in message.replace("'", ""), message


def test_a_key_that_is_there_twice_is_refused_with_its_line(yaml_file):
    path = yaml_file("data:\n  user: u\nmodel:\n  num_heads: 2\ndata:\n  item: i\n")
    assert fault("--config", path) == f"{path}:5: the key data is there twice, first in line 1"
    path = yaml_file("data:\n  features: [{name: a,\n   of: item, name: b}]\n")
    assert fault("--config", path) == f"{path}:3: the key name is there twice, first in line 2"
    assert "name is there twice" in fault("--data.features", "[{name: a, of: item, name: b}]")
    path = yaml_file("model: &model {num_heads: 2}\nencoder: {<<: {dropout: 0.5}, num_layers: 1}\n")
    assert parse("--config", path).encoder.dropout == 0.5


@pytest.mark.parametrize(
    ("arguments", "unknown", "nearest"),
    [
        (["--model.num_head", "2"], "--model.num_head", "--model.num_heads"),
        (["--model.poolings=mean"], "--model.poolings", "--model.pooling"),
        (["--optimizer.dense.lerning_rate", "2"], "--optimizer.dense.lerning_rate", "--optimizer.dense.learning_rate"),
        (["--encoder.num_layer", "2"], "--encoder.num_layer", "--encoder.num_layers"),
        (["--epochs", "2"], "--epochs", "--training.epochs"),
        (["--training.e", "2"], "--training.e", "--training.seed"),
    ],
)
def test_unknown_option_names_the_nearest(arguments, unknown, nearest):
    message = fault(*arguments)
    assert message == f"unknown option {unknown}; did you mean '{nearest}'?"


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("modle:\n  num_heads: 2\n", "modle", "model"),
        ("model:\n  num_head: 2\n", "model.num_head", "model.num_heads"),
        ("data:\n  users_table: 2\n", "data.users_table", "data.users"),
        ("encoder:\n  num_layer: 2\n", "encoder.num_layer", "encoder.num_layers"),
        ("optimizer:\n  embeddings:\n    lr: 2\n", "optimizer.embeddings.lr", "optimizer.embeddings.learning_rate"),
    ],
)
def test_unknown_key_names_the_nearest(yaml_file, text, unknown, nearest):
    path = yaml_file(text)
    line = text.count("\n")
    assert fault("--config", path) == f"{path}:{line}: unknown key {unknown}; did you mean '{nearest}'?"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--training.epochs", "many"], ["training.epochs", "int", "many"]),
        (["--training.patience", "x"], ["training.patience: got 'x', must be an integer of at least 1 or null"]),
        (
            ["--data.statistics", "[rate]"],
            ["--data.statistics: got ['rate'], must be a list of (item, user, ", ") or auto"],
        ),
        (
            ["--optimizer.embeddings.weight_decay", "true"],
            ["got 'true', must be a number of at least 0 and finite or auto"],
        ),
        (["--training.epochs", "0"], ["--training.epochs: got '0', must be an integer of at least 1"]),
        (["--training.epochs"], ["--training.epochs", "expected one argument"]),
        (["--model.pooling", "max"], ["--model.pooling: got 'max', must be attention, mean, sum or none"]),
        (["--model.dropout", "1"], ["model.dropout", "a number in [0, 1)"]),
        (["--model.over_arch", "[]"], ["model.over_arch", "a list of integers of at least 1 that is not empty"]),
        (["--model.embedding_dim", "30"], ["model.num_heads", "a divisor of embedding_dim"]),
        (["--encoder.num_layers", "-1"], ["encoder.num_layers", "-1", "an integer of at least 0"]),
        (["--encoder.num_layers", "two"], ["encoder.num_layers", "int", "two"]),
        (["--model.num_heads", "0"], ["model.num_heads", "0", "at least 1"]),
        (["--encoder.dropout", "1"], ["encoder.dropout", "[0, 1)"]),
        (["--encoder.causal", "maybe"], ["encoder.causal", "got 'maybe', must be true or false"]),
        (["--encoder.relative_bias", "distanc"], ["encoder.relative_bias", "distanc", "distance"]),
        (["--encoder.relative_bias", "distance"], ["encoder.causal", "true with encoder.relative_bias"]),
        (
            ["--optimizer.dense.learning_rate", "-1"],
            ["optimizer.dense.learning_rate", "-1", "a number above 0 and finite"],
        ),
        (["--optimizer.embeddings.learning_rate", ".nan"], ["optimizer.embeddings.learning_rate", "nan", "above 0"]),
        (
            ["--optimizer.embeddings.weight_decay", "-1"],
            ["optimizer.embeddings.weight_decay", "-1", "a number of at least 0 and finite or auto"],
        ),
        (["--optimizer.dense.name", "rowwise_adagrad"], ["optimizer.dense.name", "adagrad, adam or adamw"]),
        (["--sharding.type", "rowwise"], ["sharding.type", "row_wise", "'rowwise'"]),
        (["--sharding.compute_kernel", "uvm"], ["sharding.compute_kernel", "fused_uvm_caching", "'uvm'"]),
        (["--training.seed", "-1"], ["training.seed", "-1", "an integer in [0, 4294967296)"]),
        (["--training.seed", "4294967296"], ["training.seed", "4294967296", "[0, 4294967296)"]),
        (["stray"], ["stray"]),
        (["--config"], ["--config", "expected one argument"]),
        (["--training.epochs", "three"], ["training.epochs", "got 'three', must be an integer"]),
        (["--config", "absent.yaml"], ["absent.yaml", "No such file"]),
        (
            ["--config", "configs/encoder"],
            ["No such file", "there is a bundled config of this name: jfi config copy encoder"],
        ),
    ],
)
def test_wrong_value_names_its_key(arguments, parts):
    message = fault(*arguments)
    assert all(part in message for part in parts), message


def test_an_option_without_a_value_is_named_as_the_commands_without_a_config_do():
    assert fault("--config") == "--config: expected one argument"
    with pytest.raises(ConfigError) as caught:
        parse_config(["--data.label", "--data.user=u"])
    with pytest.raises(OptionError) as other:
        parser = OptionParser()
        parser.add_argument("--out")
        parse_config(["--out"], parser=parser)
    assert (str(caught.value), str(other.value)) == (
        "--data.label: expected one argument",
        "--out: expected one argument",
    )


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon", ""])
def test_a_time_is_a_finite_number_of_at_least_zero(text):
    parser = OptionParser()
    parser.add_argument("--wait", type=at_least_zero)
    assert parser.parse_args(["--wait", "0.5"]).wait == 0.5
    with pytest.raises(OptionError) as caught:
        parser.parse_args([f"--wait={text}"])
    assert str(caught.value) == f"--wait: got {text!r}, must be a number of at least 0"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: [\n", ["config.yaml:2", "not YAML"]),
        ("- 3\n", ["mapping"]),
        ("", ["mapping", "None"]),
        ("training: null\n", ["training must be a mapping", "None"]),
        ("training:\n  epochs: few\n", ["config.yaml:2: training.epochs: got 'few', must be an integer"]),
        ("model:\n  dense_arch: null\n", ["model.dense_arch", "null"]),
        ("optimizer:\n  dense:\n    learning_rate: null\n", ["optimizer.dense.learning_rate", "null"]),
        ("optimizer:\n  dense:\n    learning_rate: .nan\n", ["optimizer.dense.learning_rate", "nan"]),
    ],
)
def test_wrong_file(yaml_file, text, parts):
    message = fault("--config", yaml_file(text))
    assert all(part in message for part in parts), message


DEEP = 20_000
LAUGHS = "&a0 [lol]" + "".join(f", &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * DEEP, "nested over 50 deep"),
        ("data:\n  interactions: " + "[" * DEEP + "]" * DEEP, "nested over 50 deep"),
        ("data:\n  interactions: " + "{a: " * DEEP + "}" * DEEP, "nested over 50 deep"),
        ("\n".join(" " * n + "a:" for n in range(3000)), "nested over 50 deep"),
        ("- " * DEEP + "a", "nested over 50 deep"),
        (f"data:\n  interactions: [{LAUGHS}]\n", "over 100,000 values"),
        (f"data: [{LAUGHS}]\n", "over 100,000 values"),
        (f"data:\n  features: [{{name: a, of: user, cross: [{LAUGHS}]}}]\n", "over 100,000 values"),
        ("data: &self\n  interactions: *self\n", "over 100,000 values"),
        ("data:\n  statistics: [" + "a, " * 200_000 + "a]\n", "over 100,000 values"),
    ],
)
def test_yaml_that_is_a_bomb_is_refused(yaml_file, text, part):
    path = yaml_file(text)
    assert fault("--config", path) == f"{path}: {part}, which no config is"
    if len(text) < 2 * DEEP:
        assert fault("--data.interactions", text) == f"--data.interactions: {part}, which no config is"
        assert fault(f"--data.interactions={text}") == f"--data.interactions: {part}, which no config is"


def test_an_alias_of_a_small_value_is_fine(yaml_file):
    path = yaml_file("data:\n  interactions: &files [a, b]\n  validation: *files\n")
    assert parse("--config", path).data.validation == ["a", "b"]


def test_a_message_with_a_large_value_is_short(yaml_file):
    path = yaml_file("data:\n  user: [" + "word, " * 20_000 + "word]\n")
    assert len(fault("--config", path)) <= 500


def test_a_saved_config_is_whole_or_not_there(tmp_path, monkeypatch):
    save_config(Config(), tmp_path / "config.yaml")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for name in ("config.yaml", "other.yaml"):
        with pytest.raises(OSError, match="No space"):
            save_config(Config().with_training(seed=3), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert load_config(tmp_path / "config.yaml") == Config()


def test_with_training_leaves_the_original():
    config = Config()
    assert config.with_training(seed=5).training.seed == 5
    assert config.training.seed == 0
    assert dataclasses.replace(config.with_training(seed=5), training=config.training) == config


def test_exit_codes(capsys):
    def fail() -> None:
        raise ConfigError("a\n  fault")

    def stop() -> None:
        raise KeyboardInterrupt

    def diverge() -> None:
        raise FloatingPointError("the loss is nan")

    assert run_command(fail) == 2
    assert capsys.readouterr().err == "error: a fault\n"
    assert run_command(stop) == 130
    assert run_command(diverge) == 1
    assert run_command(lambda: None) == 0


def test_an_error_in_a_process_group_ends_at_once(capsys, monkeypatch):
    """Its threads would run on during the interpreter's end."""

    def fail(error: Exception) -> None:
        raise error

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for error, code, line in [
        (ConfigError("a fault"), 2, "error: a fault\n"),
        (KeyError("a bug"), 1, "KeyError: 'a bug'\n"),
    ]:
        with pytest.raises(SystemExit) as ended:
            run_command(functools.partial(fail, error))
        assert ended.value.code == code
        assert capsys.readouterr().err.endswith(line)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--data.interactions", "absent.csv"], "absent.csv"),
        (["--resume", ".", "--training.epochs", "3"], "no other option"),
    ],
)
def test_a_fault_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, part):
    monkeypatch.chdir(tmp_path)
    assert commands.call("train", *arguments) == 2
    assert_one_line(capsys.readouterr().err, part, tmp_path)


def test_a_process_with_a_fault_says_it_in_one_line(tmp_path):
    command = [sys.executable, "-m", "jfi", "train", "--training.seed", "-1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert_one_line(done.stderr, "training.seed", tmp_path)


def assert_one_line(errors: str, part: str, folder: Path) -> None:
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and part in lines[0], errors
    assert "Traceback" not in errors
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[{name: a, of: usr}]", "--data.features[0].of: got 'usr', must be user, item, event or context"),
        ("[{name: a, of: user}, {name: a}]", "data.features[1] lacks of"),
        ("[{nam: a}]", "--data.features: unknown key data.features[0].nam; did you mean 'data.features[0].name'?"),
        ("[os.system]", "--data.features[0] must be a mapping of keys, got 'os.system'"),
    ],
)
def test_entries_of_features_are_checked(entries, message):
    assert fault("--data.features", entries) == message


def test_features_are_entries_on_the_command_line():
    entries = "[{name: price, of: item, type: number}, {name: x, of: event, cross: [item_id, a], hash_buckets: 9}]"
    assert parse("--data.features", entries).data.features == [
        FeatureConfig("price", "item", "number"),
        FeatureConfig("x", "event", cross=["item_id", "a"], hash_buckets=9),
    ]


@pytest.mark.parametrize(("version", "found"), [("", "there is no version"), ("version: 1\n", "version is 1")])
def test_a_config_of_an_earlier_version_is_refused(version, found, yaml_file):
    """Its settings mean something else: `data.fractions` were of all rows."""
    path = yaml_file(f"{version}data:\n  fractions: [0.5, 0.25, 0.25]\n  unknown: [genres]\n")
    with pytest.raises(ConfigError, match=rf"{found}, must be 6: an earlier version of jfi, .* wrote it$"):
        load_config(path)
