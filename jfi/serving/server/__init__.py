"""The HTTP server of an artifact: admission, batches, versions that it follows, events, metrics."""
