import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_configs import data_config
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager, get_data_path
from matplotlib.figure import Figure
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.data import DataConfig, load_dataset
from jfi.data.schema.schema import Encodings
from jfi.training.config import EncoderConfig, ModelConfig
from jfi.training.model.build_model import build_model
from jfi.training.run.plots import _entropies, _title, _value, draw_attention, draw_curves
from jfi.utils.encoding import Vocabulary
from jfi.utils.figures import FONTS


def test_values_are_shown_as_the_table_has_them():
    edges = {"price": np.array([1.5, 20.0, 1000.0])}
    encodings = Encodings({"item": Vocabulary(["i7", "i9"]), "rating": Vocabulary(["5"])}, edges)
    dataset = SimpleNamespace(encodings=encodings, titles=None, item_key="item")
    assert _title(dataset, 2) == "item i9"
    assert _title(dataset, 0) == "item unknown"  # not seen in training
    assert _value(dataset, "rating", 1) == "5"
    assert [_value(dataset, "price", n) for n in (1, 2, 3, 4)] == ["< 1.5", "1.5 to 20", "20 to 1000", ">= 1000"]
    assert _value(dataset, "hashed", 3) == "#3"  # a row that several values share
    assert _value(dataset, "rating", 0) == _value(dataset, "price", 0) == "unknown"  # missing, or not seen in training


@pytest.fixture
def table(tmp_path):
    """Chinese titles with a price, and an event column with gaps and one with several values."""
    path = tmp_path / "table.csv"
    rows = [
        f"{i % 7},{i % 5},{i % 2},{1_000_000 + i * 50},{'' if i % 3 else i % 2},{'a;b' if i % 2 else 'a'},"
        f"茶叶 {i % 5} $5 to $10{' 茶' * 12 if i % 5 == 4 else ''}"
        for i in range(140)
    ]
    path.write_text("\n".join(["user_id,item_id,liked,timestamp,stars,tags,title", *rows]) + "\n", encoding="utf8")
    return data_config(
        interactions=str(path),
        label="liked",
        title="title",
        event_categorical=["stars", "tags"],
        separators={"tags": ";"},
    )


def drawn(config: DataConfig, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Draws attention.png of an untrained model; gives the texts in it, and matplotlib's warnings."""
    figures = []
    monkeypatch.setattr("jfi.training.run.plots.Figure", lambda **k: figures.append(Figure(**k)) or figures[-1])
    dataset = load_dataset(config)
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(embedding_dim=8, num_heads=2, cross_layers=0, dropout=0.0), EncoderConfig(), dataset.schema
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draw_attention(model, dataset, torch.device("cpu"), path)
    assert {axes.get_xlabel() for axes in figures[0].axes if axes.has_data()} == {"weight, mean over heads"}
    texts = [t.get_text() for axes in figures[0].axes for t in [*axes.get_yticklabels(), axes.title, axes._right_title]]
    # Files that other tests left open are closed at any time, with a warning.
    return texts, [str(w.message) for w in caught if w.category is not ResourceWarning]


def keep_shipped_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides this machine's fonts but those of matplotlib, of which one has a box for every character."""
    shipped = [font for font in font_manager.fontManager.ttflist if Path(font.fname).is_relative_to(get_data_path())]
    assert any(font.name.startswith("Last Resort") for font in shipped)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", shipped)


def test_titles_are_drawn_with_a_font_that_has_them_else_by_their_ids_without_warnings(
    table, tmp_path, monkeypatch, caplog
):
    keep_shipped_fonts(monkeypatch)
    texts, caught = drawn(table, tmp_path / "ids.png", monkeypatch)
    assert any("item_id 2" in text for text in texts), texts
    assert all(text.replace("…", "").isascii() for text in texts), texts
    add_font(tmp_path / "square.ttf", FONTS[1], "茶叶")
    texts, caught_with_font = drawn(table, tmp_path / "attention.png", monkeypatch)
    assert not caught + caught_with_font and not [r for r in caplog.records if r.name.startswith("matplotlib")]
    assert any("茶叶 2 $5 to $10" in text for text in texts), texts
    assert any("茶叶 4 $5 to $10 茶 茶 茶 茶 茶 茶 茶 茶 茶 …" in text for text in texts), texts


def add_font(path: Path, family: str, characters: str) -> None:
    """Makes matplotlib know a font that has these characters, each as a square."""
    builder = FontBuilder(1000, isTTF=True)
    names = [".notdef", *(f"uni{ord(c):04X}" for c in characters)]
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(c): f"uni{ord(c):04X}" for c in characters})
    pen = TTGlyphPen(None)
    for corner, move in zip([(0, 0), (800, 0), (800, 800), (0, 800)], [pen.moveTo] + [pen.lineTo] * 3, strict=True):
        move(corner)
    pen.closePath()
    builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    font_manager.fontManager.addfont(path)


