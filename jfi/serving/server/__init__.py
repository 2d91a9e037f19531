"""Servers of an artifact: over HTTP (admission, batches, swaps, metrics), and of JSON lines on standard input."""
