"""The options of the commands that take all settings of a config, and their help."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from jfi.cli.options import MEMORY, OptionParser, at_least_one
from jfi.training.config import Config
from jfi.training.config_parser import describe_settings, parse_config
from jfi.utils.exit_codes import EXIT_CODES

#: Shows all settings in place of the most important ones.
ALL = "--help=all"
#: What `jfi compare` compares: models by their pooling of histories, and baselines.
MODELS = ("baselines", "none", "mean", "sum", "attention")

_DATA = ("interactions", "users", "items", "user", "item", "timestamp", "label", "features", "statistics", "split")
_DATA = [f"data.{name}" for name in (*_DATA, "max_history", "prepared")]
_MODEL = [f"model.{name}" for name in ("pooling", "embedding_dim", "num_heads", "bias", "dropout")]
_MODEL += ["optimizer.dense.learning_rate", "optimizer.embeddings.learning_rate"]
_MODEL += [f"training.{name}" for name in ("run_dir", "epochs", "batch_size", "device")]
#: By command the settings of its short help.
_SHOWN = {"train": [*_DATA, *_MODEL], "prepare": _DATA, "compare": [*_DATA, *_MODEL]}
_LOG = ("interactions", "user", "item", "timestamp", "timestamp_unit", "label", "dwell", "dwell_unit", "surface")
_SHOWN["policy"] = [f"data.{name}" for name in (*_LOG, "session", "split", "fractions", "max_history")]

_TRAIN = """Trains a model on a table of interactions, or resumes a run.

jfi train --data.interactions clicks.csv --data.label clicked
jfi train --config quickstart.yaml --training.epochs 3
jfi train --resume runs/20250101-120000
jfi train --resume runs/20250101-120000 --follow parts
torchrun --nproc_per_node 2 -m jfi train --config multi_gpu.yaml
"""
_PREPARE = """Turns tables of any length into a dataset that opens at once. Killed and called again, it continues.

jfi prepare --data.interactions clicks.parquet --data.label clicked --out clicks.prepared
jfi train --data.prepared clicks.prepared
jfi prepare --run runs/first --data.interactions more.parquet --out more.prepared
jfi prepare --verify clicks.prepared
"""
_COMPARE = """Trains without histories and with each pooling of them, and baselines of statistics of the past.

jfi compare --config quickstart.yaml --seeds 0 1 2
jfi compare --data.interactions clicks.csv --data.label clicked --models baselines
"""
_POLICY = r"""Fits a policy of which events of a history are worth computing to a log with dwell times, and shows it.

jfi policy --data.interactions log.parquet --data.surface tab --data.dwell seconds --conversion purchase \
    --remove 0.3 --out policy.json
jfi policy --config dwell.yaml --conversion converted --remove 0.5 --out policy.json

