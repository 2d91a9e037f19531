"""Text of any script in a picture: fonts of this machine that have its characters, else their transliteration."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from anyascii import anyascii
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

#: matplotlib's own font, which every installation has.
DEFAULT = "DejaVu Sans"
#: Fonts beyond the default one for a picture; more would take longer to search and look uneven.
_MOST = 3
#: Fonts that have every code point but draw none of them; matplotlib ships one.
_BLANK = ("Last Resort", "LastResort", "Adobe Blank")
#: Among fonts with as many of the characters, those whose names begin like this come first.
_PREFERRED = ("Noto Sans", "Source Han Sans", "WenQuanYi", "PingFang", "Microsoft YaHei", "SimHei")


@dataclass(frozen=True)
class Fonts:
    """The fonts for a picture's texts.

    Args:
        families: for matplotlib's `family`, which takes each character from the first font that has it.
        known: code points that one of them has.
    """

    families: list[str]
    known: frozenset[int]

    def legible(self, text: str) -> str:
        """`text` on one line, with characters that no font has transliterated to ASCII.

        >>> Fonts([DEFAULT], frozenset(map(ord, "Tea ("))).legible("Tea (\u8336)")
        'Tea (Cha)'
        """
        return "".join(c if ord(c) in self.known else anyascii(c) or "?" for c in " ".join(text.split()))


def find_fonts(texts: Iterable[str]) -> Fonts:
    """The default font and, for the characters that it lacks, up to three others of this machine."""
    wanted = {ord(c) for text in texts for c in " ".join(text.split())}
    families, known = [DEFAULT], _code_points(font_manager.findfont(DEFAULT))
    while (missing := wanted - known) and len(families) <= _MOST:
        best = max(_upright(), key=lambda font: (len(missing & _code_points(font.fname)), _rank(font)), default=None)
        if best is None or not missing & _code_points(best.fname):
            break
        families.append(best.name)
        known |= _code_points(best.fname)
    return Fonts(families, known)


def _upright() -> list[font_manager.FontEntry]:
    fonts = font_manager.fontManager.ttflist
    return [font for font in fonts if font.style == "normal" and not font.name.startswith(_BLANK)]


def _rank(font: font_manager.FontEntry) -> tuple[bool, bool]:
    return font.name.startswith(_PREFERRED), font.weight in ("normal", "regular", 400)


@cache
def _code_points(path: str) -> frozenset[int]:
    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError, ValueError):  # a font that FreeType cannot read
        return frozenset()
