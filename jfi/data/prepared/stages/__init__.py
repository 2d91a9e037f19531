"""Stages of the preparation: each reads the files of the one before it, in bounded memory."""
