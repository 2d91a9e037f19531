"""The events of a log, sorted, and statistics of what was known before a moment; a server needs no more of jfi.data."""
