"""Tracking: logs, checkpoints and the best epoch of a training run."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ompq.checkpoints import Store
from ompq.errors import TrainingError, shorten
from ompq.files import write_text
from ompq.progress import Progress
from ompq.training.training_batches import LabelledBatch
from ompq.training.training_run import MODEL_PREFIX, Run, take_prefixed

_LOG = logging.getLogger(__name__)
LAST, BEST = "last.safetensors", "best.safetensors"


class Tracker:
    """Reports the progress of a run, keeps the best epoch and writes checkpoints."""

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
        self.reported, self.since = torch.zeros(3).double(), time.perf_counter()
        self.write: Callable[..., Any] = lambda *_: None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Start, or resume from the checkpoint; close the loggers in the end."""
        with _scalars(self.run) as self.write:
            if self.folder is not None and (self.folder / LAST).exists():
                self._resume()
            elif self.validation is not None and self.run.config.keep == "best":
                self._judge(self.run.quality(self.validation))
            self.since = time.perf_counter()
            yield

    def _resume(self) -> None:
        last = self._store(LAST).read()
        assert last is not None  # the file exists
        self.saved = last.data["step"]
        self.run.restore(last.tensors, self.saved)
        self.reported = self.run.counts().sum(0)
        # As text, since both may hold NaN, which a file's plain data may not.
        self.best = json.loads(last.data["best"])
        self.history = json.loads(last.data["history"])
        if self.best is not None and (best := self._store(BEST).read()) is not None:
            self.best_model = take_prefixed(best.tensors, MODEL_PREFIX)
            self.best_step = best.data["step"]
        _LOG.info("resuming after step %d of %d", self.saved, self.run.steps)

    def _store(self, name: str) -> Store:
        path = None if self.folder is None else self.folder / name
        return Store(path, "training", self.identity)

    def after_step(self) -> None:
        """Report progress and write a checkpoint whenever one is due."""
        run, config = self.run, self.run.config
        ended = run.step % run.epoch_steps == 0
        due = config.checkpoint_steps and run.step % config.checkpoint_steps == 0
        if ended or due or run.step % config.report_steps == 0:
            self._report()
        if due and not ended:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """Measure the accuracy, keep the best epoch and write a checkpoint."""
        run = self.run
        loss, correct, count = run.counts().sum(0).tolist()
        entry = {"epoch": epoch + 1, "loss": loss / count}
        if run.gradients.own_loss is None:
            entry["top1"] = correct / count
        run.gradients.counts.zero_()
        self.reported.zero_()
        if self.validation is not None:
            entry["validation"] = run.quality(self.validation)
            self.write(run.judged_by, entry["validation"], run.step)
        self.history.append(entry)
        _LOG.info("epoch %s", ", ".join(f"{k} {v:.4g}" for k, v in entry.items()))
        if "validation" in entry and run.config.keep == "best":
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
        run, sums = self.run, self.run.counts().sum(0)
        new, self.reported = sums - self.reported, sums
        loss, correct, count = new.tolist()
        loss, correct = loss / count, correct / count
        now = time.perf_counter()
        speed, self.since = count / max(now - self.since, 1e-9), now
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {run.step} of {run.steps}; "
                f"{self._kept()}. Lower learning_rate={run.config.learning_rate:g}, "
                "or set gradient_norm"
            )
        known = {"loss": loss, "top-1": correct, "rate": run.rate()}
        right = f", top-1 {correct:.1%}"
        if run.gradients.own_loss is not None:
            right = ""
            del known["top-1"]
        for name, value in known.items():
            self.write(name, value, run.step)
        if self.progress is not None:
            epoch = -(-run.step // run.epoch_steps)
            self.progress(
                run.step,
                run.steps,
                f"epoch {epoch}/{run.config.epochs}: loss {loss:.3f}{right}, "
                f"{speed:,.0f} images/s",
            )

    def _kept(self) -> str:
        if self.folder is None or self.saved is None:
            return "no checkpoint was written"
        return f"{self.folder / LAST} holds the network after step {self.saved}"

    def _save(self) -> None:
        model = self.run.model.state_dict()
        broken = [key for key, value in model.items() if not value.isfinite().all()]
        if broken:
            raise TrainingError(
                f"{shorten(broken)} are not finite after step {self.run.step}; "
                f"{self._kept()}. Lower "
                f"learning_rate={self.run.config.learning_rate:g}"
            )
        self._write(LAST)
        self.saved = self.run.step

    def _write(self, name: str) -> None:
        state = self.run.state()  # gathers from all processes, so all must call it
        if self.folder is not None and self.run.engine.is_main_process:
            both = {"best": self.best, "history": self.history}
            texts = {key: json.dumps(value) for key, value in both.items()}
            self._store(name).write({"step": self.run.step, **texts}, state)
            lines = json.dumps(self.history, indent=1)
            write_text(self.folder / "history.json", f"{lines}\n")
        self.run.engine.wait_for_everyone()

    def chosen(self) -> Mapping[str, Tensor]:
        """Return the state dict to keep: that of the best epoch or of the last."""
        if self.best is not None and self.best_step == 0 and self.run.shard[0] == 0:
            _LOG.warning(
                "no epoch does better on the validation data than the start (%s "
                "%.4g); the start is kept. Train longer, lower learning_rate=%g, or "
                "set keep=last",
                self.run.judged_by,
                self.best,
                self.run.config.learning_rate,
            )
        return self.best_model or self.run.model.state_dict()


@contextmanager
def _scalars(run: Run) -> Iterator[Callable[..., Any]]:
    """Yield a function ``(name, value, step)`` that logs a scalar everywhere."""
    config = run.config
    with ExitStack() as stack:
        writers: list[Callable[..., Any]] = []
        if config.logger != "none":
            run.engine.init_trackers("ompq", config=asdict(config))
            stack.callback(run.engine.end_training)
            writers.append(lambda name, value, at: run.engine.log({name: value}, at))
        if config.tensorboard is not None and run.engine.is_main_process:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(config.tensorboard)
            stack.callback(board.close)
            writers.append(board.add_scalar)
        yield lambda *scalar: [write(*scalar) for write in writers]
