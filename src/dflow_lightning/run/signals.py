"""Signals that end a run: one checkpoint is written and every process ends, within a time limit.

Between the first and the last training step a signal is only noted, and the processes agree to stop
at the next batch. Python runs signal handlers between two bytecodes, and a process that waits in a
collective for another one may never get there; so a thread, woken through a file descriptor, keeps
the time limit.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dflow_lightning.run.checkpoint import Checkpointing
from dflow_lightning.run.ranks import Ranks
from dflow_lightning.training.validation import ValidationDecoding

# What a scheduler sends before its time limit, and Ctrl-C; of several, the last one here counts.
ENDING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
END_WITHIN = 55.0  # seconds; schedulers send SIGKILL after 60


class Stopped(SIGTERMException):
    """A signal ended the run; its checkpoint is written."""

    def __init__(self, signum: int, said: str, status: int | None = None) -> None:
        self.signum, self.said = signum, said
        super().__init__(128 + signum if status is None else status)


class Signals:
    """Context manager that handles the ending signals; in the main thread only.

    Outside training they end the process at once, as without it: there is nothing to save.
    """

    end_within = END_WITHIN

    def __init__(self) -> None:
        self.received: list[int] = []
        self.failed_step: int | None = None  # of a training that an exception ended
        self.launched: Callable[[int], None] | None = None  # sends a signal to our own children
        self._training = False
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_fd = -1
        self._deadline: threading.Timer | None = None

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.getsignal(signum) for signum in ENDING}
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(self._pipe[0], True)
            self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._after_fork)
            threading.Thread(target=self._watch, args=(self._pipe[0],), daemon=True).start()
            self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.training(None)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._pipe is not None:
            signal.set_wakeup_fd(self._previous_fd)
            os.close(self._pipe[1])  # ends the thread, which closes the other end
            self._pipe = None
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def install(self) -> None:
        """Take the handlers back from Lightning, which calls collectives inside of one."""
        if self._pipe is not None:
            for signum in ENDING:
                signal.signal(signum, self._handle)

    def training(self, trainer: Trainer | None) -> None:
        """From now on only note signals; with None they end the process again."""
        self._training = trainer is not None
        launcher = trainer.strategy.launcher if trainer is not None else None
        self.launched = getattr(launcher, "kill", None)

    @property
    def received_order(self) -> int:
        """Place in `ENDING` of the signal to end with, counted from 1; 0 for none."""
        return max((ENDING.index(signal.Signals(s)) + 1 for s in self.received), default=0)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self._training:
            return  # the thread has noted it
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(signum, "terminated")

    def _watch(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while arrived := pipe.read(1):
                if arrived[0] in ENDING and self._training:
                    self._note(arrived[0])

    def _note(self, signum: int) -> None:
        self.received.append(signum)
        if self.received.count(signal.SIGINT) > 1:
            self._end(signal.SIGINT, "interrupted again, ending at once")
        if len(self.received) > 1:
            return
        if self.launched is not None:  # a terminal's Ctrl-C reaches them as well, and would be two
            self.launched(signal.SIGTERM)
        self._deadline = threading.Timer(
            self.end_within,
            self._end,
            (signum, f"not ended {self.end_within:.0f} s after the signal, ending at once"),
        )
        self._deadline.daemon = True
        self._deadline.start()

    def _end(self, signum: int, reason: str) -> None:
        print(f"{reason}; the last whole checkpoint stands", file=sys.stderr, flush=True)
        if self.launched is not None:
            self.launched(signal.SIGKILL)
        os._exit(128 + signum)

    def _after_fork(self) -> None:
        """In a loader's worker: the pipe belongs to its parent, which also ends it."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for signum in ENDING:
                signal.signal(signum, signal.SIG_IGN)


class GracefulStop(Callback):
    """Ends training when any process has received a signal: all stop at the same batch."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self._ranks = Ranks()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the handlers back: Lightning has just installed its own."""
        self.signals.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on a checkpoint is worth writing."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ValidationDecoding):
                callback.interrupted = lambda: bool(self.signals.received)
        self.signals.install()
        self.signals.training(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop before any work on the next batch."""
        self.stop_if_asked(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Skip a validation that is due: it would take longer than the time limit."""
        self.signals.install()
        self._stop_in_fit(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop between two batches of a validation."""
        self._stop_in_fit(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop after decoding, which a signal cuts short."""
        self._stop_in_fit(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the handlers back, as before a sanity check."""
        self.signals.install()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is saved; a signal during the last step changes nothing."""
        self.signals.training(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Keep the step, for the message of how the run ended."""
        self.signals.failed_step = trainer.global_step

    def _stop_in_fit(self, trainer: Trainer) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.stop_if_asked(trainer)

    def stop_if_asked(self, trainer: Trainer) -> None:
        """Raise `Stopped` on all processes if one of them has got a signal."""
        agreed = self._ranks.largest(trainer, self.signals.received_order)
        if not agreed:
            return
        checkpoint, signum = trainer.checkpoint_callback, ENDING[agreed - 1]
        said = f"stopped by {signum.name} at step {trainer.global_step}"
        if isinstance(checkpoint, Checkpointing):
            checkpoint.write_last(trainer)
            said += "; continue with --ckpt_path last"
        raise Stopped(signum, said, 0 if launched_by_lightning(trainer) else None)


def launched_by_lightning(trainer: Trainer) -> bool:
    """Whether this process was started by the first one of this machine.

    Lightning kills the first one when another ends with a status other than 0.
    """
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
