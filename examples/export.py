"""Exports a trained run as an artifact, which examples/serve.py serves.

python examples/export.py --run runs/20250101-120000
python examples/export.py --run runs/20250101-120000 --out artifacts/clicks --tables int8 --device cuda
"""

from jfi.utils.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import argparse
import sys
from pathlib import Path

import torch

from jfi.serving.artifact import ArtifactError
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import export
from jfi.serving.schema import Limits
from jfi.training import ConfigError
from jfi.training.cli import run_cli
from jfi.training.saved_run import load_run
from jfi.utils.exit_codes import EXIT_CODES, raise_on_sigterm
from jfi.utils.options import OptionParser, at_least_one


def arguments() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of examples/train_dlrm.py")
    parser.add_argument("--out", type=Path, help="folder to write, must not exist (default: RUN/artifact)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device to serve on (default: cpu)")
    parser.add_argument(
        "--tables",
        choices=["float32", "int8"],
        default="float32",
        help="format of the embedding tables (default: float32)",
    )
    parser.add_argument("--impl", choices=["triton", "torch"], help="kind of attention (default: triton on a GPU)")
    parser.add_argument("--max-candidates", type=at_least_one, default=1000, help="limit per request (default: 1000)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    out = options.out or options.run / "artifact"
    # Check the options before loading the run, which takes seconds.
    if out.exists():
        raise ConfigError(f"--out {out}: exists already; name a new folder")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here")
    if options.device == "cpu" and options.impl == "triton":
        raise ConfigError("--impl triton needs --device cuda")
    run = load_run(options.run, setting="--run")
    model, config = run.model, run.config
    reads_history = config.model.pooling != "none"
    reads_age = any(feature.bias_key is not None for feature in model.sequence_arch.features)
    schema = schema_of(config.data, run.schema, reads_history, reads_age, config.model.item_id)
    limits = Limits(options.max_candidates, run.schema.max_history)
    own = [run.calibration.get(label.name, {"a": 1.0, "b": 0.0}) for label in run.schema.labels]
    calibration = [(one["a"], one["b"]) for one in own] if run.calibration else None
    try:
        with raise_on_sigterm():
            sha256 = export(
                out,
                model,
                schema,
                limits,
                device=options.device,
                tables=options.tables,
                impl=options.impl,
                policy=run.policy,
                calibration=calibration,
            )
    except (ArtifactError, ValueError) as error:
        raise ConfigError(str(error)) from error
    print(f"wrote {out} ({options.tables} tables, for {options.device})")
    print(f"sha256 {sha256}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
