"""Several processes: each does a share of the work, and one of them writes.

``torchrun`` and ``accelerate launch`` start the same command several times. Every
process does what is quick; what is long is shared out, and all get all results. So the
processes agree at every step, and a verb returns the same in each of them.

Nothing here imports torch before there are several processes.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from ompq.errors import ProcessError

if TYPE_CHECKING:
    from torch import Tensor

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


@dataclass
class _Group:
    """The processes that share the work of the verbs."""

    rank: int = 0
    count: int = 1
    sharing: bool = True  # False while this process does its own share


_GROUP = _Group()


@contextmanager
def distributed() -> Iterator[None]:
    """Share the work of the verbs inside among the processes of a launcher.

    Every process must call the same verbs with the same arguments. Files are written by
    the first one alone. In a process that no launcher started nothing changes.

    Example:
        >>> with distributed():  # one process: nothing changes
        ...     process_count()
        1
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _GROUP.count > 1:
        yield
        return
    from torch import distributed as torch_distributed

    if not torch_distributed.is_initialized():
        torch_distributed.init_process_group(_backend())
        # Left only when the process ends: one that joins a second time may be sent to
        # the address that another had the first time, and wait there for ever.
        atexit.register(_leave)
    _GROUP.rank = torch_distributed.get_rank()
    _GROUP.count = torch_distributed.get_world_size()
    try:
        yield
    finally:
        _GROUP.rank, _GROUP.count = 0, 1


def _leave() -> None:
    """Leave the processes, unless something else did so before."""
    from torch import distributed as torch_distributed

    if torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()


def _backend() -> str:
    """Give this process its GPU, and return what the processes talk through."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    # NCCL wants a GPU for each process; Gloo does not mind if they share one.
    alone = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cpu:gloo,cuda:nccl" if gpus and alone else "gloo"


def told_by_main() -> bool:
    """Whether the first process fails as well, and so reports the error.

    An error in all of them, such as a wrong option, is then reported once.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    from torch.distributed.rendezvous import rendezvous

    patience = timedelta(seconds=10)
    try:
        store, number, _ = next(rendezvous("env://", timeout=patience))
        if number == 0:
            store.set("failed", "")
        else:
            store.wait(["failed"], patience)
    except (RuntimeError, ValueError):  # no launcher to ask, or no answer in time
        return False
    return bool(number)


def rank() -> int:
    """Return the number of this process, from 0."""
    return _GROUP.rank


def is_main() -> bool:
    """Whether this is the process that writes and prints."""
    return _GROUP.rank == 0


def process_count() -> int:
    """Return how many processes share the work that is being done."""
    return _GROUP.count if _GROUP.sharing else 1


def share_out(
    jobs: Sequence[_Job],
    work: Callable[[_Job], _Result],
    report: Callable[[int], None] = lambda _done: None,
) -> list[_Result]:
    """Return what ``work`` gives for each job; each process does some of them.

    Args:
        jobs: The same in every process.
        work: Whatever it calls is done by its process alone.
        report: Called with about how many jobs are done.

    Raises:
        ProcessError: A job failed in another process.
    """
    count = process_count()
    if count == 1:
        return [_reported(work(job), report, n) for n, job in enumerate(jobs, 1)]
    mine: list[_Result] = []
    failure: Exception | None = None
    _GROUP.sharing = False
    try:
        for job in jobs[_GROUP.rank :: count]:
            mine.append(work(job))
            report(min(count * len(mine), len(jobs)))
    except Exception as error:  # the others wait for this process: tell them
        failure = error
    finally:
        _GROUP.sharing = True
    found = _gathered((mine, failure and f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for number, (_, message) in enumerate(found):
        if message is not None:
            raise ProcessError(f"in process {number}: {message}")
    results: dict[int, _Result] = {}
    for number, (part, _) in enumerate(found):
        results.update(zip(range(number, len(jobs), count), part, strict=True))
    return [results[place] for place in range(len(jobs))]


def _reported(result: _Result, report: Callable[[int], None], done: int) -> _Result:
    report(done)
    return result


def from_main(work: Callable[[], _Result]) -> _Result:
    """Return what ``work`` gives in the first process, in all of them."""
    return share_out([None], lambda _: work())[0]


def _gathered(value: _Result) -> list[_Result]:
    from torch import distributed as torch_distributed

    # Pickled, but only between the processes of one run.
    found: list[_Result] = [value] * _GROUP.count
    torch_distributed.all_gather_object(found, value)
    return found


def wait_for_all() -> None:
    """Wait until every process that shares the work is here."""
    if process_count() > 1:
        from torch import distributed as torch_distributed

        torch_distributed.barrier()


def add_up(tensor: "Tensor") -> "Tensor":
    """Replace a tensor by its sum over the processes, and return it."""
    if process_count() > 1:
        from torch import distributed as torch_distributed

        torch_distributed.all_reduce(tensor)
    return tensor


def average(tensors: Iterable["Tensor | None"]) -> None:
    """Replace each tensor by its mean over the processes."""
    if process_count() > 1:
        for tensor in tensors:
            if tensor is not None:
                add_up(tensor).div_(process_count())


def copy_main(tensors: Iterable["Tensor"]) -> None:
    """Replace each tensor by the first process's."""
    if process_count() > 1:
        from torch import distributed as torch_distributed

        for tensor in tensors:
            torch_distributed.broadcast(tensor, 0)
