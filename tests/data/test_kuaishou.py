"""The configs of KuaiRand and KuaiSAR read files with the headers of these logs, whose rows here are made up."""

from dataclasses import replace

import numpy as np
import pytest

from jfi.data import load_dataset
from jfi.data.prepared.event_logs import training_log
from jfi.history_policies import fit
from jfi.training.config_parser import parse_config

KUAIRAND = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
KUAISAR = "user_id,item_id,playing_time,duration_ms,time,timestamp,click,forward,like,follow,search,search_item_related"
KUAIRAND_RULE = "is_like == 1 or is_follow == 1 or is_comment == 1 or is_forward == 1"
START = 1_649_400_000_000


def kuairand(i: int) -> str:
    played, like, follow, forward = i * 7919 % 60_000, i % 5 == 0, i % 7 == 0, i % 11 == 0
    click = played > 20_000
    rest = f"{click:d},{like:d},{follow:d},{i % 13 == 0:d},{forward:d},0,{played > 40_000:d},{played},58333,0,0,0,0"
    return f"{i % 9},{i * 31 % 40},20220408,1200,{START + i * 60_000},{rest},{i % 3}"


def kuaisar(i: int) -> str:
    played, like, follow, forward = float(i * 7919 % 60_000), i % 5 == 0, i % 7 == 0, i % 11 == 0
    rest = f"{played > 20_000:d},{forward:d},{like:d},{follow:d},{i % 4 == 0:d},0"
    return f"{i % 9},{i * 31 % 40},{played},45400.0,2022-04-08 14:40:00,{float(START + i * 60_000)},{rest}"


@pytest.mark.parametrize(
    ("name", "header", "row", "surfaces", "converts", "rule"),
    [
        ("kuairand", KUAIRAND, kuairand, ["0", "1", "2"], (5, 7, 11, 13), KUAIRAND_RULE),
        ("kuaisar", KUAISAR, kuaisar, ["all"], (5, 7, 11), "like == 1 or follow == 1 or forward == 1"),
    ],
)
def test_the_log_is_read_and_a_policy_fits_it(write, tmp_path, name, header, row, surfaces, converts, rule):
    path = write("log.csv", header, *(row(i) for i in range(400)))
    config = replace(parse_config(["--config", f"configs/{name}.yaml"])[0].data, interactions=path)
    dataset = load_dataset(config)
    events, fields = dataset.arrays().events, dataset.arrays().engagement
    number = np.rint((events.time - START / 1000) / 60).astype(int)
    assert np.array_equal(fields.dwell, (number * 7919 % 60_000 / 1000).astype(np.float32))
    assert fields.surfaces == surfaces
    assert np.array_equal(fields.surface, number % 3 if len(surfaces) == 3 else np.zeros(400))
    log, conversion = training_log(config, rule)
    number = np.rint((log.time - START / 1000) / 60).astype(int)
    assert np.array_equal(conversion, np.any([number % of == 0 for of in converts], axis=0))
    fit(log, conversion, remove=0.4).save(tmp_path / "p.json")
    shorter = load_dataset(replace(config, policy=str(tmp_path / "p.json")))
    kept, whole = (
        one.batches("train", 400)[0].sparse_features["history_age"].values().numel() for one in (shorter, dataset)
    )
    assert 0.5 * whole < kept < 0.9 * whole
