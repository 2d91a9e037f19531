"""Target attention: a few or many queries a sample over its history."""