Writes the policy as JSON, and a picture of relevance by surface and dwell for each segment of users next to it. The
events are those of the training rows, and need data.dwell or data.surface.
"""


def parser(command: str) -> OptionParser:
    """Returns the options of `train`, `prepare`, `compare` or `policy` that are no settings."""
    usage = f"jfi {command} [--config FILE] [--SECTION.SETTING VALUE ...] [OPTIONS]"
    description = {"train": _TRAIN, "prepare": _PREPARE, "compare": _COMPARE, "policy": _POLICY}[command]
    own = OptionParser(prog=f"jfi {command}", usage=usage, description=description)
    {"train": _add_train, "prepare": _add_prepare, "compare": _add_compare, "policy": _add_policy}[command](own)
    if command != "policy":
        own.add_argument("--memory", **MEMORY)
    return own


def parse(command: str, arguments: Sequence[str]) -> tuple[Config, argparse.Namespace] | None:
    """Returns the config of a command line and the command's own options; None where a help has been printed.

    Raises:
        InputError: a setting, an option or a value is wrong.
    """
    own = parser(command)
    if {"-h", "--help", ALL}.isdisjoint(arguments):
        return parse_config(arguments, parser=own)
    names = None if ALL in arguments else _SHOWN[command]
    more = "" if names is None else f"\n\n`jfi {command} {ALL}` shows all settings; docs/settings.md explains them."
    head = "settings, also of a YAML file that --config FILE names:"
    own.epilog = f"{head}\n{describe_settings(names)}{more}\n\n{EXIT_CODES}"
    own.print_help()
    return None


def _add_train(parser: OptionParser) -> None:
    resume = "continue the run in this folder, with its config; --data.prepared gives it another dataset, "
    resume += "--data.interactions and the like say where its tables are now"
    parser.add_argument("--resume", metavar="RUN", help=resume)
    for what, changed in (("data", "the data is not what the run was started with"), ("config", "config.yaml changed")):
        text = f"with --resume: what to do if {changed}"
        parser.add_argument(f"--{what}-changed", choices=["refuse", "accept"], default="refuse", help=text)
    follow = "with --resume: train the run, which has ended, on a folder of Parquet parts that grows: each part is "
    follow += "scored, trained on, and then part of histories and statistics"
    parser.add_argument("--follow", metavar="FOLDER", help=follow)
    idle = "with --follow: end when no further part is there (default: wait for one)"
    parser.add_argument("--until-idle", action="store_true", help=idle)
    seconds = {"type": float, "metavar": "SECONDS"}
    checkpoints = "with --follow: least time between two checkpoints; 0 is one after each part"
    parser.add_argument("--checkpoint-seconds", **seconds, default=0.0, help=checkpoints)
    late = "with --follow: a row that is further behind the newest row of the parts before is left out"
    parser.add_argument("--late-seconds", **seconds, default=86400.0, help=late)
    refused = "with --follow: move a part that is refused to this folder, beside a file with the reason, and go on "
    parser.add_argument("--refused-to", metavar="FOLDER", help=f"{refused}(default: stop there)")


def _add_prepare(parser: OptionParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write, must not exist")
    run = "prepare with the config and the vocabularies of this run, so that it can go on with the dataset"
    parser.add_argument("--run", type=Path, help=run)
    verify = "verify the checksums of a dataset; takes no other option"
    parser.add_argument("--verify", type=Path, metavar="FOLDER", help=verify)


def _add_compare(parser: OptionParser) -> None:
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="train each once per seed")
    models = "baselines, whose features need memory, and models by their pooling of histories, none for no histories"
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help=models)


def _add_policy(parser: OptionParser) -> None:
    rule = "column of 0 and 1, or a rule such as 'is_like == 1 or is_forward == 1' (default: the label)"
    parser.add_argument("--conversion", metavar="RULE", help=rule)
    segments = {"type": lambda text: None if text == "auto" else at_least_one(text)}
    parser.add_argument("--segments", **segments, default=2, help="1 to 8, or auto by silhouette")
    remove = "largest share of events to remove, such as 0.3 or passive=0.5,active=0.2"
    parser.add_argument("--remove", type=_by_segment(float), default=0.0, metavar="SHARE", help=remove)
    parser.add_argument("--boost", type=lambda text: text.split(","), default=[], help="segments to weight, by name")
    parser.add_argument("--caps", type=_by_segment(int), metavar="EVENTS", help="longest history, such as active=500")
    parser.add_argument("--newest", type=int, default=10, help="events of a history that always stay")
    parser.add_argument("--seed", type=int, default=0, help="of k-means")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON file of the policy")


def _by_segment(kind: type) -> Callable[[str], object]:
    """A type of options: a number for all segments, or `name=number` with commas between them."""

    def parse(text: str) -> object:
        try:
            if "=" not in text:
                return kind(text)
            parts = [part.split("=") for part in text.split(",")]
            return {name.strip(): kind(number) for name, number in parts}
        except ValueError:
            what = "must be a number for all segments, or such as passive=0.5,active=0.2"
            raise argparse.ArgumentTypeError(f"got {text!r}, {what}") from None

    return parse
