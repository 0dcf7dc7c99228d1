"""What tests of the server say about answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

MODEL = "tiny-qwen"
CONTEXT = 512


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails after far longer than that can take."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("the condition did not come true")
        time.sleep(0.005)


def is_error(response: httpx.Response, status: int, *, param: str | None = None) -> bool:
    """Whether an answer is an OpenAI error object with this status and field."""
    assert response.headers["content-type"] == "application/json", response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert response.headers["x-request-id"]
    assert (response.status_code, error["param"]) == (status, param), response.text
    return True
