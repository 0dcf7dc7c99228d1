"""Many clients at once against a running server: no cross-talk, no leaks, and /health stays quick.

    qwenonnx serve PACKAGE
    python scripts/soak.py http://127.0.0.1:8000 --clients 16 --seconds 300

Each client sends a code that nobody else has and asks for it back; an answer that holds another client's code is
cross-talk. A part of the clients hangs up half-way. With `--exact`, for a server whose model repeats what it is told,
every answer must hold its own code; a real model of this size may misquote it, which is counted but no failure.
Exit code 0 if all went well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

HEALTH_LIMIT_MS = 100.0
_CODE = re.compile(r"\d{8}")


@dataclass
class Findings:
    """What the clients have seen so far."""

    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    issued: set[str] = field(default_factory=set)
    foreign: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)

    def note_answer(self, code: str, text: str, exact: bool) -> None:
        """Looks for other clients' codes, and for the own one."""
        found = set(_CODE.findall(text))
        self.counts["answers"] += 1
        self.counts["with own code"] += code in found
        self.foreign += [(code, other) for other in found - {code} if other in self.issued]
        if exact and code not in found:
            self.errors.append(f"the answer to {code} lacks it: {text[:80]!r}")


async def client(http: httpx.AsyncClient, findings: Findings, options: argparse.Namespace, seed: int) -> None:
    """Asks again and again; sometimes hangs up before the end."""
    rng = random.Random(seed)
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        code = str(rng.randrange(10_000_000, 100_000_000))
        findings.issued.add(code)
        padding = "word " * rng.choice([0, 0, 5, 40, 200])
        body = {
            "messages": [{"role": "user", "content": f"{padding}Repeat this code and nothing else: {code}"}],
            "temperature": 0,
            "max_tokens": options.max_tokens,
            "stream": rng.random() < 0.7,
        }
        try:
            if rng.random() < options.hang_up:
                await ask_and_hang_up(http, body, rng.random() * options.patience)
                findings.counts["hung up"] += 1
                continue
            response = await http.post("/v1/chat/completions", json=body)
            findings.statuses[response.status_code] += 1
            if response.status_code == 429:
                await asyncio.sleep(float(response.headers.get("retry-after", "1")))
            elif response.status_code != 200:
                findings.errors.append(f"status {response.status_code}: {response.text[:200]}")
            else:
                findings.note_answer(code, text_of(response, stream=bool(body["stream"])), options.exact)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            findings.errors.append(f"{type(error).__name__}: {error}")


async def ask_and_hang_up(http: httpx.AsyncClient, body: dict[str, object], seconds: float) -> None:
    """Sends a request and closes the connection after a while."""
    try:
        async with asyncio.timeout(seconds), http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                pass
    except TimeoutError:
        pass


def text_of(response: httpx.Response, *, stream: bool) -> str:
    """What an answer says."""
    if not stream:
        return str(response.json()["choices"][0]["message"]["content"])
    frames = [frame[6:] for frame in response.text.split("\n\n") if frame.startswith("data: ")]
    if frames[-1] != "[DONE]" or '"error"' in frames[-2]:
        raise ValueError(f"a stream ended with {frames[-2:]}")
    choices = [json.loads(frame)["choices"][0] for frame in frames[:-1]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def watch_health(http: httpx.AsyncClient, findings: Findings, options: argparse.Namespace) -> None:
    """Asks for /health all the time, as a load balancer does, and notes how long that takes."""
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        response = await http.get("/health")
        findings.health_ms.append((time.perf_counter() - start) * 1000)
        if response.status_code != 200:
            findings.errors.append(f"/health said {response.status_code}")
        await asyncio.sleep(options.probe)


async def idle_again(http: httpx.AsyncClient) -> bool:
    """Whether nothing is left at work within five seconds."""
    for _ in range(50):
        health = (await http.get("/health")).json()
        if health["in_flight"] == health["running"] == health["waiting"] == 0:
            return True
        await asyncio.sleep(0.1)
    return False


async def run(options: argparse.Namespace) -> int:
    """The whole test; returns the exit code."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None)
    findings = Findings()
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=300, limits=limits) as http:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch_health(http, findings, options))
            for seed in range(options.clients):
                tasks.create_task(client(http, findings, options, options.seed * 1000 + seed))
        idle = await idle_again(http)
    waits = sorted(findings.health_ms)
    p99 = waits[min(int(len(waits) * 0.99), len(waits) - 1)]
    report = {
        **findings.counts,
        "statuses": dict(findings.statuses),
        "answers with another client's code": len(findings.foreign),
        "errors": len(findings.errors),
        "health probes": len(waits),
        "health p50 ms": round(waits[len(waits) // 2], 1),
        "health p99 ms": round(p99, 1),
        "health max ms": round(waits[-1], 1),
        "idle in the end": idle,
    }
    print(json.dumps(report, indent=2))
    for error in findings.errors[:10]:
        print(error, file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(bool(findings.foreign or findings.errors or not idle or p99 > options.health_limit))


def main() -> int:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the server is, without /v1")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--hang-up", type=float, default=0.2, help="share of requests that are given up half-way")
    parser.add_argument("--patience", type=float, default=3, help="seconds after which, at most")
    parser.add_argument("--probe", type=float, default=0.05, help="seconds between two probes of /health")
    parser.add_argument("--health-limit", type=float, default=HEALTH_LIMIT_MS, help="highest 99th percentile in ms")
    parser.add_argument("--exact", action="store_true", help="every answer must hold its own code")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the report")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
