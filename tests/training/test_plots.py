from types import SimpleNamespace

from jfi.data.schema import Encodings
from jfi.encoding import Vocabulary
from jfi.training.plots import _title, _value


def test_values_are_shown_as_the_table_has_them():
    encodings = Encodings({"item": Vocabulary(["i7", "i9"]), "rating": Vocabulary(["5"])})
    schema = SimpleNamespace(encodings=encodings, titles=None, item_key="item")
    assert _title(schema, 2) == "item i9"
    assert _title(schema, 0) == "item #0"  # not seen in training
    assert _value(schema, "rating", 1) == "5"
    assert _value(schema, "price", 3) == "#3"  # a quantile
