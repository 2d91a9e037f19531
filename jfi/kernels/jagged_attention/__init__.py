"""Jagged flash attention: packed queries over packed keys."""
