from types import SimpleNamespace

from jfi.training.pictures import _title, _value


def test_values_are_shown_as_the_table_has_them():
    dataset = SimpleNamespace(
        learnt=SimpleNamespace(vocabularies={"item": ["i7", "i9"], "rating": [5]}), titles=None, item_key="item"
    )
    assert _title(dataset, 2) == "item i9"
    assert _title(dataset, 0) == "item #0"  # not seen in training
    assert _value(dataset, "rating", 1) == "5"
    assert _value(dataset, "price", 3) == "#3"  # numbers cut to ids
