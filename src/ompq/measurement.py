"""Measure allocations: quantize, compare with the float network, save the results.

Two scores measure as well, with one unit quantized at a time.
"""

import hashlib
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ompq.allocation.problem import Allocation
from ompq.configs import QuantizeConfig, ReconstructConfig, RoundingConfig
from ompq.errors import SampleError
from ompq.evaluation import logits_of
from ompq.network.attention import with_layers
from ompq.quantization.pipeline import quantize
from ompq.reconstruction.block_loop import reconstruct
from ompq.samples import Samples, kl_divergence

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
        group_size: int = 0,
    ) -> None:
        """Run the float network once on ``held_out``, where divergence is measured.

        Args:
            samples: Samples for calibration and reconstruction.
            iterations: Reconstruction steps per block; 0 only rounds.
            group_size: Inputs of a linear unit that share a scale; 0 for all of them.
        """
        self.model = with_layers(model, samples)
        self.samples, self.held_out = samples, held_out
        self.iterations, self.seed = iterations, seed
        self.config = QuantizeConfig(group_size=group_size or None)
        self._expected = logits_of(model, held_out)

    @cached_property
    def judge(self) -> str:
        """A digest of how it measures; only equal ones give comparable divergences."""
        way = f"reconstruct {self.iterations}" if self.iterations else "feedback"
        if self.config.group_size:
            way += f" groups of {self.config.group_size}"
        content = f"{way} {len(self.samples)}".encode()
        digest = hashlib.sha256(self._expected.numpy().tobytes() + content)
        return digest.hexdigest()[:16]

    def quantized(self, bits: Allocation) -> nn.Module:
        """Return the network with these bits, reconstructed if there are iterations."""
        network = quantize(self.model, bits, self.samples, self.config)
        if self.iterations:
            rounding = RoundingConfig(iterations=self.iterations)
            config = ReconstructConfig(rounding=rounding, tuning=None, seed=self.seed)
            network = reconstruct(network, self.model, self.samples, config)
        return network

    def divergence(self, network: nn.Module) -> float:
        """Return the mean KL divergence from the float network, in nats."""
        return float(self.divergences(network).mean())

    def divergences(self, network: nn.Module) -> Floats:
        """Return the KL divergence from the float network at each sample, in nats."""
        logits = logits_of(network, self.held_out)
        # Outputs for several tokens have a row for each.
        rows = kl_divergence(self._expected, logits).view(len(self.held_out), -1)
        return rows.mean(1).numpy()


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
