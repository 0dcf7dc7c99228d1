"""Many clients at once: everybody gets their own answer, whoever leaves in between."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
from http_checks import wait_until
from test_choices import pieces_by_index
from test_running import connect

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]

CLIENTS, ROUNDS = 16, 4
CODE = re.compile(r"\d{8}")


def idle(running: Running) -> bool:
    engine = running.service.served.engine
    return running.service.in_flight == engine.num_running == engine.num_waiting == 0


def repeat_the_code(prompt: str) -> str:
    """What the model says: the last code in its prompt, twice."""
    code = CODE.findall(prompt)[-1]
    return f"It is {code}, I say {code}."


@pytest.mark.parametrize("slots", [1, 4])
def test_nobody_gets_anybody_elses_text(start: Start, slots: int) -> None:
    running = start(say=repeat_the_code, num_slots=slots)

    def client(seed: int) -> list[tuple[str, str]]:
        rng = random.Random(seed)
        answers = []
        with httpx.Client(base_url=running.url, timeout=60, verify=False) as http:
            for _ in range(ROUNDS):
                code = str(rng.randrange(10**7, 10**8))
                content = "word " * rng.choice([0, 3, 30]) + f"Repeat this code: {code}"
                body = {"messages": [{"role": "user", "content": content}], "stream": rng.random() < 0.6}
                if rng.random() < 0.2:
                    with http.stream("POST", "/v1/chat/completions", json=body) as response:
                        next(response.iter_raw(), None)
                    continue
                response = http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                if body["stream"]:
                    pieces = pieces_by_index(response.text)[0]
                    text = "".join(piece["delta"].get("content", "") for piece in pieces)
                else:
                    text = response.json()["choices"][0]["message"]["content"]
                answers.append((repeat_the_code(code), text))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pair for pairs in pool.map(client, range(CLIENTS)) for pair in pairs]
    assert len(answers) > CLIENTS
    assert all(right == text for right, text in answers)
    wait_until(lambda: idle(running))


def test_who_leaves_takes_nobody_along(start: Start) -> None:
    running = start("one two three")
    alone = running.chat().json()["choices"][0]["message"]["content"]
    for _ in range(10):
        running.runner.hold()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(running.chat)
            assert running.runner.entered.wait(20)
            with connect(running, stream=True):
                wait_until(lambda: running.service.in_flight == 2)
            wait_until(lambda: running.service.in_flight == 1)
            running.runner.release()
            assert first.result().json()["choices"][0]["message"]["content"] == alone
        with connect(running, stream=False):
            wait_until(lambda: running.service.in_flight == 1 or idle(running))
        wait_until(lambda: idle(running))
    assert running.chat().json()["choices"][0]["message"]["content"] == alone


def test_choices_of_several_requests_do_not_mix(start: Start) -> None:
    running = start(say=lambda prompt: f"<{prompt[::-1]}>", num_slots=4)

    def client(number: int) -> bool:
        prompts = [f"{number} of {index}" for index in range(10)]
        text = running.complete(prompts, max_tokens=99, stream=True).text
        pieces = pieces_by_index(text)
        said = ["".join(piece["text"] for piece in pieces[index]) for index in range(10)]
        return said == [f"<{prompt[::-1]}>" for prompt in prompts]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(client, range(8)))
    wait_until(lambda: idle(running))
