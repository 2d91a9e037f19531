"""Building blocks of all kernel families."""
