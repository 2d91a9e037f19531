"""Modules by feature, whose names may be those of attributes of a module, such as "type", "items" or "training"."""

from types import SimpleNamespace

from torch import nn


class FeatureModules(nn.ModuleDict):
    """A module a feature: `modules["taste"]`, and `modules.taste` unless that is an attribute of nn.ModuleDict."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(modules)  # add_module() refuses names of attributes of nn.ModuleDict

    def __setattr__(self, name: str, value: object) -> None:
        # nn.Module would take the name of a feature for its module: train() could not set `training`.
        if name not in self.__dict__.get("_modules", ()):
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module):
            self._modules[name] = value
        else:
            object.__setattr__(self, name, value)

    # torch.distributed.checkpoint follows a key of the state_dict by getattr(), unless the module says by
    # `_fqn_modifiers` on which of its attributes to look a name up.
    def _fqn_modifiers(self) -> dict[str, str]:
        return {name: "_hidden" for name in self._modules if name in self.__dict__ or hasattr(type(self), name)}

    @property
    def _hidden(self) -> SimpleNamespace:
        """The modules of features whose names are attributes of nn.ModuleDict."""
        return SimpleNamespace(**{name: self[name] for name in self._fqn_modifiers()})
