import pytest


@pytest.fixture(autouse=True)
def _random_projections(random_projections):
    pass
