"""Reward functions that raise, hang, return NaN or are slow, and reward services that fail."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.torture.harness import Counts, each_case, expect, fork, is_clear, wait
from benchmarks.torture.model import brightness, make_trainer, result_of
from ddpo_lessons.rewards.service import http_reward, make_server, time_limit

EPOCHS = 4
LIMIT = 0.3  # seconds
DELAY = 0.02


def _train(folder: Path, reward: Any = brightness) -> None:
    make_trainer(folder, reward, num_epochs=EPOCHS).train()


def _misbehave(kind: str, images: torch.Tensor, over: threading.Event) -> Any:
    """Do what a bad reward function does instead of scoring."""
    if kind == "raises":
        raise KeyError("a bug of the user's")
    if kind == "hangs":
        over.wait()
    if kind == "is slow":
        time.sleep(DELAY)
    return torch.full((len(images),), float(kind) if kind in ("nan", "inf") else 0.0)


# What the trainer does: the error that the run ends with, and a part of its message.
ENDS: dict[str, tuple[type[Exception], str]] = {
    "raises": (KeyError, "a bug of the user's"),
    "hangs": (TimeoutError, f"took longer than {LIMIT:g} s"),
    "nan": (ValueError, "return finite numbers"),
    "inf": (ValueError, "return finite numbers"),
}


def reward_functions(seed: int, cases: range, folder: Path) -> Counts:
    """Let the reward function misbehave in a random epoch; then mend it and continue."""
    _train(folder / "whole")
    whole = result_of(folder / "whole")

    def case(generator: random.Random, place: Path) -> str:
        kind, bad_call = generator.choice([*ENDS, "is slow"]), generator.randrange(EPOCHS)
        over, calls = threading.Event(), iter(range(EPOCHS))

        def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
            if next(calls) == bad_call:
                wrong = _misbehave(kind, images, over)
                return brightness(images, prompts, metadata) if kind == "is slow" else wrong
            return brightness(images, prompts, metadata)

        before = time.monotonic()
        try:
            _train(place, time_limit(reward, LIMIT) if kind == "hangs" else reward)
            expect(kind == "is slow", f"{kind}: the run went on")
        except tuple(error for error, _ in ENDS.values()) as error:
            expected, message = ENDS[kind]
            expect(isinstance(error, expected) and message in str(error), f"unclear: {error}")
        finally:
            over.set()
        expect(time.monotonic() - before < 60, "too slow")
        _train(place)
        expect(result_of(place) == whole, "the continued run differs")
        return f"{kind}: " + ("as without, equal" if kind == "is slow" else "error, continued, equal")

    return each_case("reward_functions", case, seed, cases, folder)


# ----------------------------------------------------------------------------------------- over HTTP
def bright_pixels(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Reward of the number of bright pixels: a sum that no layout in memory can round otherwise."""
    return (images > 0.5).sum(dim=(1, 2, 3)) / 16


class BadService(socketserver.ThreadingTCPServer):
    """Stands before a good service and spoils some of its answers."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, faults: list[str], port: int) -> None:
        """Answer the first requests with these faults, all others as the good service does."""
        self.faults, self.good_port, self.over = faults, port, threading.Event()
        super().__init__(("127.0.0.1", 0), _BadHandler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: failing is its work."""


