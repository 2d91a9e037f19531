"""The attention of all groups of features, with a state_dict that names weights by feature and not by group.

Features alike share one parameter, stacked along the first dimension. A parameter for each feature would cost 26
features 156 tensors a step to collect, to hand to autograd and to accumulate gradients in, more host time than
everything else in the layer. But which features are alike, and in what order, changes with every feature that is added:
so state_dict() has `<feature>.query_weight` and the like, each a view of the stacked parameter, and load_state_dict()
takes them. With strict=False a model with one more feature loads the weights of one without it; from the meta device
(assign=True) only the parameters whose features are all in the checkpoint move. named_parameters(),
and with it an optimizer's state, keep the stacked parameters: `0.query_weight` for group 0.
"""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from jfi import compat
from jfi.modules.feature_modules import FeatureNames
from jfi.modules.stacked_attention import StackedTargetAttention


class AttentionGroups(FeatureNames, nn.ModuleList):
    """StackedTargetAttention modules, one a group; `groups.taste.query_weight` is a view of one feature's weights.

    `groups.of(name)` has the views of any feature, also of one whose name is an attribute of a module, such as "type".
    A hook registered by `register_load_state_dict_pre_hook` of a group gets the state_dict of all groups and the prefix
    of the features' names, since no key has the group's index.
    """

    def __init__(self, groups: Iterable[StackedTargetAttention]) -> None:
        super().__init__(groups)
        self._place_of = {
            feature.name: (index, place)
            for index, group in enumerate(self)
            for place, feature in enumerate(group.features)
        }

    def feature_names(self) -> Iterable[str]:
        return self._place_of

    def of(self, name: str) -> SimpleNamespace:
        """The parameters of one feature, views of the stacked ones."""
        index, place = self._place_of[name]
        return SimpleNamespace(**{key: x[place] for key, x in self[index].stacked_parameters().items()})

    def __getattr__(self, name: str) -> object:
        return self.of(name) if name in self.__dict__.get("_place_of", ()) else super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        for group, place, name, parameter in self._parameters_by_feature():
            value = parameter[place]
            destination[f"{prefix}{group.features[place].name}.{name}"] = value if keep_vars else value.detach()

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # nn.Module calls these in the method overridden here, before it loads anything.
        for module in (self, *self):
            for hook in compat.load_state_dict_pre_hooks(module):
                hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        known = set()
        for group, place, name, parameter in self._parameters_by_feature():
            key = f"{prefix}{group.features[place].name}.{name}"
            known.add(key)
            if key not in state_dict:
                if strict:
                    missing_keys.append(key)
                continue
            value = state_dict[key]
            if value.shape != parameter[place].shape:
                error_msgs.append(
                    f"size mismatch for {key}: got {list(value.shape)} in the checkpoint, must be "
                    f"{list(parameter[place].shape)}"
                )
                continue
            # A parameter whose features are not all in the checkpoint stays on meta: it would be partly uninitialized.
            complete = all(f"{prefix}{feature.name}.{name}" in state_dict for feature in group.features)
            if parameter.is_meta and complete and local_metadata.get("assign_to_params_buffers", False):
                parameter = group.leave_meta(name, value.device)
            parameter[place].copy_(value)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]

    def _parameters_by_feature(self) -> Iterator[tuple[StackedTargetAttention, int, str, Tensor]]:
        """By feature and parameter: the group, the feature's place in it, and the parameter, [F, ...]."""
        for group in self:
            for place in range(group.num_features):
                for name, parameter in group.stacked_parameters().items():
                    yield group, place, name, parameter
