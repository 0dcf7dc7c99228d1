"""The caller's handle on a submitted request."""

from __future__ import annotations

from collections.abc import Callable


class Ticket:
    """Lets a submitted request be ended."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """Asks the engine to end the request, before its next step; may be called any time, anywhere.

        The request then ends with `Finished("cancelled")`, unless it has ended before.
        """
        self._cancel()
