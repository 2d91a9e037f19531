"""VQ fusion: a network learns one latent of several sources and labels, and its digits are the semantic ID."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jfi.semantic_ids.codec import Codec, Decoder, Progress, spread
from jfi.semantic_ids.discrete_pca import DiscretePCA
from jfi.semantic_ids.residual_kmeans import ResidualKMeans

#: Most latents to which the quantizer is fitted while the network learns.
_REFIT_ROWS = 2**14
#: The part of the steps after which the quantizer stays as it is, so that the decoders learn its final digits.
_MOVING = 0.75
_OWN = "quantizer."
_WEIGHTS = ("hidden_weight", "hidden_bias", "weight", "bias")


class FusionDecoder(Decoder):
    """The decoders of a fitted VQ fusion, each a two-layer perceptron, of the latent that digits stand for."""

    def __init__(self, codec: "VQFusion", dtype: torch.dtype) -> None:
        super().__init__()
        own = codec.quantizer
        self.quantizer = own.decoder(dtype)
        self.width, self._num_sources = sum(codec.widths), len(codec.widths)
        self.register_buffer("mean", own.tensors["mean"].to(dtype))
        self.register_buffer("scale", spread(own.tensors["scale"], own.widths).to(dtype))
        for number, (hidden, _, output) in enumerate(codec.network.decoders):
            for name, tensor in zip(_WEIGHTS, (*hidden.parameters(), *output.parameters()), strict=True):
                self.register_buffer(f"{name}_{number}", tensor.detach().to(dtype))

    def forward(self, digits: Tensor) -> Tensor:
        latent = self.quantizer(digits) * self.scale + self.mean
        parts = []
        for number in range(self._num_sources):
            hidden, hidden_bias, out, bias = (getattr(self, f"{name}_{number}") for name in _WEIGHTS)
            parts.append(F.linear(F.silu(F.linear(latent, hidden, hidden_bias)), out, bias))
        return torch.cat(parts, 1)


class VQFusion(Codec):
    """VQ fusion of Ramasamy et al. 2025, a multi-task VQ-VAE: several content embeddings and labels make one SID.

    With z = enc(x_1, .., x_n), Q the quantizer, and z^ = z + stop_gradient(Q(z) - z), it minimises

        Σ_i w_i |dec_i(z^) - x_i|² + Σ_c w_c CE(head_c(z^), y_c) + β |z - stop_gradient(Q(z))|²

    over sources x_i, scaled so that |x_i|² is 1 on average, and over labels y_c. A source or label that an item lacks
    adds nothing. The quantizer is fitted anew to the latents every `refit_every` steps of the first three quarters.

    Args:
        quantizer: a codec that is not fitted: `DiscretePCA` for ternary digits (default: 25 of them) or
            `ResidualKMeans`; or what `describe` gave of one.
        latent: width of z.
        hidden: width of the hidden layer of encoder and decoders.
        steps: of Adam, with a learning rate that falls to 0 as a cosine.
        batch_size: items a step.
        learning_rate: of the first step.
        source_weights: w_i, or None: all 1.
        label_weight: w_c of all labels.
        commitment: β.
        refit_every: steps.
        seed: of parameters, batches and the rows that are drawn.
        max_rows: most rows that `fit` looks at.

    Raises:
        ValueError: an argument is out of range; or in `fit`, a label is known of no item.

    Example:
        >>> title, image, brand = torch.randn(200, 8), torch.randn(200, 4), torch.arange(200) % 3
        >>> codec = VQFusion(DiscretePCA(num_digits=10), latent=8, hidden=16, steps=50)
        >>> _ = codec.fit([title, image], {"brand": brand})
        >>> sids = codec.encode([title, image])
        >>> codec.digits(sids).shape, codec.decode(sids).shape
        (torch.Size([200, 10]), torch.Size([200, 12]))
    """

    def __init__(
        self,
        quantizer: Codec | Mapping[str, Any] | None = None,
        *,
        latent: int = 64,
        hidden: int = 256,
        steps: int = 2000,
        batch_size: int = 1024,
        learning_rate: float = 5e-3,
        source_weights: Sequence[float] | None = None,
        label_weight: float = 0.5,
        commitment: float = 0.5,
        refit_every: int = 25,
        seed: int = 0,
        max_rows: int = 2**18,
    ) -> None:
        if quantizer is None:
            quantizer = DiscretePCA(seed=seed)
        elif isinstance(quantizer, Mapping):
            quantizer = Codec.kinds[quantizer["kind"]](**quantizer["settings"])
        if not isinstance(quantizer, DiscretePCA | ResidualKMeans):
            got = type(quantizer).__name__
            raise TypeError(f"quantizer must be a DiscretePCA or a ResidualKMeans, got {got}")
        sizes = {"latent": latent, "hidden": hidden, "steps": steps, "batch_size": batch_size}
        for name, value in {**sizes, "refit_every": refit_every}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        weights = {"learning_rate": learning_rate, "label_weight": label_weight, "commitment": commitment}
        by_source = {f"source_weights[{i}]": weight for i, weight in enumerate(source_weights or ())}
        for name, value in {**weights, **by_source}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, must be finite and at least 0")
        chosen = {"kind": type(quantizer).__name__, "settings": quantizer.settings}
        settings = {**sizes, **weights, "quantizer": chosen, "refit_every": refit_every}
        settings["source_weights"] = None if source_weights is None else list(source_weights)
        super().__init__(quantizer.layout, seed, max_rows, **settings)
        # A quantizer of its own: another VQFusion with the same argument must not fit this one anew.
        self.quantizer: Codec = type(quantizer)(**quantizer.settings)
        self.network: Any = nn.Module()  # that of `_new_network` once fitted

    def decoder(self, dtype: torch.dtype = torch.float32) -> FusionDecoder:
        return FusionDecoder(self, dtype)

    @torch.enable_grad()
    def _fit(
        self,
        x: Tensor,
        generator: torch.Generator,
        progress: Progress | None,
        *,
        present: Tensor,
        labels: Mapping[str, Tensor],
    ) -> None:
        settings, steps = self.settings, self.settings["steps"]
        weights = settings["source_weights"] or [1.0] * len(self.widths)
        if len(weights) != len(self.widths):
            raise ValueError(f"source_weights has {len(weights)} numbers for {len(self.widths)} sources")
        for name, values in labels.items():
            if values.max() < 0:
                raise ValueError(f"labels[{name!r}] is -1, not known, for every item with content")
        labels = {name: labels[name].to(x.device) for name in sorted(labels)}  # in any order the same codec
        network = self._new_network(x.device, [int(values.max()) + 1 for values in labels.values()])
        weights = present.to(x.dtype) * x.new_tensor(weights)
        optimizer = torch.optim.Adam(network.parameters(), settings["learning_rate"])
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
        for step in range(steps):
            if step % settings["refit_every"] == 0 and step <= _MOVING * steps:
                self._refit(network, x, generator, first=step == 0)
            rows = torch.randint(len(x), (min(settings["batch_size"], len(x)),), generator=generator).to(x.device)
            loss = self._loss(network, x[rows], weights[rows], {name: y[rows] for name, y in labels.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
            if progress is not None:
                progress(step + 1, steps)
        self._check_finite(loss)
        del network.heads  # the IDs need no more of them
        self.network = network.double().requires_grad_(False)

    def _new_network(self, device: torch.device, categories: Sequence[int] | None = None) -> Any:
        """Returns a module with the encoder, a decoder for each source and, to fit it, a head for each label."""
        latent, hidden, network = self.settings["latent"], self.settings["hidden"], nn.Module()

        def mlp(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network.encoder = mlp(sum(self.widths), latent)
            network.decoders = nn.ModuleList(mlp(latent, width) for width in self.widths)
            if categories is not None:
                network.heads = nn.ModuleList(nn.Linear(latent, count) for count in categories)
        return network.to(device)

    @torch.no_grad()
    def _refit(self, network: Any, x: Tensor, generator: torch.Generator, first: bool) -> None:
        rows = torch.randperm(len(x), generator=generator)[:_REFIT_ROWS].to(x.device)
        z = network.encoder(x[rows])
        self._check_finite(z)
        if isinstance(self.quantizer, ResidualKMeans) and not first:
            self.quantizer.refit(z)
        else:
            self.quantizer.fit(z)

    def _loss(self, network: Any, x: Tensor, weights: Tensor, labels: Mapping[str, Tensor]) -> Tensor:
        """The loss of rows `[B, D]`; `weights [B, number of sources]` is 0 where an item lacks a source."""
        z = network.encoder(x)
        self._check_finite(z)
        quantized = self.quantizer.decode(self.quantizer.encode(z.detach()))
        straight = z + (quantized - z).detach()
        loss = self.settings["commitment"] * (z - quantized).square().sum(1).mean()
        for i, (decoder, part) in enumerate(zip(network.decoders, x.split(self.widths, 1), strict=True)):
            loss = loss + (weights[:, i] * (decoder(straight) - part).square().sum(1)).mean()
        for head, y in zip(network.heads, labels.values(), strict=True):
            entropy = F.cross_entropy(head(straight), y, ignore_index=-1, reduction="sum")
            loss = loss + self.settings["label_weight"] * entropy / (y >= 0).sum().clamp(min=1)
        return loss

    def _check_finite(self, values: Tensor) -> None:
        if not values.isfinite().all():
            raise FloatingPointError(f"VQFusion diverged; its learning_rate is {self.settings['learning_rate']}")

    def _encode(self, x: Tensor) -> Tensor:
        return self.quantizer.encode(self.network.encoder(x))

    def to(self, device: torch.device | str) -> Self:
        self.quantizer.to(device)
        self.network.to(device)
        return super().to(device)

    def describe(self) -> dict:
        return {**super().describe(), "quantizer": self.quantizer.describe()}

    def state(self) -> dict[str, Tensor]:
        # The network has learnt in float32, so nothing is lost.
        network = {f"network.{name}": value.float() for name, value in self.network.state_dict().items()}
        own = {_OWN + name: value for name, value in self.quantizer.state().items()}
        return {**self.tensors, **network, **own}

    def set_state(self, description: dict, tensors: dict[str, Tensor]) -> None:
        def below(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}

        self.tensors = {name: x for name, x in tensors.items() if "." not in name}
        self.quantizer = Codec.rebuild(description["quantizer"], below(_OWN))
        network = self._new_network(torch.device("cpu"))
        network.load_state_dict(below("network."))
        self.network = network.double().requires_grad_(False)
