"""The embedding tables of a model, at any depth of its modules."""

from collections.abc import Iterator

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from jfi.utils.arguments import check_module


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields every table once, with its name in `model.named_parameters()`."""
    check_module("model", model)
    seen = set()
    for prefix, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for name, parameter in module.named_parameters(prefix):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter


def table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the weights of all tables of a model that is not sharded yet, for `apply_optimizer_in_backward`.

    TorchRec's examples pass `model.sparse_arch.parameters()`, which misses collections in other modules, such as the
    `embedding_collection` of a JaggedFeatureInteraction.

    Args:
        model: with any number of EmbeddingBagCollections and EmbeddingCollections, at any depth.

    Example:
        >>> import torch
        >>> from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> from torchrec import EmbeddingCollection, EmbeddingConfig
        >>> items = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=10, feature_names=["item"])
        >>> model = torch.nn.ModuleDict({"history": EmbeddingCollection(tables=[items])})
        >>> apply_optimizer_in_backward(torch.optim.Adagrad, table_parameters(model), {"lr": 0.05})
        >>> require_optimizer_in_backward(model)
    """
    return [parameter for _, parameter in _tables(model)]


def require_optimizer_in_backward(model: nn.Module) -> None:
    """Checks, before DistributedModelParallel, that `apply_optimizer_in_backward` has reached every table.

    DistributedModelParallel fuses the optimizer of a table into its backward pass and gives a table that has none
    TorchRec's default, SGD at a learning rate of 0.01, without a warning.

    Args:
        model: not sharded yet.

    Raises:
        ValueError: a table has no optimizer (the message names it), or all tables are sharded already.
    """
    tables = dict(_tables(model))
    if not tables:
        raise ValueError("model must hold tables that are not sharded yet, got none: check it before sharding")
    missing = [name for name, parameter in tables.items() if not hasattr(parameter, "_in_backward_optimizers")]
    if missing:
        raise ValueError(
            f"every table must have an optimizer in backward, got none for {missing}: "
            "call apply_optimizer_in_backward with table_parameters(model)"
        )
