"""A Lightning callback that keeps how long every training step took."""

import time
from typing import Any, ClassVar

from lightning.pytorch import Callback


class StepTimer(Callback):
    """Processor milliseconds from the end of one step to the end of the next, data included.

    Attributes:
        milliseconds: of the last training of this process, in the order of its steps.
    """

    milliseconds: ClassVar[list[float]] = []

    def on_train_start(self, *_: Any) -> None:
        """Forget an earlier training."""
        StepTimer.milliseconds.clear()
        self._last = time.process_time()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """After optimizer and rollout."""
        now = time.process_time()
        StepTimer.milliseconds.append(1000 * (now - self._last))
        self._last = now
