"""The tables that models are compared on: their config, the files of each fold, and published figures."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.quality.impressions import CEILING, SHOP_CEILING

ROOT = Path(__file__).parents[2]
#: Where configs name their files; `--data` replaces it.
DATA = Path("data/quality")


@dataclass(frozen=True)
class Table:
    """A table and its folds.

    Args:
        title: for people.
        config: path of the config, from the repository's root.
        folds: for each fold the files by their setting of the section `data`, relative to the folder of all tables.
        known: test AUC that is not measured here, by what has it: models that others published for these folds, or the
            true logit of a generated table.
        events: of the history of a test row, the mean of at most 200.
        repeated: the share of test rows whose item is in their history.
    """

    title: str
    config: str
    folds: list[dict[str, str]]
    known: dict[str, float] = field(default_factory=dict)
    events: float = 0.0
    repeated: float = 0.0

    def arguments(self, fold: int, data: Path) -> list[str]:
        """The command line that `jfi.training.config_parser.parse_config` takes."""
        files = [f"--data.{setting}={data / path}" for setting, path in self.folds[fold].items()]
        return ["--config", str(ROOT / self.config), *files]


def _assistments(fold: int) -> dict[str, str]:
    names = {"interactions": f"train{fold}", "validation": f"valid{fold}", "test": "test"}
    return {setting: f"assistments2009/{name}.csv" for setting, name in names.items()}


TABLES = {
    "movielens_100k": Table(
        "MovieLens-100K",
        "configs/movielens_100k.yaml",
        [{"interactions": "ml-100k/ml-100k.inter", "items": "ml-100k/ml-100k.item"}],
        events=100,
    ),
    "ml_latest_small": Table(
        "MovieLens latest-small",
        "configs/quality/ml_latest_small.yaml",
        [{"interactions": "ml-latest-small/ratings.csv", "items": "ml-latest-small/movies.csv"}],
        events=136,
    ),
    "assistments2009": Table(
        "ASSISTments2009-updated",
        "configs/quality/assistments2009.yaml",
        [_assistments(fold) for fold in range(1, 6)],
        {"DKT (published)": 0.8181, "DKVMN (published)": 0.7956, "NPA (published)": 0.8182},
        events=113,
        repeated=0.87,
    ),
    "amazon_office": Table(
        "Amazon Office Products",
        "configs/quality/amazon_office.yaml",
        [{"interactions": "amazon_office/interactions.csv", "items": "amazon_office/items.csv"}],
        events=4.8,
        repeated=0.007,
    ),
    "ml_latest_small_implicit": Table(
        "MovieLens latest-small, implicit",
        "configs/quality/ml_latest_small_implicit.yaml",
        [{"interactions": "ml-latest-small/ratings.csv", "items": "ml-latest-small/movies.csv"}],
        events=94,
    ),
    "impressions": Table(
        "Impressions (generated)",
        "configs/quality/impressions.yaml",
        [{"interactions": "impressions/interactions.parquet", "items": "impressions/items.parquet"}],
        {"true logit, the ceiling": CEILING},
        events=108,
        repeated=0.26,
    ),
    "shop": Table(
        "Shop (generated)",
        "configs/quality/shop.yaml",
        [{"interactions": "shop/interactions.parquet", "items": "shop/items.parquet"}],
        {"true logit, the ceiling": SHOP_CEILING},
        events=91,
        repeated=0.24,
    ),
}
