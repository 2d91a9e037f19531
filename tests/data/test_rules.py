import datetime
import itertools

import numpy as np
import pyarrow as pa
import pytest

from jfi.data import DataError
from jfi.data.io.table import SourceRows
from jfi.data.schema.rules import OPERATORS, describe_values, only_column, parse_rule

ACTION = ["view", "buy", "add to cart", None, "buy"]
STARS = [5, 4, 3, 2, None]
TABLE = pa.table({"action": ACTION, "stars": STARS, "page type": ["a", "b", "a", "b", "a"], "code": ["07"] * 5})
DAYS = ["2024-01-31 10:00:00 UTC", "2024-02-01", "2024-02-01 00:00:01.123456789", None, "2024-02-01T00:30:00+01:00"]
TABLE = TABLE.append_column("day", pa.array(DAYS))
MOMENTS = [datetime.datetime.fromisoformat(day[:10]) if day else None for day in DAYS]
TABLE = TABLE.append_column("moment", pa.array(MOMENTS, pa.timestamp("us")))


def table() -> SourceRows:
    return SourceRows("r.csv", TABLE, TABLE.column_names, lambda row: row + 2)


NAN = float("nan")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("action == buy", [0, 1, 0, NAN, 1]),
        ("action != buy", [1, 0, 1, NAN, 0]),
        ("action == add to cart", [0, 0, 1, NAN, 0]),
        ("action=='add to cart'", [0, 0, 1, NAN, 0]),
        ('action in [buy, "add to cart"]', [0, 1, 1, NAN, 1]),
        ("action not in [buy, add to cart]", [1, 0, 0, NAN, 0]),
        ("stars >= 4", [1, 1, 0, 0, NAN]),
        ("stars<=3", [0, 0, 1, 1, NAN]),
        ("stars > 4", [1, 0, 0, 0, NAN]),
        ("stars < 3.0", [0, 0, 0, 1, NAN]),
        ("stars == 4.0", [0, 1, 0, 0, NAN]),
        ("stars != 4", [1, 0, 1, 1, NAN]),
        ("stars in [3, 4e0]", [0, 1, 1, 0, NAN]),
        ("stars not in [3, 4]", [1, 0, 0, 1, NAN]),
        ("stars == '4'", [0, 1, 0, 0, NAN]),
        ("code == 7", [1] * 5),
        ("code == '7'", [0] * 5),
        ("page type == a", [1, 0, 1, 0, 1]),
        ("'page type' == a and stars >= 4", [1, 0, 0, 0, NAN]),
        # An empty field leaves a rule open unless the other test decides it.
        ("action == buy and stars >= 4", [0, 1, 0, 0, NAN]),
        ("action == buy or stars >= 4", [1, 1, 0, NAN, 1]),
        # `and` binds first.
        ("action == view or action == buy and stars == 4", [1, 1, 0, NAN, NAN]),
        ("(action == view or action == buy) and stars == 4", [0, 1, 0, 0, NAN]),
        ("not (stars >= 4)", [0, 0, 1, 1, NAN]),
        ("not (action == buy and stars >= 4)", [1, 0, 1, 1, NAN]),
        ("not (not (stars >= 4))", [1, 1, 0, 0, NAN]),
        ("action == buy and not (stars >= 4) or code == 8", [0, 0, 0, NAN, NAN]),
        ("not(action in [buy])", [1, 0, 1, NAN, 0]),
        # Dates are in UTC unless they name a zone, in the rule and in the column.
        ("day >= 2024-02-01", [0, 1, 1, NAN, 0]),
        ("day > '2024-02-01'", [0, 0, 1, NAN, 0]),
        ("day < 2024-02-01 00:00:01", [1, 1, 0, NAN, 1]),
        ("day <= 2024-01-31T23:30Z", [1, 0, 0, NAN, 1]),
        ("moment >= 2024-02-01", [0, 1, 1, NAN, 1]),
        ("moment > 2024-02-01", [0, 0, 0, NAN, 0]),
        ("day == 2024-02-01", [0, 1, 0, NAN, 0]),
    ],
)
def test_rules_hold(rule, expected):
    held = parse_rule(rule).holds(table())
    assert held.dtype == np.float32
    np.testing.assert_array_equal(held, np.array(expected, np.float32))


