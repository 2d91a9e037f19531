"""Triton's interpreter without work whose result it drops: the same results in two fifths of the time.

When a kernel calls a function it looks through triton.language for what to replace, although the launch has replaced
it; and it computes whether each sum of integers overflows, which it asserts in debug mode alone.
"""

import dataclasses
import functools
import inspect
import os


def make_faster() -> None:
    """Changes Triton's interpreter in this process, if it has kernels run."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton

    if not triton.__version__.startswith("3.7."):  # whose names these are
        return
    from triton import language as tl
    from triton.runtime import interpreter

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope()

    @functools.cache
    def languages(function) -> tuple:
        found = (value for value in function.__globals__.values() if inspect.ismodule(value))
        return tuple(one for one in found if one in (tl, tl.core))

    def patch_once(function):
        replaced = (tl.core.tensor.__add__, *(one.load for one in languages(function)))
        return patch(function) if any(map(tl.core.is_builtin, replaced)) else scope

    # A dictionary of 18 types is made for each look-up.
    scalar, pointer = functools.cache(interpreter._get_np_dtype), interpreter._get_np_dtype(tl.pointer_type(tl.int32))
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = lambda dtype: pointer if dtype.scalar.is_ptr() else scalar(dtype.scalar)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
