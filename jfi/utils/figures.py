"""Pictures: PNG files that are written whole or not at all, with text in any script that has a font on this machine."""

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


def installed_fonts() -> list[str]:
    """Returns the names of `FONTS` that are installed, in that order."""
    installed = set(font_manager.get_font_names())
    return [name for name in FONTS if name in installed]


def is_drawable(text: str) -> bool:
    """Returns whether the installed fonts have every character of a text; one that none has is drawn as a box."""
    known = frozenset().union(*(_characters(font_manager.findfont(name)) for name in installed_fonts()))
    return text.isascii() or known.issuperset(map(ord, text))


@cache
def _characters(font: str) -> frozenset[int]:
    """The code points that a font file has."""
    return frozenset(font_manager.get_font(font).get_charmap())


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
