"""Columns that are computed: statistics of the past, semantic IDs."""
