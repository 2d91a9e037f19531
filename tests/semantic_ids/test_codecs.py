"""The interface that all codecs share: shapes, determinism, files, missing content, refusals."""

import hashlib

import pytest
import safetensors.torch
import torch

from jfi.semantic_ids import UNKNOWN_SID, Codec, DiscretePCA, ResidualKMeans, VQFusion, sid_quality
from jfi.semantic_ids.codec import BLOCK
from jfi.semantic_ids.residual_kmeans import lloyd
from jfi.utils.files import DamagedFileError

CODECS = {
    "dpca": lambda seed=0: DiscretePCA(num_digits=12, seed=seed),
    "rq": lambda seed=0: ResidualKMeans(num_levels=2, codebook_size=16, steps=8, seed=seed),
    "vq": lambda seed=0: VQFusion(DiscretePCA(12), latent=8, hidden=16, steps=60, batch_size=128, seed=seed),
    "vq_rq": lambda seed=0: VQFusion(ResidualKMeans(2, 16), latent=8, hidden=16, steps=60, refit_every=20, seed=seed),
}


def content(device, rows=300):
    generator = torch.Generator().manual_seed(3)
    factors = torch.randn(rows, 4, generator=generator)
    sources = [factors @ torch.randn(4, width, generator=generator) * size + 2 for width, size in ((10, 1), (6, 100))]
    labels = {"brand": (factors[:, 0] > 0).long() + (factors[:, 1] > 0).long()}
    return [source.to(device) for source in sources], {name: values.to(device) for name, values in labels.items()}


@pytest.fixture(scope="module", params=CODECS)
def fitted(request, device):
    sources, labels = content(device)
    return request.param, CODECS[request.param]().fit(sources, labels), sources, labels


def test_shapes_and_dtypes(fitted):
    _, codec, sources, _ = fitted
    sids = codec.encode(sources)
    digits, decoded = codec.digits(sids), codec.decode(sids)
    assert (sids.shape, sids.dtype, sids.device) == ((300,), torch.int64, sources[0].device)
    assert digits.shape == (300, 2 if codec.layout.codebook_size else 12)
    assert digits.dtype == (torch.int64 if codec.layout.codebook_size else torch.int8)
    assert (decoded.shape, decoded.dtype) == ((300, 16), torch.float32)
    errors = [
        (part - x).square().sum() / (x - x.mean(0)).square().sum()
        for part, x in zip(decoded.split([10, 6], 1), sources, strict=True)
    ]
    assert max(errors) < 0.35


def test_the_same_seed_gives_the_same_codec(fitted, device):
    name, codec, sources, labels = fitted
    again = CODECS[name]().fit(sources, labels)
    assert again.fingerprint == codec.fingerprint
    assert torch.equal(again.encode(sources), codec.encode(sources))
    if name != "dpca":  # which draws nothing
        assert CODECS[name](seed=1).fit(sources, labels).fingerprint != codec.fingerprint


