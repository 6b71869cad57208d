"""Samples: unlabelled inputs, brought into one form and fed to a network.

A *batch* is what one call of the network takes: a tensor, a tuple of tensors
(positional arguments) or a dict of tensors (keyword arguments). *Samples* are one
batch or an iterable of batches.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ompq.errors import SampleError

Batch: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Samples: TypeAlias = Batch | Iterable[Batch]
# Called as progress(done, total, message); total is None where it is not known.
Progress: TypeAlias = Callable[[int, int | None, str], None]
Report: TypeAlias = Callable[[int, int | None], None]  # the same without a message


def sample_batches(samples: Samples, *, batch_size: int = 256) -> Iterator[Batch]:
    """Yield the batches of the samples; one large batch is cut into several.

    Raises:
        SampleError: The samples are empty, hold NaN or infinity, or are labelled.
    """
    batches = [samples] if isinstance(samples, Tensor | tuple | dict) else samples
    found = False
    for batch in batches:
        _check(batch)
        count = batch_length(batch)
        found = found or count > 0
        for start in range(0, count, batch_size):
            yield _cut(batch, count, start, start + batch_size)
    if not found:
        raise SampleError("samples are empty: give at least one input")


def first_samples(samples: Samples, count: int) -> Batch:
    """Return the first inputs, at most ``count``, without exhausting a list.

    Raises:
        SampleError: As :func:`sample_batches`.
        TypeError: The samples are an iterator, which can be read only once.
    """
    if isinstance(samples, Iterator):
        raise TypeError(
            "samples is an iterator that can be read only once; "
            "pass a list, a DataLoader or a tensor"
        )
    return next(sample_batches(samples, batch_size=count))


def batch_length(batch: Batch) -> int:
    """Return the number of inputs in the batch: its tensors' leading dimension."""
    sizes = [t.shape[0] for t in _tensors(batch) if t.dim() > 0]
    return max(sizes, default=0)


def batch_count(samples: Samples, batch_size: int) -> int | None:
    """Return how many batches there will be, if that can be told beforehand."""
    if not isinstance(samples, Tensor | tuple | dict):
        return None
    return -(-batch_length(samples) // batch_size)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device."""
    return map_batch(batch, lambda t: t.to(device, non_blocking=True))


def call(model: nn.Module, batch: Batch) -> Any:
    """Call the network with the batch, whatever its form."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch)


def first_tensor(output: Any) -> Tensor:
    """Return the first floating-point tensor of an output: its logits, usually.

    Raises:
        SampleError: There is none.
    """
    if isinstance(output, Tensor) and output.is_floating_point():
        return output
    children: Iterable[Any] = ()
    if isinstance(output, dict):
        children = output.values()
    elif isinstance(output, tuple | list):
        children = output
    for child in children:
        try:
            return first_tensor(child)
        except SampleError:
            continue
    raise SampleError(
        f"the network returned {type(output).__name__} without a float tensor"
    )


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer; CPU without any."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put the network into eval mode without gradients; restore every flag after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def attached(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks in the end, whatever happens."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


def run_first(
    model: nn.Module,
    samples: Samples,
    count: int,
    *,
    batch_size: int | None = None,
    report: Report = lambda _done, _total: None,
) -> None:
    """Run the network, in eval mode, on the first samples, for what its hooks see.

    Args:
        model: The network.
        samples: Inputs.
        count: How many of them.
        batch_size: How many at a time; all, unless given.
        report: Called after each batch, with the number of batches done and of all.
    """
    size = batch_size or count
    some = to_device(first_samples(samples, count), model_device(model))
    total = batch_count(some, size)
    with evaluating(model):
        for done, batch in enumerate(sample_batches(some, batch_size=size), 1):
            call(model, batch)
            report(done, total)


def cudnn_kernels(*, repeatable: bool) -> AbstractContextManager[None]:
    """Let cuDNN take kernels that give the same bits every time, or the fastest."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=not repeatable,
        deterministic=repeatable,
        allow_tf32=cudnn.allow_tf32,
    )


def _tensors(batch: Batch) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, dict) else batch)


def map_batch(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch of the same form, of what the function makes of its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: function(value) for key, value in batch.items()}
    return tuple(function(value) for value in batch)


def _cut(batch: Batch, count: int, start: int, stop: int) -> Batch:
    # A tensor without the batch dimension (a shared mask, say) is passed whole.
    return map_batch(
        batch, lambda t: t[start:stop] if t.dim() and t.shape[0] == count else t
    )


def _check(batch: Any) -> None:
    if isinstance(batch, list):
        raise SampleError(
            "samples yield lists, as a labelled DataLoader does; "
            "pass the inputs alone, for example [x for x, _ in loader]"
        )
    if not isinstance(batch, Tensor | tuple | dict) or not all(
        isinstance(value, Tensor) for value in _tensors(batch)
    ):
        raise SampleError(
            f"a batch must be a tensor, a tuple or a dict of tensors, "
            f"not {type(batch).__name__}"
        )
    for value in _tensors(batch):
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise SampleError("samples hold NaN or infinity; check the preprocessing")
