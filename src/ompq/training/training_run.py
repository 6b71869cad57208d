"""The state of a training run: what a checkpoint holds and resumes."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.configs import TrainConfig
from ompq.content_identity import identity
from ompq.errors import DataError
from ompq.evaluation import targets_on
from ompq.layers import quantized_layers
from ompq.network.observation import copy_network
from ompq.optional_libraries import optional_library
from ompq.samples import batch_length, call, evaluating, first_tensor, model_device
from ompq.training.batch_norms import (
    Variances,
    fold_norms,
    keep_norms,
    norm_factor,
    restore_float_weights,
)
from ompq.training.rounding_rules import ActivationRanges, make_rule
from ompq.training.schedule import learning_rate
from ompq.training.step import (
    CodePenalty,
    Gradients,
    Loss,
    Recorded,
    make_trainable,
    may_leave_unused,
    memory_layout,
)
from ompq.training.training_batches import Batches, LabelledBatch, Shard, checked_length

MODEL_PREFIX, _MOMENTUM, _COUNTS = "model/", "momentum/", "counts"
# Settings that may change when a run is resumed, because they do not affect its result.
_NOT_IN_IDENTITY = {"checkpoint_steps", "report_steps", "tensorboard", "logger"}


def check_installed(config: TrainConfig) -> None:
    """Raise a MissingExtraError if a package that training needs is not installed."""
    needed = {"accelerate": "train"}
    if config.tensorboard is not None:
        needed["torch.utils.tensorboard"] = "tensorboard"
    if config.logger != "none":
        needed[config.logger] = config.logger
    for module, extra in needed.items():
        optional_library(module, extra)


class Run:
    """The state of one training run in this process: model, optimizer and steps."""

    def __init__(
        self,
        quantized: nn.Module,
        batches: Batches,
        config: TrainConfig,
        *,
        teacher: nn.Module | None,
        loss: Loss | None = None,
    ) -> None:
        self.config, self.device = config, model_device(quantized)
        self.engine = _accelerator(quantized, config)
        processes = self.engine.num_processes
        if processes > 1:
            self.device = self.engine.device
        self.length = checked_length(batches, config, processes, self.device)
        self.step, self.epoch_steps = 0, self.length // config.accumulate
        self.steps = self.epoch_steps * config.epochs
        self.model = copy_network(quantized).to(self.device)
        if teacher is not None and config.start == "float":
            restore_float_weights(self.model, teacher)
        if teacher is not None and config.batch_norm == "fold-and-train":
            keep_norms(self.model, teacher)
        self.rule = make_rule(self.model, config.weights)
        self.trainable = make_trainable(self.model, config, self.rule)
        layout = memory_layout(config, self.device)
        self.model.to(memory_format=layout)
        self.optimizer = self.trainable.optimizer(config)
        self.prepared, self.stepping = self.engine.prepare(self.model, self.optimizer)
        self.variances = Variances(self.model)
        self.ranges = _running_ranges(self.model, config)
        if teacher is not None and config.distill:
            teacher = copy_network(teacher).to(self.device).eval()
            teacher.to(memory_format=layout)
        penalty: Callable[[], Tensor | None] = self.rule.penalty
        if config.code_penalty:
            penalty = CodePenalty(self.model, config.code_penalty)
        self.gradients = Gradients(
            torch.compile(self.prepared) if config.compile else self.prepared,
            teacher if config.distill else None,
            config,
            backward=self.engine.backward,
            device=self.device,
            penalty=penalty,
            own_loss=loss,
        )
        self.compute: Callable[..., None] = self.gradients

    @property
    def judged_by(self) -> str:
        """What epochs are judged by; higher is better."""
        own_loss = self.gradients.own_loss
        return "validation top-1" if own_loss is None else "minus validation loss"

    @property
    def shard(self) -> Shard:
        """Index of this process, and the number of processes."""
        return self.engine.process_index, self.engine.num_processes

    def identity(self, quantized: nn.Module) -> str:
        """Return a digest that a run and the checkpoint it resumes from must share."""
        settings = asdict(self.config)
        kept = {k: v for k, v in settings.items() if k not in _NOT_IN_IDENTITY}
        kept["weights"] = self.config.weights  # may be a rule of the user's own
        loss = self.gradients.own_loss
        return identity(kept, self.length, loss, quantized.state_dict())

    def begin_epoch(self, number: int) -> range:
        """Set the modules' modes; return the numbers of the batches still to train."""
        self.model.train()
        if number >= self.config.freeze_norm_epoch:
            for module in self.model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        self.rule.begin_epoch(number, self.config.epochs)
        if self.config.cuda_graph:
            # The recorded graph depends on the modes of the norms: record it again when
            # they are frozen.
            freezes = self.step == self.config.freeze_norm_epoch * self.epoch_steps
            if freezes or not isinstance(self.compute, Recorded):
                self.compute = Recorded(self.gradients, self.model)
        done = (self.step - number * self.epoch_steps) * self.config.accumulate
        return range(done, self.length)

    def update(self) -> None:
        """Take one optimizer step with the accumulated gradients."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        if self.config.gradient_norm:
            parameters = [*self.trainable.named.values()]
            # Accelerate's version removes the loss scale first under fp16.
            self.engine.clip_grad_norm_(parameters, self.config.gradient_norm)
        self.stepping.step()
        if not isinstance(self.compute, Recorded):
            self.stepping.zero_grad()
        self.trainable.keep_positive()
        self.variances.limit()
        self.rule.update()
        self.step += 1

    def rate(self) -> float:
        """Return the next step's learning rate."""
        return learning_rate(self.config, self.step, self.steps)

    def counts(self) -> Tensor:
        """Return the epoch's sums so far: loss, correct, images; (processes, 3)."""
        gathered: Tensor = self.engine.gather(self.gradients.counts[None])
        return gathered.cpu()

    def quality(self, batches: Iterable[LabelledBatch]) -> float:
        """Return the top-1 accuracy, or minus the mean of the user's own loss.

        The processes share the batches.
        """
        own_loss = self.gradients.own_loss
        process, processes = self.shard
        counts = torch.zeros(2, device=self.device)
        with evaluating(self.model):
            for number, (inputs, targets) in enumerate(batches):
                if number % processes == process:
                    output = call(self.model, self.gradients.placed(inputs))
                    images, wanted = (
                        batch_length(inputs),
                        targets_on(self.device, targets),
                    )
                    if own_loss is not None:
                        counts[0] -= images * own_loss(output, wanted)
                    else:
                        counts[0] += (first_tensor(output).argmax(1) == wanted).sum()
                    counts[1] += images
        total, count = self.engine.reduce(counts).tolist()
        if not count:
            raise DataError(
                "validation yielded no images; it is read once before training and "
                "once per epoch, so pass a list or a DataLoader that is not empty"
            )
        return float(total / count)

    def result(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state as that of an ordinary quantized network, norms folded."""
        self.model.load_state_dict(state)
        layers = [x for x in quantized_layers(self.model).values() if x.rounding]
        with torch.no_grad():
            factors = [norm_factor(layer) for layer in layers]
            pairs = zip(layers, factors, strict=True)
            weights = [layer.rounded_weight(factor) for layer, factor in pairs]
            fold_norms(self.model)
            for layer, factor, weight in zip(layers, factors, weights, strict=True):
                layer.weight.copy_(weight)
                self.rule.finalize(layer, factor)
        self.rule.detach()
        if self.ranges is not None:
            self.ranges.detach()
        return self.model.state_dict()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: network, momentum, sums of the epoch."""
        state = {
            MODEL_PREFIX + key: value for key, value in self.model.state_dict().items()
        }
        for name, parameter in self.trainable.named.items():
            buffer = self.optimizer.state[parameter].get("momentum_buffer")
            if buffer is not None:
                state[_MOMENTUM + name] = buffer
        return {**state, _COUNTS: self.counts()}

    def restore(self, state: Mapping[str, Tensor], step: int) -> None:
        """Continue after the step at which a checkpoint was written."""
        self.model.load_state_dict(take_prefixed(state, MODEL_PREFIX))
        for name, tensor in take_prefixed(state, _MOMENTUM).items():
            parameter = self.trainable.named[name]
            buffer = torch.empty_like(parameter).copy_(tensor)
            self.optimizer.state[parameter]["momentum_buffer"] = buffer
        counts, (process, processes) = state[_COUNTS], self.shard
        if len(counts) != processes:  # then sums may differ in the last digit
            counts = counts.sum(0) * torch.eye(processes, 1, dtype=counts.dtype)
        self.gradients.counts.copy_(counts[process])
        self.step = step


def _running_ranges(model: nn.Module, config: TrainConfig) -> ActivationRanges | None:
    """Return the running ranges of activations, if the settings ask for them."""
    if config.activations != "ema":
        return None
    return ActivationRanges(model, config.range_momentum)


def _accelerator(quantized: nn.Module, config: TrainConfig) -> Any:
    check_installed(config)
    from accelerate import Accelerator, DistributedDataParallelKwargs

    # Otherwise processes would wait forever for gradients of unused parameters.
    unused = may_leave_unused(quantized)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return Accelerator(
        gradient_accumulation_steps=config.accumulate,
        log_with=None if config.logger == "none" else config.logger,
        device_placement=False,  # training runs where the network is
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
        # Several processes need it to communicate on CPUs. With one process it would
        # only prevent a later run on another device.
        cpu=several and model_device(quantized).type == "cpu",
    )


def take_prefixed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
