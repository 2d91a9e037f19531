"""Requests a second with and without a history policy, from JSON to scores, one after the other on one thread of a CPU.

python -m benchmarks.policy_requests
python -m benchmarks.policy_requests --device cuda
python -m benchmarks.policy_requests --data.max_history 400 --mean_length 320 --encoder.num_layers 2

The model is that of configs/dwell.yaml with what follows on the command line, untrained: its scores are noise, its time
is not. Users, candidates and the events of their requests are the same for all, and the arms take turns. Times are CPU
seconds of the process, or elapsed seconds where the model is on a GPU. Reading is that of a server, from the bytes to
ids and numbers. Beside each policy is what it could save at most: requests without a policy that hold only the events
that stay, so that nothing has to be chosen, and removed events are not even sent.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.dwell import ARMS, CANDIDATES, Seed, request_bodies
from jfi.history_policies import Policy
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export
from jfi.serving.history_policy import RequestPolicy
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.training.model.build_model import build_model


def export_arm(seed: Seed, policy: Policy | None, folder: Path, device: str) -> tuple[Scorer, list[bytes]]:
    """The artifact of an untrained model, loaded, and requests to it."""
    dataset, config = seed.dataset(ARMS["full"]), seed.config
    if policy is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, policy="policy.json"))
    torch.manual_seed(0)
    model = build_model(config.model, config.encoder, dataset.schema).eval()
    reads_age = any(feature.bias_key is not None for feature in model.sequence_arch.features)
    schema = schema_of(config.data, dataset.schema, reads_history=True, reads_age=reads_age)
    limits = Limits(CANDIDATES, dataset.schema.max_history)
    Export(model, schema, limits, device=device, policy=policy).write(folder)
    scorer = Scorer(folder)
    return scorer, request_bodies(config, dataset, scorer)


def only_what_stays(policy: Policy, scorer: Scorer, bodies: list[bytes], plain: list[bytes]) -> list[bytes]:
    """The requests `plain`, each with the events alone that the policy keeps of the one in `bodies`."""
    fields, found = scorer.reader.schema.policy, []
    choose = RequestPolicy(policy, fields)
    for body, own in zip(bodies, plain, strict=True):
        rows, request = json.loads(body)["history"], json.loads(own)
        ages, dwell = (np.array([row[name] for row in rows], np.float64) for name in ("age", fields.dwell))
        texts = (name and [row[name] for row in rows] for name in (fields.surface, fields.session))
        request["history"] = [request["history"][i] for i in choose(ages, dwell, *texts)[0]]
        found.append(json.dumps(request).encode())
    return found


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.policy_requests", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--arms", nargs="*", default=["policy-30", "policy-50"], choices=[n for n in ARMS if ARMS[n].fit]
    )
    parser.add_argument("--rounds", type=int, default=15, help="of all requests of all arms (default: 15)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of the model (default: cpu)")
    parser.add_argument("--mean_length", type=float, default=160, help="events of a user in the log (default: 160)")
    options, more = parser.parse_known_args()  # what is left overrides fields of the config
    torch.set_num_threads(1)
    seed = Seed(0, more, mean_length=options.mean_length)
    with tempfile.TemporaryDirectory() as scratch:
        scorer, plain = export_arm(seed, None, Path(scratch) / "full", options.device)
        arms = {"full": (scorer, plain)}
        for name in options.arms:
            policy = seed.policy(ARMS[name])
            arms[name] = export_arm(seed, policy, Path(scratch) / name, options.device)
            arms[f"{name}, only what stays"] = scorer, only_what_stays(policy, *arms[name], plain)
    steps, clock = ("reading", "scores"), time.process_time if options.device == "cpu" else time.perf_counter
    times = {name: {step: [] for step in steps} for name in arms}
    for _ in range(options.rounds):
        for name, (scorer, bodies) in arms.items():
            spent = dict.fromkeys(steps, 0.0)
            for body in bodies:
                begin = clock()
                request = scorer.reader.read(body)  # as the server does, JSON and all
                read = clock()
                scorer.score([request])
                spent["reading"] += read - begin
                spent["scores"] += clock() - read
            for step, seconds in spent.items():
                times[name][step].append(1e6 * seconds / len(bodies))
    totals = {name: [sum(of) for of in zip(*own.values(), strict=True)] for name, own in times.items()}
    print(f"{'':30}{'events':>8}{'reading':>9}{'scores':>8}{'all, us':>9}{'requests/s':>12}{'beside full':>13}")
    for name, (scorer, bodies) in arms.items():
        events = sum(scorer.reader.read(body).num_events for body in bodies) / len(bodies)
        parts = [median(times[name][step]) for step in steps]
        # Round by round, since other processes slow some rounds down.
        gain = median(full / own for full, own in zip(totals["full"], totals[name], strict=True)) - 1
        whole = median(totals[name])
        columns = f"{parts[0]:9.0f}{parts[1]:8.0f}{whole:9.0f}{1e6 / whole:12.0f}{gain:+13.1%}"
        print(f"{name:30}{events:8.0f}{columns}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
