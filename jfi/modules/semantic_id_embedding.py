"""Embeddings of semantic IDs: a linear map of their digits, or of the content that they stand for."""

import math
import struct
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules import validation
from jfi.semantic_ids.codec import Codec
from jfi.semantic_ids.packing import UNKNOWN_SID, Layout, trits_of_bytes
from jfi.tables.table_rows import DigitRows, parts_of
from jfi.utils.arguments import check_choice, check_device, check_int, check_keys, check_type
from jfi.utils.context import is_traced, may_read

Read = Literal["digits", "decode"]


class _DigitReader(nn.Module):
    """Digits of IDs: as floats -1, 0 and 1 [S, L], or codes [S, L] int64."""

    trits: Tensor

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.width = layout, layout.num_digits
        if not layout.codebook_size:
            self.register_buffer("trits", trits_of_bytes().float(), persistent=False)

    def forward(self, sids: Tensor) -> Tensor:
        pieces = self.layout.pieces(sids)
        if self.layout.codebook_size:
            return pieces
        return F.embedding(pieces, self.trits).flatten(1)[:, : self.width]


class _ContentReader(nn.Module):
    """The content of IDs, [S, D], scaled so that the mean square of each source's elements was 1 before encoding."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.digits, self.decoder = _DigitReader(codec.layout), codec.decoder().cpu()
        self.width = self.decoder.width
        scales = [math.sqrt(width) for width in codec.widths for _ in range(width)]
        self.register_buffer("scale", torch.tensor(scales, device="cpu"))

    def forward(self, sids: Tensor) -> Tensor:
        if not may_read(sids):
            return self.decoder(self.digits(sids)) * self.scale
        # Histories repeat items, and a network decodes each of them once.
        distinct, index = torch.unique(sids, return_inverse=True)
        return (self.decoder(self.digits(distinct)) * self.scale).index_select(0, index)


class SemanticIDEmbedding(nn.Module):
    """Turns semantic IDs of a codec into embeddings; it stands where an EmbeddingCollection stands.

    The keys of a batch's KeyedJaggedTensor hold the IDs themselves, int64, so a history of n events is 8n bytes:

        #                  sample 0       1       2
        # "item_sid"       [58656]      [-1]   [6455]     <- -1: an item without content
        # "history_sid"    [6455, 31]    []    [58656]

    How they are read:

    - "digits": ternary digits as floats, then a linear map.
    - "decode": the content that the codec's frozen decoder gives, as it was fitted, less the mean, each source scaled
      so that the mean square of its elements was 1, then a linear map. For ternary digits without VQ fusion that is
      "digits" with another start.

    Neither has a table, so an item that training has never seen has an embedding as good as any other's.

    Embeddings of "digits" are not made before somebody reads them. A JaggedFeatureInteraction whose sequence feature
    has no other key reads the digits themselves: 4 bytes for 16 of them instead of `embedding_dim` numbers.

    The ID -1, of an item without content, has a learned vector, which begins as zeros. The state_dict holds the tensors
    of the codec that are read and its fingerprint; that of another codec is refused.

    Args:
        codec: a fitted codec.
        embedding_dim: width of the embeddings.
        feature_names: keys of the IDs, which share all weights.
        read: how they are read; "digits" needs ternary digits, since codes of codebooks are names, not numbers.
        device: of parameters and buffers; after "meta" call `to_empty()` and `reset_parameters()`.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.
        RuntimeError: the codec is not fitted.

    Example:

        >>> import torch
        >>> from jfi import SemanticIDEmbedding
        >>> from jfi.semantic_ids import DiscretePCA
        >>> from torchrec import KeyedJaggedTensor
        >>> content = torch.randn(100, 8)
        >>> codec = DiscretePCA(num_digits=10).fit(content)
        >>> sids = codec.encode(content)
        >>> ids = KeyedJaggedTensor(
        ...     keys=["item_sid", "history_sid"],
        ...     values=torch.cat([sids[:1], torch.tensor([-1]), sids[5:9]]),
        ...     lengths=torch.tensor([1, 1, 3, 1]),
        ... )
        >>> embedding = SemanticIDEmbedding(codec, 4, ["item_sid", "history_sid"])
        >>> embedding(ids)["history_sid"].values().shape
        torch.Size([4, 4])
    """

    fingerprint: Tensor

    def __init__(
        self,
        codec: Codec,
        embedding_dim: int,
        feature_names: list[str],
        read: Read = "digits",
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_type("codec", codec, Codec, "a jfi.semantic_ids.Codec")
        check_keys("feature_names", feature_names, may_be_empty=False)
        check_choice("read", read, get_args(Read))
        check_int("embedding_dim", embedding_dim)
        if read == "digits" and codec.layout.codebook_size:
            what = f"a codec of {codec.layout}, whose codes are names, not numbers"
            raise ValueError(f"read must be 'decode' for {what}, got 'digits'")
        check_device("device", device)
        self.embedding_dim, self.feature_names, self.read = embedding_dim, list(feature_names), read
        self.layout = codec.layout
        self.reader = _DigitReader(self.layout) if read == "digits" else _ContentReader(codec)
        #: An nn.Linear, or what a user replaces it with.
        self.projection: Any = nn.Linear(self.reader.width, embedding_dim, device=device)
        self.unknown = nn.Parameter(torch.empty(embedding_dim, device=device))
        fingerprint = struct.unpack(">4q", bytes.fromhex(codec.fingerprint))
        self.register_buffer("fingerprint", torch.tensor(fingerprint, device="cpu"))
        #: What buffers hold, to be written again where they were on the meta device.
        self._constants = {name: buffer.detach().cpu().clone() for name, buffer in self.named_buffers()}
        if device is not None:
            self.to(device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters anew."""
        for name, buffer in self.named_buffers():
            buffer.copy_(self._constants[name])
        self.projection.reset_parameters()
        nn.init.zeros_(self.unknown)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks the IDs up.

        Args:
            features: the IDs, int64.

        Returns:
            By key the embeddings [S, embedding_dim] with the key's lengths and weights, as of an EmbeddingCollection;
            of read="digits" made where they are first read, unless a compiler or a tracer is at work.

        Raises:
            ValueError, TypeError: a key is absent, of another dtype, or holds an ID that the codec cannot have given.
                The last is found on the CPU, and on a GPU under `jfi.ops.validation()`, since reading IDs there waits
                for the device; otherwise an ID with a code beyond its codebook gives zeros on a GPU.
        """
        are_readable = validation.check_ids("features", features, self.feature_names, sharded=True)
        by_key, embeddings = features.to_dict(), {}
        for key in self.feature_names:
            sids, parts = by_key[key].values(), parts_of(by_key[key])
            if sids.dtype != torch.int64:
                raise TypeError(f"features['{key}'] must be int64 semantic IDs, got {sids.dtype}")
            if are_readable:
                self.layout.check(sids, f"features['{key}']")
            if self._stays_digits() and not is_traced():
                embeddings[key] = DigitRows(sids, self, self._dtype(sids.device.type), **parts)
            else:
                embeddings[key] = JaggedTensor(self.embed(sids), **parts)
        return embeddings

    def _stays_digits(self) -> bool:
        """Returns whether the projection is a plain linear map, whose weights can be read instead of a call."""
        projection = self.projection
        if self.read != "digits" or type(projection) is not nn.Linear:
            return False
        plain = all([type(x) is nn.Parameter for x in (projection.weight, projection.bias)])
        return plain and not (projection._forward_hooks or projection._forward_pre_hooks)

    def embed(self, sids: Tensor) -> Tensor:
        """Returns the embeddings [S, embedding_dim] of IDs [S], which are not checked.

        Where they cannot be checked, an ID with a code beyond its codebook gives zeros.
        """
        missing, size, readable = None, self.layout.codebook_size, may_read(sids)
        unknown = sids == UNKNOWN_SID
        sids = sids.masked_fill(unknown, 0)
        if size and size < 2**self.layout.piece_bits and not readable:
            missing = (self.layout.pieces(sids) >= size).any(1)
            sids = sids.masked_fill(missing, 0)
        rows = self.projection(self.reader(sids))
        rows = torch.where(unknown.unsqueeze(1), self.unknown.to(rows.dtype), rows)
        return rows if missing is None else rows.masked_fill(missing.unsqueeze(1), 0)

    def digit_weight(self) -> Tensor:
        """Returns P [embedding_dim, L + 2] of read="digits": the embedding of an ID is P times its L + 2 digits."""
        columns = self.projection.bias, self.unknown
        return torch.cat([self.projection.weight, *[column.unsqueeze(1) for column in columns]], dim=1)

    def _dtype(self, device_type: str) -> torch.dtype:
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        return self.projection.weight.dtype

    def extra_repr(self) -> str:
        return f"{', '.join(self.feature_names)}: {self.layout}, read={self.read!r}"

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}fingerprint")
        if saved is not None and saved.tolist() != self._constants["fingerprint"].tolist():
            errors = args[-1]
            texts = (struct.pack(">4q", *one.tolist()).hex() for one in (self._constants["fingerprint"], saved))
            own, other = (text[:12] for text in texts)
            errors.append(f"{prefix}fingerprint is of the codec {other}, but this model reads IDs of the codec {own}")
        super()._load_from_state_dict(state_dict, prefix, *args)
