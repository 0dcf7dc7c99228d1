"""A process that serves a scripted model: `serve_scripted.py CHECKPOINT MODE GRACE [PORT]`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from scripted import Script, ScriptedRunner

from qwenonnx.engine.engine import Engine
from qwenonnx.errors import PackageError
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.run import serve
from qwenonnx.server.served import Served
from qwenonnx.text.chat_template import ChatTemplate
from qwenonnx.text.tokenizer import Tokenizer


def main() -> int:
    folder, mode, grace = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    port = int(sys.argv[4]) if len(sys.argv) > 4 else 0

    def load() -> Served:
        if mode == "never":
            threading.Event().wait()
        if mode == "broken":
            raise PackageError("models/x has no model.onnx; export it again.")
        tokenizer = Tokenizer.load(folder)
        words, end = tokenizer.encode("word " * 40), tokenizer.added_tokens["<|im_end|>"]

        def repeat(prompt: tuple[int, ...]) -> list[int]:
            # What the user said last, without the words before a colon.
            said = tokenizer.decode(prompt).rpartition("user\n")[2].partition("\nassistant")[0]
            return [*tokenizer.encode(said.rpartition(":")[2]), end]

        scripts: dict[str, Script] = {"short": [*words, end], "echo": repeat}
        script = scripts.get(mode, words)
        runner = ScriptedRunner(script, vocab_size=512, context_length=1_000_000, delay=0.01)
        template = ChatTemplate.load(folder, tokenizer)
        return Served(Engine(runner, tokenizer), tokenizer, template, "tiny", 0, 1_000_000)

    return serve(load, ServeConfig(port=port, grace=grace))


if __name__ == "__main__":
    sys.exit(main())