def test_missing_event_values_are_unknown_and_empty_slots_left_out(table, tmp_path, monkeypatch):
    texts = drawn(table, tmp_path / "attention.png", monkeypatch)[0]
    events = [text for text in texts if "ago" in text]
    assert any("stars unknown" in text for text in events) and any("stars 1" in text for text in events), events
    assert not [text for text in events if "#0" in text or "tags unknown" in text]
    assert any("tags a, tags b" in text for text in events)


def test_the_entropy_of_attention_is_a_share_of_that_of_equal_weights(table, tmp_path):
    """Of two heads one has equal weights and one a single event; histories of no and one event do not count."""
    values = torch.tensor([[1.0, 1.0]] + [[0.25, 1.0]] + 3 * [[0.25, 0.0]] + 2 * [[0.5, 0.5]]).unsqueeze(1)
    weights = JaggedTensor(values, lengths=torch.tensor([1, 0, 4, 2]))
    assert _entropies(weights).tolist() == pytest.approx([0.5, 1.0])
    assert _entropies(JaggedTensor(values[:1], lengths=torch.tensor([1, 0]))).tolist() == []
    dataset = load_dataset(table)
    model = build_model(ModelConfig(embedding_dim=8, num_heads=2), EncoderConfig(), dataset.schema)
    for own in model.parameters():
        torch.nn.init.zeros_(own)
    line = draw_attention(model, dataset, torch.device("cpu"), tmp_path / "attention.png")
    assert line == "attention of test samples: 1.00 of the entropy of equal weights, mean over heads"


def test_the_axis_of_a_single_epoch_spans_more_than_its_noise(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("jfi.training.run.plots.Figure", lambda **k: figures.append(Figure(**k)) or figures[-1])
    values = {"loss": 0.61, "ne": 0.95, "auc": 0.7041, "user_auc": None}
    log = [{"split": split, "epoch": 1, "step": 10, **values} for split in ("train", "validation", "test")]
    log[2]["auc"] = 0.7043
    draw_curves(log, "auc", tmp_path / "curves.png")
    spans = [axes.get_ylim()[1] - axes.get_ylim()[0] for axes in figures[0].axes]
    assert min(spans) >= 0.02
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("monitor", "last"), [("auc", "AUC per user"), ("ndcg@10", "NDCG@10")])
def test_the_curves_show_the_metric_that_selects(tmp_path, monkeypatch, monitor, last):
    figures = []
    monkeypatch.setattr("jfi.training.run.plots.Figure", lambda **k: figures.append(Figure(**k)) or figures[-1])
    metrics = {name: 0.5 for name in ("loss", "ne", "auc", "user_auc", "ndcg@10")}
    log = [{"split": split, "epoch": 1, "step": 9, **metrics} for split in ("validation", "test")]
    draw_curves(log, monitor, tmp_path / "curves.png")
    assert [axes.get_title() for axes in figures[0].axes][1:] == ["normalized entropy", "AUC", last]


def test_the_points_of_epochs_with_different_numbers_of_steps_are_at_their_epochs(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("jfi.training.run.plots.Figure", lambda **k: figures.append(Figure(**k)) or figures[-1])
    metrics = {name: 0.5 for name in ("loss", "ne", "auc", "user_auc")}
    steps = [("train", 1, 5), ("train", 1, 10), ("validation", 1, 10), ("train", 2, 20), ("train", 2, 40)]
    steps += [("validation", 2, 40), ("test", 2, 40)]
    log = [{"split": split, "epoch": epoch, "step": step, **metrics} for split, epoch, step in steps]
    draw_curves(log, "auc", tmp_path / "curves.png")
    x = {line.get_label(): list(line.get_xdata()) for line in figures[0].axes[0].lines}
    assert x["validation"] == [1, 2]
    assert x["train"] == pytest.approx([0.5, 1, 1 + 1 / 3, 2])


def test_a_dotted_line_is_where_the_data_has_changed(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("jfi.training.run.plots.Figure", lambda **k: figures.append(Figure(**k)) or figures[-1])
    metrics = {name: 0.5 for name in ("loss", "ne", "auc", "user_auc")}
    lines = [("validation", 1, "a"), ("validation", 2, "a"), ("validation", 3, "b"), ("test", 3, "b")]
    log = [{"split": split, "epoch": epoch, "step": epoch, "data": data, **metrics} for split, epoch, data in lines]
    draw_curves(log, "auc", tmp_path / "curves.png")
    (line,) = [line for line in figures[0].axes[0].lines if line.get_label() == "data changed"]
    assert list(line.get_xdata()) == [2, 2]
