"""Importing onnxruntime, the one place where it is done."""

from __future__ import annotations

import os
from typing import Any


def load_onnxruntime() -> Any:
    """The onnxruntime module, with its telemetry switched off.

    From version 1.32 on it keeps an identifier and a database in the user's home, and prints a warning where it cannot;
    the switch is only looked at when the module is imported. Setting the variable to 0 leaves it on.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime
