"""What is kept of a run: reports, checkpoints, the best epoch."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ompq.errors import TrainingError, shortened
from ompq.files import write_text
from ompq.samples import Progress
from ompq.training.batches import LabelledBatch
from ompq.training.checkpoints import BEST, LAST, State, read_state, write_state
from ompq.training.runs import Run

logger = logging.getLogger(__name__)


class Keeper:
    """Watches a run, reports on it, and keeps it in files.

    Attributes:
        best: The best accuracy so far; None without validation.
        history: What was measured, epoch by epoch.
    """

    def __init__(
        self,
        run: Run,
        identity: str,
        folder: Path | None,
        *,
        validation: Iterable[LabelledBatch] | None,
        progress: Progress | None,
    ) -> None:
        self.run, self.identity, self.folder = run, identity, folder
        self.validation, self.progress = validation, progress
        self.best: float | None = None
        self.best_model: Mapping[str, Tensor] | None = None
        self.best_step: int | None = None
        self.history: list[Mapping[str, Any]] = []
        self.saved: int | None = None
        self.sums, self.since = (0.0, 0.0, 0), time.perf_counter()
        self.write: Callable[..., Any] = lambda *_: None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Begin, or continue from the checkpoint; end what is written meanwhile."""
        with _scalars(self.run) as self.write:
            last = None if self.folder is None else self.folder / LAST
            if last is not None and last.exists():
                self._resume(last)
            elif self.validation is not None and self.run.config.keep == "best":
                self._judge(self.run.accuracy(self.validation))
            self.since = time.perf_counter()
            yield

    def _resume(self, last: Path) -> None:
        state = read_state(last, self.identity)
        self.run.restore(state)
        self.best, self.saved = state.best, state.step
        self.history = list(state.history)
        if self.best is not None:
            assert self.folder is not None
            best = read_state(self.folder / BEST, self.identity)
            self.best_model, self.best_step = best.model, best.step
        logger.info("continuing after step %d of %d", state.step, self.run.steps)

    def after_step(self) -> None:
        """Report and write checkpoints, as often as the settings say."""
        run, config = self.run, self.run.config
        ended = run.step % run.epoch_steps == 0
        due = config.checkpoint_steps and run.step % config.checkpoint_steps == 0
        if ended or due or run.step % config.report_steps == 0:
            self._report()
        if due and not ended:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """Measure the accuracy, remember the best, write a checkpoint."""
        loss, right, count = self.sums
        self.sums = (0.0, 0.0, 0)
        entry = {"epoch": epoch + 1, "loss": loss / count, "top1": right / count}
        if self.validation is not None:
            entry["validation"] = self.run.accuracy(self.validation)
            self.write("validation top-1", entry["validation"], self.run.step)
        self.history.append(entry)
        logger.info("epoch %s", ", ".join(f"{k} {v:.4g}" for k, v in entry.items()))
        if "validation" in entry and self.run.config.keep == "best":
            self._judge(entry["validation"])
        self._save()
        self.since = time.perf_counter()

    def _judge(self, accuracy: float) -> None:
        if self.best is not None and accuracy <= self.best:
            return
        self.best, self.best_step = accuracy, self.run.step
        model = self.run.model.state_dict()
        self.best_model = {key: value.detach().clone() for key, value in model.items()}
        self._write(BEST)

    def _report(self) -> None:
        run = self.run
        loss, right, count = run.taken_counts()
        now = time.perf_counter()
        speed = count / max(now - self.since, 1e-9)
        self.since = now
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} by step {run.step} of {run.steps}; "
                f"{self._good()}. Lower "
                f"learning_rate={run.config.learning_rate:g}, or set gradient_norm"
            )
        old = self.sums
        self.sums = (old[0] + loss * count, old[1] + right * count, old[2] + count)
        for name, value in (("loss", loss), ("top-1", right), ("rate", run.rate())):
            self.write(name, value, run.step)
        if self.progress is not None:
            epoch = -(-run.step // run.epoch_steps)
            self.progress(
                run.step,
                run.steps,
                f"epoch {epoch}/{run.config.epochs}: loss {loss:.3f}, "
                f"top-1 {right:.1%}, {speed:,.0f} images/s",
            )

    def _good(self) -> str:
        if self.saved is None:
            return "no checkpoint was written"
        assert self.folder is not None
        return f"{self.folder / LAST} holds the network after step {self.saved}"

    def _save(self) -> None:
        state = self.run.model.state_dict()
        broken = [k for k, v in state.items() if not v.isfinite().all()]
        if broken:
            raise TrainingError(
                f"{shortened(broken)} are not finite after step {self.run.step}; "
                f"{self._good()}. Lower "
                f"learning_rate={self.run.config.learning_rate:g}"
            )
        self._write(LAST)
        self.saved = None if self.folder is None else self.run.step

    def _write(self, name: str) -> None:
        if self.folder is not None and self.run.engine.is_main_process:
            state: State = self.run.state(self.best, self.history)
            write_state(self.folder / name, state, self.identity)
            text = json.dumps(self.history, indent=1)
            write_text(self.folder / "history.json", f"{text}\n")
        self.run.engine.wait_for_everyone()

    def chosen(self) -> Mapping[str, Tensor]:
        """Return the state of the network to return."""
        main = self.run.engine.is_main_process
        if main and self.best is not None and self.best_step == 0:
            logger.warning(
                "no epoch does better on the validation data than the start, %.2f %%; "
                "the start is kept. Train longer, lower learning_rate=%g, or set "
                "keep=last",
                100 * self.best,
                self.run.config.learning_rate,
            )
        return self.best_model or self.run.model.state_dict()


@contextmanager
def _scalars(run: Run) -> Iterator[Callable[..., Any]]:
    """Yield a function that writes a scalar for TensorBoard: name, value, step."""
    folder = run.config.tensorboard
    if folder is None or not run.engine.is_main_process:
        yield lambda *_: None
        return
    from torch.utils.tensorboard import SummaryWriter  # the engine made sure of it

    writer = SummaryWriter(folder)
    try:
        yield writer.add_scalar
    finally:
        writer.close()
