"""The base of all codecs: content in, one int64 an item out, and back; files and their fingerprint.

Ids are computed in float64, a block of rows at a time, so that an item's id does not depend on the items of its block,
the device or the number of threads, except where content lies within rounding of a boundary. A catalogue's ids are
still best written once and kept.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from jfi.semantic_ids.packing import UNKNOWN_SID, Layout
from jfi.semantic_ids.tensor_file import read_tensors, write_tensors
from jfi.utils.files import DamagedFileError

#: `[N, D]`, or several of these with the same items in the rows.
Sources = Tensor | Sequence[Tensor]
#: Called with how much is done and how much there is.
Progress = Callable[[int, int], None]
#: Rows that are encoded or decoded at a time.
BLOCK = 4096
_FORMAT = "jfi codec 2"


class Decoder(nn.Module):
    """The frozen part of a codec that a model reads: maps digits `[N, L]`, of `Codec.digits`, to content `[N, D]`.

    It has no parameters. The digits of an unknown item give any finite row.
    """

    #: D, of the content.
    width: int


class Codec(ABC):
    """Content embeddings to semantic IDs (SIDs) and back: the interface of all codecs.

    Args:
        layout: where the digits are in an ID.
        seed: of everything random in `fit`.
        max_rows: `fit` draws this many rows where there are more.
        settings: the other arguments of the constructor, as JSON can hold them.

    A codec is fitted once. An item whose sources are all missing (rows of NaN) has the ID `UNKNOWN_SID`; `fit` leaves
    it out.
    """

    #: By the name in a codec's file, its class.
    kinds: ClassVar[dict[str, type["Codec"]]] = {}

    def __init__(self, layout: Layout, seed: int, max_rows: int, **settings: Any) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}, must be at least 1")
        self.layout, self.seed, self.max_rows = layout, seed, max_rows
        self.settings = {**settings, "seed": seed, "max_rows": max_rows}
        #: D_i of each source; empty before `fit`.
        self.widths: list[int] = []
        self.tensors: dict[str, Tensor] = {}

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        Codec.kinds[cls.__name__] = cls

    def fit(
        self, sources: Sources, labels: Mapping[str, Tensor] | None = None, progress: Progress | None = None
    ) -> Self:
        """Fits the codec to the content of a catalogue; the same seed and device give the same codec.

        Args:
            sources: content embeddings, `[N, D]` or several `[N, D_i]` of a floating dtype; on the device to compute
                on. A row of NaN says that an item lacks a source.
            labels: by name, `[N]` int64 categories from 0 on, -1 where not known. `VQFusion` learns to predict them;
                the others make no use of them.
            progress: called with how much is done and how much there is.

        Returns:
            The codec.

        Raises:
            TypeError: a source is not of a floating dtype, or a label is not int64.
            ValueError: the shapes differ, a row holds an infinity or is NaN in part, or no row has content.
        """
        listed = as_sources(sources)
        labels = _check_labels(labels or {}, len(listed[0]))
        present = present_rows(listed)
        known = present.any(1).nonzero()[:, 0]
        if not len(known):
            raise ValueError("no row of sources has content")
        generator = torch.Generator().manual_seed(self.seed)
        if len(known) > self.max_rows:
            drawn = torch.randperm(len(known), generator=generator)[: self.max_rows].sort().values
            known = known[drawn.to(known.device)]
        if len(known) < len(present):
            listed, present = [source[known] for source in listed], present[known]
            labels = {name: values.to(known.device)[known] for name, values in labels.items()}
        self.widths = [source.shape[1] for source in listed]
        mean, scale = learn_scales(listed, present)
        self.tensors = {"mean": mean, "scale": scale}
        try:
            x = normalize(listed, present, mean.float(), scale.float())
            self._fit(x, generator, progress, present=present, labels=labels)
        except BaseException:
            self.tensors = {}  # not fitted: `encode` says so
            raise
        return self

    @torch.no_grad()
    def encode(self, sources: Sources, progress: Progress | None = None) -> Tensor:
        """The SID of each item, `[N]` int64 on the device of the sources; UNKNOWN_SID where all sources are missing.

        Args:
            sources: as in `fit`, of the same widths.
            progress: called with the rows done and the number of rows.

        Raises:
            RuntimeError: the codec is not fitted.
            TypeError: a source is not of a floating dtype.
            ValueError: widths other than in `fit`, or a row that holds an infinity or is NaN in part.
        """
        self._check_fitted()
        listed = as_sources(sources, self.widths)
        sids = torch.empty(len(listed[0]), dtype=torch.int64, device=listed[0].device)
        end = 0
        for x, present in self.normalized(listed):
            begin, end = end, end + len(x)
            sids[begin:end] = torch.where(present.any(1), self._encode(x), UNKNOWN_SID)
            if progress is not None:
                progress(end, len(sids))
        return sids

    def normalized(self, sources: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields `BLOCK` items after another: normalized sources `[n, D]` float64, and which are there, as bool."""
        for begin in range(0, len(sources[0]), BLOCK):
            block = [source[begin : begin + BLOCK].to(self.device) for source in sources]
            present = present_rows(block, begin)
            yield normalize(block, present, self.tensors["mean"], self.tensors["scale"]), present

    def digits(self, sids: Tensor) -> Tensor:
        """Returns the digits `[N, L]` of SIDs `[N]`, and raises, as `Layout.unpack`."""
        return self.layout.unpack(sids)

    @torch.no_grad()
    def decode(self, sids: Tensor) -> Tensor:
        """The content that each SID stands for: `[N, sum of D_i]` float32, the sources side by side.

        UNKNOWN_SID stands for the mean of the content that the codec was fitted on.

        Args:
            sids: `[N]` int64.

        Raises:
            RuntimeError: the codec is not fitted.
            TypeError, ValueError: as in `digits`.
        """
        self._check_fitted()
        digits, unknown = self.digits(sids), (sids == UNKNOWN_SID)[:, None]
        mean, scale = self.tensors["mean"], spread(self.tensors["scale"], self.widths)
        decoder = self.decoder(torch.float64)
        out = torch.empty(len(sids), len(mean), dtype=torch.float32, device=sids.device)
        for begin in range(0, len(sids), BLOCK):
            block = slice(begin, begin + BLOCK)
            content = decoder(digits[block].to(self.device)) * scale + mean
            out[block] = torch.where(unknown[block].to(self.device), mean, content)
        return out

    def save(self, path: str | Path) -> None:
        """Writes the codec to one file of safetensors, with JSON in its header; whole or not at all."""
        description = {"format": _FORMAT, "fingerprint": self.fingerprint, "codec": self.describe()}
        write_tensors(Path(path), self.state(), description)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The codec of a file that `save` wrote, on the CPU; `Codec.load` takes every kind.

        Raises:
            DamagedFileError: the file is missing or damaged.
            ValueError: it holds a codec of another class than this.

        Example:
            >>> path = getfixture("tmp_path") / "codec.safetensors"
            >>> from jfi.semantic_ids import DiscretePCA
            >>> codec = DiscretePCA(num_digits=4).fit(torch.randn(100, 8))
            >>> codec.save(path)
            >>> Codec.load(path).fingerprint == codec.fingerprint
            True
        """
        path = Path(path)
        try:
            tensors, description = read_tensors(path, DamagedFileError)
            if description.get("format") != _FORMAT:
                raise ValueError(f"its format is {description.get('format')!r}, not {_FORMAT!r}")
            codec = cls.rebuild(description["codec"], tensors)
            if codec.fingerprint != description["fingerprint"]:
                raise ValueError("its content does not match its fingerprint")
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            fault = " ".join(str(error).split())  # that of a state_dict has several lines
            raise DamagedFileError(f"{path} is no codec of this version of jfi, or damaged: {fault}") from None
        if not isinstance(codec, cls):
            raise ValueError(f"{path} holds a {type(codec).__name__}, not a {cls.__name__}")
        return codec

    @property
    def fingerprint(self) -> str:
        """SHA-256 of settings and tensors, in hexadecimal; it travels with the ids that the codec has given."""
        self._check_fitted()
        found = hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode())
        for name, tensor in sorted(self.state().items()):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    @abstractmethod
    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """The decoder in this dtype.

        It gives the content as the codec was fitted to it: with a mean of 0, and the mean square of a source's rows 1.
        """

    @property
    def device(self) -> torch.device:
        """Returns where the codec computes: where it was fitted, or where `to` has put it."""
        return self.tensors["mean"].device

    def to(self, device: torch.device | str) -> Self:
        """Moves the codec, and returns it."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self

    def describe(self) -> dict:
        """Returns what JSON can hold of the codec: class, settings, widths."""
        return {"kind": type(self).__name__, "settings": self.settings, "widths": self.widths}

    def state(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        return self.tensors

    @staticmethod
    def rebuild(description: dict, tensors: dict[str, Tensor]) -> "Codec":
        """The codec of what `describe` and `state` gave."""
        codec = Codec.kinds[description["kind"]](**description["settings"])
        codec.widths = description["widths"]
        codec.set_state(description, tensors)
        return codec

    def set_state(self, description: dict, tensors: dict[str, Tensor]) -> None:
        """Takes what `state` gave."""
        self.tensors = tensors

    @abstractmethod
    def _fit(
        self,
        x: Tensor,
        generator: torch.Generator,
        progress: Progress | None,
        *,
        present: Tensor,
        labels: Mapping[str, Tensor],
    ) -> None:
        """Fits to the items that have content: normalized sources `[N, D]` float32, which an item has, its labels."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """SIDs of normalized sources, `[N, D]` float64."""

    def _check_fitted(self) -> None:
        if not self.tensors:
            raise RuntimeError(f"the {type(self).__name__} is not fitted; call fit first, or load one")


def _check_labels(labels: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    for name, values in labels.items():
        if not isinstance(values, Tensor) or values.dtype != torch.int64:
            raise TypeError(f"labels[{name!r}] must be int64, got {getattr(values, 'dtype', type(values).__name__)}")
        if values.shape != (rows,):
            raise ValueError(f"labels[{name!r}] must be [{rows}] as the sources, got the shape {list(values.shape)}")
        if rows and values.min() < -1:
            raise ValueError(f"labels[{name!r}] holds {int(values.min())}; categories begin at 0, -1 is not known")
    return dict(labels)


def as_sources(sources: Sources, widths: Sequence[int] | None = None) -> list[Tensor]:
    """The sources as a list of `[N, D_i]` tensors, of these widths D_i if they are given.

    Raises:
        TypeError: one is not a floating-point tensor.
        ValueError: the number of sources, a shape or a width is wrong.
    """
    listed = [sources] if isinstance(sources, Tensor) else list(sources)
    if not listed:
        raise ValueError("sources is empty; it must have at least one tensor")
    for i, source in enumerate(listed):
        if not isinstance(source, Tensor) or not source.is_floating_point():
            got = getattr(source, "dtype", type(source).__name__)
            raise TypeError(f"sources[{i}] must be a floating-point tensor, got {got}")
        if source.dim() != 2 or not source.shape[1]:
            raise ValueError(f"sources[{i}] must be [N, D] with D of at least 1, got the shape {list(source.shape)}")
        if len(source) != len(listed[0]):
            raise ValueError(f"sources[{i}] has {len(source)} rows and sources[0] has {len(listed[0])}")
    if widths is not None and [source.shape[1] for source in listed] != list(widths):
        raise ValueError(f"sources have widths {[s.shape[1] for s in listed]}; the codec was fitted on {list(widths)}")
    return listed


def present_rows(sources: Sequence[Tensor], first: int = 0) -> Tensor:
    """`[N, number of sources]` bool: whether an item has that source; a row that is all NaN says that it has not.

    Raises:
        ValueError: a number is infinite, or only part of a row is NaN; it names the row, the first of which is `first`.
    """
    present = []
    for i, source in enumerate(sources):
        finite, missing = source.isfinite().all(1), source.isnan().all(1)
        wrong = ~(finite | missing)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            column = int((~source[row].isfinite()).nonzero()[0])
            what = "must be finite, or all NaN where the item lacks this source"
            raise ValueError(
                f"sources[{i}], row {first + row}: {what}, got {float(source[row, column])} in column {column}"
            )
        present.append(finite)
    return torch.stack(present, 1)


def learn_scales(sources: Sequence[Tensor], present: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of all sources side by side, `[D]`, and the scale of each, `[number of sources]`, in float64.

    A source's scale is the root of the mean squared distance of its rows from their mean: with it each source has as
    much to say as any other, and directions stay as they are. A source that never varies has the scale 1.

    Raises:
        ValueError: no item has a source.
    """
    means, scales = [], []
    for i, source in enumerate(sources):
        rows = source[present[:, i]].double()
        if not len(rows):
            raise ValueError(f"sources[{i}] is missing in every row")
        means.append(rows.mean(0))
        scale = (rows - means[-1]).square().sum(1).mean().sqrt()
        scales.append(torch.where(scale > 0, scale, torch.ones_like(scale)))
    return torch.cat(means), torch.stack(scales)


def normalize(sources: Sequence[Tensor], present: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The sources side by side, `[N, D]`, less the mean, by their scales; 0 where an item lacks a source."""
    means = mean.split([source.shape[1] for source in sources])
    parts = [(source.to(mean.dtype) - means[i]) / scale[i] for i, source in enumerate(sources)]
    return torch.cat([part.masked_fill(~present[:, i : i + 1], 0.0) for i, part in enumerate(parts)], 1)


def spread(scale: Tensor, widths: Sequence[int]) -> Tensor:
    """The scale of each source `[number of sources]` for each of its columns, `[D]`."""
    return scale.repeat_interleave(torch.tensor(list(widths), device=scale.device))
