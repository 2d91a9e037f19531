"""Training that follows a log: each part is scored, then trained on, then added to histories and statistics."""
