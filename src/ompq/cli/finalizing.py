"""What is evaluated and saved computes as its exported forms will, where it can."""

from torch import nn

from ompq.cli.screen import Screen
from ompq.errors import QuantizationError
from ompq.integer.finalization import finalize
from ompq.samples import SamplesLike

WHOLE_NUMBERS = "whole numbers: integers and ONNX compute the same"


def finalized(
    network: nn.Module, samples: SamplesLike, screen: Screen
) -> tuple[nn.Module, str]:
    """Settle a quantized network, unless something in it has no integer form.

    Returns:
        The network to evaluate and save, and what it computes with: for example
        ``float: hardswish in features.0.2 has no integer form``.
    """
    with screen.stage("settling"):
        try:
            return finalize(network, samples), WHOLE_NUMBERS
        except QuantizationError as error:
            return network, f"float: {error}"
