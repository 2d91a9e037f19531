from modules.conftest import _random_projections  # noqa: F401
