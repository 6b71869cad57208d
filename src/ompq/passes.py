"""Forward passes that pause inside a network and later continue from there."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from threading import Semaphore, Thread, current_thread
from typing import Any

import torch
from torch import Tensor, nn

from ompq.samples import attached

logger = logging.getLogger(__name__)


class _Abandoned(BaseException):
    """Ends a forward pass that is not needed any more."""


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
        return self._sent

    def pause(self, value: Any) -> Any:
        """Pause; a hook calls this while the pass runs through its module.

        Another thread may run the network meanwhile: it goes on, with the answer None.
        """
        if current_thread() is not self._thread:
            return None
        self._sent = value
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
            with torch.no_grad():
                self._run()
        except _Abandoned:
            return
        except BaseException as error:  # raised where the pass was resumed
            self._error = error
        self._thread = self._sent = None
        self._stopped.release()


def visit_outputs(
    runs: Sequence[Callable[[], Any]],
    modules: Mapping[str, nn.Module],
    visit: Callable[[str, Sequence[Tensor]], Sequence[Tensor] | None],
) -> None:
    """Run a network on several batches side by side and visit outputs of its modules.

    Each of ``runs`` runs one batch. When all have passed a module, ``visit`` is called
    with its name and outputs, before other hooks see them; it may return other outputs.
    """
    if not modules:
        return
    passes = [ForwardPass(run) for run in runs]
    running = passes[0]

    def hook(name: str) -> Any:
        return lambda _module, _args, output: running.pause((name, output))

    hooks = [m.register_forward_hook(hook(n), prepend=True) for n, m in modules.items()]
    with attached(hooks), ExitStack() as stack:
        for one in passes:
            stack.enter_context(closing(one))
        answers: Sequence[Tensor | None] = [None] * len(passes)
        while True:
            found = []
            for running, answer in zip(passes, answers, strict=True):
                found.append(running.resume(answer))  # hooks read it
            names = {one and one[0] for one in found}
            if len(names) > 1:
                logger.warning(
                    "batches take different paths from %s on; later layers are left "
                    "as they are",
                    min(name for name in names if name),
                )
            if None in names or len(names) > 1:
                return
            changed = visit(names.pop(), [output for _, output in found])
            answers = changed or [None] * len(passes)
