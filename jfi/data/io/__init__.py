"""Reads files: names, formats and tables of their rows."""
