"""The HTTP server of an artifact: admission, batches, swaps, versions that it follows, events, metrics."""
