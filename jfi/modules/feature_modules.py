"""Modules by feature, whose names may be those of a module's own attributes, such as "type", "items" or "training"."""

from collections.abc import Iterable
from types import SimpleNamespace

from torch import nn


class FeatureNames:
    """Lets torch.distributed.checkpoint find a feature whose name is an attribute of the module.

    It follows a key of the state_dict by getattr(), unless the module says by `_fqn_modifiers` on which of its
    attributes to look a name up.
    """

    def feature_names(self) -> Iterable[str]:
        raise NotImplementedError

    def of(self, name: str) -> object:
        """What getattr() gives for a feature whose name is no attribute of the module."""
        raise NotImplementedError

    def _fqn_modifiers(self) -> dict[str, str]:
        return {name: "_hidden" for name in self.feature_names() if name in self.__dict__ or hasattr(type(self), name)}

    @property
    def _hidden(self) -> SimpleNamespace:
        """The features whose names are attributes of the module."""
        return SimpleNamespace(**{name: self.of(name) for name in self._fqn_modifiers()})


class FeatureModules(FeatureNames, nn.ModuleDict):
    """A module a feature: `modules["taste"]`, and `modules.taste` unless that is an attribute of nn.ModuleDict."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(modules)  # add_module() refuses names of nn.ModuleDict's own

    def feature_names(self) -> Iterable[str]:
        return self._modules

    def of(self, name: str) -> nn.Module:
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        # nn.Module would take the name of a feature for its module: train() could not set `training`.
        if name not in self.__dict__.get("_modules", ()):
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module):
            self._modules[name] = value
        else:
            object.__setattr__(self, name, value)
