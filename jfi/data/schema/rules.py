"""Rules over the columns of a table, such as `rating >= 4 and action in [buy, cart]`.

    rule    = term {"or" term}
    term    = test {"and" test}
    test    = ["not"] "(" rule ")" | column compare value | column ["not"] "in" "[" value {"," value} "]"
    compare = "==" | "!=" | ">=" | "<=" | ">" | "<"

A column or value is one or more words, or any text in quotes. A value without quotes that is a number is compared with
the column's numbers, every other one with its text; >=, <=, > and < also compare a date such as 2024-01-31 or
2024-01-31 18:00 with a column of dates. Rules are parsed here and never evaluated as Python.
"""

import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyparsing as pp

from jfi.data.errors import DataError
from jfi.data.io.table import SourceRows
from jfi.data.labels import COUNT, LabelWindow
from jfi.utils.encoding import LARGEST_NUMBER, text_of

OPERATORS = "==, !=, >=, <=, >, <, in [...], not in [...], and, or, not (...)"

_KEYWORD = r"(?:and|or|in|not)(?=[\s()\[\],<>=]|!=|$)"
_WORD = rf"""(?!{_KEYWORD})[^\s()\[\],<>='"!](?:[^\s()\[\],<>=!]|!(?!=))*"""
_ORDER = {">=": pc.greater_equal, "<=": pc.less_equal, ">": pc.greater, "<": pc.less}
_COMPARE = {"==": pc.equal, "!=": pc.not_equal, **_ORDER}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class _Test(NamedTuple):
    column: str
    compare: str
    values: tuple[str, ...]
    kind: str  # number, date, text

    def holds(self, table: SourceRows) -> pa.BooleanArray:
        column, values = self._read(table)
        if self.compare in _COMPARE:
            return _COMPARE[self.compare](column, values[0])
        hit = pc.is_in(column, value_set=values)
        return pc.if_else(column.is_null(), None, pc.invert(hit) if self.compare == "not in" else hit)

    def absent(self, table: SourceRows) -> list[str]:
        if self.compare in _ORDER:
            return []
        column, values = self._read(table)
        found = pc.is_in(values, value_set=column).to_pylist()
        return [value for value, known in zip(self.values, found, strict=True) if not known]

    def _read(self, table: SourceRows) -> tuple[pa.Array, pa.Array]:
        """Returns the column, null where it is empty, and the values."""
        if self.kind == "text":
            column = table.strings(self.column)
            return column, pa.array(self.values, column.type)
        column = _moments(table, self.column) if self.kind == "date" else table.numbers(self.column)
        values = [_moment(value) if self.kind == "date" else float(value) + 0.0 for value in self.values]
        return pa.array(column + 0.0, mask=np.isnan(column)), pa.array(values)  # without -0.0


class _Joined(NamedTuple):
    word: str  # and, or, not
    parts: tuple["_Test | _Joined", ...]

    def holds(self, table: SourceRows) -> pa.BooleanArray:
        results = (part.holds(table) for part in self.parts)
        if self.word == "not":
            return pc.invert(next(results))
        return reduce(pc.and_kleene if self.word == "and" else pc.or_kleene, results)


def _tests(node: _Test | _Joined) -> Iterator[_Test]:
    if isinstance(node, _Test):
        yield node
    else:
        for part in node.parts:
            yield from _tests(part)


