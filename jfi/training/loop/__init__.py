"""The training loop and what a step is made of."""
