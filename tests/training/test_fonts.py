"""Which fonts a picture's texts get."""

from types import SimpleNamespace

import pytest

from jfi.training import fonts


@pytest.fixture
def installed(monkeypatch):
    """A function that lets fonts be the only ones beyond the default: by name the characters that one has."""

    def install(**characters: str) -> None:
        entries = [SimpleNamespace(name=name, fname=name, style="normal", weight=400) for name in characters]
        points = {name: frozenset(map(ord, text)) for name, text in characters.items()}
        monkeypatch.setattr(fonts.font_manager.fontManager, "ttflist", entries)
        monkeypatch.setattr(fonts.font_manager, "findfont", lambda name: "default")
        monkeypatch.setattr(fonts, "_code_points", lambda path: points.get(path, frozenset(range(128))))

    return install


def test_a_font_is_added_for_what_the_others_lack_up_to_three(installed):
    installed(a="\u8336", b="\u8336\u5496", c="\u0e01", d="\u0e02", e="\u0e03")
    assert fonts.find_fonts(["Tea"]).families == [fonts.DEFAULT]
    assert fonts.find_fonts(["\u8336"]).families == [fonts.DEFAULT, "a"]
    assert fonts.find_fonts(["\u8336 \u5496"]).families == [fonts.DEFAULT, "b"]
    found = fonts.find_fonts(["\u8336\u5496", "\u0e01\u0e02\u0e03"])
    assert found.families == [fonts.DEFAULT, "b", "c", "d"]
    assert found.legible("x\u8336\u0e02\n y") == "x\u8336\u0e02 y"
    assert found.legible("\u0e03") not in ("", "\u0e03")
    assert fonts.find_fonts(["\uffff"]).families == [fonts.DEFAULT]
