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
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.errors import DataError
from jfi.data.io.table import Table
from jfi.utils.encoding import text_of

OPERATORS = "==, !=, >=, <=, >, <, in [...], not in [...], and, or, not (...)"

_WORD = r"""[^\s()\[\],<>='"!] (?: [^\s()\[\],<>=!] | !(?!=) )*"""
_KEYWORD = r"""(?: and | or | in | not ) (?= [\s()\[\],<>=] | != | $ )"""
_TOKEN = re.compile(
    rf"""\s*(?: (?P<sign> ==|!=|>=|<=|>|<|=|[()\[\],] | {_KEYWORD} )
             | "(?P<double> [^"]*)" | '(?P<single> [^']*)'
             | (?P<word> {_WORD} (?: \s+ (?! {_KEYWORD} ) {_WORD} )* ) )""",
    re.VERBOSE,
)
_ORDER = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_COMPARE = {"==": operator.eq, "!=": operator.ne, **_ORDER}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?)?")
_MAX_DEPTH = 50


class _Test(NamedTuple):
    column: str
    compare: str
    values: tuple[str, ...]
    kind: str  # number, date, text

    def holds(self, table: Table) -> np.ndarray:
        if self.kind == "text":
            column = table.strings(self.column)
            empty = column.is_null().to_numpy(zero_copy_only=False)
            hit = pc.is_in(column, value_set=pa.array(self.values, column.type)).to_numpy(zero_copy_only=False)
            hit = ~hit if self.compare in ("!=", "not in") else hit
        else:
            column = _moments(table, self.column) if self.kind == "date" else table.numbers(self.column)
            empty = np.isnan(column)
            numbers = [_moment(value) if self.kind == "date" else float(value) for value in self.values]
            if self.compare in _COMPARE:
                hit = _COMPARE[self.compare](column, numbers[0])
            else:
                hit = np.isin(column, numbers, invert=self.compare == "not in")
        return np.where(empty, np.float32("nan"), hit.astype(np.float32))

    def absent(self, table: Table) -> list[str]:
        if self.compare in _ORDER:
            return []
        if self.kind == "number":
            found = np.isin([float(value) for value in self.values], table.numbers(self.column))
        else:
            column = table.strings(self.column)
            found = pc.is_in(pa.array(self.values, column.type), value_set=column.unique()).to_numpy(False)
        return [value for value, known in zip(self.values, found, strict=True) if not known]


class _Joined(NamedTuple):
    word: str  # and, or, not
    parts: tuple["_Test | _Joined", ...]

    def holds(self, table: Table) -> np.ndarray:
        result = self.parts[0].holds(table)
        if self.word == "not":
            return 1 - result
        # fmin and fmax skip a NaN, which remains where it can still decide.
        skip, decided = (np.fmin, 0.0) if self.word == "and" else (np.fmax, 1.0)
        for part in self.parts[1:]:
            other = part.holds(table)
            known = skip(result, other)
            result = np.where((np.isnan(result) | np.isnan(other)) & (known != decided), np.float32("nan"), known)
        return result


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
        text: the rule as written.
        root: the tree of its tests; those of equal rules are equal.
    """

    text: str
    root: _Test | _Joined

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, in the order in which the rule names them."""
        return list(dict.fromkeys(test.column for test in _tests(self.root)))

    def holds(self, table: Table) -> np.ndarray:
        """`[N]` float32: 1 where the rule holds, 0 where not, NaN where an empty field leaves it open.

        An empty field leaves `and` open unless another test fails, and `or` unless another test holds.

        Raises:
            DataError: a column is absent, or one that is compared with a number or a date holds something else.
        """
        return self.root.holds(table)

    def absent_values(self, table: Table) -> list[tuple[str, str]]:
        """The columns and values that ==, !=, in and not in compare where no row has the value: probably misspelt."""
        return list(dict.fromkeys((test.column, value) for test in _tests(self.root) for value in test.absent(table)))


def parse_rule(text: str) -> Rule:
    """The rule that `text` states.

    Raises:
        DataError: `text` is not a rule; the message names the operators.

    Example:
        >>> parse_rule("rating >= 4 and (action in [buy, 'add to cart'] or price < 2)").columns
        ['rating', 'action', 'price']
    """
    parser = _Parser(text)
    root = parser.rule()
    if parser.token is not None:
        raise parser.fault(f"'{parser.token}' is not expected after '{parser.before()}'")
    return Rule(text, root)


def single_threshold(rule: Rule) -> tuple[str, str, float] | None:
    """The column, the operator and the number of a rule that is one comparison by >=, >, <= or <; None of another.

    >>> single_threshold(parse_rule("rating >= 4")), single_threshold(parse_rule("rating == 4"))
    (('rating', '>=', 4.0), None)
    """
    test = rule.root
    if not isinstance(test, _Test) or test.kind != "number" or test.compare not in _ORDER:
        return None
    return test.column, test.compare, float(test.values[0])


def only_column(text: str) -> str | None:
    """The column if `text` is the name of one, in quotes or not, and None if it is a rule.

    >>> only_column("clicked"), only_column("'made in'"), only_column("clicked = 1")
    ('clicked', 'made in', None)
    """
    parser = _Parser(text)
    if parser.kind in (None, "sign"):
        return None
    name = parser.advance()
    return name if parser.token is None else None


