import numpy as np

from jfi.data import DataConfig, load_dataset
from jfi.data.prepared.stages.splits import leave_one_out


def test_time_orders_by_timestamp_then_user_then_item(write):
    rows = [f"{user},{item},{time},{label}" for label in (0, 1) for user, time, item in
            [(0, 1, 3), (0, 5, 0), (0, 5, 1), (1, 5, 0), (1, 9, 2)]]  # fmt: skip
    path = write("r.csv", "user_id,item_id,timestamp,clicked", *rows)
    dataset = load_dataset(DataConfig(interactions=path, label="clicked", fractions=[0.4, 0.4, 0.2]))
    assert dataset.arrays().events.split[::2].tolist() == [0, 0, 1, 1, 2]


def test_leave_one_out():
    # User 0 has enough, user 1 too few; the unlabeled rows of user 2 go with the labeled one after.
    user = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2])
    labeled = np.array([1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0]).astype(bool)
    assert leave_one_out(user, labeled).tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 1, 1, 2, 2, 2]
