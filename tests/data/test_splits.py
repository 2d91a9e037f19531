import numpy as np

from jfi.data.prepared.splits import leave_one_out, split_by_time


def test_time_orders_by_timestamp_then_user_then_item():
    user = np.array([0, 0, 0, 1, 1])
    time = np.array([1.0, 5.0, 5.0, 5.0, 9.0])
    item = np.array([3, 0, 1, 0, 2])
    assert split_by_time(user, time, item, np.ones(5, bool), [0.4, 0.4, 0.2]).tolist() == [0, 0, 1, 1, 2]


def test_leave_one_out():
    # User 0 has enough, user 1 too few; the unlabeled rows of user 2 go with the labeled one after.
    user = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2])
    labeled = np.array([1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0]).astype(bool)
    assert leave_one_out(user, labeled).tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 1, 1, 2, 2, 2]
