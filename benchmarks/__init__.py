"""Speed and memory of jfi's operators beside their peers: ``python -m benchmarks --help``."""

import os

# Before torch starts its threads: waiting threads sleep.  By default they spin, and where anything else
# runs on the cores, an operator's time is then the scheduler's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
