"""The short help of the commands that take all settings of a config, and the names of their options.

The names are read in the source: to import what has them takes seconds.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jfi.utils.errors import suggest

#: Shows all settings in place of the short help.
ALL = "--help=all"

_DATA = {
    "data.interactions FILE": "a table: CSV, TSV, JSON Lines or Parquet; a folder, a glob or a URL",
    "data.users FILE": "table of users, for their columns",
    "data.items FILE": "table of items, for their columns",
    "data.user COLUMN": "the user's id (default: user_id)",
    "data.item COLUMN": "the item's id (default: item_id)",
    "data.timestamp COLUMN": "the time (default: timestamp)",
    "data.label RULE": "column of 0 and 1, or a rule such as 'rating >= 4'; otherwise each row is positive",
    "data.features '[{name: genres, of: item}]'": "columns that the model reads, of user, item, event or context",
    "data.statistics GROUPS": "rates and counts of the past: auto, [] or groups of them (default: auto)",
    "data.split KIND": "time, leave_one_out, user, column or files (default: time)",
    "data.max_history EVENTS": "newest events of a history (default: 200)",
    "data.prepared FOLDER": "a dataset of `jfi prepare`, in place of the tables",
}
_MODEL = {
    "model.pooling KIND": "attention, mean, sum or none (default: attention)",
    "model.embedding_dim WIDTH": "width of embeddings (default: 64)",
    "model.num_heads H": "heads of attention (default: 4)",
    "model.bias KIND": "what attention adds to its scores (default: by age and by recency)",
    "model.dropout SHARE": "of the interaction's input (default: 0.1)",
}
_TRAINING = {
    "optimizer.dense.learning_rate RATE": "of the dense parameters (default: 0.003)",
    "optimizer.embeddings.learning_rate RATE": "of the embedding tables (default: 0.05)",
    "training.run_dir FOLDER": "folder of the run (default: runs/DATE-TIME)",
    "training.epochs N": "most epochs (default: 10)",
    "training.batch_size SAMPLES": "of a step (default: 512, or 1024 for large tables)",
    "training.device KIND": "auto, cpu or cuda (default: auto)",
}
#: By command its first line, an example, its own options and sections of settings.
_COMMANDS = {
    "train": (
        "Trains a model on a table of interactions, or resumes a run.",
        [
            "jfi train --data.interactions clicks.csv --data.label clicked",
            "jfi train --config quickstart.yaml --training.epochs 3",
            "jfi train --resume runs/20250101-120000",
            "jfi train --resume runs/20250101-120000 --follow parts",
            "torchrun --nproc_per_node 2 -m jfi train --config multi_gpu.yaml",
        ],
        {
            "config FILE": "YAML file with any setting",
            "resume RUN": "continue a run; --data.prepared, its tables and the options below go with it",
            "data-changed accept": "with --resume: go on although the data has changed",
            "config-changed accept": "with --resume: go on although config.yaml was changed",
            "follow FOLDER": "with --resume: go on with a folder of Parquet parts that grows, each scored first",
            "until-idle": "with --follow: end when no further part is there (default: wait for one)",
            "checkpoint-seconds SECONDS": "with --follow: least time between checkpoints (default: 0)",
            "late-seconds SECONDS": "with --follow: rows further behind the newest one are left out (default: 86400)",
            "refused-to FOLDER": "with --follow: refused parts are moved there, with the reason (default: stop)",
        },
        {"data": _DATA, "model": _MODEL, "training": _TRAINING},
    ),
    "prepare": (
        "Turns tables of any length into a dataset that opens at once. Killed and called again, it continues.",
        [
            "jfi prepare --data.interactions clicks.parquet --data.label clicked --out clicks.prepared",
            "jfi train --data.prepared clicks.prepared",
            "jfi prepare --run runs/first --data.interactions more.parquet --out more.prepared",
            "jfi prepare --verify clicks.prepared",
        ],
        {
            "config FILE": "YAML file with any setting",
            "out FOLDER": "folder to write, must not exist",
            "memory SIZE": "most that sorting holds in memory (default: 1GB)",
            "run RUN": "prepare with the config and the vocabularies of this run",
            "verify FOLDER": "verify the checksums of a dataset; takes no other option",
            "add-statistics FILE": "write only the interactions with the columns of data.statistics, as Parquet",
        },
        {"data": _DATA},
    ),
    "compare": (
        "Trains without histories and with each pooling of them, and baselines of statistics of the past.",
        [
            "jfi compare --config quickstart.yaml --seeds 0 1 2",
            "jfi compare --data.interactions clicks.csv --data.label clicked --poolings",
        ],
        {
            "config FILE": "YAML file with any setting",
            "seeds N ...": "train each once per seed (default: 0)",
            "poolings KIND ...": "of none, mean, sum and attention (default: all); no value trains no model",
            "baselines false": "without baselines, whose features need memory",
        },
        {"data": _DATA, "model": _MODEL, "training": _TRAINING},
    ),
}


def describe_settings(command: str) -> str:
    """Returns the short help of `train`, `prepare` or `compare`."""
    what, examples, own, sections = _COMMANDS[command]
    lines = [f"usage: jfi {command} [--config FILE] [--SECTION.SETTING VALUE ...]", "", what, ""]
    lines += [f"  {example}" for example in examples]
    for title, settings in {"options": own, **sections}.items():
        lines += ["", f"{title}:", *(_line(f"--{setting}", text) for setting, text in settings.items())]
    lines += ["", f"`jfi {command} {ALL}` shows all settings; docs/settings.md explains them."]
    return "\n".join(lines)


def _line(setting: str, text: str) -> str:
    return f"  {setting:36s}{text}" if len(setting) < 35 else f"  {setting}\n{'':38s}{text}"


_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("training/config.py", "training/model_config.py", "data/config.py")


def unknown_option(command: str, arguments: Sequence[str]) -> str | None:
    """Returns a message about the first option that `train`, `prepare` or `compare` lacks; None if it has all.

    Example:
        >>> unknown_option("train", ["--data.lable", "clicked"])
        "unknown option --data.lable; did you mean '--data.label'?"
    """
    own = ["--config", "--help", *re.findall(r'"(--[a-z-]+)"', (_PACKAGE / f"cli/{command}.py").read_text("utf-8"))]
    removed = (_PACKAGE / "data/removed_settings.py").read_text("utf-8")  # whose message is another one
    known = [f"--{name}" for name in setting_names()]
    for argument in arguments:
        option = argument.split("=")[0].removesuffix("+")
        is_setting = any(f"{name}.".startswith(f"{option}.") or option.startswith(f"{name}.") for name in known)
        if not argument.startswith("--") or option in own or is_setting:
            continue
        if not any(f'"{name}"' in removed for name in (option[2:], *option.split(".")[1:2])):
            return f"unknown option {option}; {suggest(option, [*known, *own], cutoff=0.0)}"
    return None


def setting_names() -> list[str]:
    """Returns the names of all settings, such as data.label; an entry of a list has those of each of its settings."""
    trees = [ast.parse((_PACKAGE / source).read_text("utf-8")) for source in _SOURCES]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def leaves(name: str, prefix: str) -> Iterator[str]:
        for item in classes[name].body:
            if isinstance(item, ast.AnnAssign):
                kind, path = ast.unparse(item.annotation), f"{prefix}{item.target.id}"
                inner = next((one for one in re.findall(r"\w+", kind) if one in classes), None)
                yield from [path] if inner is None or kind.startswith("dict") else leaves(inner, f"{path}.")

    return list(leaves("Config", ""))
