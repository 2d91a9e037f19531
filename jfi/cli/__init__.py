"""The `jfi` command. Its parser is here, without torch and other packages whose import takes seconds."""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from jfi import __version__
from jfi.cli import options
from jfi.cli.options import OptionError
from jfi.utils.errors import suggest
from jfi.utils.exit_codes import begin_command, run_command

#: The documentation; examples and configs are beside it.
DOCS = Path(__file__).parents[1] / "docs"
#: By command, the module that runs it and what it does. Those without a parser in `options` take all settings of a
#: config, and their parser is in `settings`.
COMMANDS = {
    "train": ("train", "train a model on a table of interactions, or resume a run"),
    "predict": ("predict", "score every row of a table with a trained run"),
    "evaluate": ("evaluate", "score rows that have labels, and print their metrics"),
    "prepare": ("prepare", "turn tables of any length into a dataset that opens at once"),
    "compare": ("compare", "train without histories and with each pooling, and baselines such as boosting"),
    "export": ("export", "export a run as an artifact to serve"),
    "serve": ("serve", "serve an artifact over HTTP"),
    "audit": ("audit", "compare what a server has read and answered with what training makes of it"),
    "state": ("state", "fill or export the events of users that a server keeps"),
    "semantic-ids": ("semantic_ids", "turn the content of items into semantic IDs"),
    "policy": ("policy", "fit which events of a history are worth computing, from dwell times"),
    "config": ("configs", "list the bundled configs, or copy one"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, see `jfi COMMAND --help`.

    Args:
        arguments: of the command line, without the name of the program; None for those of the process.

    Example:
        >>> main(["--version"])
        jfi 0.1.0
        0
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen: list[tuple[str, tuple]] = []
    code = run_command(lambda: chosen.extend(_parse(arguments)))
    if not chosen:
        return code
    ((name, given),) = chosen
    begin_command()  # before torch is imported
    if name != "serve":  # whose log has times; otherwise a package chooses the format, with names of modules
        logging.basicConfig(format="%(levelname)s: %(message)s")
    return run_command(lambda: _module(name).main(*given), lambda: _module(name))


def run(arguments: Sequence[str]) -> int | None:
    """Runs a command in this process as it is; returns its exit code, None for success.

    Raises:
        InputError: as of the command.
    """
    chosen = _parse(arguments)
    return _module(chosen[0][0]).main(*chosen[0][1]) if chosen else None


def _parse(arguments: Sequence[str]) -> list[tuple[str, tuple]]:
    """Returns the command and what its `main` takes; nothing where a help has been printed."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(_overview())
        return []
    if name == "--version":
        print(f"jfi {__version__}")
        return []
    if name not in COMMANDS:
        raise OptionError(f"unknown command {name}; {suggest(name, COMMANDS, cutoff=0.0)}")
    if name in options.PARSERS:
        return [(name, (options.PARSERS[name]().parse_args(rest),))]
    from jfi.cli import settings  # not for the others, which it would make slower

    given = settings.parse(name, rest)
    return [] if given is None else [(name, given)]


def _module(name: str) -> ModuleType:
    return import_module(f"jfi.cli.{COMMANDS[name][0]}")


def _overview() -> str:
    lines = [f"  {name:14s}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jfi COMMAND [OPTIONS]",
            "",
            "Sequence features for recommendation models: training, prediction and serving of a table of interactions.",
            "",
            *lines,
            "",
            "`jfi COMMAND --help` shows the options of a command. Begin with: jfi train --data.interactions clicks.csv",
            f"Documentation, beside configs and examples: {DOCS / 'index.md'}",
        ]
    )
