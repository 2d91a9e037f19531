"""jfi: sequence features for recommendation models, without padding.

``jfi.ops`` and ``jfi.semantic_ids`` need PyTorch alone.  ``jfi.modules``, ``jfi.models``, ``jfi.data`` and
``jfi.training`` need TorchRec; they are imported on first use, so ``import jfi.ops`` works where TorchRec is absent.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "AttentionPooling": "jfi.models",
    "CapturedStep": "jfi.cuda_graphs",
    "FusedEmbeddingBagCollection": "jfi.modules",
    "FusedEmbeddingCollection": "jfi.modules",
    "JaggedEncoder": "jfi.modules",
    "JaggedFeatureInteraction": "jfi.modules",
    "KeyBias": "jfi.modules",
    "PositionBias": "jfi.modules",
    "SemanticIDEmbedding": "jfi.modules",
    "SequenceFeatureConfig": "jfi.modules",
    "TableRows": "jfi.modules",
    "TimeBias": "jfi.modules",
    "WeightBias": "jfi.modules",
    "SequenceDLRM": "jfi.models",
    "load_run": "jfi.training.run.saved_run",
}

__all__ = ["__version__", "ops", *_LAZY]


def __getattr__(name: str):
    if name == "ops":
        return importlib.import_module("jfi.ops")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jfi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
