"""torch.optim's and TorchRec's own steps of some rows of a table."""

import torch
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jfi.tables.step_rows import RowOptimizer

CLASSES = {
    "sgd": (torch.optim.SGD, ()),
    "adagrad": (torch.optim.Adagrad, ("sum",)),
    "rowwise_adagrad": (RowWiseAdagrad, ("sum",)),
    "adam": (torch.optim.Adam, ("exp_avg", "exp_avg_sq")),
    "adamw": (torch.optim.AdamW, ("exp_avg", "exp_avg_sq")),
}


def states_of(name: str, table: Tensor, average: bool = False, decay: bool = False) -> tuple[Tensor, ...]:
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    shapes = [table.shape[:1] if name == "rowwise_adagrad" else table.shape for _ in CLASSES[name][1]]
    states = [torch.zeros(shape, dtype=dtype, device=table.device) for shape in shapes]
    if average:
        states.append(table.to(dtype, copy=True))
    if average or decay:
        states.append(torch.zeros(len(table), dtype=torch.int32, device=table.device))
    return tuple(states)


def torch_step(optimizer: RowOptimizer, table: Tensor, states: tuple, rows: Tensor, grad: Tensor, lr: float, t: int):
    """torch's own step of some rows of a table, in float64, and the penalty of the steps since their last one."""
    kind, names = CLASSES[optimizer.name]
    parameter = nn.Parameter(table[rows])
    parameter.grad = grad
    options = {"lr": lr, "weight_decay": 0.0}
    if optimizer.name != "sgd":
        options["eps"] = optimizer.eps
    if "adam" in optimizer.name:
        options["betas"] = (optimizer.beta1, optimizer.beta2)
    own = kind([parameter], **options)
    shape = (-1, 1) if optimizer.name == "rowwise_adagrad" else table[rows].shape
    if names:
        values = {name: state[rows].view(shape) for name, state in zip(names, states, strict=False)}
        own.state[parameter] = {"step": torch.tensor(float(t - 1)), **values}
    own.step()
    table[rows] = parameter.detach()
    for name, state in zip(names, states, strict=False):
        state[rows] = own.state[parameter][name].view(state[rows].shape)
    if optimizer.weight_decay:
        at, root = states[-1][rows], torch.ones(())
        if "adagrad" in optimizer.name:
            root = states[0][rows].view(shape).sqrt() + optimizer.eps
        elif optimizer.name == "adam":
            root = (states[1][rows] / (1 - optimizer.beta2**t)).sqrt() + optimizer.eps
        missed = torch.where(at == 0, 1, t - at).unsqueeze(1)
        root = torch.where(root == optimizer.eps, torch.inf, root)  # of gradients that have always been 0
        table[rows] /= 1 + lr * optimizer.weight_decay * missed / root
        states[-1][rows] = t
