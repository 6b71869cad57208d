"""Measure allocations: quantize, compare with the float network, save the results."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ompq.allocation.problem import Allocation
from ompq.configs import QuantizeConfig, ReconstructConfig, RoundingConfig
from ompq.content_identity import identity
from ompq.errors import SampleError
from ompq.network.attention import with_layers
from ompq.outputs import Outputs
from ompq.parallel import share_out
from ompq.quantization.pipeline import quantize
from ompq.reconstruction.block_loop import reconstruct
from ompq.samples import Batch, Samples, batch_length, evaluating, run_batch

Floats = NDArray[np.float64]
MEASURED_AT_ONCE = 64  # samples per forward pass


class Meter:
    """Measures allocations against the outputs of the float network."""

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        held_out: Samples,
        *,
        iterations: int = 0,
        seed: int = 0,
        config: QuantizeConfig = QuantizeConfig(),
    ) -> None:
        """Run the float network once on ``held_out``, where divergence is measured.

        Args:
            samples: Samples for calibration and reconstruction.
            iterations: Reconstruction steps per block; 0 only rounds.
            config: How allocations are quantized.
        """
        self.model = with_layers(model, samples)
        self.samples, self.held_out = samples, held_out
        self.iterations, self.seed = iterations, seed
        self.outputs = Outputs.of(self.model, held_out, config.output)
        self.config = replace(config, output=str(self.outputs))
        self._expected = self._returned(self.model)

    @cached_property
    def judge(self) -> str:
        """A digest of how it measures; only equal ones give comparable divergences."""
        way = f"reconstruct {self.iterations}" if self.iterations else "feedback"
        if self.config.group_size:
            way += f" groups of {self.config.group_size}"
        return identity(way, str(self.outputs), len(self.samples), self._expected)[:16]

    def quantized(self, bits: Allocation) -> nn.Module:
        """Return the network with these bits, reconstructed if there are iterations."""
        network = quantize(self.model, bits, self.samples, self.config)
        if self.iterations:
            rounding = RoundingConfig(iterations=self.iterations)
            config = ReconstructConfig(rounding=rounding, tuning=None, seed=self.seed)
            network = reconstruct(network, self.model, self.samples, config)
        return network

    def divergence(self, network: nn.Module) -> float:
        """Return the mean divergence from the float network (:mod:`ompq.outputs`)."""
        return float(self.divergences(network).mean())

    def divergences(self, network: nn.Module) -> Floats:
        """Return the divergence from the float network at each held-out sample."""
        found = [
            self.outputs.divergences(expected, tensors, count)
            for (count, expected), (_, tensors) in zip(
                self._expected, self._returned(network), strict=True
            )
        ]
        return torch.cat(found).numpy()

    def _returned(self, network: nn.Module) -> list[tuple[int, list[Tensor]]]:
        """Return the outputs for each batch of held-out samples, and its length."""

        def run(batch: Batch) -> tuple[int, list[Tensor]]:
            tensors = self.outputs.read(run_batch(network, batch))
            return batch_length(batch), [_on_host(tensor) for tensor in tensors]

        with evaluating(network):
            return share_out([*self.held_out.batches(MEASURED_AT_ONCE)], run)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.float().cpu() if tensor.is_floating_point() else tensor.cpu()


def split(samples: Samples, fraction: float) -> tuple[Samples, Samples]:
    """Split samples for calibration from the last ones, which are held out.

    Raises:
        SampleError: There are too few to hold any back.
    """
    count = max(round(len(samples) * (1 - fraction)), 1)
    if count >= len(samples):
        raise SampleError(
            f"{len(samples)} samples are too few to hold some back; give 1,000 or more"
        )
    return samples[:count], samples[count:]
