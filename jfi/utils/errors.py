"""The base of errors whose messages are for users."""


class InputError(ValueError):
    """A fault in what a user gave: a file, a setting or an option. A command prints it as one line, exit code 2."""
