"""The models that are compared, as data: settings that stay, and the trials that are tried for each.

Every model that is tuned has `TRIALS` trials; the best one on the validation rows counts.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

Kind = Literal["ours", "fuxictr", "baseline"]
TRIALS = 4
#: Of the final trainings of a table; with several folds the first one is that of all of them.
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Model:
    """A model with its settings.

    Args:
        kind: which of `run.RUNNERS` trains it.
        settings: fields of the config by their dotted name for ours, arguments of the class for FuxiCTR's.
        trials: what is tried beside them, or `[{}]` for a model that has nothing to tune.
        chosen_by: metric on the validation rows of the trial that counts, `auc` or `ne`.
        tables: names of the tables that have what it reads; None for all.
    """

    kind: Kind
    settings: dict[str, object]
    trials: list[dict[str, object]]
    chosen_by: Literal["auc", "ne"] = "auc"
    tables: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.trials != [{}] and len(self.trials) != TRIALS:
            raise ValueError(f"trials has {len(self.trials)} entries; it must have {TRIALS}, or one empty one")


def grid(**values: list) -> list[dict[str, object]]:
    """All combinations of the values; `__` in a name stands for a dot.

    >>> grid(a__b=[1, 2], c=[3])
    [{'a.b': 1, 'c': 3}, {'a.b': 2, 'c': 3}]
    """
    names = [name.replace("__", ".") for name in values]
    return [dict(zip(names, chosen, strict=True)) for chosen in product(*values.values())]


#: Of FuxiCTR's trainings: the most epochs, the epochs without a better validation AUC after which one ends, and rows of
#: a step. Ours are in the config of the table.
PEER_TRAINING = {"epochs": 10, "patience": 2, "batch_size": 256}
OUR_TRIALS = grid(optimizer__dense__learning_rate=[0.003, 0.01], optimizer__embeddings__learning_rate=[0.05, 0.1])


def _peer_trials(name: str) -> list[dict[str, object]]:
    # At 1e-3 TransAct's first steps on MovieLens-100K saturate its sigmoid, and all predictions stay 1.
    rate = 2e-4 if name == "TransAct" else 1e-3
    chosen = [(rate / 2, 1e-5), (rate, 1e-5), (2 * rate, 1e-5), (rate, 1e-4)]
    return [{"learning_rate": one, "embedding_regularizer": penalty} for one, penalty in chosen]


_BIASES: dict[str, object] = {"model.bias": ["history_age", "position"]}
_CROSSED = _BIASES | {"model.cross_layers": 2}
#: With heads by recency in the place of those by position.
_RECENT: dict[str, object] = {"model.bias": ["history_age", "recency"], "model.cross_layers": 2}
_STATISTICS, _OWN = ({"data.statistics": names} for names in (["item", "user", "similar"], ["user", "user_item"]))
#: Our models: what differs from the table's config. Each part after target attention is added to the one before, but
#: for those after the cross network, which are each beside it: statistics of one's own past are those that do not read
#: other users' rows.
OURS: dict[str, dict[str, object]] = {
    "no history": {"model.pooling": "none"},
    "mean pooling": {"model.pooling": "mean"},
    "sum pooling": {"model.pooling": "sum"},
    "target attention": {},
    "+ heads by position": _BIASES,
    "+ cross network": _CROSSED,
    "+ statistics": _CROSSED | _STATISTICS,
    "+ statistics of one's own past": _CROSSED | _OWN,
    "+ recency": _RECENT,
    "+ recency, statistics": _RECENT | _STATISTICS,
    "+ recency, statistics of one's own past": _RECENT | _OWN,
}
#: Where the label is a rating of at least 4: two other thresholds train the model too.
_OTHERS = [("three", "rating >= 3"), ("five", "rating >= 5")]
_AUXILIARY: dict[str, object] = {
    "data.label": None,
    "data.labels": [
        {"name": "label", "label": "rating >= 4"},
        *({"name": name, "label": rule, "weight": 0.5, "task": "auxiliary"} for name, rule in _OTHERS),
    ],
}
WITH_RATINGS: dict[str, dict[str, object]] = {
    "+ auxiliary labels": _CROSSED | _AUXILIARY,
    "+ auxiliary labels, statistics": _CROSSED | _AUXILIARY | _STATISTICS,
    "+ auxiliary labels, recency, statistics": _RECENT | _AUXILIARY | _STATISTICS,
}
RATINGS = ("movielens_100k", "ml_latest_small")
#: The tables with a label.
LABELED = (*RATINGS, "assistments2009", "amazon_office", "impressions", "shop")
#: Content in the place of ids, where items have texts; benchmarks.quality.semantic_ids makes the semantic IDs.
_SIDS = {"data.semantic_ids": "semantic_ids/vq_brand.parquet"}
_CONTENT = _SIDS | {"model.item_id": False}
WITH_CONTENT: dict[str, dict[str, object]] = {
    "+ semantic IDs, no id": _CROSSED | _CONTENT,
    "+ semantic IDs, no id, statistics": _CROSSED | _CONTENT | _STATISTICS,
}
#: The library's defaults of what a table's config may set beside the section `data`.
DEFAULTS: dict[str, object] = {
    "model.embedding_dim": 64,
    "model.num_heads": 4,
    "model.bias": "auto",
    "model.dropout": 0.1,
    "model.cross_layers": 2,
    "optimizer.dense.name": "adam",
    "optimizer.dense.learning_rate": 3e-3,
    "optimizer.embeddings.name": "adagrad",
    "optimizer.embeddings.learning_rate": 0.05,
    "optimizer.ema_decay": "auto",
    "training.batch_size": None,
    "training.epochs": 10,
    "training.monitor": "auto",
    "training.patience": 2,
}


def _defaults(statistics: str | list[str], **model: str) -> dict[str, object]:
    return DEFAULTS | {"data.statistics": statistics} | {f"model.{name}": value for name, value in model.items()}


#: Ours without tuning.
UNTUNED: dict[str, dict[str, object]] = {
    "library defaults, no histories": _defaults([], pooling="none"),
    "library defaults, mean pooling": _defaults([], pooling="mean"),
    "library defaults, sum pooling": _defaults([], pooling="sum"),
    "library defaults, no statistics": _defaults([]),
    "library defaults, statistics only": _defaults("auto", pooling="none"),
    "library defaults, mean pooling and statistics": _defaults("auto", pooling="mean"),
    "library defaults": _defaults("auto"),
}
#: FuxiCTR's models: arguments beside those of all, with the values of its own configs for what is not tuned.
PEERS: dict[str, dict[str, object]] = {
    "DIN": {},
    "DIEN": {"batch_norm": True, "dnn_activations": "Dice", "attention_activation": "ReLU"},
    "BST": {"num_heads": 4},
    "DMIN": {"num_heads": 4, "neg_seq_field": None, "batch_norm": False},
    "DMR": {"neg_seq_field": None, "context_field": None, "batch_norm": True, "dnn_activations": "PReLU"},
    "SIM": {"num_heads": 2, "short_seq_len": 50, "topk": 50},
    "ETA": {"num_heads": 2, "short_seq_len": 50, "topk": 50},
    "SDIM": {"num_heads": 2, "num_hashes": 2, "hash_bits": 4, "short_seq_len": 50},
    "TWIN": {"num_heads": 2, "short_seq_len": 50, "topk": 50},
    "TransAct": {"dcn_hidden_units": [128, 64], "num_heads": 1, "dim_feedforward": 128},
}
#: Arguments of all of FuxiCTR's models.
_PEER = {"embedding_dim": 16, "dnn_hidden_units": [128, 64]}

#: `jfi.baselines`, each with settings that it chooses on the validation rows by itself, and the tables that have it.
BASELINES: dict[str, tuple[str, ...] | None] = {
    "item mean": None,
    "item + user mean": LABELED,
    "popularity by time": None,
    "co-occurrence": None,
    "logistic regression": None,
    "gradient boosting": None,
}

MODELS: dict[str, Model] = {
    **{name: Model("ours", settings, OUR_TRIALS) for name, settings in OURS.items()},
    **{name: Model("ours", settings, OUR_TRIALS, tables=RATINGS) for name, settings in WITH_RATINGS.items()},
    **{name: Model("ours", settings, OUR_TRIALS, tables=("amazon_office",)) for name, settings in WITH_CONTENT.items()},
    **{name: Model("ours", settings, [{}]) for name, settings in UNTUNED.items()},
    **{name: Model("fuxictr", _PEER | one, _peer_trials(name), tables=LABELED) for name, one in PEERS.items()},
    **{name: Model("baseline", {}, [{}], tables=tables) for name, tables in BASELINES.items()},
}

#: Sets of models that `--models` takes in the place of their names.
SETS: dict[str, list[str]] = {
    "defaults": [*UNTUNED],
    "baselines": [*BASELINES],
    "tuned": [*OURS, *WITH_RATINGS, *WITH_CONTENT],
    "peers": [*PEERS],
}
