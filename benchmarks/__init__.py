"""Speed and memory of jfi's operators beside their peers: ``python -m benchmarks --help``."""
