"""Several processes share the work, and one of them writes files.

``torchrun`` and ``accelerate launch`` start the same command several times. Every
process does the quick work itself. Long work is divided, and every process gets all
results, so they agree at every step and a verb returns the same value in each.

Nothing here imports torch unless there are several processes.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ompq.errors import ProcessError

if TYPE_CHECKING:
    from torch import Tensor


_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def _torch() -> Any:
    from torch import distributed

    return distributed


@dataclass
class _Group:
    """The processes that share work."""

    rank: int = 0
    count: int = 1
    sharing: bool = True  # False while this process works on its own share


_GROUP = _Group()


@contextmanager
def distributed() -> Iterator[None]:
    """Divide the work of verbs called inside among the processes of a launcher.

    Every process must call the same verbs with the same arguments. Only the first one
    writes files. Without a launcher there is one process, and nothing changes.

    Example:
        >>> with distributed():
        ...     process_count()
        1
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _GROUP.count > 1:
        yield
        return
    if not _torch().is_initialized():
        _torch().init_process_group(_backend())
        # The group is destroyed only at exit: a process that joins a second group may
        # be given the address of the first one and wait there forever.
        atexit.register(_destroy_group)
    _GROUP.rank, _GROUP.count = _torch().get_rank(), _torch().get_world_size()
    try:
        yield
    finally:
        _GROUP.rank, _GROUP.count = 0, 1


def _destroy_group() -> None:
    if _torch().is_initialized():
        _torch().destroy_process_group()


def _backend() -> str:
    """Select this process's GPU and return the communication backend."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    # NCCL needs a GPU for each process; with Gloo they can share one.
    enough = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cpu:gloo,cuda:nccl" if gpus and enough else "gloo"


def hear_from_main() -> bool:
    """Whether the first process fails too, and so reports the error.

    An error in all processes, such as a wrong option, is then reported once.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=10)
    try:
        store, number, _ = next(rendezvous("env://", timeout=timeout))
        if number == 0:
            store.set("failed", "")
        else:
            store.wait(["failed"], timeout)
    except (RuntimeError, ValueError):  # no launcher, or no answer in time
        return False
    return bool(number)


# Kept, so that the first process keeps answering the others.
_STORES: list[object] = []


def main_has(done: str) -> None:
    """Say that the first process has done something; the others wait for it.

    Works outside :func:`distributed`, once for each ``done``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    from torch.distributed.rendezvous import rendezvous

    patience = timedelta(hours=1)  # others may have loaded their data much earlier
    store, number, _ = next(rendezvous("env://", timeout=patience))
    _STORES.append(store)
    if number == 0:
        store.set(done, "")
    else:
        store.wait([done], patience)


def rank() -> int:
    """Return the number of this process, from 0."""
    return _GROUP.rank


def is_main() -> bool:
    """Whether this is the process that writes and prints."""
    return _GROUP.rank == 0


def process_count() -> int:
    """Return the number of processes that share the current work."""
    return _GROUP.count if _GROUP.sharing else 1


def share_out(
    jobs: Sequence[_Job],
    work: Callable[[_Job], _Result],
    report: Callable[[int], None] = lambda _done: None,
) -> list[_Result]:
    """Return ``work(job)`` for each job; each process does some of the jobs.

    Args:
        jobs: The same in every process.
        work: Anything it calls runs in its process alone, without sharing.
        report: Called with the approximate number of finished jobs.

    Raises:
        ProcessError: A job failed in another process.
    """
    count, total = process_count(), len(jobs)
    if count == 1:
        return _do_all(jobs, work, report)
    mine: list[_Result] = []
    failure: Exception | None = None
    _GROUP.sharing = False
    try:
        own = jobs[_GROUP.rank :: count]
        mine = _do_all(own, work, lambda done: report(min(count * done, total)))
    except Exception as error:  # the others wait for this process and must be told
        failure = error
    finally:
        _GROUP.sharing = True
    outcome = mine, failure and f"{type(failure).__name__}: {failure}"
    found = [outcome] * count
    # Uses pickle, which is safe between the processes of one run.
    _torch().all_gather_object(found, outcome)
    if failure is not None:
        raise failure
    for number, (_, message) in enumerate(found):
        if message is not None:
            raise ProcessError(f"in process {number}: {message}")
    results: dict[int, _Result] = {}
    for number, (part, _) in enumerate(found):
        results.update(zip(range(number, total, count), part, strict=True))
    return [results[index] for index in range(total)]


def _do_all(
    jobs: Sequence[_Job],
    work: Callable[[_Job], _Result],
    report: Callable[[int], None],
) -> list[_Result]:
    results = []
    for job in jobs:
        results.append(work(job))
        report(len(results))
    return results


def from_main(work: Callable[[], _Result]) -> _Result:
    """Call ``work`` in the first process and return its result in all of them."""
    return share_out([None], lambda _: work())[0]


def wait_for_all() -> None:
    """Wait until all processes that share the work have arrived here."""
    if process_count() > 1:
        _torch().barrier()


def add_up(tensor: "Tensor") -> "Tensor":
    """Replace a tensor by its sum over the processes, and return it."""
    if process_count() > 1:
        _torch().all_reduce(tensor)
    return tensor


def average(tensors: Iterable["Tensor | None"]) -> None:
    """Replace each tensor by its mean over the processes."""
    if process_count() > 1:
        for tensor in tensors:
            if tensor is not None:
                add_up(tensor).div_(process_count())


def copy_main(tensors: Iterable["Tensor"]) -> None:
    """Replace each tensor by its value in the first process."""
    if process_count() > 1:
        for tensor in tensors:
            _torch().broadcast(tensor, 0)
