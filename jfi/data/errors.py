"""The error of this package."""

from jfi.utils.errors import InputError

_MAX_LENGTH = 2000


class DataError(InputError):
    """A fault in the input data or in the config that describes it, as one line that names the place.

    Messages quote what files hold, so line breaks and other characters that are not printable are escaped, and a
    message that is too long to read is cut.

    >>> str(DataError("r.csv:3: 'rating' is 'a\\nb', not a number"))
    "r.csv:3: 'rating' is 'a\\\\nb', not a number"
    """

    def __init__(self, message: str) -> None:
        if len(message) > _MAX_LENGTH:
            half = _MAX_LENGTH // 2
            message = f"{message[:half]} ... {message[-half:]}"
        if not message.isprintable():
            message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__(message)