@dataclass(frozen=True)
class Rule:
    """A parsed rule.

    Args:
        root: the tree of its tests; those of equal rules are equal.
    """

    root: _Test | _Joined

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, in the order in which the rule names them."""
        return list(dict.fromkeys(test.column for test in _tests(self.root)))

    def holds(self, table: SourceRows) -> np.ndarray:
        """`[N]` float32: 1 where the rule holds, 0 where not, NaN where an empty field leaves it open.

        An empty field leaves `and` open unless another test fails, and `or` unless another test holds.

        Raises:
            DataError: a column is absent, or one that is compared with a number or a date holds something else.
        """
        # By way of integers, since Arrow is slow from booleans to floats.
        return self.root.holds(table).cast(pa.uint8()).cast(pa.float32()).to_numpy(zero_copy_only=False)

    def absent_values(self, table: SourceRows) -> list[tuple[str, str]]:
        """The columns and values that ==, !=, in and not in compare where no row has the value: probably misspelt."""
        return list(dict.fromkeys((test.column, value) for test in _tests(self.root) for value in test.absent(table)))


@cache
def parse_rule(text: str) -> Rule:
    """The rule that `text` states.

    Raises:
        DataError: `text` is not a rule; the message names the operators.

    Example:
        >>> parse_rule("rating >= 4 and (action in [buy, 'add to cart'] or price < 2)").columns
        ['rating', 'action', 'price']
    """
    try:
        return Rule(_RULE.parse_string(text, parse_all=True)[0])
    except pp.ParseBaseException as error:
        before = text[: error.loc].strip()
        raise _fault(text, f"{error.msg.lower()} " + (f"after '{before}'" if before else "at the start")) from None
    except RecursionError:
        raise _fault(text, "too many parentheses are open") from None


def only_column(text: str) -> str | None:
    """The column if `text` is the name of one, in quotes or not, and None if it is a rule.

    >>> only_column("clicked"), only_column("'made in'"), only_column("clicked = 1")
    ('clicked', 'made in', None)
    """
    try:
        return _plain(_COLUMN.parse_string(text, parse_all=True)[0])
    except pp.ParseBaseException:
        return None


def label_columns(label: str | LabelWindow) -> list[str]:
    """The column that a label names, or those that its rule compares, and of a window also that of its value.

    Raises:
        DataError: the label is neither a column nor a rule.
    """
    if isinstance(label, LabelWindow):
        return [*parse_rule(label.event).columns, *([label.value] if label.value not in (None, COUNT) else [])]
    column = only_column(label)
    return parse_rule(label).columns if column is None else [column]


def describe_values(tables: Iterable[SourceRows], column: str) -> str:
    """The ten most frequent values of a column of tables, with counts, for messages.

    >>> describe_values([], "action")
    "values of 'action': none"
    """
    counts: Counter[str] = Counter()
    for table in tables:
        for pair in table.strings(column).drop_null().value_counts():
            counts[pair["values"].as_py()] += pair["counts"].as_py()
    shown = ", ".join(f"{value[:40]} ({count})" for value, count in counts.most_common(10))
    more = f" and {len(counts) - 10} more" if len(counts) > 10 else ""
    return f"values of '{column}': {shown or 'none'}{more}"


def _moments(table: SourceRows, name: str) -> np.ndarray:
    """`[N]` float64: the seconds since 1970 of a column of dates; NaN where it is empty."""
    encoded = table.strings(name).dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    seconds = [_moment(text) for text in texts]
    if None in seconds:
        wrong = seconds.index(None)
        what = f"'{name}' is '{texts[wrong][:40]}', no date such as 2024-01-31; compare numbers with a number"
        raise table.fault(pc.index(encoded.indices, wrong).as_py(), what)
    return np.array([*seconds, np.nan])[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)]


def _moment(text: str) -> float | None:
    """The seconds since 1970 of a date and time by ISO 8601, in UTC unless it names a zone; None of another text."""
    try:
        moment = datetime.datetime.fromisoformat(re.sub(r" ?(UTC|GMT)$", "Z", text.strip()))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _fault(rule: str, what: str) -> DataError:
    return DataError(f"rule '{rule}': {what}; the operators are {OPERATORS}")


def _plain(operand: str) -> str:
    """Returns a column or a value without its quotes."""
    return operand[1:-1] if operand[0] in "'\"" else operand


def _test(rule: str, _: int, found: pp.ParseResults) -> _Test:
    column, compare, *operands = found
    values = tuple(map(_plain, operands))
    if all(map(_NUMBER.fullmatch, operands)):
        kind = "number"
    elif compare not in _ORDER:
        kind, values = "text", tuple(text_of(value) or "" for value in values)
    elif _moment(values[0]) is not None:
        kind = "date"
    else:
        raise _fault(rule, f"'{values[0]}' is neither a number nor a date; compare it with ==, != or in")
    return _Test(_plain(column), compare, values, kind)


def _joined(word: str, part: pp.ParserElement) -> pp.ParserElement:
    joined = part + (_keyword(word).suppress() - part)[...]
    return joined.set_parse_action(lambda found: found[0] if len(found) == 1 else _Joined(word, tuple(found)))


def _keyword(word: str) -> pp.ParserElement:
    return pp.Regex(rf"(?={_KEYWORD}){word}").set_name(f"'{word}'")


def _grammar() -> tuple[pp.ParserElement, pp.ParserElement]:
    """Returns the parsers of a rule and of a column alone; behind `-` what is wrong is a fault of the rule."""
    operand = rf"""{_WORD}(?:\s+{_WORD})*|"[^"]*"|'[^']*'"""
    column, value = (pp.Regex(operand).set_name(name) for name in ("a column", "a value"))
    opened, closed, comma, begin, end = (pp.Suppress(sign) for sign in "(),[]")
    values = begin - value - (comma - value)[...] - end
    is_in, is_not = _keyword("in"), _keyword("not")
    not_in = (is_not - is_in).set_parse_action(lambda: "not in")
    compare = (pp.one_of([*_COMPARE]) - value | (is_in | not_in) - values).set_name("an operator")
    rule = pp.Forward()
    nested = opened - rule - closed
    negated = (is_not.suppress() - nested).set_parse_action(lambda found: _Joined("not", (found[0],)))
    test = (nested | negated | (column - compare).set_parse_action(_test)).set_name("a column")
    rule <<= _joined("or", _joined("and", test))
    return rule.parse_with_tabs(), column.parse_with_tabs()


