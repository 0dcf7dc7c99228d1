"""`qwenonnx serve` as users run it: a process, a real package, HTTP, SIGTERM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import httpx
import pytest
from packages import package_runner

from qwenonnx.package.package import Package
from qwenonnx.text.tokenizer import Tokenizer

PROMPT = "The quick brown fox jumps over the"


@pytest.mark.parametrize("recipe", ["tiny_fp32", "tiny_int8"])
def test_a_package_is_served_until_sigterm(recipe: str, request: pytest.FixtureRequest) -> None:
    package: Package = request.getfixturevalue(recipe)
    line = [sys.executable, "-m", "qwenonnx", "serve", str(package.folder), "--port", "0", "--threads", "1"]
    process = subprocess.Popen([*line, "--model-name", "mine"], stderr=subprocess.PIPE, text=True)
    try:
        url = listening(process)
        with httpx.Client(base_url=url, timeout=30, transport=httpx.HTTPTransport(retries=3)) as http:
            while http.get("/health").status_code == 503:
                pass
            models = http.get("/v1/models").json()
            body = {"model": "mine", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "repetition_penalty": 1.0}
            answer = http.post("/v1/completions", json=body).json()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=30)
    finally:
        process.kill()
        process.communicate()

    assert code == 0
    assert [model["id"] for model in models["data"]] == ["mine"]
    tokenizer = Tokenizer.load(package.folder)
    ids = tokenizer.encode(PROMPT)
    logits = package_runner(package).prefill(0, ids, 0)[: tokenizer.num_tokens]
    assert answer["choices"][0]["text"] == tokenizer.decode([int(logits.argmax())])
    assert answer["usage"]["prompt_tokens"] == len(ids)


def listening(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if found := re.search(r"http://[\d.]+:\d+", line):
            return found[0]
    raise AssertionError(seen)
