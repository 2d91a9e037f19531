"""Rules over the columns of a table, such as `rating >= 4 and action in [buy, cart]`.

    rule    = term {"or" term}
    term    = test {"and" test}
    test    = "(" rule ")" | column compare value | column ["not"] "in" "[" value {"," value} "]"
    compare = "==" | "!=" | ">=" | "<=" | ">" | "<"

A column or value is one or more words, or any text in quotes. A value without quotes that is a number is compared with
the column's numbers, every other one with its text. Rules are parsed here and never evaluated as Python.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.errors import DataError
from jfi.data.schema.codes import Codes
from jfi.utils.encoding import text_of

OPERATORS = "==, !=, >=, <=, >, <, in [...], not in [...], and, or"

_TOKEN = re.compile(
    r"""\s*(?: (?P<sign> ==|!=|>=|<=|>|<|=|[()\[\],] )
             | "(?P<double> [^"]*)" | '(?P<single> [^']*)'
             | (?P<word> [^\s()\[\],<>='"!] (?: [^\s()\[\],<>=!] | !(?!=) )* ) )""",
    re.VERBOSE,
)
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_KEYWORDS = ("and", "or", "in", "not")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MAX_DEPTH = 50


class _Columns(Protocol):
    """The part of `jfi.data.io.table.Table` that a rule reads."""

    def __len__(self) -> int: ...
    def strings(self, name: str) -> pa.Array: ...
    def numbers(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Rule:
    """A parsed rule.

    Args:
        text: the rule as written.
        columns: the columns that it reads, in the order in which the rule names them.
        root: the tree of its tests.
    """

    text: str
    columns: list[str]
    root: "_Test | _Joined"

    def holds(self, table: _Columns) -> np.ndarray:
        """`[N]` float32: 1 where the rule holds, 0 where not, NaN where an empty field leaves it open.

        An empty field leaves `and` open unless another test fails, and `or` unless another test holds.

        Raises:
            DataError: a column is absent, or one that is compared with a number holds something else.
        """
        return self.root.holds(table)

    def absent_values(self, table: _Columns) -> list[tuple[str, str]]:
        """The columns and values that ==, !=, in and not in compare where no row has the value: probably misspelt."""
        return list(dict.fromkeys(self.root.absent_values(table)))

    def text_columns(self) -> list[str]:
        """The columns whose text the rule compares."""
        return list(dict.fromkeys(self.root.columns(numeric=False)))


@dataclass(frozen=True)
class _Test:
    column: str
    compare: str
    values: list[str]
    numeric: bool

    def columns(self, numeric: bool = True) -> Iterator[str]:
        """The columns that it reads; without `numeric` only those whose text it compares."""
        if numeric or not self.numeric:
            yield self.column

    def holds(self, table: _Columns) -> np.ndarray:
        if self.numeric:
            column = table.numbers(self.column)
            empty = np.isnan(column)
            numbers = [float(value) for value in self.values]
            if self.compare in _COMPARE:
                hit = _COMPARE[self.compare](column, numbers[0])
            else:
                hit = np.isin(column, numbers, invert=self.compare == "not in")
        else:
            column = table.strings(self.column)
            empty = column.is_null().to_numpy(zero_copy_only=False)
            hit = pc.is_in(column, value_set=pa.array(self.values, column.type)).to_numpy(zero_copy_only=False)
            if self.compare in ("!=", "not in"):
                hit = ~hit
        return np.where(empty, np.float32("nan"), hit.astype(np.float32))

    def absent_values(self, table: _Columns) -> Iterator[tuple[str, str]]:
        if self.compare in (">=", "<=", ">", "<"):
            return
        if self.numeric:
            found = np.isin([float(value) for value in self.values], table.numbers(self.column))
        else:
            column = table.strings(self.column)
            found = pc.is_in(pa.array(self.values, column.type), value_set=column.unique()).to_numpy(False)
        yield from ((self.column, value) for value, known in zip(self.values, found, strict=True) if not known)


@dataclass(frozen=True)
class _Joined:
    word: str
    parts: list["_Test | _Joined"]

    def columns(self, numeric: bool = True) -> Iterator[str]:
        for part in self.parts:
            yield from part.columns(numeric)

    def holds(self, table: _Columns) -> np.ndarray:
        # fmin and fmax skip a NaN, which remains where it can still decide.
        skip, decided = (np.fmin, 0.0) if self.word == "and" else (np.fmax, 1.0)
        result = self.parts[0].holds(table)
        for part in self.parts[1:]:
            other = part.holds(table)
            known = skip(result, other)
            result = np.where((np.isnan(result) | np.isnan(other)) & (known != decided), np.float32("nan"), known)
        return result

    def absent_values(self, table: _Columns) -> Iterator[tuple[str, str]]:
        for part in self.parts:
            yield from part.absent_values(table)


def parse_rule(text: str) -> Rule:
    """The rule that `text` states.

    Raises:
        DataError: `text` is not a rule; the message names the operators.

    Example:
        >>> parse_rule("rating >= 4 and (action in [buy, 'add to cart'] or price < 2)").columns
        ['rating', 'action', 'price']
    """
    parser = _Parser(text)
    root = parser.rule(depth=0)
    if parser.token is not None:
        raise parser.fault(f"'{parser.token.text}' is not expected after '{parser.before()}'")
    return Rule(text, list(dict.fromkeys(root.columns())), root)


def single_threshold(rule: Rule) -> tuple[str, str, float] | None:
    """The column, the operator and the number of a rule that is one comparison by >=, >, <= or <; None of another.

    >>> single_threshold(parse_rule("rating >= 4")), single_threshold(parse_rule("rating == 4"))
    (('rating', '>=', 4.0), None)
    """
    test = rule.root
    if not isinstance(test, _Test) or not test.numeric or test.compare not in (">=", ">", "<=", "<"):
        return None
    return test.column, test.compare, float(test.values[0])


def only_column(text: str) -> str | None:
    """The column if `text` is the name of one, in quotes or not, and None if it is a rule.

    >>> only_column("clicked"), only_column("'made in'"), only_column("clicked = 1")
    ('clicked', 'made in', None)
    """
    parser = _Parser(text)
    if parser.token is None or parser.token.kind not in ("word", "quoted"):
        return None
    name = parser.operand("a column")
    return name.text if parser.token is None else None


def describe_values(tables: Iterable[_Columns], column: str, most: int = 10) -> str:
    """The most frequent values of a column of tables, with counts, for messages: `view (90), buy (7) and 3 more`."""
    codes, counts = Codes(), np.zeros(0, np.int64)
    for table in tables:
        found = codes.encode(table.strings(column).drop_null())
        more = np.bincount(found, minlength=len(codes.values))
        more[: len(counts)] += counts
        counts = more
    values = codes.values
    order = np.argsort(-counts, kind="stable")
    shown = ", ".join(f"{values[int(i)].as_py()[:40]} ({counts[i]})" for i in order[:most])
    return f"{shown or 'none'}{f' and {len(order) - most} more' if len(order) > most else ''}"


@dataclass(frozen=True)
class _Token:
    kind: str  # sign, word, quoted
    text: str
    start: int
    end: int


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._position = text, 0
        self.token: _Token | None = None
        self._advance()

    def _advance(self) -> None:
        rest = self._text[self._position :]
        if not rest.strip():
            self.token = None
            return
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            raise self.fault(f"'{rest.strip()[:40]}' is not understood; is a quote not closed?")
        group = match.lastgroup
        kind = "quoted" if group in ("double", "single") else group
        self.token = _Token(kind, match[group], match.start(group), match.end())
        self._position = match.end()

    def before(self) -> str:
        return self._text[: self.token.start if self.token else None].strip()

    def fault(self, what: str) -> DataError:
        return DataError(f"rule '{self._text}': {what}; the operators are {OPERATORS}")

    def _is(self, *texts: str) -> bool:
        return self.token is not None and self.token.kind != "quoted" and self.token.text in texts

    def _expect(self, text: str) -> None:
        if not self._is(text):
            raise self.fault(f"expected '{text}' {self._place()}")
        self._advance()

    def _place(self) -> str:
        before = self.before()
        return f"after '{before}'" if before else "at the start"

    def rule(self, depth: int) -> _Test | _Joined:
        if depth > _MAX_DEPTH:
            raise self.fault(f"more than {_MAX_DEPTH} parentheses are open")
        return self._joined("or", lambda: self._joined("and", lambda: self._test(depth)))

    def _joined(self, word: str, part: Callable[[], _Test | _Joined]) -> _Test | _Joined:
        parts = [part()]
        while self._is(word):
            self._advance()
            parts.append(part())
        return parts[0] if len(parts) == 1 else _Joined(word, parts)

    def _test(self, depth: int) -> _Test | _Joined:
        if self._is("("):
            self._advance()
            inner = self.rule(depth + 1)
            self._expect(")")
            return inner
        column = self.operand("a column")
        if self._is(*_COMPARE):
            compare = self.token.text
            self._advance()
            values = [self.operand("a value")]
        elif self._is("in", "not"):
            compare = "in"
            if self._is("not"):
                self._advance()
                compare = "not in"
            self._expect("in")
            values = self._list()
        elif self._is("="):
            raise self.fault("'=' is not an operator")
        else:
            raise self.fault(f"expected an operator {self._place()}")
        numeric = all(value.kind == "word" and _NUMBER.fullmatch(value.text) for value in values)
        if not numeric and compare in (">=", "<=", ">", "<"):
            raise self.fault(f"'{values[0].text}' is not a number; compare it with ==, != or in")
        texts = [value.text if numeric else text_of(value.text) or "" for value in values]
        return _Test(column.text, compare, texts, numeric)

    def _list(self) -> list[_Token]:
        self._expect("[")
        values = [self.operand("a value")]
        while self._is(","):
            self._advance()
            values.append(self.operand("a value"))
        self._expect("]")
        return values

    def operand(self, what: str) -> _Token:
        """A quoted text, or words up to the next sign or keyword, with the spaces between them."""
        first = self.token
        if first is None or first.kind == "sign" or self._is(*_KEYWORDS):
            raise self.fault(f"expected {what} {self._place()}")
        last = first
        self._advance()
        if first.kind == "quoted":
            return first
        while self.token is not None and self.token.kind == "word" and not self._is(*_KEYWORDS):
            last = self.token
            self._advance()
        return _Token("word", self._text[first.start : last.end], first.start, last.end)
