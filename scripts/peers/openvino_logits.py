"""A worker of fidelity_peers.py: OpenVINO on the CPU. Arguments: MODEL_FOLDER THREADS [PROPERTY=VALUE ...].

MODEL_FOLDER is what `optimum-cli export openvino --task text-generation-with-past` writes: a model that keeps its KV
cache as state and gives the logits of all tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from pipe_logits import Score, serve_logits


def load() -> tuple[Score, int]:
    """The model that the arguments name, compiled with the properties that they ask for."""
    properties = dict(argument.split("=", 1) for argument in sys.argv[3:])
    model = openvino.Core().compile_model(
        str(Path(sys.argv[1]) / "openvino_model.xml"), "CPU", {"INFERENCE_NUM_THREADS": sys.argv[2], **properties}
    )
    request = model.create_infer_request()

    def score(tokens: list[int], start: int) -> Any:
        if start == 0:
            request.reset_state()
        end = start + len(tokens)
        outputs = request.infer(
            {
                "input_ids": np.array([tokens], dtype=np.int64),
                "attention_mask": np.ones((1, end), dtype=np.int64),
                "position_ids": np.arange(start, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        return outputs["logits"][0]

    return score, model.output("logits").partial_shape[2].get_length()


if __name__ == "__main__":
    serve_logits(load)
