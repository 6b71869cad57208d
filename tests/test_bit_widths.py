"""Widths that are refused."""

import pytest
import torch

from ompq.bit_widths import check_bits
from ompq.grids import (
    Grid,
)


@pytest.mark.parametrize("bits", [1, 9, 0, -2, 2.5])
def test_wrong_bits_are_refused_with_the_limits(bits):
    with pytest.raises(ValueError, match=rf"bits={bits} .* integer from 2 to 8"):
        check_bits(bits)
    with pytest.raises(ValueError, match="integer from 2 to 8"):
        Grid(torch.tensor(1.0), torch.tensor(0.0), bits)