_RULE, _COLUMN = _grammar()


def read_window(table: SourceRows, window: LabelWindow) -> np.ndarray:
    """`[N]` float64, what each row adds to the labels of rows before it; NaN where an empty field leaves it open."""
    holds = parse_rule(window.event).holds(table)
    values = table.numbers(window.value) if window.value not in (None, COUNT) else 1.0
    return np.where(holds == 1, np.nan_to_num(values), holds).astype(np.float64)


def read_labels(table: SourceRows, label: str | None, task: str) -> np.ndarray:
    """`[N]` float32, 0 or 1, or NaN for a row that is history only.

    Args:
        table: the interactions.
        label: None (every row is a positive), a column of 0 and 1, or of finite numbers in a regression, or a rule.
        task: of the label.

    Raises:
        DataError: a wrong rule, an absent column, or a value that is not 0 or 1, or not finite.
    """
    if label is None:
        return np.ones(len(table), np.float32)
    column = only_column(label)
    if column is None:
        return parse_rule(label).holds(table)
    advises = table.reading.is_configured
    advice = f"; did you mean a rule such as '{label} == VALUE'?" if advises and task != "regression" else ""
    values = table.numbers(column, advice)
    if task == "regression":
        wrong = np.abs(values) > LARGEST_NUMBER
    else:
        wrong = ~((values == 0) | (values == 1) | np.isnan(values))
    if wrong.any():
        row = int(wrong.argmax())
        value, advice = f"{values[row]:g}", "a label with task: regression predicts numbers"
        must = f"0 or 1; did you mean a rule such as '{label} >= {value}'? {advice}" if advises else "0 or 1"
        must = "a finite number of float32" if task == "regression" else must
        raise table.fault(row, f"label '{label}' is {value}, not {must}")
    return values.astype(np.float32)


def check_held(
    name: str, setting: str, rule: str | None, counts: Sequence[int], tables: Callable[[], Iterable[SourceRows]]
) -> None:
    """Raises DataError for a rule that holds in no row, and for one of a label that holds in every row.

    Args:
        name: of the whole table, for messages.
        setting: "label", or that of a rule for samples or events.
        rule: its value; a column alone is not checked.
        counts: the number of rows where the rule does not hold and of those where it does.
        tables: gives the parts of the table, which are read again to show the values of the rule's columns.
    """
    if rule is None or only_column(rule) is not None or not sum(counts):
        return
    what = {"label": "positive", "samples": "a sample"}.get(setting, "an event")
    if not counts[1]:
        fault = f"none of the {sum(counts)} rows is {what}"
    elif not counts[0] and setting == "label":
        fault = f"every one of the {sum(counts)} rows is {what}"
    else:
        return
    shown = "; ".join(describe_values(tables(), column) for column in parse_rule(rule).columns)
    raise DataError(f"{name}: {setting} '{rule}': {fault}; {shown}")
