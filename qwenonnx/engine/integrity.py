"""Checking a package's files while it is being loaded."""

from __future__ import annotations

import threading

from qwenonnx.package.package import Package


class IntegrityCheck:
    """Compares all files of a package with their sums, in a thread that starts at once.

    Hashing and loading both leave the interpreter's lock alone, so with two cores the check costs little time.
    """

    def __init__(self, package: Package) -> None:
        self._package = package
        self._error: Exception | None = None
        # A daemon: nobody has to wait for it when loading is broken off.
        self._thread = threading.Thread(target=self._run, name="qwenonnx-integrity", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            PackageError: a file was changed; the message names it.
            OSError: a file cannot be read.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._package.check_sums()
        except Exception as error:
            self._error = error
