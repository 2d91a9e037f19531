"""The configs of synthetic tables with the tables in memory."""

from dataclasses import replace
from pathlib import Path

from examples.synthetic_tables import MAKERS
from jfi.training import Config
from jfi.training.config_parser import parse_config

CONFIGS = Path(__file__).parents[1] / "configs"


def synthetic_config(name: str, arguments: list[str] | None = None, **table: float) -> Config:
    """Returns a config of configs/.

    Args:
        name: such as quickstart.
        arguments: settings, as on a command line.
        table: what differs in the arguments of what makes its table.
    """
    config, _ = parse_config(["--config", str(CONFIGS / f"{name}.yaml"), *(arguments or [])])
    interactions, items = MAKERS[name](**table)
    return replace(config, data=replace(config.data, interactions=interactions, items=items))
