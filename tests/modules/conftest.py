import pytest
import torch
from torchrec import JaggedTensor

EMBEDDING_DIM = 8
LENGTHS = [3, 0, 1, 5]
BATCH_SIZE = len(LENGTHS)


@pytest.fixture
def events():
    """Makes a JaggedTensor of random embeddings, float64 and differentiable."""

    def make(lengths=LENGTHS, width=EMBEDDING_DIM, dtype=torch.float64, **kwargs):
        values = torch.randn(sum(lengths), width, dtype=dtype, requires_grad=True)
        return JaggedTensor(values=values, lengths=torch.tensor(lengths, dtype=torch.long), **kwargs)

    return make


@pytest.fixture
def target():
    """Makes random target embeddings, float64 and differentiable."""

    def make(batch_size=BATCH_SIZE, width=EMBEDDING_DIM, dtype=torch.float64):
        return torch.randn(batch_size, width, dtype=dtype, requires_grad=True)

    return make


@pytest.fixture(autouse=True)
def _random_projections(random_projections):
    pass