class _BadHandler(socketserver.StreamRequestHandler):
    server: BadService

    def handle(self) -> None:
        length = 0
        lines = [self.rfile.readline()]
        while lines[-1] not in (b"\r\n", b""):
            lines.append(self.rfile.readline())
            if lines[-1].lower().startswith(b"content-length:"):
                length = int(lines[-1].split(b":")[1])
        request = b"".join(lines) + self.rfile.read(length)
        with socket.create_connection(("127.0.0.1", self.server.good_port)) as good:
            good.sendall(request)
            answer = good.makefile("rb").read()
        fault = self.server.faults.pop(0) if self.server.faults else ""
        self._spoiled(fault, answer)

    def _spoiled(self, fault: str, answer: bytes) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        if fault == "hangs":
            self.server.over.wait()
        elif fault == "drips":  # a byte at a time, so that no single read takes too long
            for byte in answer:
                self.wfile.write(bytes([byte]))
                if self.server.over.wait(LIMIT / 4):
                    return
        elif fault == "ends in the middle":
            self.wfile.write(answer[: len(head) + 4 + len(body) // 2])
        elif fault == "ends before":
            return
        elif fault == "fails":
            self.wfile.write(_response("500 Broken", {"error": "out of memory"}))
        elif fault == "is no HTTP":
            self.wfile.write(b"\x00\x01\x02\r\n\r\n")
        elif fault in WRONG:
            self.wfile.write(_response(WRONG[fault][0], WRONG[fault][1]))
        else:
            self.wfile.write(answer)


def _response(status: str, answer: Any) -> bytes:
    body = json.dumps(answer).encode()
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


PASSING = ("hangs", "drips", "ends in the middle", "ends before", "fails", "is no HTTP")
WRONG: dict[str, tuple[str, Any]] = {
    "no rewards": ("200 OK", {"reward": [1.0, 2.0]}),
    "too many rewards": ("200 OK", {"rewards": [1.0, 2.0, 3.0]}),
    "texts": ("200 OK", {"rewards": ["1", "2"]}),
    "a list": ("200 OK", [1.0, 2.0]),
    "NaN": ("200 OK", {"rewards": [1.0, float("nan")]}),
    "a refusal": ("422 No", {"error": "prompt too long"}),
}


def _good_service(folder: Path, port: int = 0) -> tuple[int, int]:
    """Start a service in a process of its own; return the process and its port."""
    where = folder / f"port-{time.monotonic_ns()}"

    def work() -> None:
        server = make_server(bright_pixels, port)
        where.with_suffix(".part").write_text(str(server.server_port))
        where.with_suffix(".part").rename(where)
        server.serve_forever()

    process = fork(work, folder / "error")
    deadline = time.monotonic() + 60
    while not where.exists():
        expect(time.monotonic() < deadline, "the service did not start")
        time.sleep(0.002)
    return process, int(where.read_text())


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    wait(process)


def _spoiled_answers(generator: random.Random, place: Path, whole: dict[str, Any]) -> str:
    """A service that fails for a while: the run goes on, or ends with one error and can be continued."""
    retries = generator.randrange(4)
    faults = [""] * generator.randrange(EPOCHS)
    if generator.random() < 0.4:
        fault = generator.choice(list(WRONG))
        faults.append(fault)
    else:
        fault = ""
        faults += generator.choices(PASSING, k=generator.randrange(1, 5))
    process, port = _good_service(place)
    bad = BadService(list(faults), port)
    url = f"http://127.0.0.1:{bad.server_address[1]}"
    failing = sum(map(bool, faults))
    try:
        _train(place / "run", http_reward(url, timeout=LIMIT, retries=retries, backoff=0))
        outcome = "answers came late: as without faults, equal"
        expect(not fault and failing <= retries, "the run went on without an answer")
    except (ValueError, ConnectionError) as error:
        expect(is_clear(error, ValueError, ConnectionError), f"unclear: {error}")
        named = "finite numbers" in str(error) if fault == "NaN" else url in str(error)
        expect(named, f"unclear: {error}")
        expect(bool(fault) or failing > retries, f"the run ended although an answer came: {error}")
        outcome = "wrong answer" if fault else "no answer in all tries"
        outcome += ": clear error, continued, equal"
    finally:
        bad.over.set()
        bad.shutdown()
        bad.server_close()
    _train(place / "run", http_reward(f"http://127.0.0.1:{port}", retries=0))
    _kill(process)
    expect(result_of(place / "run") == whole, "the run differs")
    return outcome


def _killed_service(generator: random.Random, place: Path, whole: dict[str, Any]) -> str:
    """A service that is killed in the middle of a run, and started again or not."""
    process, port = _good_service(place)
    returns, call = generator.random() < 0.5, generator.randrange(EPOCHS)
    calls = iter(range(EPOCHS))
    retries = 8 if returns else 2
    ask = http_reward(f"http://127.0.0.1:{port}", timeout=10, retries=retries, backoff=0.05)
    helpers: list[threading.Thread] = []
    restarted: list[int] = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
        if next(calls) == call:
            _kill(process)
            if returns:
                restart: Callable[[], None] = lambda: restarted.append(_good_service(place, port)[0])  # noqa: E731
                helpers.append(threading.Timer(0.1, restart))
                helpers[0].start()
        return ask(images, prompts, metadata)

    try:
        _train(place / "run", reward)
        expect(returns, "the run went on without a service")
    except ConnectionError as error:
        expect(is_clear(error, ConnectionError) and not returns, f"unclear: {error}")
    for thread in helpers:
        thread.join()
    if not restarted:
        restarted.append(_good_service(place, port)[0])
    _train(place / "run", http_reward(f"http://127.0.0.1:{port}", retries=0))
    _kill(restarted[0])
    expect(result_of(place / "run") == whole, "the run differs")
    if returns:
        return "service killed and started again: the run waited, equal"
    return "service killed: clear error, continued, equal"


def http_service(seed: int, cases: range, folder: Path) -> Counts:
    """Train on a reward service that hangs, breaks off, answers nonsense or is killed; then continue."""
    _train(folder / "whole", bright_pixels)
    whole = result_of(folder / "whole")

    def case(generator: random.Random, place: Path) -> str:
        chosen = _killed_service if generator.random() < 0.3 else _spoiled_answers
        return chosen(generator, place, whole)

    return each_case("http_service", case, seed, cases, folder)
