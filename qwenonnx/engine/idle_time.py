"""What is done when nobody asks for anything."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class IdleTime:
    """Waits for work without using the CPU, and does each of some chores once, after so many seconds of waiting."""

    def __init__(self, wake: threading.Condition, chores: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """`chores` are seconds and what to do then."""
        self._wake = wake
        self._chores = sorted(chores, key=lambda chore: chore[0])

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Returns when `is_over`, which is asked whenever the condition is notified, and under its lock."""
        began = time.monotonic()
        pending = deque(self._chores)
        while True:
            with self._wake:
                if is_over():
                    return
                left = pending[0][0] - (time.monotonic() - began) if pending else None
                if left is None or left > 0:
                    self._wake.wait(left)
                    continue
            try:
                pending.popleft()[1]()
            except Exception:
                logger.exception("what was to be done in idle time failed")
