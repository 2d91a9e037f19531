"""Training by several processes: the process group, sharded tables and what they exchange."""
