"""Serving: a trained SequenceDLRM as one folder, the artifact, and a server that answers requests from it.

`dataset_schema`, `export`, `model` and `attention` write an artifact; they need the dataset or the model. `scorer`
and `server` and the modules that these import read one. They import neither models nor training code, and of jfi only
this package and `jfi.utils`, which needs no torch there. `export_module` compiles a module of the user's own.
"""

__all__ = ["export_module"]

#: The limit of candidates in a request, unless a command says another.
MAX_CANDIDATES = 1000


def __getattr__(name: str) -> object:
    if name == "export_module":  # imported when it is asked for, since a server needs no exporter
        from jfi.serving.own_module import export_module

        return export_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
