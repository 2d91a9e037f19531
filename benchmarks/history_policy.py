"""Time to fit a history policy and to apply it where batches are assembled, on a CPU.

python -m benchmarks.history_policy --events 10_000_000

Prints seconds of `fit` on a log of random events (5 surfaces, 5 % of them without dwell), seconds of the segments of
all of its rows, and milliseconds of the policy per batch beside those of the assembly of the batch itself, in turn, for
histories of the same length. All are CPU seconds of the process, which other processes disturb less than wall time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks.synthetic_data import synthetic_config
from jfi.data import InteractionDataset, load_dataset
from jfi.history_policies import EventLog, Policy, PolicyModule, fit
from jfi.utils.jagged import ranges

_SURFACES, _DAYS = 5, 30


def random_log(count: int, seed: int = 0) -> tuple[EventLog, np.ndarray]:
    """Events in random order, and their conversions: active users have three times as many and convert by dwell."""
    rng = np.random.default_rng(seed)
    users = max(2, count // 100)
    active = rng.random(users) < 0.4
    rate = np.cumsum(np.where(active, 3.0, 1.0))
    user = np.minimum(np.searchsorted(rate / rate[-1], rng.random(count)), users - 1)
    dwell = rng.lognormal(3, 1.2, count)
    conversion = rng.random(count) < np.where(active[user] & (dwell > 40), 0.2, 0.03)
    dwell[rng.random(count) < 0.05] = np.nan
    time_of, surface = rng.uniform(0, _DAYS * 86400, count), rng.integers(0, _SURFACES, count)
    return EventLog(user, time_of, surface, dwell, [f"surface {i}" for i in range(_SURFACES)]), conversion


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def load(events: int) -> InteractionDataset:
    """Synthetic users, most of whom have more than `events` events."""
    config = synthetic_config("quickstart", [f"--data.max_history={events}"], num_users=200, mean_length=4.0 * 500)
    return load_dataset(config.data)


def time_batches(policy: Policy, samples: int, events: int, repeats: int) -> None:
    """Prints milliseconds per batch of the plain assembly and of the parts of an assembly with the policy."""
    dataset = load(events)
    features = dataset.batches("validation", samples)[0].sparse_features
    keys = [key for key in features.keys() if key.startswith("history_")]  # noqa: SIM118
    lengths = features[keys[0]].lengths().numpy()
    total, rng = int(lengths.sum()), np.random.default_rng(0)
    surface, dwell = rng.integers(0, _SURFACES, total), rng.lognormal(3, 1.2, total).astype(np.float32)
    segments, cells = rng.integers(0, len(policy.segments.names), samples).astype(np.int8), policy.cells(surface, dwell)
    module = PolicyModule(policy, keys)
    tensors = torch.from_numpy(surface), torch.from_numpy(dwell), torch.from_numpy(segments)
    # The histories lie as in a dataset: ranges of the events of users.
    of_events = policy.cells(rng.integers(0, _SURFACES, 10**6), rng.lognormal(3, 1.2, 10**6))
    start = np.sort(rng.integers(0, 10**6 - events, samples))
    share = len(policy.select(cells, segments, lengths).rows) / total
    short = load(round(share * events))
    calls = {
        "plain assembly": lambda: dataset.batches("validation", samples)[0],
        "assembly of what stays": lambda: short.batches("validation", samples)[0],
        "ranges of all events": lambda: ranges(start, lengths),
        "choice of what stays": lambda: policy.select(of_events[ranges(start, lengths)], segments, lengths),
        "PolicyModule on all keys": lambda: module(features, *tensors),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds_of(call))
    print(f"{samples:,} samples, {total / samples:.0f} events each in {len(keys)} keys, {share:.0%} stay")
    middle = {name: 1e3 * median(found) for name, found in times.items()}
    for name, found in middle.items():
        print(f"  {name:26}{found:8.2f} ms")
    # An assembly with a policy makes the ranges of all events within its choice.
    parts = middle["assembly of what stays"] - share * middle["ranges of all events"] + middle["choice of what stays"]
    print(f"  samples a second, by these parts: {middle['plain assembly'] / parts:.0%} of the plain rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="of the log (default: 1,000,000)")
    parser.add_argument("--samples", type=int, default=1024, help="of a batch (default: 1024)")
    parser.add_argument("--history", type=int, default=500, help="events of a sample (default: 500)")
    parser.add_argument("--repeats", type=int, default=20, help="batches (default: 20)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    log, conversion = random_log(options.events)
    begin = time.perf_counter()
    policies = {}
    busy = seconds_of(lambda: policies.update(remove=fit(log, conversion, remove=0.3)))
    print(f"fit of {options.events:,} events: {busy:.1f} s of CPU time, {time.perf_counter() - begin:.1f} s")
    print(f"segments of all rows: {seconds_of(lambda: policies['remove'].segments_before(log)):.1f} s of CPU time")
    small, of = random_log(100_000)
    policies["remove, boost and caps"] = fit(small, of, remove=0.3, boost=["active"], caps=400)
    for name, policy in policies.items():
        print(name, end=": ")
        time_batches(policy, options.samples, options.history, options.repeats)


if __name__ == "__main__":
    sys.exit(main())