def label_columns(label: str) -> list[str]:
    """The column that a label names, or those that its rule compares.

    Raises:
        DataError: the label is neither a column nor a rule.
    """
    column = only_column(label)
    return parse_rule(label).columns if column is None else [column]


def describe_values(tables: Iterable[Table], column: str, most: int = 10) -> str:
    """The most frequent values of a column of tables, with counts, for messages: `view (90), buy (7) and 3 more`."""
    counts: Counter[str] = Counter()
    for table in tables:
        for pair in table.strings(column).drop_null().value_counts():
            counts[pair["values"].as_py()] += pair["counts"].as_py()
    shown = ", ".join(f"{value[:40]} ({count})" for value, count in counts.most_common(most))
    return f"{shown or 'none'}{f' and {len(counts) - most} more' if len(counts) > most else ''}"


def _moments(table: Table, name: str) -> np.ndarray:
    """`[N]` float64: the seconds since 1970 of a column of dates; NaN where it is empty."""
    column = table.strings(name)
    encoded = column.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    seconds = [_moment(value) for value in encoded.dictionary.to_pylist()]
    wrong = [place for place, value in enumerate(seconds) if value is None]
    if wrong:
        row = pc.index(encoded.indices, wrong[0]).as_py()
        value = encoded.dictionary[wrong[0]].as_py()[:40]
        raise table.fault(row, f"'{name}' is '{value}', no date such as 2024-01-31; compare numbers with a number")
    return np.array([*seconds, np.nan])[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)]


def _moment(text: str) -> float | None:
    """The seconds since 1970 of a date and time by ISO 8601, in UTC unless it names a zone; None of another text."""
    try:
        moment = datetime.datetime.fromisoformat(re.sub(r" ?(UTC|GMT)$", "Z", text.strip()))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


class _Parser:
    """Parses by recursive descent; `kind` and `token` are those of the next token, None at the end."""

    def __init__(self, text: str) -> None:
        self._text, self._end, self.token = text, 0, None
        self.advance()

    def advance(self) -> str | None:
        """Goes on behind the next token, and returns it."""
        token, self._start = self.token, self._end
        match = _TOKEN.match(self._text, self._start)
        if match is None and (rest := self._text[self._start :].strip()):
            raise self.fault(f"'{rest[:40]}' is not understood; is a quote not closed?")
        self.kind, self._end = (match.lastgroup, match.end()) if match else (None, self._start)
        self.token = match and match[self.kind]
        return token

    def fault(self, what: str) -> DataError:
        return DataError(f"rule '{self._text}': {what}; the operators are {OPERATORS}")

    def before(self) -> str:
        return self._text[: self._start].strip()

    def _expected(self, what: str) -> DataError:
        before = self.before()
        return self.fault(f"expected {what} " + (f"after '{before}'" if before else "at the start"))

    def _takes(self, *signs: str) -> str | None:
        """Returns the next token and goes on behind it if it is one of these signs and keywords."""
        return self.advance() if self.kind == "sign" and self.token in signs else None

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._expected(f"'{sign}'")

    def rule(self, depth: int = 0) -> _Test | _Joined:
        if depth > _MAX_DEPTH:
            raise self.fault(f"more than {_MAX_DEPTH} parentheses are open")
        return self._joined("or", lambda: self._joined("and", lambda: self._test(depth)))

    def _joined(self, word: str, part: Callable[[], _Test | _Joined]) -> _Test | _Joined:
        parts = [part()]
        while self._takes(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else _Joined(word, tuple(parts))

    def _test(self, depth: int) -> _Test | _Joined:
        negated = self._takes("not")
        if negated or (self.kind, self.token) == ("sign", "("):
            self._expect("(")
            inner = self.rule(depth + 1)
            self._expect(")")
            return _Joined("not", (inner,)) if negated else inner
        column, _ = self.operand("a column")
        compare = self._takes(*_COMPARE, "in", "not", "=")
        if compare is None or compare == "=":
            raise self.fault("'=' is not an operator") if compare else self._expected("an operator")
        if compare == "not":
            self._expect("in")
            compare = "not in"
        if compare in _COMPARE:
            values = [self.operand("a value")]
        else:
            self._expect("[")
            values = [self.operand("a value")]
            while self._takes(","):
                values.append(self.operand("a value"))
            self._expect("]")
        kind = self._kind(compare, values)
        return _Test(column, compare, tuple(text_of(v) or "" if kind == "text" else v for v, _ in values), kind)

    def _kind(self, compare: str, values: list[tuple[str, bool]]) -> str:
        if all(_NUMBER.fullmatch(value) and not quoted for value, quoted in values):
            return "number"
        if compare not in _ORDER:
            return "text"
        value = values[0][0]
        if _DATE.fullmatch(value) and _moment(value) is not None:
            return "date"
        raise self.fault(f"'{value}' is neither a number nor a date; compare it with ==, != or in")

    def operand(self, what: str) -> tuple[str, bool]:
        """Returns a column or a value, and whether it is in quotes."""
        if self.kind in (None, "sign"):
            raise self._expected(what)
        quoted = self.kind != "word"
        return self.advance(), quoted
