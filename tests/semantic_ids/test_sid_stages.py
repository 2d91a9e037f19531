"""Discrete PCA generalises residual k-means and PCA: one loop over stages, another alphabet of digits."""

import itertools

import pytest
import torch

from jfi.semantic_ids import DiscretePCA, ResidualKMeans
from jfi.semantic_ids.residual_kmeans import OneHot
from jfi.semantic_ids.stages import Ternary, first_direction, fit_stages, nearest_trit


def content(rows: int = 400, width: int = 12) -> torch.Tensor:
    spread = torch.linspace(3.0, 0.2, width, dtype=torch.float64)
    mixed = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q
    return torch.randn(rows, width, dtype=torch.float64) * spread @ mixed + 5.0


class Real:
    """Real digits along the direction of largest variance."""

    by_moments = True

    def fit(self, residual, moments):
        return first_direction(moments)[None]

    def digits(self, residual, basis):
        return residual @ basis.T / basis.square().sum()


def stage_digits(x, alphabets, bases):
    """The digits `[N, m]` of each stage for centred rows `[N, D]`."""
    residual, digits = x.clone(), []
    for alphabet, basis in zip(alphabets, bases, strict=True):
        digits.append(alphabet.digits(residual, basis))
        residual -= digits[-1] @ basis
    return digits


def test_real_digits_are_pca():
    x = content()
    centred = x - x.mean(0)
    alphabets = [Real()] * x.shape[1]
    bases = fit_stages(centred, alphabets)
    digits = torch.cat(stage_digits(centred, alphabets, bases), 1)
    _, sizes, components = torch.linalg.svd(centred, full_matrices=False)
    signs = (torch.cat(bases) * components).sum(1, keepdim=True)
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))
    torch.testing.assert_close(torch.cat(bases), components * signs.sign())
    torch.testing.assert_close(digits, centred @ components.T * signs.sign().T)
    torch.testing.assert_close(digits.norm(dim=0), sizes)
    torch.testing.assert_close(digits @ torch.cat(bases), centred)


def test_real_digits_are_the_pca_of_scikit_learn():
    decomposition = pytest.importorskip("sklearn.decomposition")
    x = content()
    pca = decomposition.PCA(5).fit(x.numpy())
    centred = x - x.mean(0)
    bases = fit_stages(centred, [Real()] * 5)
    digits = torch.cat(stage_digits(centred, [Real()] * 5, bases), 1)
    torch.testing.assert_close(digits.abs(), torch.from_numpy(pca.transform(x.numpy())).abs())


def lloyd(rows: torch.Tensor, centroids: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        codes = torch.cdist(rows, centroids).argmin(1)
        centroids = torch.stack([rows[codes == k].mean(0) for k in range(len(centroids))])
    return centroids


def test_one_hot_digits_are_residual_kmeans():
    x = content()
    centred = x - x.mean(0)
    starts = [centred[:8].clone(), torch.randn(8, 12, dtype=torch.float64)]
    alphabets = [OneHot(8, 10, torch.Generator(), start) for start in starts]
    bases = fit_stages(centred, alphabets)
    digits = stage_digits(centred, alphabets, bases)
    residual = centred.clone()
    for start, basis, one_hot in zip(starts, bases, digits, strict=True):
        centroids = lloyd(residual, start, 10)
        codes = torch.cdist(residual, centroids).argmin(1)
        assert len(codes.unique()) == 8
        torch.testing.assert_close(basis, centroids)
        assert torch.equal(one_hot, torch.nn.functional.one_hot(codes, 8).double())
        residual = residual - centroids[codes]


def test_residual_kmeans_gives_the_codes_of_its_codebooks():
    x = content().float()
    codec = ResidualKMeans(num_levels=3, codebook_size=8).fit(x)
    residual = (x.double() - codec.tensors["mean"]) / codec.tensors["scale"]
    for level, codes in enumerate(codec.digits(codec.encode(x)).T):
        codebook = codec.tensors["codebooks"][level]
        assert torch.equal(codes, torch.cdist(residual, codebook).argmin(1))
        residual = residual - codebook[codes]
    decoded = x.double() - residual * codec.tensors["scale"]
    torch.testing.assert_close(codec.decode(codec.encode(x)), decoded.float())


def test_discrete_pca_encodes_as_its_stages_do():
    x = content().float()
    codec = DiscretePCA(num_digits=40).fit(x)
    centred = (x.double() - codec.tensors["mean"]) / codec.tensors["scale"]
    bases = list(codec.tensors["basis"].split(1))
    expected = torch.cat(stage_digits(centred, [Ternary()] * 40, bases), 1)
    assert torch.equal(codec.digits(codec.encode(x)).double(), expected)
    assert {*expected.unique().tolist()} == {-1.0, 0.0, 1.0}


def test_a_ternary_stage_is_the_first_component_with_the_best_step():
    x = content()
    x -= x.mean(0)
    (basis,) = fit_stages(x, [Ternary()])
    first = torch.linalg.svd(x).Vh[0]
    torch.testing.assert_close((basis[0] / basis.norm() @ first).abs(), torch.ones((), dtype=torch.float64))
    scores = x @ (basis[0] / basis.norm())

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
    bases = fit_stages(line - line.mean(0), [Ternary()] * 4)
    lengths = [basis.norm() for basis in bases]
    assert all(a > b for a, b in itertools.pairwise(lengths))
    unit = torch.cat(bases) / torch.stack(lengths)[:, None]
    torch.testing.assert_close(unit @ unit[0], torch.ones(4, dtype=torch.float64))


def test_moments_follow_the_residual():
    class Watched(Ternary):
        def fit(self, residual, moments):
            torch.testing.assert_close(moments, residual.T @ residual, atol=1e-8, rtol=1e-8)
            return super().fit(residual, moments)

    x = content()
    assert len(fit_stages(x - x.mean(0), [Watched()] * 30)) == 30
