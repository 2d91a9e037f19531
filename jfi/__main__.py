"""Runs the `jfi` command, as `python -m jfi` or `torchrun -m jfi`."""

import sys

from jfi.cli import main

sys.exit(main())
