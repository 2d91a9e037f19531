"""A clear error for torch.jit.script, whose own would point at an annotation that TorchScript cannot read."""

from collections.abc import Callable


def not_scriptable(name: str) -> Callable:
    """Returns a `__prepare_scriptable__` for a module or function; torch.jit.script calls it before it compiles."""

    def refuse(*_: object) -> None:
        raise NotImplementedError(
            f"torch.jit.script does not support {name}: use torch.export, torch.compile or torch.jit.trace"
        )

    return refuse