def test_numbers_are_no_dates():
    with pytest.raises(
        DataError, match=r"^r\.csv:2: 'stars' is '5', no date such as 2024-01-31; compare numbers with a"
    ):
        parse_rule("stars >= 2024-01-31").holds(table())


def test_and_and_or_follow_three_valued_logic():
    values = {"1": 1.0, "0": 0.0, "": NAN}
    rows = list(itertools.product(values, repeat=3))
    data = pa.table({name: [row[i] or None for row in rows] for i, name in enumerate("abc")})
    made = SourceRows("t", data, data.column_names, lambda row: row)
    both = parse_rule("a == 1 and b == 1 and c == 1").holds(made)
    either = parse_rule("a == 1 or b == 1 or c == 1").holds(made)
    for row, all_hold, any_holds in zip(rows, both, either, strict=True):
        expected = 0.0 if "0" in row else NAN if "" in row else 1.0
        np.testing.assert_array_equal(all_hold, expected)
        expected = 1.0 if "1" in row else NAN if "" in row else 0.0
        np.testing.assert_array_equal(any_holds, expected)


def test_a_rule_lists_its_columns_once():
    assert parse_rule("a == 1 and (b > 2 or a < 0) and 'c d' in [x]").columns == ["a", "b", "c d"]


@pytest.mark.parametrize(
    ("text", "column"),
    [("clicked", "clicked"), ("is clicked", "is clicked"), ("'a and b'", "a and b"), ("a == b", None), ("a = b", None)],
)
def test_a_name_alone_is_a_column(text, column):
    assert only_column(text) == column


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("action = buy", "expected an operator after 'action'"),
        ("action in buy", "expected '[' after 'action in'"),
        ("action in [buy", "expected ']' after 'action in [buy'"),
        ("action in []", "expected a value after 'action in ['"),
        ("action == ", "expected a value after 'action =='"),
        ("== buy", "expected a column at the start"),
        ("", "expected a column at the start"),
        ("action", "expected an operator after 'action'"),
        ("action not buy", "expected 'in' after 'action not'"),
        ("(stars > 4", "expected ')' after '(stars > 4'"),
        ("stars > 4)", "expected end of text after 'stars > 4'"),
        ("stars > 4 and", "expected a column after 'stars > 4 and'"),
        ("stars > 4 & action == buy", "'4 & action' is neither a number nor a date"),
        ("stars > four", "'four' is neither a number nor a date; compare it with ==, != or in"),
        ("not stars > 4", "expected '(' after 'not'"),
        ("day > 2024-02-30", "'2024-02-30' is neither a number nor a date"),
        ("not (" * 2000 + "a == 1" + ")" * 2000, "too many parentheses are open"),
        ("stars > '4'", "'4' is neither a number nor a date; compare it with ==, != or in"),
        ("action == 'buy", "expected a value after 'action =='"),
        ("(" * 2000 + "a == 1" + ")" * 2000, "too many parentheses are open"),
        ("__import__('os').system('id') == 0", "expected an operator after '__import__'"),
    ],
)
def test_a_wrong_rule_names_the_operators(rule, expected):
    with pytest.raises(DataError) as caught:
        parse_rule(rule)
    message = str(caught.value)
    assert expected in message
    assert message.endswith(f"; the operators are {OPERATORS}")


def test_values_are_described_with_their_counts():
    assert describe_values([table()], "action") == "values of 'action': buy (2), view (1), add to cart (1)"
    data = pa.table({"n": [str(i % 12) for i in range(50)]})
    text = describe_values([SourceRows("t", data, ["n"], lambda row: row)], "n")
    assert text.startswith("values of 'n': 0 (5), 1 (5), 2 (4)")
    assert text.endswith(" and 2 more")
