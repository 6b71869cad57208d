"""Forward passes: observed call by call, or paused and continued later."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from threading import Semaphore, Thread, current_thread
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ompq.samples import Batch, attached, call, evaluating, in_this_thread, lock_of
from ompq.working_memory import release, resident_bytes

logger = logging.getLogger(__name__)
# What a paused pass holds, relative to a module's output: its input, and both rounded.
_HELD = 3

Visit = Callable[[int, Any, tuple[Any, ...], dict[str, Any], Any], None]
Change = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]
Enter = Callable[[str, nn.Module], None]
Leave = Callable[[str, nn.Module, Any, Any, Any], None]


@dataclass(frozen=True)
class Call:
    """One call of a torch function that returned a float tensor."""

    position: int  # number of the call within the forward pass
    function: str  # the function's name without underscores: ``conv2d``, ``add``
    module: str  # name of the innermost module it happened in; "" is the network
    # Positions of the calls whose outputs it read; -1 is the input.
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]  # keys of the parameters it read
    shape: tuple[int, ...]  # shape of its first output tensor


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: what it read and what it returned."""

    name: str
    input_shape: tuple[int, ...]  # shape of its first tensor argument; () without one
    output_shape: tuple[int, ...]  # shape of its first output tensor; () without one
    # Position of the call that made its output; -1 when it returned its input, None
    # when it returned no tensor.
    output: int | None
    weight_used: bool  # whether a linear map or a lookup got its weight as it is stored


@dataclass
class Recording:
    """What one forward pass did."""

    calls: list[Call] = field(default_factory=list)  # of torch functions, in order
    # Calls of modules, in the order in which they returned.
    module_calls: list[ModuleCall] = field(default_factory=list)
    # Positions of the calls whose outputs the network returned.
    returned: set[int] = field(default_factory=set)
    inference: bool = False  # whether the network itself ran in inference mode


