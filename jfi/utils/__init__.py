"""Helpers of all packages: files, errors of commands, checks of arguments, private names of PyTorch."""
