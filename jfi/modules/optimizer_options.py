"""The optimizers of fused collections: their options, and the group of parameters that holds them."""

import math
from numbers import Real
from typing import Any

import torch
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


class ParameterGroup(dict):
    """The options of the optimizer; writing "lr" writes the tensor that the steps read."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.learning_rate = torch.tensor(float(options["lr"]))
        super().__init__(options)

    def __setitem__(self, key: str, value: object) -> None:
        if key in ("weight_decay", "eps", "betas") and value != self[key]:
            raise ValueError(f"{key} of a fused collection is given at its construction, {self[key]}; got {value}")
        super().__setitem__(key, value)
        if key == "lr":
            self.learning_rate.fill_(float(value))

    def __reduce__(self) -> tuple:
        return ParameterGroup, (dict(self),), {"learning_rate": self.learning_rate}

    def update(self, *args: object, **kwargs: object) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


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
