"""Trains a DLRM with sequence features on an interaction table, in Python; `jfi train` is the command.

python examples/synthetic_tables.py quickstart
python examples/train_dlrm.py --config configs/quickstart.yaml --training.epochs 3 --model.pooling mean
"""

import sys

from jfi.training import train
from jfi.training.config_parser import parse_config

config, _ = parse_config(sys.argv[1:])
result = train(config)
print(f"best epoch {result.best_epoch} of {result.epochs}, test {result.test}; {result.run_dir}")
