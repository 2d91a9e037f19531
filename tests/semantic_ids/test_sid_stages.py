"""Stages of discrete PCA and of residual k-means against other ways to the same bases and digits."""

import itertools

import torch

from jfi.semantic_ids import DiscretePCA, ResidualKMeans
from jfi.semantic_ids.discrete_pca import nearest_trit
from jfi.semantic_ids.residual_kmeans import lloyd


def content(rows: int = 400, width: int = 12) -> torch.Tensor:
    spread = torch.linspace(3.0, 0.2, width, dtype=torch.float64)
    mixed = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q
    return torch.randn(rows, width, dtype=torch.float64) * spread @ mixed + 5.0


def test_lloyd_moves_centroids_to_the_means_of_their_rows():
    x, found = content(), content()[:8]
    expected = found
    for _ in range(10):
        codes = torch.cdist(x, expected).argmin(1)
        assert len(codes.unique()) == 8
        expected = torch.stack([x[codes == k].mean(0) for k in range(8)])
    torch.testing.assert_close(lloyd(x, found, 10), expected)


def test_residual_kmeans_gives_the_codes_of_its_codebooks():
    x = content().float()
    codec = ResidualKMeans(num_levels=3, codebook_size=8).fit(x)
    residual = (x.double() - codec.tensors["mean"]) / codec.tensors["scale"]
    for level, codes in enumerate(codec.digits(codec.encode(x)).T):
        codebook = codec.tensors["codebooks"][level]
        assert torch.equal(codes, torch.cdist(residual, codebook).argmin(1))
        # The fit has ended: each centroid is the mean of the rows that have its code.
        means = torch.stack([residual[codes == k].mean(0) for k in range(8)])
        torch.testing.assert_close(codebook, means, atol=1e-5, rtol=1e-5)
        residual = residual - codebook[codes]
    decoded = x.double() - residual * codec.tensors["scale"]
    torch.testing.assert_close(codec.decode(codec.encode(x)), decoded.float())


def test_directions_of_discrete_pca_are_first_components_of_what_is_left():
    x = content().float()
    codec = DiscretePCA(num_digits=40).fit(x)
    residual = (x - codec.tensors["mean"].float()) / codec.tensors["scale"].float()
    residual, expected = residual.double(), []
    for b in codec.tensors["basis"].split(1):
        largest = torch.linalg.eigvalsh(residual.T @ residual)[-1]
        torch.testing.assert_close((residual @ b[0]).square().sum() / b.square().sum(), largest, atol=1e-8, rtol=1e-8)
        expected.append(nearest_trit(residual @ b.T, b.square().sum(1)))
        residual = residual - expected[-1] @ b
    assert torch.equal(codec.digits(codec.encode(x)).double(), torch.cat(expected, 1))
    assert {*torch.cat(expected).unique().tolist()} == {-1.0, 0.0, 1.0}


def test_a_ternary_stage_is_the_first_component_with_the_best_step():
    x = content()
    x -= x.mean(0)
    codec = DiscretePCA(1).fit(x)
    basis = codec.tensors["basis"][0] * codec.tensors["scale"]
    first = torch.linalg.svd(x).Vh[0]
    torch.testing.assert_close((basis / basis.norm() @ first).abs(), torch.ones((), dtype=torch.float64))
    scores = x @ (basis / basis.norm())

    def error(step: torch.Tensor) -> torch.Tensor:
        levels = step * torch.tensor([-1.0, 0.0, 1.0])
        return (scores[:, None] - levels).square().min(1).values.sum()

    found = error(basis.norm())
    assert all(found <= error(basis.norm() * factor) for factor in (0.9, 0.97, 1.03, 1.1))


def test_a_digit_is_the_nearest_of_three():
    rows, basis = torch.randn(200, 4), torch.randn(4)
    nearest = torch.stack([(rows - t * basis).square().sum(1) for t in (-1, 0, 1)]).argmin(0) - 1
    assert torch.equal(nearest_trit(rows @ basis, basis.square().sum()), nearest.float())


def test_a_strong_direction_is_taken_again_in_finer_steps():
    line = torch.randn(300, 1, dtype=torch.float64) @ torch.randn(1, 6, dtype=torch.float64)
    basis = DiscretePCA(4).fit(line).tensors["basis"]
    lengths = basis.norm(dim=1)
    assert all(a > b for a, b in itertools.pairwise(lengths.tolist()))
    unit = basis / lengths[:, None]
    torch.testing.assert_close(unit @ unit[0], torch.ones(4, dtype=torch.float64), atol=1e-5, rtol=1e-5)
