"""Labels of a config: of the row itself, or of what its user does later."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from jfi.data.errors import DataError
from jfi.data.setting_types import Positive, check_bounds

Task = Literal["binary", "regression"]
#: The `value` that counts rows.
COUNT = "count"
#: What `of` may name besides a column.
USER, ITEM, SESSION = "user", "item", "session"
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass
class LabelWindow:
    """A label that says what the user of a row does from then on, such as a purchase of the item within an hour.

    It reads the user's other rows from the row's time on, until `within` later: those of its own time too, since
    histories have rows strictly before it. A row whose window is not over at the newest time of the table has no label.

    Args:
        event: a rule for the rows that count, such as `event == buy`.
        within: the length of the window: a number of s, min, h or d, such as `30 min`, `1 h` or `7 d`.
        of: what these rows must have in common with the row: `item`, `session` (of `data.session`, or cut by pauses of
            30 minutes), `user` for nothing more, or a column with one value a row; a feature of the item is looked up
            in `data.items`, if that is set. A row without a value of it has no label.
        value: None for a label of 1 if there is such a row and 0 if not; or a column of numbers, whose sum over these
            rows is the label, of `task: regression`; `count` is their number. A missing number counts as 0.

    Example:
        >>> print(LabelWindow("event == buy", "1 h"))
        event == buy within 1 h of item
    """

    event: str
    within: str
    of: Annotated[str, Meta(min_length=1)] = ITEM
    value: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data.label.", DataError)
        if not self.seconds > 0:
            raise DataError(f"data.label.within: got {self.within!r}, must be a time such as 30 min, 1 h or 7 d")

    def __str__(self) -> str:
        return f"{'' if self.value is None else f'{self.value} of '}{self.event} within {self.within} of {self.of}"

    @property
    def seconds(self) -> float:
        """The length of the window."""
        found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(_SECONDS)})", self.within.strip())
        return float(found[1]) * _SECONDS[found[2]] if found else 0.0


@dataclass
class LabelConfig:
    """A label.

    Args:
        name: letters, digits and underscores. With several, metrics, columns of predictions and scores of a request
            have it.
        label: a column, a rule or a window, as `data.label`.
        task: "binary"; "regression" for a column of real numbers, which the model predicts by their squared error; or
            "auxiliary" for a binary label whose loss alone matters, which helps to train the model: it is not
            predicted, no metric reads it, and a row that lacks it does not count in its loss.
        weight: weight of its loss in the sum over all labels, positive.
    """

    name: str
    label: str | LabelWindow
    task: Task | Literal["auxiliary"] = "binary"
    weight: Positive = 1.0

    def __post_init__(self) -> None:
        check_bounds(self, f"data.labels '{self.name}': ", DataError)
