"""Samples: unlabelled inputs, read once, and functions that run a network on them.

A *batch* is what one call of the network takes: a tensor, a tuple of tensors
(positional arguments) or a dict of tensors (keyword arguments).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from threading import Lock, RLock, get_ident
from typing import Any, TypeAlias, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

from ompq.errors import SampleError
from ompq.offload import running_device, visiting
from ompq.working_memory import working_bytes

Batch: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Report: TypeAlias = Callable[[int, int | None], None]  # Progress without a message
# A forward hook with keyword arguments: called with module, args, kwargs and output.
Collector: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
# A pass changes a network's mode and hooks for a while: one thread at a time.
_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
_NEW_LOCK = Lock()
_READ_AT_ONCE = 64  # items of a dataset
# The largest output of a batch takes at most this part of the memory to work in.
_BATCH_SHARE = 16
_MOST_BYTES = (
    1 << 35
)  # of samples; more is a whole training set or an endless generator


@dataclass(frozen=True, eq=False)
class Samples:
    """Unlabelled inputs in host memory, in the order in which they were read.

    Every verb that takes samples reads them with :meth:`of`. Call it yourself to give
    the same inputs of a generator or a shuffled DataLoader to several verbs.
    """

    runs: tuple[Batch, ...]  # consecutive inputs of one shape, each as one large batch

    @classmethod
    def of(cls, given: "SamplesLike") -> "Samples":
        """Read all samples, once.

        Args:
            given: A batch; an iterable of batches, which may differ in shape, such as a
                list, a DataLoader or a generator; or a dataset. NumPy arrays become
                tensors, of float32 if they hold floats. A tuple is several inputs of
                one call. Of a list ``[inputs, targets]``, as a DataLoader of
                labelled images yields, the targets (class numbers) are ignored.

        Raises:
            SampleError: There are none or too many, or they are not finite tensors.
        """
        if isinstance(given, Samples):
            return given
        if isinstance(given, Dataset) and hasattr(given, "__len__"):
            given = DataLoader(given, batch_size=_READ_AT_ONCE)
        single = isinstance(given, Tensor | np.ndarray | tuple | Mapping)
        single = single or is_labelled(given)
        if not single and not isinstance(given, Iterable):
            raise SampleError(
                f"samples must be tensors or an iterable of batches, not "
                f"{type(given).__name__}"
            )
        # Workers of a loader share their memory, and a generator may reuse its own.
        lent = not single and not isinstance(given, list)
        runs: list[list[Batch]] = []
        for batch in _read([given] if single else given):
            kept = map_batch(batch, torch.clone) if lent else batch
            if runs and _alike(runs[-1][0], kept):
                runs[-1].append(kept)
            else:
                runs.append([kept])
        if not runs:
            hint = "; an iterator can be read only once" * isinstance(given, Iterator)
            raise SampleError(f"samples are empty: give at least one input{hint}")
        return cls(tuple(map(_join, runs)))

    def __repr__(self) -> str:
        shapes = {str(tuple(t.shape[1:])) for run in self.runs for t in _tensors(run)}
        return f"Samples({len(self)} of {', '.join(sorted(shapes))})"

    def __len__(self) -> int:
        return sum(map(batch_length, self.runs))

    def __iter__(self) -> Iterator[Batch]:
        """Yield each input as a batch of one."""
        return self.batches(1)

    @overload
    def __getitem__(self, part: int) -> Batch: ...
    @overload
    def __getitem__(self, part: slice) -> "Samples": ...
    def __getitem__(self, part: int | slice) -> "Samples | Batch":
        """Return one input as a batch of one, or several in a row as Samples."""
        if isinstance(part, int):
            if not -len(self) <= part < len(self):
                raise IndexError(f"there are {len(self)} samples, so none is {part}")
            at = part % len(self)
            return self[at : at + 1].runs[0]
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"samples are cut in order: step {step} must be 1")
        if start >= stop:
            raise SampleError(
                f"samples[{part.start}:{part.stop}] of {len(self)} samples is empty"
            )
        kept = []
        for run in self.runs:
            if max(start, 0) < min(stop, batch_length(run)):
                kept.append(_cut(run, max(start, 0), stop))
            start, stop = start - batch_length(run), stop - batch_length(run)
        return Samples(tuple(kept))

    def first(self, count: int) -> "Samples":
        """Return at most ``count`` inputs, the first ones."""
        return self[:count]

    def first_batch(self, count: int) -> Batch:
        """Return the first inputs as one batch: at most ``count``, all of one shape."""
        return _cut(self.runs[0], 0, count)

    def share(self, number: int, count: int) -> "Samples":
        """Return every ``count``-th input, starting at ``number``.

        If there are fewer than ``count``, all are returned.
        """
        if len(self) < count:
            return self
        runs, start = [], number
        for run in self.runs:
            length = batch_length(run)
            if start < length:
                runs.append(_cut(run, start, length, count))
            start = (start - length) % count
        return Samples(tuple(runs))

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all inputs in order, in batches of one shape and at most ``size``."""
        for run in self.runs:
            for start in range(0, batch_length(run), size):
                yield _cut(run, start, start + size)

    def batch_count(self, size: int) -> int:
        """Return the number of batches of at most ``size`` inputs."""
        return sum(-(-batch_length(run) // size) for run in self.runs)


SamplesLike: TypeAlias = Samples | Batch | Iterable[Batch]


def batch_length(batch: Batch) -> int:
    """Return the number of inputs in a batch: its first tensor's leading dimension."""
    return next((len(t) for t in _tensors(batch) if t.dim() > 0), 0)


def batch_values(batch: Batch) -> int:
    """Return the total number of elements in a batch."""
    return sum(tensor.numel() for tensor in _tensors(batch))


def map_batch(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch of the same structure with the function applied to its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: function(value) for key, value in batch.items()}
    return tuple(function(value) for value in batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of the batch on the device.

    A forward pass may change its input in place, so each pass gets its own.
    """
    return map_batch(batch, lambda t: t.to(device, non_blocking=True, copy=True))


def arguments(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and keyword arguments of a call with the batch."""
    if isinstance(batch, dict):
        return (), batch
    return ((batch,) if isinstance(batch, Tensor) else batch), {}


def call(model: nn.Module, batch: Batch) -> Any:
    """Call the network with a batch on its device."""
    args, kwargs = arguments(batch)
    with visiting(model):
        return model(*args, **kwargs)


def run_batch(model: nn.Module, batch: Batch) -> Any:
    """Call the network with a batch that may be on another device."""
    return call(model, to_device(batch, model_device(model)))


def first_tensor(output: Any) -> Tensor:
    """Return the first floating-point tensor of an output, usually the logits."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return output
    nested = output.values() if isinstance(output, dict) else output
    for child in nested if isinstance(output, dict | tuple | list) else ():
        try:
            return first_tensor(child)
        except SampleError:
            continue
    raise SampleError(
        f"the network returned {type(output).__name__} without a float tensor"
    )


def class_rows(output: Tensor) -> Tensor:
    """Return an output as rows of logits, (N × places, classes).

    Classes are the second dimension of images, (N, classes, H, W), and otherwise the
    last, as in tokens, (N, length, classes).
    """
    if output.dim() > 3:
        output = output.movedim(1, -1)
    return output.reshape(-1, output.shape[-1] if output.dim() > 1 else 1)


def kl_divergence(expected: Tensor, logits: Tensor) -> Tensor:
    """Return KL(softmax(expected) || softmax(logits)) of each row, (N,)."""
    log_p = expected.double().log_softmax(1)
    log_q = logits.double().log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def token_ids(batch: Batch) -> Tensor | None:
    """Return the token ids of a batch, if it has any; -100 where a mask hides them.

    They are an int32 or int64 tensor, which may be the ``input_ids`` of a dict.
    """
    mask = None
    if isinstance(batch, dict):
        mask = batch.get("attention_mask")
        batch = batch.get("input_ids", ())
    if not isinstance(batch, Tensor) or batch.dtype not in (torch.int32, torch.int64):
        return None
    return batch if mask is None else batch.masked_fill(mask == 0, -100)


def model_device(model: nn.Module) -> torch.device:
    """Return the device that a network runs on: that of its first weight, or CPU."""
    for tensor in chain(model.parameters(), model.buffers()):
        return running_device(tensor.device)
    return torch.device("cpu")


def check_network(model: object) -> None:
    """Raise a TypeError unless this is a network."""
    if not isinstance(model, nn.Module):
        inner = isinstance(getattr(model, "module", None), nn.Module)
        raise TypeError(
            f"model is of type {type(model).__name__}, not a network; give "
            f"{'its module' if inner else 'a torch.nn.Module'}"
        )


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put networks into eval mode without gradients; restore all flags afterwards.

    Meanwhile decoders do not cache keys and values, or a block would see those of its
    last call. Other threads that evaluate one of the networks wait.
    """
    for model in models:
        check_network(model)
    with ExitStack() as stack:
        for model in sorted(
            models, key=id
        ):  # one order, so that threads never deadlock
            stack.enter_context(lock_of(model))
        modules = [module for model in models for module in model.modules()]
        modes: list[tuple[Any, str, bool]] = [
            (m, "training", m.training) for m in modules
        ]
        # This flag makes decoders of transformers cache keys and values.
        configs = [getattr(module, "config", None) for module in modules]
        caching = [c for c in configs if getattr(c, "use_cache", None) is True]
        modes += [(config, "use_cache", True) for config in caching]
        try:
            for module, flag, mode in modes:
                if mode:
                    setattr(module, flag, False)
            with _buffers_restored(modules), torch.no_grad(), visiting(*models):
                yield
        finally:
            for module, flag, mode in modes:
                if getattr(module, flag) is not mode:  # setting it is slow
                    setattr(module, flag, mode)


@contextmanager
def _buffers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo what forward passes do to buffers, such as counting calls.

    Our own modules are left out: their buffers are changed on purpose.
    """
    kept = [
        (module._buffers, key, buffer, buffer._version, buffer.clone())
        for module in modules
        if not type(module).__module__.startswith("ompq.")
        for key, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference() and not buffer.is_meta
    ]
    try:
        yield
    finally:
        for buffers, key, buffer, version, value in kept:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)
            buffers[key] = buffer


@contextmanager
def usual_settings() -> Iterator[None]:
    """Compute as PyTorch does by default, whatever the caller has set.

    That is with gradients and version counters (not in inference mode), and with new
    tensors in float32 on the CPU. What the caller set returns afterwards.
    """
    dtype, cpu = torch.get_default_dtype(), torch.device("cpu")
    try:
        torch.set_default_dtype(torch.float32)
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(mode=False))
            if torch.get_default_device() != cpu:
                stack.enter_context(cpu)
            yield
    finally:
        torch.set_default_dtype(dtype)


def lock_of(model: nn.Module) -> AbstractContextManager[object]:
    """Return a lock that protects a network's mode and hooks from other threads."""
    with _NEW_LOCK:
        return _LOCKS.setdefault(model, RLock())


@contextmanager
def attached(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks, and remove them at the end in any case."""
    handles: list[RemovableHandle] = []
    try:
        handles.extend(hooks)
        yield
    finally:
        for handle in handles:
            handle.remove()


def in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that ignores calls of the network made by other threads."""
    own = get_ident()

    def wrapped(*args: Any) -> None:
        if get_ident() == own:
            hook(*args)

    return wrapped


def collect(
    model: nn.Module,
    samples: Samples,
    collectors: Iterable[tuple[nn.Module, Collector]],
    *,
    batch_size: int = 256,
    report: Report = lambda _done, _total: None,
) -> None:
    """Run the network on all samples in eval mode; collectors see calls of modules."""
    total = samples.batch_count(batch_size)
    hooks = (
        module.register_forward_hook(in_this_thread(collector), with_kwargs=True)
        for module, collector in collectors
    )
    with evaluating(model), attached(hooks):
        for done, batch in enumerate(samples.batches(batch_size), 1):
            run_batch(model, batch)
            report(done, total)


def fitting_batch(model: nn.Module, samples: Samples, most: int) -> int:
    """Return how many samples a network on a CPU runs at once in little memory.

    It is a power of two, or ``most``. One sample runs, which shows how large outputs
    become.
    """
    largest = 1

    def measure(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    if model_device(model).type != "cpu":
        return most
    one = samples.first(1)
    script = torch.jit.ScriptModule  # takes no hooks
    hooked = [m for m in model.modules() if not isinstance(m, script)]
    collect(model, one, [(module, measure) for module in hooked])
    count = working_bytes() // (_BATCH_SHARE * largest)
    return min(most, 1 << max(count.bit_length() - 1, 0))


def cudnn_kernels(*, repeatable: bool) -> AbstractContextManager[None]:
    """Make cuDNN choose kernels with repeatable results, or the fastest ones."""
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


def _cut(batch: Batch, start: int, stop: int, step: int = 1) -> Batch:
    # Tensors without the batch dimension, such as a shared mask, are kept whole.
    count, part = batch_length(batch), slice(start, stop, step)
    return map_batch(batch, lambda t: t[part] if t.dim() and len(t) == count else t)


def is_labelled(given: Any) -> bool:
    """Return whether this is a list of inputs (N, ...) and class numbers (N,)."""
    if not isinstance(given, list) or len(given) != 2:
        return False
    if not all(isinstance(tensor, Tensor) for tensor in given):
        return False
    inputs, targets = given
    whole = not targets.is_floating_point()
    return whole and inputs.dim() > 1 and targets.shape == inputs.shape[:1]


@cache
def _say_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def _read(batches: Iterable[Any]) -> Iterator[Batch]:
    """Yield the non-empty batches, checked, in host memory."""
    size = 0
    for batch in map(_inputs, batches):
        size += sum(tensor.nbytes for tensor in _tensors(batch))
        if size > _MOST_BYTES:
            raise SampleError(
                f"samples take more than {_MOST_BYTES >> 30} GiB; give fewer, for "
                "example list(itertools.islice(loader, 16))"
            )
        if batch_length(batch) > 0:
            yield batch


def _inputs(batch: Any) -> Batch:
    """Return the inputs of a batch in host memory, checked."""
    if is_labelled(batch):
        _say_once("ignoring the targets that come with the samples")
        batch = batch[0]
    elif isinstance(batch, list) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, list):
        raise SampleError(
            f"samples yield lists of {len(batch)}; pass the inputs alone, for example "
            "[x for x, _ in loader], or tuples if the network takes several"
        )
    inputs = _without_arrays(dict(batch) if isinstance(batch, Mapping) else batch)
    if not isinstance(inputs, Tensor | tuple | dict) or not all(
        isinstance(value, Tensor) for value in _tensors(inputs)
    ):
        raise SampleError(
            f"a batch must be a tensor, a tuple or a dict of tensors, "
            f"not {type(batch).__name__}"
        )
    for value in _tensors(inputs):
        _check_values(value)
    return map_batch(inputs, lambda t: t.detach().cpu())


def _check_values(value: Tensor) -> None:
    if value.layout != torch.strided or value.is_nested:
        raise SampleError("samples are sparse or nested; give dense ones: to_dense()")
    if value.is_meta:
        raise SampleError("samples are on the meta device, so they have no values")
    # If any value is NaN or infinite, an extreme is; checking all takes 40 times as
    # long.
    checked = value.numel() and value.is_floating_point()
    if checked and not torch.stack(value.aminmax()).isfinite().all():
        raise SampleError("samples hold NaN or infinity; check the preprocessing")


def _without_arrays(inputs: Any) -> Any:
    """Return inputs with NumPy arrays as tensors."""
    if isinstance(inputs, np.ndarray):
        floats = inputs.dtype.kind == "f"
        array = inputs.astype(np.float32) if floats else inputs
        return torch.from_numpy(np.ascontiguousarray(array))
    if type(inputs) is tuple:
        return tuple(map(_without_arrays, inputs))
    if isinstance(inputs, dict):
        return {key: _without_arrays(value) for key, value in inputs.items()}
    return inputs


def _types(batch: Batch) -> tuple[Any, list[tuple[torch.dtype, torch.Size, bool]]]:
    """Return keys, dtypes and shapes, and which tensors have the batch dimension."""
    count = batch_length(batch)
    keys = [*batch] if isinstance(batch, dict) else type(batch)
    return keys, [
        (t.dtype, t.shape[1:], bool(t.dim()) and len(t) == count)
        for t in _tensors(batch)
    ]


def _alike(one: Batch, other: Batch) -> bool:
    """Return whether batches can be joined; tensors that inputs share must be equal."""
    if _types(one) != _types(other):
        return False
    pairs = zip(_tensors(one), _tensors(other), _types(one)[1], strict=True)
    return all(own or torch.equal(a, b) for a, b, (_, _, own) in pairs)


def _join(run: list[Batch]) -> Batch:
    if len(run) == 1:
        return run[0]
    columns = zip(zip(*map(_tensors, run), strict=True), _types(run[0])[1], strict=True)
    joined = iter([torch.cat(c) if own else c[0] for c, (_, _, own) in columns])
    return map_batch(run[0], lambda _: next(joined))
