"""The models that the docs show, each as a module of dense features and a KeyedJaggedTensor."""

import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from jfi import JaggedFeatureInteraction, SequenceDLRM, SequenceFeatureConfig

ROOT = Path(__file__).parents[1]
PYTHON = re.compile(r"<!-- (?:setup|check)\n(?P<hidden>.*?)-->|```python\n(?P<shown>.*?)```", re.DOTALL)
Example = tuple[nn.Module, Tensor, KeyedJaggedTensor]
TASTE = SequenceFeatureConfig("taste", ["history_item"], ["item"])


@cache
def python_of(page: str) -> list[str]:
    """The code in the order of the page; each block padded so that a traceback has the page's line numbers."""
    text, found = (ROOT / page).read_text(), []
    for match in PYTHON.finditer(text):
        group = "hidden" if match["hidden"] is not None else "shown"
        found.append("\n" * text.count("\n", 0, match.start(group)) + match[group])
    return found


class OfTensors(nn.Module):
    """A model that makes its KeyedJaggedTensor itself, as `jfi.serving.export_module` takes it."""

    def __init__(self, model: nn.Module, keys: list[str]) -> None:
        super().__init__()
        self.model, self.keys = model, keys

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return self.model(dense, KeyedJaggedTensor(self.keys, values, lengths=lengths))


class OfItems(nn.Module):
    """What a function returns of each sample's item and history, read from one table."""

    def __init__(self, tables: EmbeddingCollection, pool: nn.Module, sums=None) -> None:
        super().__init__()
        self.tables, self.pool, self.sums = tables, pool, sums

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = self.tables(ids)
        if self.sums is None:  # every sample has one item
            return self.pool(found, {"item": found["item"].values()}).values()
        return self.pool(self.sums(found["item"]), found["history_item"])


def _page(page: str, *wanted: str) -> dict:
    """The names of a page's Python up to the first of these texts, and of later blocks with one of the others.

    They are those of a module, since torch.compile reads the globals of a function by the name of its module.
    """
    module = sys.modules["docs_page"] = ModuleType("docs_page")
    names, first, later = module.__dict__, True, wanted[1:]
    for block in python_of(page):
        if first or any(text in block for text in later):
            exec(compile(block, page, "exec"), names)
        first = first and wanted[0] not in block
    return names


def _integration(name: str) -> Example:
    page = _page("docs/integration.md", "shared_logits = ", "class DIN", "def dot_attention")
    model = page[name]
    if name in ("din", "dot_attention"):
        model = OfItems(EmbeddingCollection(tables=[page["items"]]), model, page["sums"])
    return model, page["dense_features"], page["sparse_features"]


def _items() -> EmbeddingCollection:
    table = EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["item", "history_item"])
    return EmbeddingCollection(tables=[table])


def _batch() -> tuple[Tensor, KeyedJaggedTensor]:
    values, lengths = torch.randint(0, 10, (11,)), torch.tensor([1, 1, 1, 1, 1, 1, 2, 0, 3])
    return torch.rand(3, 4), KeyedJaggedTensor(["user", "item", "history_item"], values, lengths=lengths)


def _sequence_dlrm(**options: object) -> Example:
    users = EmbeddingBagConfig(name="u", embedding_dim=8, num_embeddings=10, feature_names=["user"])
    bags = EmbeddingBagCollection(tables=[users])
    return SequenceDLRM(bags, _items(), [TASTE], 4, [16, 8], [16, 1], **options), *_batch()


MODELS = {
    "one table for target and history": lambda: _integration("shared"),
    "SequenceDLRM": lambda: _sequence_dlrm(),
    "DIN": lambda: _integration("din"),
    "the layer in TorchRec's DLRM": lambda: _integration("model"),
    "TorchEasyRec's attention": lambda: _integration("dot_attention"),
    "values as targets": lambda: (OfItems(_items(), JaggedFeatureInteraction([TASTE], 8, num_heads=2)), *_batch()),
    "SequenceDLRM, sums": lambda: _sequence_dlrm(pooling="sum"),
}


def other_batch(dense: Tensor, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Five samples of one id a key, but histories of 0 to 4."""
    keys = ids.keys()
    lengths = [[4, 0, 1, 2, 0] if "history" in key else [1] * 5 for key in keys]
    lengths = torch.tensor(lengths).flatten()
    return torch.rand(5, dense.size(1)), torch.randint(0, 3, (int(lengths.sum()),)), lengths
