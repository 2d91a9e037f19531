"""What a fingerprint of the data sees."""

import dataclasses

from data_configs import data_config

from jfi.data import load_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.store import DATA, TIMELINES, TRAIN, fingerprint_of


def test_a_changed_value_of_any_row_is_seen(write, tmp_path):
    def of(changed: int | None, prepared: bool = False) -> dict[str, str]:
        rows = [f"{i % 3},{i % 4},{i},{i % 2},t{(i + (i == changed)) % 2}" for i in range(40)]  # the same vocabulary
        path = write("r.csv", "user_id,item_id,timestamp,liked,tag", *rows)
        config = data_config(interactions=path, label="liked", event_categorical=["tag"])
        if prepared:
            prepare_dataset(config, tmp_path / "out", show=False)
            config = dataclasses.replace(config, prepared=str(tmp_path / "out"))
        return fingerprint_of(load_dataset(config))

    before = of(None)
    assert before == of(None) == of(None, prepared=True)
    for row in (0, 1, 2, 20, 39):
        now = of(row)
        assert [name for name in (DATA, TRAIN, TIMELINES) if before[name] != now[name]] == [DATA]
