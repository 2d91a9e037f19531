"""Trains our models and the peers' on public tables, with the same rows and the same number of trials.

python -m benchmarks.quality.fetch --out data/quality
python -m benchmarks.quality --models baselines defaults
python -m benchmarks.quality --tables ml_latest_small --models "target attention" DIN

Results go to benchmarks/results/quality/<table>.json after each training; another call goes on from there, and calls
with other models may run at the same time. `python -m benchmarks.readme` then writes the tables of docs/quality.md.
"""

from jfi.utils.exit_codes import EXIT_CODES, begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import sys
from pathlib import Path

from benchmarks.quality.fuxictr import Peers
from benchmarks.quality.models import MODELS, SETS
from benchmarks.quality.page import RESULTS
from benchmarks.quality.results import Results
from benchmarks.quality.run import run_table
from benchmarks.quality.tables import DATA, TABLES
from jfi.cli.options import OptionError, OptionParser
from jfi.utils.errors import suggest
from jfi.utils.exit_codes import run_command


def main(arguments: list[str] | None = None) -> None:
    parser = OptionParser(prog="python -m benchmarks.quality", description=__doc__, epilog=EXIT_CODES)
    shown = f"the sets {', '.join(SETS)}, and the models {', '.join(MODELS)}"
    parser.add_argument("--tables", nargs="+", default=list(TABLES), help=f"some of: {', '.join(TABLES)}")
    parser.add_argument("--models", nargs="+", default=list(SETS), help=f"some of: {shown}")
    parser.add_argument("--data", type=Path, default=DATA, help="folder that benchmarks.quality.fetch wrote")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--peers-python", type=Path, default=Peers.python, help="interpreter that has FuxiCTR")
    options = parser.parse_args(arguments)
    for name, known in (("tables", TABLES), ("models", SETS | MODELS)):
        for one in getattr(options, name):
            if one not in known:
                raise OptionError(f"--{name}: unknown {one!r}; {suggest(one, known)}")
    names = list(dict.fromkeys(one for given in options.models for one in SETS.get(given, [given])))
    peers = Peers(options.peers_python.absolute(), options.data.absolute() / "fuxictr/model_zoo")
    for name in options.tables:
        print(f"-- {TABLES[name].title}", flush=True)
        results = Results(options.out / f"{name}.json")
        models = [one for one in names if MODELS[one].tables is None or name in MODELS[one].tables]
        run_table(TABLES[name], results, models, options.data, peers)


if __name__ == "__main__":
    sys.exit(run_command(main))
