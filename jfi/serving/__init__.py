"""Serving: a trained SequenceDLRM as one artifact, and a server that answers from it.

export.py, model.py and vocabularies.py make an artifact and need the model. What reads one, scorer.py and whatever
stands on it, imports neither the model nor training, and nothing of jfi outside of this package.
"""
