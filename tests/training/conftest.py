"""Small runs have their own constants, by the names of the test's module: `LOG_EVERY` and `REPLICATE_BELOW`."""

import pytest

from jfi.training import ShardingConfig, TrainingConfig


@pytest.fixture(autouse=True, scope="module")
def _constants_of_small_runs(request):
    with pytest.MonkeyPatch.context() as patched:
        for section, name in ((TrainingConfig, "log_every"), (ShardingConfig, "replicate_below")):
            patched.setattr(section, name, getattr(request.module, name.upper(), getattr(section, name)))
        yield
