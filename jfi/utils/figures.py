"""Pictures: PNG files that are written whole or not at all, with text in any script that has a font on this machine."""

import re
import unicodedata
import warnings
from functools import cache
from pathlib import Path

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from jfi.utils.files import writing_file

#: Each character is drawn with the first of these fonts that is installed and has it. matplotlib ships the first one.
FONTS = (
    "DejaVu Sans",
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "SimHei"),
    *("Noto Sans Devanagari", "Noto Sans Thai", "Nirmala UI", "Leelawadee UI", "Arial Unicode MS"),
)


#: Punctuation of Chinese and Japanese.
_PUNCTUATION = {
    "、": ", ",
    "。": ". ",
    "「": " (",
    "」": ") ",
    "『": " (",
    "』": ") ",
    "【": " (",
    "】": ") ",
    "ー": "-",
}
#: The sound of a letter in its Unicode name, as in HIRAGANA LETTER SMALL YA.
_SOUND = re.compile(r"(?:LETTER|SYLLABLE|VOWEL SIGN) (?:(?:SMALL|CAPITAL|FINAL) )*([A-Z]+)$")


def installed_fonts() -> list[str]:
    """Returns the names of `FONTS` that are installed, in that order."""
    installed = set(font_manager.get_font_names())
    return [name for name in FONTS if name in installed]


def in_drawable_letters(text: str) -> str:
    """Writes the characters that no installed font has in Latin letters, and keeps the others.

    Kana, Hangul and other letters become their sound, emoji and other symbols their name in brackets. A character
    without either, such as a Chinese one, becomes its code: U+8336. Marks that only change the character before
    them are left out.

    Example:
        >>> in_drawable_letters("5 €")
        '5 €'
    """
    if text.isascii():
        return text
    drawable = frozenset().union(*(_characters(font_manager.findfont(name)) for name in installed_fonts()))
    if all(ord(character) in drawable for character in text):
        return text
    parts = [(part, True) if ord(part) in drawable else _in_latin(part) for part in text]
    written = "".join(part if joins else f" {part} " for part, joins in parts)
    return re.sub(r" +(?=[,.!?)\]])|(?<=\() +", "", " ".join(written.split()))


@cache
def _characters(font: str) -> frozenset[int]:
    """The code points that a font file has."""
    return frozenset(font_manager.get_font(font).get_charmap())


def _in_latin(character: str) -> tuple[str, bool]:
    """The character in ASCII, and whether it joins its neighbours without a space."""
    if character in _PUNCTUATION:
        return _PUNCTUATION[character], True
    plain = unicodedata.normalize("NFKC", character)  # full-width letters, half-width kana
    if plain.isascii():
        return plain, True
    name, category = unicodedata.name(plain, ""), unicodedata.category(character)
    if sound := _SOUND.search(name):
        return sound[1].lower(), True
    if category in ("Mn", "Me", "Cf"):
        return "", True
    if category == "So" and name:
        return f"[{name.lower()}]", False
    return f"U+{ord(character):04X}", False


def save_figure(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Writes a figure as a PNG; a character that no font has is a box, without the warning of matplotlib for each."""
    fonts = installed_fonts()
    for text in figure.findobj(Text):
        text.set_family(fonts)
    with writing_file(path) as unfinished, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(unfinished, format="png", dpi=dpi)


def widen_axis(axes: Axes, least: float) -> None:
    """Makes the vertical axis span at least `least`, so that noise does not fill it."""
    low, high = axes.get_ylim()
    if high - low < least:
        axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)
