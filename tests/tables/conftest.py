from modules.conftest import _random_projections, events, target  # noqa: F401
