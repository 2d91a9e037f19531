"""What a fingerprint of the data sees."""

from data_configs import data_config

from jfi.data import load_dataset
from jfi.data.prepared.fingerprint import Fingerprint


def test_a_changed_value_of_any_row_is_seen(write):
    def of(changed: int | None) -> Fingerprint:
        rows = [f"{i % 3},{i % 4},{i},{i % 2},t{(i + (i == changed)) % 2}" for i in range(40)]  # the same vocabulary
        path = write("r.csv", "user_id,item_id,timestamp,liked,tag", *rows)
        config = data_config(interactions=path, label="liked", event_categorical=["tag"])
        return Fingerprint.of(load_dataset(config), config)

    before = of(None)
    assert before.changes(of(None)) is None
    for row in (0, 1, 2, 20, 39):
        assert before.changes(of(row)) == "the values of column 'tag' have changed"
