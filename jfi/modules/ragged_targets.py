"""Ragged targets: C_u candidates of user u, all of which attend to the user's one timeline."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.modules import validation
from jfi.modules.sequence_configs import Bias, FeatureGroup, KeyBias, PositionBias, TimeBias
from jfi.utils.arguments import MAX_ROWS, check_int


class Candidates(NamedTuple):
    """The candidates of a group of F features: R of them to a feature, whose users are those of the histories."""

    offsets: Tensor  # [F * U + 1], from 0 to F * R
    times: Tensor | None  # [F * R]; with times a candidate sees strictly older events
    event_times: Tensor | None  # [S]
    max_events: int | None


class RaggedTargets(NamedTuple):
    """The candidates of a batch."""

    values: dict[str, Tensor]  # [R, embedding_dim] by target key
    offsets: Tensor  # [U + 1], from 0 to R
    times: Tensor | None  # [R]
    event_times: dict[str, Tensor] | None  # [S] by first sequence key
    max_events: int | None
    first_key: str

    def of(self, group: FeatureGroup) -> Candidates:
        """The candidates, once for each feature of a group."""
        count = len(group.features)
        if count == 1:
            offsets = self.offsets
        else:
            offsets = F.pad(self.offsets.diff().repeat(count).cumsum(0), (1, 0))
        if self.times is None:
            return Candidates(offsets, None, None, None)
        times = self.times if count == 1 else self.times.repeat(count)
        event_times = [self.event_times[feature.sequence_keys[0]] for feature in group.features]
        event_times = event_times[0] if count == 1 else torch.cat(event_times)
        return Candidates(offsets, times, event_times, self.max_events)


def count_visible(candidates: Candidates, offsets: Tensor, rows: int) -> Tensor:
    """Returns for each of `rows` candidates the number [R] of events that it sees.

    Args:
        candidates: of one feature.
        offsets: [U + 1], those of the events.
        rows: R. The numbers of candidates that pad a batch have no meaning.
    """
    index = torch.arange(rows, device=offsets.device)
    user = torch.searchsorted(candidates.offsets[1:-1].contiguous(), index, right=True)
    if candidates.times is None:
        return offsets.diff()[user]
    events = candidates.event_times
    # Events behind the last user's, which pad a batch, belong to nobody.
    event_user = torch.searchsorted(
        offsets[1:].contiguous(), torch.arange(len(events), device=offsets.device), right=True
    )
    # Candidates and events of each user in order of time; the sort is stable, so that of equal times candidates come
    # first and see only older events.
    order = torch.argsort(torch.cat([candidates.times, events]), stable=True)
    order = order[torch.argsort(torch.cat([user, event_user])[order], stable=True)]
    older = torch.empty_like(order).scatter_(0, order, (order >= rows).cumsum(0))[:rows]
    return (older - offsets[:-1][user]).clamp(min=0, max=candidates.max_events)


def is_by_pair(bias: Bias | None, has_times: bool) -> bool:
    """Whether a learned bias belongs to a pair of candidate and event rather than to an event."""
    return has_times and isinstance(bias, PositionBias | TimeBias)


def read_ragged_targets(
    targets: dict[str, JaggedTensor],
    groups: list[FeatureGroup],
    sequences: dict[str, JaggedTensor],
    target_times: JaggedTensor | None,
    event_times: JaggedTensor | dict[str, JaggedTensor] | None,
    max_events: int | None,
) -> RaggedTargets:
    """Checks and reads all that ragged targets bring but the shapes of their embeddings, which `check_inputs` checks.

    The arguments are those of `JaggedFeatureInteraction.forward`.
    """
    features = [feature for group in groups for feature in group.features]
    first_key = groups[0].target_keys[0][0]
    validation.require_keys("targets", targets, [first_key])
    first = targets[first_key]
    if not isinstance(first, JaggedTensor):
        options = {"target_times": target_times, "event_times": event_times, "max_events": max_events}
        given = next(name for name, option in options.items() if option is not None)
        raise TypeError(
            f"{given} needs ragged targets: targets['{first_key}'] must be a JaggedTensor, got {type(first).__name__}"
        )
    validation.check_jagged(f"targets['{first_key}']", first)
    reads_contents = validation.contents_are_free(first.values())
    for key in dict.fromkeys(key for feature in features for key in feature.target_keys):
        validation.require_keys("targets", targets, [key])
        target = targets[key]
        if not isinstance(target, JaggedTensor):
            raise TypeError(
                f"targets['{key}'] must be a JaggedTensor like '{first_key}', got {type(target).__name__}: ragged and "
                "dense targets cannot be mixed"
            )
        validation.check_jagged(f"targets['{key}']", target)
        if target.values().dim() != 2:
            raise ValueError(f"targets['{key}'] must be [R, embedding_dim], got shape {list(target.values().shape)}")
        if key != first_key:
            validation.check_aligned(f"targets['{key}']", target, first_key, first, reads_contents, "candidates")
        elif reads_contents:
            validation.check_lengths(f"targets['{key}']", first, "candidates")
    values = {key: target.values() for key, target in targets.items() if isinstance(target, JaggedTensor)}
    _check_options(features, target_times, event_times, max_events)
    if target_times is None:
        return RaggedTargets(values, first.offsets(), None, None, None, first_key)
    validation.check_jagged("target_times", target_times)
    validation.check_aligned("target_times", target_times, first_key, first, reads_contents, "candidates")
    validation.check_times("target_times", target_times, first, "candidates")
    times = target_times.values()
    if times.device != first.values().device:
        raise ValueError(f"target_times must be on {first.values().device} like the targets, got {times.device}")
    of_events = {}
    for feature in features:
        key = feature.sequence_keys[0]
        if key in of_events:
            continue
        name = "event_times"
        if not isinstance(event_times, JaggedTensor):
            validation.require_keys(name, event_times, [key])
            name = f"event_times['{key}']"
        one = event_times if isinstance(event_times, JaggedTensor) else event_times[key]
        if not isinstance(one, JaggedTensor):
            raise TypeError(f"{name} must be a JaggedTensor, got {type(one).__name__}")
        validation.check_jagged(name, one)
        events = sequences.get(key)
        if not isinstance(events, JaggedTensor):
            continue  # check_inputs refuses it
        validation.check_aligned(name, one, key, events, reads_contents)
        validation.check_times(name, one, events)
        of_events[key] = one.values()
        if of_events[key].device != times.device:
            raise ValueError(f"{name} must be on {times.device} like target_times, got {of_events[key].device}")
        if of_events[key].dtype != times.dtype:
            raise TypeError(f"{name} must be {times.dtype} like target_times, got {of_events[key].dtype}")
    most = None if max_events is None else int(max_events)
    return RaggedTargets(values, first.offsets(), times, of_events, most, first_key)


def _check_options(
    features: list, target_times: JaggedTensor | None, event_times: object, max_events: int | None
) -> None:
    if (target_times is None) != (event_times is None):
        given, missing = ("target_times", "event_times")[:: 1 if event_times is None else -1]
        raise ValueError(f"{missing} must be given with {given}, got None")
    if max_events is not None:
        check_int("max_events", max_events, most=MAX_ROWS)
        if target_times is None:
            raise ValueError("max_events needs target_times, which say what lies before a candidate, got None")
    if target_times is None:
        return
    if not isinstance(target_times, JaggedTensor):
        raise TypeError(f"target_times must be a JaggedTensor, got {type(target_times).__name__}")
    if not isinstance(event_times, JaggedTensor | dict):
        raise TypeError(f"event_times must be a JaggedTensor or a dict of them, got {type(event_times).__name__}")
    for feature in features:
        if isinstance(feature.bias, KeyBias) and not isinstance(feature.bias, TimeBias):
            raise ValueError(
                f"target_times must be None for feature '{feature.name}' with {feature.bias!r}, whose ids are the same "
                "for all candidates of a user: TimeBias computes ages from the times"
            )
