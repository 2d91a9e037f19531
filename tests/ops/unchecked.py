"""Calls as on a GPU, where ids are not read before they are used: a CPU refuses those outside of their tables."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

#: Modules that choose an implementation for an operator.
_CHOOSE = [
    "ops.target_attention",
    "ops.digit_attention",
    "ops.jagged_attention",
    "tables.gather_rows",
    "tables.step_rows",
]
#: Modules that ask whether a batch may be read.
_FREE = ("jfi.modules.validation", "jfi.modules.semantic_id_embedding")


@contextmanager
def as_on_a_gpu(device: torch.device, kernels: bool = True) -> Iterator[None]:
    """On a CPU nothing within reads ids, and with `kernels` Triton's interpreter runs them; a GPU does so by itself."""
    with pytest.MonkeyPatch.context() as patched:
        if device.type == "cpu":
            patched.setattr("jfi.utils.context._READABLE", ())
            for name in _FREE:
                patched.setattr(importlib.import_module(name), "may_read", lambda x: False)
            for name in _CHOOSE if kernels else ():
                module = importlib.import_module(f"jfi.{name}")
                check = module.check_impl

                def chosen(impl: str, like: torch.Tensor, check=check) -> str:
                    return check("triton" if impl == "auto" else impl, like)

                patched.setattr(module, "check_impl", chosen)
            for name in ("ops.absorbed_target_attention", "tables.gather_rows") if kernels else ():
                patched.setattr(importlib.import_module(f"jfi.{name}"), "default_impl", lambda like: "triton")
        yield
