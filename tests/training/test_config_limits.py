"""The least and the greatest value of every number of a config: both are accepted, and the next ones are refused."""

import math

import pytest
from data_configs import data_config

from jfi.data import DataConfig, DataError, FeatureConfig
from jfi.data.config_checks import check_data_config
from jfi.training import Config, ConfigError
from jfi.training.config import EncoderConfig, ModelConfig, OptimizerConfig, ShardingConfig
from jfi.training.config import TrainingConfig as Training
from jfi.training.config_parser import parse_config
from jfi.training.model_config import OptimizerGroup

ABOVE = math.nextafter(1.0, 2.0)
BELOW = math.nextafter(1.0, 0.0)
TINY = 5e-324
MANY = 2**31 - 1
#: Option, accepted values, refused values.
LIMITS = [
    ("model.cross_layers", [0, 3], [-1]),
    ("model.bias", [None, "position", ["position", "history_age"]], ["age", [], ["position", "position"], ["age"]]),
    ("model.embedding_dim", [4, 8], [0, -4]),
    ("model.num_heads", [1, 64], [0, -1, 3, 128]),
    ("model.dense_arch", [[], [1], [2, 1]], [[0], [2, 0], [-1, 2]]),
    ("model.over_arch", [[1], [2, 1]], [[], [0], [2, 0]]),
    *((f"{section}.dropout", [0.0, BELOW], [-TINY, 1.0, math.nan]) for section in ("model", "encoder")),
    ("encoder.num_layers", [0, 1], [-1]),
    ("optimizer.ema_decay", [None, TINY, BELOW], [0.0, 1.0]),
    ("sharding.group_size", [None, 1], [0, -1]),
    *((f"training.{name}", [1], [0]) for name in ("epochs", "batch_size", "eval_batch_size")),
    ("training.patience", [None, 1], [0]),
    ("training.checkpoint_every", [0, 1], [-1]),
    ("training.seed", [0, 2**32 - 1], [-1, 2**32]),
]
SECTIONS = {"model": ModelConfig, "encoder": EncoderConfig, "optimizer": OptimizerConfig}
SECTIONS |= {"sharding": ShardingConfig, "training": Training}


