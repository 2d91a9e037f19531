"""The model of a run: how it is built, its parameter groups, pretrained rows and the EMA of its parameters."""
