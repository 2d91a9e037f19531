"""The contents of times, which operators and modules check alike; imports torch alone."""

from torch import Tensor


def check_ascending(name: str, times: Tensor, offsets: Tensor, row: str) -> None:
    """Raises ValueError unless times [S] are finite and do not decrease within a sample; reads them on the host.

    Args:
        name: of the argument.
        times: integers or floating.
        offsets: [B+1], from 0 to S.
        row: what a time belongs to, for the message.
    """
    if times.is_floating_point() and not bool(times.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {times[~times.isfinite()][0].item()}")
    falls = times[1:] < times[:-1]
    starts = offsets[1:-1].long()
    falls[starts[(starts > 0) & (starts < times.shape[0])] - 1] = False  # between samples
    if bool(falls.any()):
        at = int(falls.nonzero()[0])
        got = f"{times[at].item()} then {times[at + 1].item()} at {row} {at + 1}"
        raise ValueError(f"{name} must not decrease within a sample, got {got}")
