"""Runs commands of `jfi` in this process."""

from jfi import cli


def call(*arguments: object) -> int:
    """Returns the exit code of a command, whose error is a line on stderr."""
    return cli.main(list(map(str, arguments)))


def run(*arguments: object) -> None:
    """Runs a command; raises its error."""
    cli.run(list(map(str, arguments)))
