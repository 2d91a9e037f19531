"""What docs/integration.md says is not supported fails with an error that says so."""

import pytest
import torch
from torch import nn

import jfi
import jfi.table1
from integration.sharded import build
from jfi import JaggedEncoder, JaggedFeatureInteraction, SequenceFeatureConfig

FEATURE = SequenceFeatureConfig("taste", ["history_item"], ["item"])


class CallsAnOperator(nn.Module):
    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return jfi.table1.jagged_softmax(x, offsets)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (lambda: JaggedFeatureInteraction([FEATURE], 8), "JaggedFeatureInteraction"),
        (lambda: JaggedEncoder([FEATURE], 8), "JaggedEncoder"),
        (lambda: build("own tables"), "JaggedFeatureInteraction"),
        (lambda: build("SequenceDLRM"), "SequenceDLRM"),
        (lambda: torch.fx.symbolic_trace(CallsAnOperator()), "jfi.table1.jagged_softmax"),
    ],
    ids=["layer", "encoder", "inside a model", "SequenceDLRM", "operator"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The TorchScript type system")
def test_torch_script(module, name):
    with pytest.raises(NotImplementedError, match=f"torch.jit.script does not support {name}: use torch.export"):
        torch.jit.script(module())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_of_the_operator_is_what_to_use_instead():
    x, offsets = torch.randn(5, 2), torch.tensor([0, 2, 5])
    traced = torch.jit.trace(CallsAnOperator(), (x, offsets), check_trace=False)
    other = torch.randn(5, 2)
    torch.testing.assert_close(traced(other, offsets), jfi.table1.jagged_softmax(other, offsets))
