"""The optimizers of fused collections: their options, the group of parameters that holds them, and no GradScaler."""

import inspect
import math
from collections import UserDict
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jfi.utils.arguments import check_number, check_type, shown

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
#: By class of optimizer its name, the names of its states, and its options with their defaults.
OPTIMIZERS: dict[type, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    torch.optim.SGD: ("sgd", (), {"lr": 1e-3, "weight_decay": 0.0}),
    torch.optim.Adagrad: ("adagrad", ("sum",), {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    torch.optim.Adam: ("adam", ("exp_avg", "exp_avg_sq"), _ADAM),
    torch.optim.AdamW: ("adamw", ("exp_avg", "exp_avg_sq"), _ADAM | {"weight_decay": 1e-2}),
    RowWiseAdagrad: ("rowwise_adagrad", ("sum",), {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
}


class ParameterGroup(UserDict):
    """The options of the optimizer; writing "lr" writes the tensor that the steps read.

    Args:
        options: by name; names that a scheduler adds are kept as well.
        fixed: options that cannot change, those of the class that fused collections lack included.
    """

    def __init__(self, options: dict[str, Any], fixed: dict[str, Any]) -> None:
        self.data, self._fixed = dict(options), fixed
        self.learning_rate = torch.tensor(float(options["lr"]))

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params" or (key in self._fixed and value != self._fixed[key]):
            raise ValueError(f"{key} of a fused collection is given at its construction; only lr may be set")
        if key == "lr":  # a tensor too: what is written into it later would not be seen
            value = float(value)
            self.learning_rate.fill_(value)
        self.data[key] = value

    def copy(self) -> dict[str, Any]:
        return dict(self.data)

    def __delitem__(self, key: str) -> None:
        if key in self._fixed or key in ("lr", "params"):
            raise ValueError(f"{key} is an option of a fused collection and must stay in its group")
        del self.data[key]

    def __ior__(self, other: Mapping[str, Any]) -> "ParameterGroup":  # UserDict's writes none of its items
        self.update(other)
        return self


class ScalerCheck:
    """Refuses a GradScaler that steps any optimizer after a backward pass that has stepped fused tables.

    Tables are stepped in the backward pass, by gradients that no scaler has unscaled. Scalers are not announced before.
    """

    has_stepped = False

    @staticmethod
    def refuse(*_: object) -> None:
        raise RuntimeError(
            "a GradScaler has scaled the loss of a fused collection, whose tables the backward pass has stepped by the "
            "scaled gradient: train in bfloat16 without a GradScaler, or with enabled=False, and restart training"
        )

    @classmethod
    def before_step(cls, *_: object) -> None:
        """Looks for a scaler among the callers of an optimizer's step; a hook of all optimizers."""
        if cls.has_stepped:
            cls.has_stepped = False
            frame = inspect.currentframe()
            while frame is not None and frame.f_code is not GradScaler.step.__code__:
                frame = frame.f_back
            if frame is not None and frame.f_locals["self"].is_enabled():
                cls.refuse()


register_optimizer_step_pre_hook(ScalerCheck.before_step)


def checked_options(optimizer_type: type, options: dict[str, Any], ema_decay: float | None) -> dict[str, Any]:
    """Checks the options of an optimizer; returns them with the defaults of the others."""
    if not isinstance(optimizer_type, type) or optimizer_type not in OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in OPTIMIZERS)
        got = getattr(optimizer_type, "__name__", shown(optimizer_type))
        raise ValueError(f"optimizer_type must be one of {known}, got {got}")
    check_type("optimizer_kwargs", options, dict, "a dict of options")
    defaults = OPTIMIZERS[optimizer_type][2]
    if unknown := sorted(map(str, options.keys() - defaults.keys())):
        raise ValueError(f"optimizer_kwargs of {optimizer_type.__name__} must be of {sorted(defaults)}, got {unknown}")
    options = defaults | options
    betas = options.pop("betas", None)
    for key, value in options.items():
        check_number(f"optimizer_kwargs['{key}']", value, lambda x: 0 <= x < math.inf, "0 or more and finite")
    if betas is not None:
        is_pair = isinstance(betas, list | tuple) and len(betas) == 2 and bool not in map(type, betas)
        if not is_pair or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"optimizer_kwargs['betas'] must be two numbers in [0, 1), got {shown(betas)}")
        options["betas"] = tuple(betas)
    if ema_decay is not None:
        check_number("ema_decay", ema_decay, lambda x: 0 < x < 1, "between 0 and 1, or None")
    return options
