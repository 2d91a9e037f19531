"""Exports a trained run as one artefact, which examples/serve.py answers from.

python examples/export.py --run runs/20250101-120000
python examples/export.py --run runs/20250101-120000 --out artefacts/clicks --tables int8 --device cuda
"""

import argparse
import sys
from pathlib import Path

import torch

from jfi.data import InteractionDataset, load_dataset
from jfi.models import SequenceDLRM
from jfi.serving.artefact import ArtefactError
from jfi.serving.export import export
from jfi.serving.fields import Limits
from jfi.serving.request_fields import request_fields
from jfi.training import Config, ConfigError
from jfi.training.build import build_model
from jfi.training.checkpoint import (
    DamagedCheckpointError,
    checkpoint_name,
    latest_checkpoint,
    load_checkpoint,
    read_progress,
)
from jfi.training.cli import run_cli
from jfi.training.run import RunFolder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of examples/train_dlrm.py")
    parser.add_argument("--out", type=Path, help="the artefact, a new folder (default: RUN/artefact)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where it will serve (default: cpu)")
    parser.add_argument("--tables", choices=["float32", "int8"], default="float32", help="(default: float32)")
    parser.add_argument("--impl", choices=["triton", "torch"], help="of the attention (default: triton on a GPU)")
    parser.add_argument("--max-candidates", type=int, default=1000, help="of a request (default: 1000)")
    return parser.parse_args()


def load_best(path: Path) -> tuple[SequenceDLRM, Config, InteractionDataset]:
    """The model of a run's best epoch, as its test evaluated it."""
    if not RunFolder(path).config.is_file():
        raise ConfigError(f"--run {path}: no run folder, config.yaml is missing")
    run, config = RunFolder.open(path)
    last = latest_checkpoint(run.checkpoints)
    if last is None:
        raise ConfigError(f"--run {path}: no checkpoint yet")
    try:
        best = run.checkpoints / checkpoint_name(read_progress(last)["best_epoch"], 0)
    except (OSError, KeyError, ValueError):
        raise ConfigError(f"--run {path}: {last / 'progress.json'} is missing or damaged") from None
    if not best.is_dir():
        raise ConfigError(f"--run {path}: no epoch is done yet")
    dataset = load_dataset(config.data)
    model = build_model(config.model, config.encoder, dataset)
    name, prefix = ("model", "") if config.optimizer.average is None else ("average", "module.")
    state = {name: {prefix + key: torch.empty_like(value) for key, value in model.state_dict().items()}}
    try:
        load_checkpoint(best, state)
    except DamagedCheckpointError as fault:
        raise ConfigError(f"--run {path}: {fault}") from fault
    model.load_state_dict({key.removeprefix(prefix): value for key, value in state[name].items()})
    return model, config, dataset


def main() -> None:
    options = arguments()
    out = options.out or options.run / "artefact"
    # What takes seconds comes after what can be told at once.
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new folder")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here")
    if options.device == "cpu" and options.impl == "triton":
        raise ConfigError("--impl triton needs --device cuda")
    model, config, dataset = load_best(options.run)
    reads_history = config.model.pooling != "none"
    reads_age = any(feature.bias_key is not None for feature in model.sequence_arch.features)
    fields = request_fields(config.data, dataset, reads_history, reads_age)
    limits = Limits(options.max_candidates, config.data.max_history)
    try:
        export(out, model, fields, limits, device=options.device, tables=options.tables, impl=options.impl)
    except (ArtefactError, ValueError) as error:
        raise ConfigError(str(error)) from error
    print(f"{out}: {options.tables} tables, for {options.device}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