def test_an_id_does_not_depend_on_the_items_beside_it(fitted):
    _, codec, sources, _ = fitted
    sids = codec.encode(sources)
    many = [source.repeat(BLOCK // 300 + 2, 1) for source in sources]
    assert torch.equal(codec.encode(many).view(-1, 300), sids.expand(BLOCK // 300 + 2, 300))
    assert torch.equal(codec.encode([source[7:8] for source in sources]), sids[7:8])
    assert codec.encode([source[:0] for source in sources]).shape == (0,)


def test_the_cpu_gives_the_ids_of_the_gpu(fitted, tmp_path):
    _, codec, sources, _ = fitted
    codec.save(tmp_path / "codec")
    on_cpu = Codec.load(tmp_path / "codec")
    sids = codec.encode(sources)
    assert torch.equal(on_cpu.encode([source.cpu() for source in sources]), sids.cpu())
    torch.testing.assert_close(on_cpu.decode(sids.cpu()), codec.decode(sids).cpu())


def test_files(fitted, tmp_path):
    _, codec, sources, _ = fitted
    codec.save(tmp_path / "codec.safetensors")
    again = Codec.load(tmp_path / "codec.safetensors")
    assert type(again) is type(codec) and again.fingerprint == codec.fingerprint
    assert again.settings == codec.settings
    assert torch.equal(again.encode(sources), codec.encode(sources))
    again.save(tmp_path / "again.safetensors")
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("codec", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize("categories", [(3, 5), (4, 4)])
def test_labels_in_any_order_give_the_same_codec(categories, device):
    sources, _ = content(device)
    row = torch.arange(300, device=device)
    labels = {"type": row % categories[0], "brand": row // 7 % categories[1]}
    codec = VQFusion(DiscretePCA(10), latent=8, hidden=16, steps=60).fit(sources, labels)
    in_order = VQFusion(DiscretePCA(10), latent=8, hidden=16, steps=60).fit(sources, dict(sorted(labels.items())))
    assert codec.fingerprint == in_order.fingerprint


def test_codecs_with_the_same_quantizer_are_fitted_apart(device):
    sources, _ = content(device)
    quantizer = DiscretePCA(10)
    first = VQFusion(quantizer, latent=8, hidden=16, steps=30).fit(sources)
    before = first.encode(sources)
    VQFusion(quantizer, latent=8, hidden=16, steps=30, seed=1).fit(sources)
    assert torch.equal(first.encode(sources), before)
    with pytest.raises(RuntimeError, match="not fitted"):
        quantizer.encode(sources)


def test_a_codec_whose_fit_has_failed_is_not_fitted(device):
    codec = ResidualKMeans(2, 16).fit(torch.randn(20, 4, device=device))
    with pytest.raises(ValueError, match="only 5 rows have content"):
        codec.fit(torch.randn(5, 4, device=device))
    with pytest.raises(RuntimeError, match="ResidualKMeans is not fitted"):
        codec.encode(torch.randn(5, 4, device=device))


def test_any_reader_of_safetensors_opens_the_file(fitted, tmp_path):
    _, codec, _, _ = fitted
    codec.save(tmp_path / "codec")
    tensors = safetensors.torch.load_file(tmp_path / "codec")
    assert tensors.keys() == codec.state().keys()
    assert all(torch.equal(tensor, codec.state()[name].cpu()) for name, tensor in tensors.items())
    assert len(codec.fingerprint) == len(hashlib.sha256().hexdigest())


def test_damaged_files_are_refused(tmp_path, device):
    codec = CODECS["dpca"]().fit(content(device)[0])
    path = tmp_path / "codec"
    codec.save(path)
    data = path.read_bytes()
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    for damaged in (
        flipped,
        data[:-8],
        data[:100],
        b"",
        b"text of any kind",
        data.replace(b"DiscretePCA", b"DiscretePCX"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=f"{path} is no codec of this version"):
            Codec.load(path)
    fusion = VQFusion(DiscretePCA(4), latent=4, hidden=8, steps=2).fit(torch.randn(20, 5))
    fusion.save(path)
    path.write_bytes(path.read_bytes().replace(b"network.encoder", b"network.encodes"))
    with pytest.raises(DamagedFileError, match="no codec of this version") as fault:
        Codec.load(path)
    assert "\n" not in str(fault.value)
    with pytest.raises(DamagedFileError, match="no such file"):
        Codec.load(tmp_path / "gone")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="holds a DiscretePCA, not a ResidualKMeans"):
        ResidualKMeans.load(path)


def test_missing_content(fitted):
    _, codec, sources, _ = fitted
    gone = [source.clone() for source in sources]
    gone[0][3:5], gone[1][4:6] = float("nan"), float("nan")
    sids = codec.encode(gone)
    assert (sids == UNKNOWN_SID).nonzero().tolist() == [[4]]
    others = [row for row in range(300) if row not in (3, 4, 5)]
    assert torch.equal(sids[others], codec.encode(sources)[others])
    torch.testing.assert_close(codec.decode(sids)[4], codec.tensors["mean"].float())
    # A source that an item lacks counts as its mean.
    means = [part.expand(1, -1).float() for part in codec.tensors["mean"].split([10, 6])]
    assert sids[3] == codec.encode([means[0], sources[1][3:4]])[0]


def test_items_without_content_do_not_change_the_fit(fitted):
    name, codec, sources, labels = fitted
    nothing = [torch.full_like(source[:20], float("nan")) for source in sources]
    more = [torch.cat(pair) for pair in zip(nothing, sources, strict=True)]
    labels = {key: torch.cat([torch.full_like(y[:20], 1), y]) for key, y in labels.items()}
    assert CODECS[name]().fit(more, labels).fingerprint == codec.fingerprint


def test_sources_count_alike(device):
    sources, _ = content(device)
    sids = DiscretePCA(12).fit(sources).encode(sources)
    scaled = [sources[0] * 8, sources[1] / 4]
    assert torch.equal(DiscretePCA(12).fit(scaled).encode(scaled), sids)


def test_more_rows_than_looked_at(device):
    sources, _ = content(device)
    codec = DiscretePCA(6, max_rows=50).fit(sources)
    assert codec.fingerprint == DiscretePCA(6, max_rows=50).fit(sources).fingerprint
    assert codec.fingerprint != DiscretePCA(6, seed=1, max_rows=50).fit(sources).fingerprint


def test_constant_content_has_one_id():
    x = torch.ones(50, 3)
    codec = DiscretePCA(5).fit(x)
    assert codec.digits(codec.encode(x)).abs().sum() == 0
    torch.testing.assert_close(codec.decode(codec.encode(x)), x)


def test_a_dead_code_is_seeded_anew():
    """Two centroids begin at one place; Lloyd's algorithm alone would leave one of them without rows for ever."""
    x = torch.cat([torch.randn(50, 2) * 0.1 + centre for centre in (0.0, 10.0, 20.0)])
    start = torch.tensor([[0.0, 0.0], [0.0, 0.0], [15.0, 15.0]])
    centroids = lloyd(x, start, 20)
    assert sorted(round(value) for value in centroids[:, 0].tolist()) == [0, 10, 20]


def test_straight_through_gradients_reach_the_encoder(device):
    sources, labels = content(device)
    # A quantizer whose digits ignored the encoder's learning would leave the error where random latents have it.
    errors = []
    for steps in (1, 80):
        codec = VQFusion(DiscretePCA(12), latent=8, hidden=16, steps=steps, refit_every=10).fit(sources, labels)
        decoded = codec.decode(codec.encode(sources)).split([10, 6], 1)
        pairs = zip(decoded, sources, strict=True)
        errors.append(sum(((a - b).square().sum() / (b - b.mean(0)).square().sum()).item() for a, b in pairs))
    assert errors[1] < 0.5 * errors[0]


def test_labels_are_read_from_the_ids(device):
    """A label that the content knows little of shapes the IDs by its weight."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 16, generator=generator)
    y = (x[:, 0] > 0).long().to(device)
    x[:, 0] *= 0.3
    x = x.to(device)
    right = []
    for weight in (0.0, 3.0):
        codec = VQFusion(DiscretePCA(5), latent=8, hidden=32, steps=150, batch_size=256, label_weight=weight)
        codec.fit(x, {"side": y})
        sids = codec.encode(x)
        right.append(sid_quality(codec, x, sids, {"side": y}).labels["side"].probe)
    assert right[1] > 0.75 and right[1] > right[0] + 0.15


def test_a_source_without_weight_or_content_adds_no_loss(device):
    sources, _ = content(device)

    def error(codec: Codec, fitted_on: list[torch.Tensor]) -> float:
        codec.fit(fitted_on)
        return sid_quality(codec, sources, codec.encode(sources)).source_errors[1]

    def fusion(weights: list[float]) -> Codec:
        return VQFusion(DiscretePCA(12), latent=8, hidden=16, steps=100, source_weights=weights)

    # Half of the items lack the second source; if they counted as its mean, its decoder would learn half of what is so.
    half = [sources[0], sources[1].clone()]
    half[1][::2] = float("nan")
    assert error(fusion([1.0, 1.0]), half) < 0.4
    assert error(fusion([1.0, 0.0]), sources) > 0.9


def test_a_label_that_is_not_known_adds_nothing(device):
    sources, labels = content(device)
    y = labels["brand"].clone()
    y[::2] = -1
    changed = {"brand": y, "rare": torch.full_like(y, -1).index_fill_(0, torch.tensor([3], device=device), 0)}
    codec = CODECS["vq"]().fit(sources, changed)
    assert codec.decode(codec.encode(sources)).isfinite().all()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda c: c.fit([]), ValueError, "sources is empty"),
        (lambda c: c.fit(torch.ones(3, 2, dtype=torch.int64)), TypeError, r"sources\[0\] must be a floating-point"),
        (lambda c: c.fit(torch.ones(3)), ValueError, r"sources\[0\] must be \[N, D\]"),
        (
            lambda c: c.fit([torch.ones(3, 2), torch.ones(4, 2)]),
            ValueError,
            r"sources\[1\] has 4 rows and sources\[0\] has 3",
        ),
        (lambda c: c.fit(torch.tensor([[1.0, 1], [NAN, 1]])), ValueError, r"\[0\], row 1: must be finite.* got nan in"),
        (lambda c: c.fit(torch.tensor([[1.0, 1], [INF, 1]])), ValueError, r"\[0\], row 1: must be finite.* got inf in"),
        (lambda c: c.fit(torch.full((3, 2), NAN)), ValueError, "no row of sources has content"),
        (
            lambda c: c.fit([torch.ones(3, 2), torch.full((3, 2), NAN)]),
            ValueError,
            r"sources\[1\] is missing in every row",
        ),
        (lambda c: c.fit(torch.ones(3, 2), {"a": torch.ones(3)}), TypeError, r"labels\['a'\] must be int64"),
        (lambda c: c.fit(torch.ones(3, 2), {"a": torch.ones(2).long()}), ValueError, r"labels\['a'\] must be \[3\]"),
        (lambda c: c.fit(torch.ones(3, 2), {"a": torch.tensor([0, -2, 0])}), ValueError, r"labels\['a'\] holds -2"),
        (lambda c: c.encode(torch.ones(3, 2)), RuntimeError, "DiscretePCA is not fitted"),
        (lambda c: c.decode(torch.zeros(3).long()), RuntimeError, "DiscretePCA is not fitted"),
        (
            lambda c: c.fit(torch.randn(9, 2)).encode(torch.ones(3, 4)),
            ValueError,
            r"sources have widths \[4\]; .* on \[2\]",
        ),
        (
            lambda c: c.fit(torch.randn(9, 2)).decode(torch.tensor([0] * BLOCK + [10**6])),
            ValueError,
            rf"sids\[{BLOCK}\] is 1000000",
        ),
        (lambda c: DiscretePCA(41), ValueError, "num_digits is 41, must be from 1 to 40"),
        (lambda c: DiscretePCA(max_rows=0), ValueError, "max_rows is 0"),
        (lambda c: ResidualKMeans(codebook_size=1), ValueError, "codebook_size is 1, must be at least 2"),
        (lambda c: ResidualKMeans(codebook_size=0), ValueError, "codebook_size is 0, must be at least 2"),
        (lambda c: ResidualKMeans(0), ValueError, "num_levels is 0, must be at least 1"),
        (lambda c: ResidualKMeans(8, 256), ValueError, "num_levels 8 of codebook_size 256 take 64 bits"),
        (lambda c: ResidualKMeans(steps=0), ValueError, "steps is 0"),
        (lambda c: ResidualKMeans(1, 8).fit(torch.randn(7, 2)), ValueError, "codebook_size is 8, but only 7 rows"),
        (
            lambda c: VQFusion(quantizer=3),
            TypeError,
            "quantizer must be a DiscretePCA or a ResidualKMeans, got int",
        ),
        (lambda c: VQFusion(latent=0), ValueError, "latent is 0, must be at least 1"),
        (lambda c: VQFusion(commitment=NAN), ValueError, "commitment is nan"),
        (lambda c: VQFusion(source_weights=[1.0, -1.0]), ValueError, r"source_weights\[1\] is -1.0"),
        (lambda c: VQFusion(source_weights=[1.0]).fit([torch.randn(9, 2)] * 2), ValueError, "1 numbers for 2 sources"),
        (lambda c: VQFusion().fit(torch.randn(9, 2), {"a": torch.full((9,), -1)}), ValueError, r"labels\['a'\] is -1"),
        (lambda c: VQFusion(steps=3, learning_rate=1e30).fit(torch.randn(9, 2)), FloatingPointError, "diverged"),
    ],
)
def test_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call(DiscretePCA(4))