@pytest.mark.parametrize(("option", "accepted", "refused"), LIMITS, ids=[option for option, *_ in LIMITS])
def test_limits_of_training(option, accepted, refused):
    section, name = option.split(".")
    for value in accepted:
        assert getattr(SECTIONS[section](**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^{option}: got "):
            SECTIONS[section](**{name: value})


@pytest.mark.parametrize(
    ("option", "accepted", "refused"),
    [
        (
            "encoder.causal",
            [
                {"encoder": EncoderConfig(2, causal=True)},
                {"encoder": EncoderConfig(2, causal=True, relative_bias="distance")},
                {"encoder": EncoderConfig(2), "model": ModelConfig(pooling="none")},
            ],
            {"encoder": EncoderConfig(2)},
        ),
    ],
)
def test_what_samples_that_share_a_timeline_cannot_have(option, accepted, refused):
    for sections in accepted:
        Config(DataConfig(batching="user"), **sections)
    with pytest.raises(ConfigError, match=rf"^{option}: got .* with data\.batching: user"):
        Config(DataConfig(batching="user"), **refused)
    Config(DataConfig(), **refused)


@pytest.mark.parametrize("group", ["dense", "embeddings"])
def test_limits_of_the_optimizers(group):
    for changes in ({"learning_rate": TINY}, {"weight_decay": 0.0}, {"learning_rate": 1e300, "weight_decay": 1e300}):
        OptimizerConfig(**{group: OptimizerGroup(**changes)})
    for name, values in (("learning_rate", (0.0, -1.0, math.inf, math.nan)), ("weight_decay", (-TINY, math.inf))):
        for value in values:
            with pytest.raises(ConfigError, match=rf"^optimizer\.{group}\.{name}: got "):
                OptimizerConfig(**{group: OptimizerGroup(**{name: value})})


def test_without_options_nothing_unusual_is_on():
    """Each is described as `none`, `off` or `null` where it is documented."""
    config = Config()
    assert (config.training.checkpoint_every, config.training.warm_start, config.training.run_dir) == (0, None, None)
    assert (config.encoder.num_layers, config.encoder.causal, config.encoder.relative_bias) == (0, False, None)
    assert (config.encoder.dropout, config.model.pretrained, config.optimizer.dense.weight_decay) == (0, {}, 0)


def test_options_that_must_go_together():
    with pytest.raises(ConfigError, match=r"^encoder\.causal: got False, must be true with encoder.relative_bias$"):
        EncoderConfig(relative_bias="distance")
    narrow = DataConfig("a.csv", features=[FeatureConfig("item_id", "item", width=6)])
    Config(narrow)  # without an encoder, attention is on projected events
    with pytest.raises(ConfigError, match=r"^model\.num_heads: got 4, must be a divisor of the width of events"):
        Config(narrow, encoder=EncoderConfig(num_layers=1))
    rule = "auc >= .7 or rows < 1000"
    Config(training=Training(publish_every=1.0, publish_if=rule))
    with pytest.raises(ConfigError, match=r"^training\.publish_if: got '.*', must be null without .*\.publish_every$"):
        Config(training=Training(publish_if=rule))
    with pytest.raises(DataError, match=r"^rule 'auc >=': .*after 'auc >='; the operators are"):
        Config(training=Training(publish_every=1.0, publish_if="auc >="))


#: Option of `data` with the settings that it needs, accepted values, refused values.
DATA_LIMITS = [
    *((name, {}, [1, MANY], [0, MANY + 1]) for name in ("max_history", "max_slots")),
    ("negatives", {"label": None}, [1, MANY], [0, MANY + 1]),
    ("negatives", {"label": "liked"}, [0], [MANY + 1]),
    ("fractions", {}, [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2 + 9e-7]], [[0.5, 0.5, 0.0], [0.5, 0.5], [0.5, 0.3, 0.2 + 2e-6]]),
    ("fractions", {}, [], [[0.5, 0.3, 0.1, 0.1], [1.2, 0.3, -0.5]]),
    *((name, {}, [{"a": 1}], [{"a": 0}]) for name in ("min_count", "hash_buckets")),
    (
        "features",
        {"event_categorical": ["a"]},
        [[FeatureConfig("x", "event", cross=["item_id", "a"])]],
        [[FeatureConfig("x", "event", cross=cross)] for cross in (["a"], ["a", "b"])],
    ),
]


@pytest.mark.parametrize(
    ("option", "settings", "accepted", "refused"),
    DATA_LIMITS,
    ids=[f"{i}-{one[0]}" for i, one in enumerate(DATA_LIMITS)],
)
def test_limits_of_data(option, settings, accepted, refused):
    for value in accepted:
        check_data_config(data_config(interactions="r.csv", **settings, **{option: value}))
    for value in refused:
        with pytest.raises(DataError, match=rf"^data\.(features 'a': )?{option}"):
            check_data_config(data_config(interactions="r.csv", **settings, **{option: value}))


def test_an_unknown_bias_is_refused():
    known = "position, recency, weights, history_age"
    with pytest.raises(ConfigError, match=rf"^model\.bias: got 'history_ago', must be .*{known}.* or null$"):
        ModelConfig(bias="history_ago")
    for bias in (None, "position", "recency", "weights", "history_age"):
        assert ModelConfig(bias=bias).bias == bias


def test_heads_by_recency_are_several():
    """A single one would begin as without recency."""
    assert ModelConfig(bias="recency", num_heads=2).num_heads == 2
    with pytest.raises(ConfigError, match=r"^model\.num_heads: got 1, must be at least 2 with model\.bias"):
        ModelConfig(bias="recency", num_heads=1)


def test_a_value_or_a_section_of_a_config_may_be_an_alias(tmp_path):
    (tmp_path / "config.yaml").write_text("training:\n  epochs: &few 3\n  patience: *few\n")
    config = parse_config(["--config", str(tmp_path / "config.yaml")])[0]
    assert (config.training.epochs, config.training.patience) == (3, 3)
    (tmp_path / "config.yaml").write_text("optimizer:\n  dense: &same {learning_rate: 0.5}\n  embeddings: *same\n")
    config = parse_config(["--config", str(tmp_path / "config.yaml")])[0]
    assert config.optimizer.embeddings.learning_rate == config.optimizer.dense.learning_rate == 0.5
