"""The error of this package."""


class DataError(ValueError):
    """A fault in the input data or in the config that describes it, as one line that names the place."""
