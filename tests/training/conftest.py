"""Short runs write a line of metrics more often than long ones: every `LOG_EVERY` steps of the test's module."""

import pytest

from jfi.training import TrainingConfig


@pytest.fixture(autouse=True, scope="module")
def _lines_of_short_runs(request):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingConfig, "log_every", getattr(request.module, "LOG_EVERY", TrainingConfig.log_every))
        yield
