"""Options of the commands that have no config; a fault is one line, as everywhere."""

import argparse
import math
import re
from collections.abc import Sequence

from jfi.utils.errors import InputError
from jfi.utils.suggest import suggest


class OptionError(InputError):
    """A wrong option of a command, as one line that names it."""


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser that raises OptionError instead of printing the usage, and takes no abbreviations.

    Example:
        >>> parser = OptionParser()
        >>> _ = parser.add_argument("--rows", type=at_least_one)
        >>> parser.parse_args(["--rows", "0"])
        Traceback (most recent call last):
        jfi.utils.options.OptionError: --rows: got '0', must be a whole number of at least 1
        >>> parser.parse_args(["--row", "1"])
        Traceback (most recent call last):
        jfi.utils.options.OptionError: unknown option --row; did you mean '--rows'?
    """

    def __init__(self, **settings: object):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """The options; `--help` prints them and exits.

        Raises:
            OptionError: an option is unknown, missing or wrong.
        """
        found, unknown = self.parse_known_args(args)
        if unknown:
            name = unknown[0].split("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            kind = f"option {name}; {suggest(name, known, cutoff=0.0)}" if name.startswith("-") else f"argument {name}"
            raise OptionError(f"unknown {kind}")
        return found

    def error(self, message: str) -> None:
        raise OptionError(re.sub(r"^argument (?:-\w/)?(--\S+):", r"\1:", message))


def at_least_one(text: str) -> int:
    """A type of options: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number of at least 1")
    return number


def at_least_zero(text: str) -> float:
    """A type of options: a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number of at least 0")
    return number
