"""Whether this CPU's integer products are exact, found out by trying.

On x86 without VNNI the fast product of unsigned and signed bytes adds pairs in 16 bits, which saturates without a word:
the same model is right on one machine and wrong on another. onnxruntime has exact kernels for these machines, which
`session.x64quantprecision` selects; they are slower. `MatMulNBits` is exact everywhere.
"""

from __future__ import annotations

import logging
from importlib import resources
from typing import Any

import numpy as np

from qwenonnx.runtime.ort import load_onnxruntime

EXACT_KEY = "session.x64quantprecision"
_LARGEST = 255
_EXPECTED = (_LARGEST - 128) * 127 * 64

logger = logging.getLogger(__name__)


def products_are_exact(options: Any | None = None) -> bool:
    """Runs a product of the largest values and checks the sum; takes a few milliseconds."""
    ort = load_onnxruntime()

    if options is None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
    model = (resources.files("qwenonnx.runtime") / "probe.onnx").read_bytes()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    inputs = np.full((2, 64), _LARGEST, dtype=np.uint8)
    return all(bool((session.run(None, {"x": inputs[:rows]})[0] == _EXPECTED).all()) for rows in (1, 2))


def make_products_exact(options: Any) -> None:
    """Selects exact kernels in a session's options where the CPU's own are not, and says so in the log."""
    if not products_are_exact():
        options.add_session_config_entry(EXACT_KEY, "1")
        logger.warning("This CPU has no exact 8-bit product (no VNNI); slower exact ones are used")
