"""Trains a DLRM with sequence features on an interaction table, in Python; `jfi train` does the same.

python examples/train_dlrm.py --config configs/quickstart.yaml --training.epochs 3 --model.pooling mean
torchrun --nproc_per_node 2 examples/train_dlrm.py --config configs/multi_gpu.yaml
"""

import sys

from jfi.training import train
from jfi.training.cli import parse_config

config, _ = parse_config(sys.argv[1:], "Train a DLRM with sequence features.")
result = train(config)
print(f"best epoch {result.best_epoch} of {result.epochs}: test AUC {result.test['auc']:.4f}; {result.run_dir}")
