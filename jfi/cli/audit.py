"""Runs `jfi audit`."""

import argparse
from dataclasses import replace

import msgspec
import numpy as np
import torch

from jfi.data import Batch, DataError
from jfi.data.io.blocks import existing_interactions, find_table
from jfi.serving.audit import Audit
from jfi.serving.rebuild import Rebuilder
from jfi.training.run.saved_run import SavedRun, load_run
from jfi.utils.exit_codes import DIFFERS
from jfi.utils.files import write_file


def main(options: argparse.Namespace) -> int | None:
    """Compares logged requests with what the training code makes of them; returns the exit code."""
    run = load_run(options.run, setting="--run")
    audit = audit_of(run, options.log, options.items, options.users, options.tolerance, options.examples)
    report = audit(options.requests)
    print(*report.lines(), sep="\n")
    if options.report is not None:
        write_file(options.report, msgspec.json.format(msgspec.json.encode(report)))
        print(f"wrote {options.report}")
    return None if report.is_clean else DIFFERS


def audit_of(
    run: SavedRun,
    log: str | list[str] | None = None,
    items: str | None = None,
    users: str | None = None,
    tolerance: float = 1e-5,
    examples: int = 20,
) -> Audit:
    """Returns what audits the requests to a run's model.

    Args:
        run: of `jfi train`.
        log: the parts of the log behind the run's own interactions, or None.
        items, users: tables; None means those of the run's config.
        tolerance, examples: as of Audit.

    Raises:
        DataError: the run's interactions are not there, or a table is not.
    """
    config = run.config.data
    config = replace(config, items=items or config.items, users=users or config.users)
    own = existing_interactions(config) if config.interaction_settings() else []
    if not own:
        raise DataError(f"--run {run.path}: its own interactions are not there, of which histories are made")
    files = [] if log is None else find_table(log, "--log", config)

    def score(batch: Batch) -> np.ndarray:
        with torch.inference_mode():
            logits = run.model(batch.dense_features, batch.sparse_features, batch.timelines)
        return logits.float().reshape(len(batch.labels), -1).numpy()

    labels = run.schema.labels
    is_logit = np.array([label.task == "binary" for label in labels])
    scales = [run.calibration.get(label.name, {"a": 1.0, "b": 0.0}) for label in labels]
    slope, offset = (np.array([scale[name] for scale in scales]) for name in ("a", "b"))

    def outputs(logits: np.ndarray, output: str) -> np.ndarray:
        if output == "logits":
            return logits
        found = logits * slope + offset if output == "calibrated" else logits.astype(np.float64)
        return np.where(is_logit, 1 / (1 + np.exp(-found)), found)

    rebuild = Rebuilder(run.schema, config, run.policy, score, own, files)
    return Audit(rebuild, run.fingerprint(), outputs, tolerance, examples)
