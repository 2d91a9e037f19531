"""What a history policy saves and wins on the synthetic log with dwell times (configs/dwell.yaml).

python -m benchmarks.dwell                                   every arm with 5 seeds, then the table
python -m benchmarks.dwell --seeds 2 --only full policy-50   some of them
python -m benchmarks.dwell --serving                         and requests a second of seed 0

An arm says which of the newest 200 events of a history a model reads. Removal by a policy is compared with the same
number of events removed at random, the oldest ones of each history, and by one cap for all; boosting of the active with
a short history for all and the long one for all. A seed is that of the log and of the training, so arms are compared
seed by seed. Every finished training is written to benchmarks/results/<device>/dwell.json, and is not repeated.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import report
from benchmarks.quality.run import environment
from benchmarks.synthetic_data import synthetic_config
from jfi.data import InteractionDataset, load_dataset
from jfi.data.batches.choose_events import EventChooser
from jfi.data.prepared.event_logs import training_log
from jfi.data.prepared.stages.read import open_tables
from jfi.events.events import Histories
from jfi.history_policies import Policy, fit
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.training import Config, train
from jfi.training.metrics.label_metrics import Predictions
from jfi.training.run.saved_run import SavedRun, load_run
from jfi.utils.files import write_file
from jfi.utils.jagged import ranges

ROOT = Path(__file__).parents[1]
#: Events of a short history, and of a long one.
SHORT, LONG = 100, 200
CANDIDATES, _BODIES, _SECONDS = 50, 64, 3.0


@dataclass(frozen=True)
class Arm:
    """Which events of a history a model reads.

    Args:
        fit: arguments of `jfi.history_policies.fit` for an arm with a policy.
        like: name of the arm with as many events, of an arm that removes in another way.
        remove: that way: "random", "oldest" (of each history the same share) or "cap" (one for all histories).
        bias: `model.bias`, "weights" for a policy that boosts by weights.
    """

    fit: dict | None = None
    like: str | None = None
    remove: str | None = None
    bias: str | None = None


ARMS = {
    "full": Arm(),
    **{
        name: arm
        for share in (30, 50)
        for name, arm in (
            (f"policy-{share}", Arm(fit={"remove": share / 100})),
            *((f"{how}-{share}", Arm(like=f"policy-{share}", remove=how)) for how in ("random", "oldest", "cap")),
        )
    },
    "short for all": Arm(fit={"caps": SHORT}),
    "long for the active": Arm(fit={"caps": {"passive": SHORT}}),
    "weights for the active": Arm(fit={"boost": ["active"]}, bias="weights"),
}
#: Arms whose requests are measured: they have a policy, or none.
SERVED = ("full", "policy-30", "policy-50", "short for all", "long for the active", "weights for the active")


class OtherRemoval:
    """Removes events in another way than a policy, for `InteractionDataset.chooser`.

    Args:
        how: as `Arm.remove`.
        dataset: whose histories they are.
        kept: the share of the training samples' events to keep.
        seed: of the random removal.
    """

    policy = None

    def __init__(self, how: str, dataset: InteractionDataset, kept: float, seed: int) -> None:
        self._how, self._kept, self._longest = how, kept, dataset.schema.max_history
        self._events = dataset.arrays().events
        self._stays = np.random.default_rng((seed, 7)).random(len(self._events)) < kept
        lengths = self._events.histories(dataset.arrays().samples["train"].astype(np.int64), self._longest)[1]
        caps = np.arange(1, self._longest + 1)
        sums = np.array([np.minimum(lengths, cap).sum() for cap in caps])
        self._cap = int(caps[np.argmin(np.abs(sums - kept * lengths.sum()))])

    def histories(self, owners: np.ndarray) -> Histories:
        start, length = self._events.histories(owners, self._longest)
        if self._how == "random":
            rows = ranges(start, length)
            stays = self._stays[rows]
            counts = np.bincount(np.repeat(np.arange(len(owners)), length)[stays], minlength=len(owners))
            return Histories(counts, events=rows[stays])
        kept = np.rint(length * self._kept).astype(np.int64) if self._how == "oldest" else np.minimum(length, self._cap)
        return Histories(kept, start=start + length - kept)


def num_events(dataset: InteractionDataset) -> int:
    """Events of the histories of all training samples."""
    owners = dataset.arrays().samples["train"].astype(np.int64)
    if dataset.chooser is None:
        return int(dataset.arrays().events.histories(owners, dataset.schema.max_history)[1].sum())
    return int(dataset.chooser.histories(owners).lengths.sum())


class Seed:
    """The log of a seed, read once for all arms, with other settings and arguments of the table."""

    def __init__(self, seed: int, more: list[str], **table: float) -> None:
        self.seed = seed
        self.config = synthetic_config("dwell", [*more, f"--training.seed={seed}"], seed=seed, **table)
        self._log = training_log(self.config.data)
        log = self.config.data.interactions
        users, index = np.unique(log["user"].to_numpy(), return_inverse=True)
        #: `[U]` bool, which users are active in truth.
        self.active = np.zeros(len(users), bool)
        self.active[index] = log["active"].to_numpy() == 1

    def policy(self, arm: Arm) -> Policy | None:
        return None if arm.fit is None else fit(*self._log, **arm.fit)

    def dataset(self, arm: Arm) -> InteractionDataset:
        dataset = load_dataset(self.config.data)
        made = self.policy(arm)
        if made is not None:
            arrays = dataset.arrays()
            dataset.chooser = EventChooser(made, arrays.events, arrays.engagement, dataset.schema.max_history)
        elif arm.remove is not None:
            other = self.dataset(ARMS[arm.like])
            dataset.chooser = OtherRemoval(arm.remove, dataset, num_events(other) / num_events(dataset), self.seed)
        return dataset


def by_segment(run: SavedRun, dataset: InteractionDataset, active: np.ndarray) -> dict[str, dict[str, float]]:
    """Test NE and AUC of the active and of the passive users."""
    parts = []
    with torch.no_grad():
        for batch in dataset.batches("test", 2048):
            parts.append(
                (run.model(batch.dense_features, batch.sparse_features).squeeze(-1), batch.labels, batch.users)
            )
    logits, labels, users = (torch.cat(of) for of in zip(*parts, strict=True))
    found = {}
    for name, of in (("active", active), ("passive", ~active)):
        rows = torch.from_numpy(of[users.numpy()])
        metrics = Predictions([logits[rows].double()], [labels[rows].double()], [users[rows]]).metrics()
        found[name] = {metric: metrics[metric] for metric in ("ne", "auc")}
    return found


def run_arm(seed: Seed, name: str, serving: bool) -> dict:
    """Trains an arm and measures it."""
    arm, dataset = ARMS[name], seed.dataset(ARMS[name])
    config = seed.config
    if arm.bias is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, bias=arm.bias))
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere:
        if dataset.policy is not None:  # as a run does that is told its policy by a file
            dataset.policy.save(f"{scratch}/policy.json")
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, policy=f"{scratch}/policy.json"))
        cpu = time.process_time()
        with contextlib.redirect_stdout(nowhere):
            result = train(config.with_training(run_dir=f"{scratch}/run"), dataset)
        cpu = time.process_time() - cpu
        run = load_run(f"{scratch}/run")
        requests = measure_requests(run, config, dataset, Path(scratch)) if serving and name in SERVED else None
        segments = by_segment(run, dataset, seed.active)
    samples = dataset.num_samples("train") * result.epochs
    return {
        "events": num_events(dataset),
        "test": result.test,
        "validation": result.validation,
        "segments": segments,
        "epochs": result.epochs,
        "samples_per_second": samples / result.train_seconds,
        "cpu_seconds": cpu,
        **({} if requests is None else {"requests_per_second": requests}),
    }


def measure_requests(run: SavedRun, config: Config, dataset: InteractionDataset, folder: Path) -> float:
    """Requests a second, one after the other, from JSON to scores, of users of the test split."""
    schema = schema_of(config.data, run.schema, reads_history=True, reads_age=False)
    device = "cuda" if config.training.device == "cuda" else "cpu"
    limits = Limits(CANDIDATES, run.schema.max_history)
    Export(run.model, schema, limits, device=device, policy=run.policy).write(folder / "artifact")
    scorer = Scorer(folder / "artifact")
    bodies = request_bodies(config, dataset, scorer)
    times, end, i = [], time.perf_counter() + _SECONDS, 0
    while time.perf_counter() < end or i < 2 * _BODIES:
        start = time.perf_counter()
        scorer.score([scorer.reader.read(bodies[i % _BODIES])])
        times.append(time.perf_counter() - start)
        i += 1
    return 1 / statistics.mean(times[_BODIES:])


def request_bodies(config: Config, dataset: InteractionDataset, scorer: Scorer) -> list[bytes]:
    """Requests of users of the test split: their newest events and random candidates."""
    tables, draw = open_tables(config.data), random.Random(0)
    items = tables.items.data.to_pylist()
    names = list(scorer.reader.fields["history"])
    log = [row for part in tables.blocks() for row in part.data.to_pylist()]
    log.sort(key=lambda row: (str(row["user"]), row["timestamp"]))
    by_user: dict[object, list[dict]] = {}
    for row in log:
        by_user.setdefault(row["user"], []).append(row | items[row["item"]])
    bodies = []
    for user in draw.sample(sorted(by_user), _BODIES):
        rows = by_user[user][-dataset.schema.max_history :]
        now = rows[-1]["timestamp"] + 60
        history = [{name: row[name] for name in names if name != "age"} for row in rows]
        if "age" in names:
            history = [one | {"age": now - row["timestamp"]} for one, row in zip(history, rows, strict=True)]
        candidates = [draw.choice(items) for _ in range(CANDIDATES)]
        bodies.append(json.dumps({"user": {}, "history": history, "candidates": candidates}).encode())
    return bodies


#: By heading of the table what it shows of a cell.
COLUMNS: dict[str, Callable[[dict], float]] = {
    "events": lambda cell: cell["events"],
    "NE": lambda cell: cell["test"]["ne"],
    "AUC": lambda cell: cell["test"]["auc"],
    "NE, active": lambda cell: cell["segments"]["active"]["ne"],
    "NE, passive": lambda cell: cell["segments"]["passive"]["ne"],
    "samples/s": lambda cell: cell["samples_per_second"],
    "CPU s": lambda cell: cell["cpu_seconds"],
}


def table(cells: list[dict]) -> str:
    """Markdown: the mean over the seeds, and of NE the difference to the full history, seed by seed."""
    full = {cell["seed"]: cell for cell in cells if cell["arm"] == "full"}
    heads = ["arm", "seeds", *COLUMNS, "NE, change from full", "requests/s"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in ARMS:
        own = [cell for cell in cells if cell["arm"] == name]
        if not own:
            continue
        shown = [name, str(len(own))]
        for head, of in COLUMNS.items():
            values = [of(cell) for cell in own]
            digits = 4 if head.startswith(("NE", "AUC")) else 0
            spread = f" ± {statistics.stdev(values):.4f}" if digits and len(values) > 1 else ""
            shown.append(f"{statistics.mean(values):,.{digits}f}{spread}")
        differences = [cell["test"]["ne"] - full[cell["seed"]]["test"]["ne"] for cell in own if cell["seed"] in full]
        spread = f" ± {statistics.stdev(differences):.4f}" if len(differences) > 1 else ""
        shown.append(f"{statistics.mean(differences):+.4f}{spread}" if differences else "")
        rates = [cell["requests_per_second"] for cell in own if "requests_per_second" in cell]
        shown.append(f"{statistics.mean(rates):,.0f}" if rates else "")
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.dwell", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(ARMS), default=list(ARMS), help="arms (default: all)")
    parser.add_argument("--serving", action="store_true", help="measure requests of seed 0 too, which compiles")
    parser.add_argument(
        "--out", type=Path, help="file of the results (default: benchmarks/results/<device>/dwell.json)"
    )
    options, more = parser.parse_known_args()  # what is left overrides fields of the config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = options.out or ROOT / "benchmarks/results" / report.folder_name(device) / "dwell.json"
    cells = json.loads(out.read_text()) if out.exists() else []
    for number in range(options.seeds):
        seed = None
        for name in options.only:
            measured = options.serving and number == 0 and name in SERVED
            known = [c for c in cells if (c["arm"], c["seed"], c["overrides"]) == (name, number, more)]
            if known and ("requests_per_second" in known[0] or not measured):
                continue
            seed = seed or Seed(number, more)
            cell = {"arm": name, "seed": number, "overrides": more} | environment() | run_arm(seed, name, measured)
            cells = [c for c in cells if c not in known] + [cell]
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, json.dumps(cells, indent=1))
            shown = f"NE {cell['test']['ne']:.4f}, AUC {cell['test']['auc']:.4f}, {cell['samples_per_second']:,.0f}/s"
            print(f"{name}, seed {number}: {cell['events']:,} events, {shown}", flush=True)
    print(table([cell for cell in cells if cell["overrides"] == more]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
