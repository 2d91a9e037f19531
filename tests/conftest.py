"""Kernels run on the GPU where there is one, else through Triton's interpreter, chosen before they are defined."""

import functools
import os
import shutil
import signal
import threading
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# The code around an artifact's kernels, whose optimizer takes a fifth of the compiler's time.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
if shutil.which("g++"):
    os.environ.setdefault("CXX", str(Path(__file__).parent / "cxx/g++"))

import pictures
import pytest
from hypothesis import HealthCheck, settings
from interpreter import make_faster

make_faster()

# No example has to end, or to be drawn, in a given time.
settings.register_profile("jfi", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jfi")

# A shell starts what runs in the background with Ctrl-C ignored, which tests of it and their processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: The modules that take longest, which workers begin with: one that came last would run alone.
LONGEST = (
    *("training/test_distributed", "serving/test_publish", "modules/test_compiled_layers", "serving/test_ends"),
    *("training/test_disturbed_runs", "serving/test_commands", "serving/test_counters", "ops/test_jagged_attention"),
    *("training/test_run", "test_imports", "integration/test_sharded", "training/test_attention_exchange"),
    *("ops/test_target_attention", "ops/test_needed_gradients", "ops/test_compiled", "training/test_growing_runs"),
    *("ops/test_timelines", "follow/test_published", "tables/test_step_rows", "serving/test_capacity_run"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    pictures.replace()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_loader_is_left():
    """Threads that assemble batches end with the loop that reads them, however it ends."""
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("jfi-prefetch")]


@pytest.fixture
def poisoned():
    """Uninitialised memory is NaN, so that an element nobody wrote cannot pass for a right one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def random_projections(monkeypatch):
    """Draws the projections of layers at random: at their initial values swapped heads, say, would not show."""
    from jfi.modules import JaggedEncoder, JaggedFeatureInteraction

    def drawn(method):
        @functools.wraps(method)
        def draw(self, *args, **kwargs):
            method(self, *args, **kwargs)
            for name, parameter in self.named_parameters():
                if name.endswith("weight") and parameter.dim() == 2 and not name.startswith("embedding_collection"):
                    torch.nn.init.xavier_uniform_(parameter)

        return draw

    monkeypatch.setattr(JaggedFeatureInteraction, "__init__", drawn(JaggedFeatureInteraction.__init__))
    for kind in (JaggedFeatureInteraction, JaggedEncoder):
        monkeypatch.setattr(kind, "reset_parameters", drawn(kind.reset_parameters))
