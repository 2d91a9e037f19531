"""The HTTP server of an artifact: admission, batches, swaps of the artifact, metrics."""