class Watch(TorchFunctionMode):
    """Numbers the calls that return float tensors and shows each to ``visit``.

    Positions and masks are left out: how they are made may depend on the batch.
    ``change`` sees every call first and returns the output to go on with. A call of a
    TorchScript module, whose own calls cannot be seen, counts as one of a function.
    """

    def __init__(
        self, visit: Visit = lambda *_: None, change: Change | None = None
    ) -> None:
        super().__init__()
        self.visit, self.change = visit, change
        self.position = 0  # of the next call
        self._handles: list[RemovableHandle] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.change is not None:
            output = self.change(func, args, kwargs, output)
        self._show(func, args, kwargs, output)
        return output

    def _show(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        made = (output,) if isinstance(output, Tensor) else tensors_in(output)
        if any(tensor.is_floating_point() for tensor in made):
            self.visit(self.position, func, args, kwargs, output)
            self.position += 1

    def __enter__(self) -> Self:
        """Start to see calls."""
        # TorchScript modules take no hooks of their own.
        after = in_this_thread(self._show_script)
        self._handles.append(register_module_forward_hook(after, with_kwargs=True))
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        """Stop to see calls."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        handle = self._handles.pop()
        handle.remove()
        # PyTorch forgets to, and torch.compile then warns of a hook that is gone.
        _global_forward_hooks_with_kwargs.pop(handle.id, None)

    def _show_script(
        self, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if is_script(module):
            with DisableTorchFunction():
                self._show(torchscript, args, kwargs, output)


def watch(
    model: nn.Module,
    batch: Batch,
    visit: Visit = lambda *_: None,
    *,
    gradients: bool = False,
) -> Any:
    """Run the network in eval mode, show every call to ``visit``, return its output."""
    with evaluating(model), torch.set_grad_enabled(gradients), Watch(visit):
        return call(model, batch)


def record(model: nn.Module, batch: Batch) -> Recording:
    """Run the network once and return what it did."""
    recorder = _Recorder(model)
    for tensor in tensors_in(batch):
        recorder.producer[id(tensor)] = -1
    with watched_modules(model, recorder.enter, recorder.leave):
        output = watch(model, batch, recorder.visit)
    made = (recorder.producer.get(id(tensor), -1) for tensor in tensors_in(output))
    recorder.recording.returned.update(made)
    own = not torch.is_inference_mode_enabled()
    recorder.recording.inference = own and any(
        t.is_inference() for t in tensors_in(output)
    )
    return recorder.recording


@contextmanager
def watched_modules(
    model: nn.Module, enter: Enter, leave: Leave, *, first: bool = False
) -> Iterator[None]:
    """Show every call of a module, except that of the network itself.

    With ``first``, ``leave`` sees the output before the module's other hooks do.
    """

    def hooks() -> Iterator[RemovableHandle]:
        for name, module in open_modules(model):
            if name and not is_script(module):
                before = in_this_thread(partial(_before, enter, name))
                yield module.register_forward_pre_hook(before)
                after, register = partial(leave, name), module.register_forward_hook
                yield register(in_this_thread(after), prepend=first, with_kwargs=True)

    with lock_of(model), attached(hooks()):
        yield


def _before(enter: Enter, name: str, module: nn.Module, _args: Any) -> None:
    enter(name, module)


def is_script(module: nn.Module) -> bool:
    """Whether a module was scripted or traced by ``torch.jit``."""
    return isinstance(module, torch.jit.ScriptModule)


def torchscript() -> None:
    """Stand for the function that a TorchScript module computes."""


def open_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, except those inside a TorchScript module."""
    closed: list[str] = []
    for name, module in model.named_modules():
        if not any(name.startswith(prefix) for prefix in closed):
            yield name, module
            closed += [f"{name}." if name else ""] * is_script(module)


def function_name(function: Any) -> str:
    """Return a function's plain name: ``__iadd__`` and ``add_`` are ``add``."""
    name = str(getattr(function, "__name__", function)).strip("_")
    return _ALIASES.get(name, name)


def _call_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name = function_name(function)
    if name == "interpolate":
        mode = args[3] if len(args) > 3 else kwargs.get("mode", "nearest")
        return "interpolate_nearest" if "nearest" in str(mode) else name
    bounds = (*args[1:3], kwargs.get("min_val"), kwargs.get("max_val"))
    # nn.ReLU6 calls hardtanh(x, 0, 6); its bounds are what matters to a grid.
    return "relu6" if name == "hardtanh" and bounds[:2] == (0, 6) else name


def is_linear_map(function: str) -> bool:
    """Whether a function multiplies its input by a weight: a convolution or linear."""
    return function == "linear" or function.startswith("conv")


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises by stored statistics; FrozenBatchNorm2d does, too."""
    return isinstance(module, _BatchNorm) or (
        type(module).__name__.startswith("FrozenBatchNorm")
        and all(key in module._buffers for key in ("running_mean", "running_var"))
    )


_NESTED = (tuple, list, dict)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _NESTED):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, _NESTED):  # most arguments are plain numbers
                yield from tensors_in(item)


def with_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the same nested value with other tensors, in the order of tensors_in."""
    return _nested_alike(value, iter(tensors))


def copy_network(model: nn.Module, *, share_weights: bool = False) -> nn.Module:
    """Return a copy of a network in which tensors kept by modules are detached.

    PyTorch refuses to copy a tensor with a graph, such as a cached feature. Parameters
    and buffers are copied, too, unless both networks are to share them.
    """
    kept = [t for m in model.modules() for t in tensors_in(m.__dict__)]
    known = {id(t): t.detach().clone() for t in kept if t.grad_fn is not None}
    if share_weights:
        known |= {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, known)


def detach_state(model: nn.Module) -> bool:
    """Detach tensors that modules keep, such as cached keys.

    Returns whether there were any: a second backward pass would fail on them.
    """
    found = False
    for module in model.modules():
        for held in (module.__dict__, module._buffers):
            for key, value in list(held.items()):
                tensors = list(tensors_in(value))
                if any(tensor.grad_fn is not None for tensor in tensors):
                    held[key] = with_tensors(value, [t.detach() for t in tensors])
                    found = True
    return found


def with_first_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nested value with its first tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    first, *others = tensors_in(value)
    return with_tensors(value, [change(first), *others])


def _nested_alike(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        items = [_nested_alike(item, tensors) for item in value]
        named = hasattr(value, "_fields")
        return type(value)(*items) if named else type(value)(items)
    if isinstance(value, dict):
        # A subclass stays one; torch.compile knows no copy of a plain dict.
        made = {} if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            made[key] = _nested_alike(item, tensors)
        return made
    return value


_ALIASES = {
    **{f"{prefix}{name}": name for prefix in "ir" for name in ("add", "mul", "sub")},
    "concat": "cat",
    "concatenate": "cat",
    "rsub": "sub",
    "truediv": "div",
    "itruediv": "div",
}


class _Scope(NamedTuple):
    """A call of a module that has not returned yet."""

    name: str
    start: int  # position of its first call
    multiplied: set[int]  # ids of what linear maps and lookups in it read


class _Recorder:
    """Builds a Recording from the calls and the module hooks of one pass."""

    def __init__(self, model: nn.Module) -> None:
        self.recording = Recording()
        self.producer: dict[int, int] = {}  # id of a tensor → position of its call
        self.parameters = {id(p): key for key, p in model.named_parameters()}
        self.alive: list[Any] = []  # so that no id is used twice
        self.scopes = [_Scope("", 0, set())]

    def visit(
        self,
        position: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        read = [id(tensor) for tensor in tensors_in((args, kwargs))]
        name = _call_of(function, args, kwargs)
        if is_linear_map(name) or name == "embedding":
            self.scopes[-1].multiplied.update(read)
        made = list(tensors_in(output))
        sources = [self.producer[key] for key in read if key in self.producer]
        keys = [self.parameters[key] for key in read if key in self.parameters]
        self.recording.calls.append(
            Call(
                position=position,
                function=name,
                module=self.scopes[-1].name,
                inputs=tuple(dict.fromkeys(sources)),
                parameters=tuple(keys),
                shape=tuple(made[0].shape),
            )
        )
        self.alive.append(output)
        self.producer.update({id(tensor): position for tensor in made})

    def enter(self, name: str, _module: nn.Module) -> None:
        self.scopes.append(_Scope(name, len(self.recording.calls), set()))

    def leave(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        scope = self.scopes.pop()
        given = next(tensors_in((args, kwargs)), None)
        if given is not None and is_batch_norm(module):
            self._as_one_norm(scope, self.producer.get(id(given)))
        made = next(tensors_in(output), None)
        weight = module._parameters.get("weight")
        with DisableTorchFunction():  # the watch need not see this
            shapes = [() if t is None else tuple(t.shape) for t in (given, made)]
        self.recording.module_calls.append(
            ModuleCall(
                name=name,
                input_shape=shapes[0],
                output_shape=shapes[1],
                output=None if made is None else self.producer.get(id(made)),
                weight_used=id(weight) in scope.multiplied,
            )
        )

    def _as_one_norm(self, scope: _Scope, source: int | None) -> None:
        """Represent a norm that is written as several calls by the last of them."""
        calls = self.recording.calls
        own = [c.position for c in calls[scope.start :] if c.module == scope.name]
        if source is None or len(own) < 2:
            return
        for at in own:
            calls[at] = replace(calls[at], inputs=())
        norm = replace(calls[own[-1]], function="batch_norm", inputs=(source,))
        calls[own[-1]] = norm


class _Abandoned(BaseException):
    """Ends a forward pass that is not needed any more."""


def _thread_settings() -> list[AbstractContextManager[Any]]:
    """Return what another thread must enter to compute as this one does now."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    found: list[AbstractContextManager[Any]] = [
        torch.autocast(kind, torch.get_autocast_dtype(kind)) for kind in kinds
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.device(torch.cuda.current_device()))
    return found


class ForwardPass:
    """A forward pass that hooks can pause.

    It runs in a thread of its own, which works only while :meth:`resume` waits for it.
    A paused pass holds exactly the tensors that the rest of the network will read, so
    it continues correctly whatever the network's graph is.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        """Prepare a pass; ``run`` calls the network, which must be in eval mode."""
        self._run = run
        self._thread: Thread | None = None
        self._resumed, self._stopped = Semaphore(0), Semaphore(0)
        self._abandoned = False
        self._sent: Any = None
        self._settings: list[AbstractContextManager[Any]] = []
        self._error: BaseException | None = None

    @property
    def paused(self) -> bool:
        """Whether it has started and not ended."""
        return self._thread is not None

    def resume(self, answer: Any = None) -> Any:
        """Start the pass, or continue it, until it pauses or ends (then return None).

        The :meth:`pause` that it waits in returns ``answer``; what the hook gives to
        the next one is returned.
        """
        if self._thread is None:
            self._abandoned, self._error = False, None
            self._settings = _thread_settings()
            self._thread = Thread(target=self._work, daemon=True)
            self._thread.start()
        self._sent = answer
        self._resumed.release()
        try:
            self._stopped.acquire()
        except KeyboardInterrupt:
            self._stopped.acquire()  # the network must not run on in another mode
            raise
        if self._error is not None:
            raise self._error
        sent, self._sent = self._sent, None  # a paused pass must not keep it alive
        return sent

    def pause(self, value: Any) -> Any:
        """Pause; a hook calls this while the pass runs through its module.

        Another thread may run the network meanwhile: it goes on, with the answer None.
        """
        if current_thread() is not self._thread:
            return None
        self._sent = value
        del value
        self._stopped.release()
        self._resumed.acquire()
        if self._abandoned:
            raise _Abandoned
        return self._sent

    def close(self) -> None:
        """Give up the pass and free what it holds; it may start again."""
        if self._thread is not None:
            self._abandoned = True
            self._resumed.release()
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        self._resumed.acquire()
        try:
            with ExitStack() as stack, torch.no_grad():
                for each in self._settings:
                    stack.enter_context(each)
                self._run()
        except _Abandoned:
            return
        except BaseException as error:  # raised where the pass was resumed
            self._error = error
        self._thread = self._sent = None
        self._stopped.release()


class Visited(NamedTuple):
    """What a module read and returned for one batch."""

    input: Any
    output: Any


def visit_outputs(
    runs: Sequence[Callable[[], Any]],
    modules: Mapping[str, nn.Module],
    visit: Callable[[str, Sequence[Tensor]], Sequence[Tensor] | None],
    *,
    limit: float = math.inf,
) -> None:
    """Run a network on several batches side by side and visit outputs of its modules.

    Each of ``runs`` runs one batch. When all have passed a module, ``visit`` is called
    with its name and outputs, before other hooks see them; it may return other outputs.

    Paused batches take memory. If that would exceed ``limit`` bytes, fewer of them run,
    the first ones; the others join where it does no longer, and see on their way what
    ``visit`` has changed in the network.
    """

    def visit_own(name: str, found: Sequence[Sequence[Visited]]) -> Any:
        return visit(name, [output for _, output in found[0]])

    visit_twins([runs], [modules], visit_own, limit=limit)


def visit_twins(
    runs: Sequence[Sequence[Callable[[], Any]]],
    modules: Sequence[Mapping[str, nn.Module]],
    visit: Callable[[str, Sequence[Sequence[Visited]]], Sequence[Tensor] | None],
    *,
    limit: float = math.inf,
) -> None:
    """Run several networks side by side on several batches, and visit their modules.

    As :func:`visit_outputs`, but runs and modules are given for each network. ``visit``
    is called with the input and output of each batch in each network; what it returns
    are other outputs of the last network.
    """
    if not modules[0]:
        return
    each = [_SideBySide(one) for one in runs]
    hooks = [
        module.register_forward_hook(side.hook(name), prepend=True, with_kwargs=True)
        for side, named in zip(each, modules, strict=True)
        for name, module in named.items()
    ]
    with attached(hooks), ExitStack() as stack:
        for side in each:
            stack.enter_context(closing(side))
            if limit < math.inf:
                side.count_fitting(limit / len(each))
        answers: Sequence[Tensor | None] = []
        most = resident_bytes() + limit / 2
        for at in count():
            silent = [None] * len(answers)
            found = [side.advance(at, silent) for side in each[:-1]]
            found.append(each[-1].advance(at, answers))
            names = {one and one[0] for batches in found for one in batches}
            if len(names) > 1:
                logger.warning(
                    "batches take different paths from %s on; later layers stay "
                    "as they are",
                    min(name for name in names if name),
                )
            if None in names or len(names) > 1:
                return
            visited = [[one[1] for one in batches] for batches in found]
            changed = visit(names.pop(), visited)
            answers = changed or [None] * len(found[-1])
            if resident_bytes() > most:
                release()  # which is slow, as what is needed next must be asked for


class _SideBySide:
    """Passes of several batches that pause at the same modules."""

    def __init__(self, runs: Sequence[Callable[[], Any]]) -> None:
        self._passes = [ForwardPass(run) for run in runs]
        self._running = self._passes[0]  # hooks read it
        self._counts = [len(runs)]  # how many may be paused, at each place in turn

    def hook(self, name: str) -> Any:
        """Return a forward hook that pauses the running pass."""

        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            read = next(tensors_in((args, kwargs)), None)
            return self._running.pause((name, Visited(read, output)))

        return hook

    def count_fitting(self, limit: float) -> None:
        """Limit the paused passes, which together hold at most ``limit`` bytes.

        The number never falls on the way through the network.
        """
        if len(self._passes) == 1:
            return
        one, sizes = self._passes[0], list[int]()
        while (found := one.resume()) is not None:
            sizes.append(sum(tensor.nbytes for tensor in tensors_in(found[1].output)))
        largest = accumulate(reversed(sizes), max)
        fitting = [int(limit / (_HELD * max(size, 1))) for size in largest]
        most = len(self._passes)
        self._counts = [max(1, min(most, one)) for one in fitting[::-1]] or [most]

    def advance(self, at: int, answers: Sequence[Tensor | None]) -> list[Any]:
        """Run to the place with this number; return what each pass gives there.

        Passes without an answer begin and join the others.
        """
        found: list[Any] = []
        places = range(at + 1)
        for one in self._passes[: self._counts[: at + 1][-1]]:
            self._running = one
            if len(found) < len(answers):
                found.append(one.resume(answers[len(found)]))
            else:
                found.append([one.resume() for _ in places][-1])
                release()
        return found

    def close(self) -> None:
        """Close all passes."""
        for one in self._passes:
            one.close()
