"""The folder of a run: its data, state and records, and its use after training."""
