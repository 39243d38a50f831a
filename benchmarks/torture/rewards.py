"""Reward functions that raise, hang, return NaN or are slow, and reward services that fail."""

from __future__ import annotations

import json
import random
import socket
import socketserver
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.torture.harness import Counts, each_case, expect, fork, is_clear, kill, wait_for
from benchmarks.torture.model import brightness, continue_run, make_trainer, whole_run
from ddpo_lessons.rewards.service import http_reward, make_server, time_limit

EPOCHS = 4
LIMIT = 0.3  # seconds


# What the trainer does: the error that the run ends with, and a part of its message.
ENDS: dict[str, tuple[type[Exception], str]] = {
    "raises": (KeyError, "a bug of the user's"),
    "hangs": (TimeoutError, f"took longer than {LIMIT:g} s"),
    "nan": (ValueError, "return finite numbers"),
    "inf": (ValueError, "return finite numbers"),
}


def reward_functions(seed: int, cases: range, folder: Path) -> Counts:
    """Let the reward function misbehave in a random epoch; then mend it and continue."""
    whole = whole_run(folder / "whole", num_epochs=EPOCHS)

    def case(generator: random.Random, place: Path) -> str:
        kind, bad_call = generator.choice([*ENDS, "is slow"]), generator.randrange(EPOCHS)
        over, calls = threading.Event(), iter(range(EPOCHS))

        def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
            scores = brightness(images, prompts, metadata)
            if next(calls) != bad_call:
                return scores
            if kind == "raises":
                raise KeyError("a bug of the user's")
            if kind == "hangs":
                over.wait()
            if kind == "is slow":
                time.sleep(0.02)
            return torch.full_like(scores, float(kind)) if kind in ("nan", "inf") else scores

        before = time.monotonic()
        try:
            limited = time_limit(reward, LIMIT) if kind == "hangs" else reward
            make_trainer(place, limited, num_epochs=EPOCHS).train()
            expect(kind == "is slow", f"{kind}: the run went on")
        except tuple(error for error, _ in ENDS.values()) as error:
            expected, message = ENDS[kind]
            expect(isinstance(error, expected) and message in str(error), f"unclear: {error}")
        finally:
            over.set()
        expect(time.monotonic() - before < 60, "too slow")
        continue_run(place, whole, num_epochs=EPOCHS)
        return f"{kind}: " + ("as without, equal" if kind == "is slow" else "error, continued, equal")

    return each_case("reward_functions", case, seed, cases, folder)


# ----------------------------------------------------------------------------------------- over HTTP
def bright_pixels(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Reward of the number of bright pixels: a sum that no layout in memory can round otherwise."""
    return (images > 0.5).sum(dim=(1, 2, 3)) / 16


class BadService(socketserver.ThreadingTCPServer):
    """Stands before a good service and spoils its first answers, each by a fault or by "" not at all."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, faults: list[str], port: int) -> None:
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
        elif fault == "is no HTTP":
            self.wfile.write(b"\x00\x01\x02\r\n\r\n")
        elif fault == "fails" or fault in WRONG:
            status, wrong = WRONG.get(fault, ("500 Broken", {"error": "out of memory"}))
            data = json.dumps(wrong).encode()
            self.wfile.write(f"HTTP/1.0 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        elif fault != "ends before":
            self.wfile.write(answer)


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
    wait_for(where)
    return process, int(where.read_text())


def _spoiled_answers(generator: random.Random, place: Path, whole: dict[str, Any]) -> str:
    """A service that fails for a while: the run goes on, or ends with one error and can be continued."""
    retries, good = generator.randrange(4), [""] * generator.randrange(EPOCHS)
    fault = generator.choice(list(WRONG)) if generator.random() < 0.4 else ""
    spoiled = [fault] if fault else generator.choices(PASSING, k=generator.randrange(1, 5))
    process, port = _good_service(place)
    bad = BadService(good + spoiled, port)
    url = f"http://127.0.0.1:{bad.server_address[1]}"
    try:
        ask = http_reward(url, timeout=LIMIT, retries=retries, backoff=0)
        make_trainer(place / "run", ask, num_epochs=EPOCHS).train()
        outcome = "answers came late: as without faults, equal"
        expect(not fault and len(spoiled) <= retries, "the run went on without an answer")
    except (ValueError, ConnectionError) as error:
        expect(is_clear(error, ValueError, ConnectionError), f"unclear: {error}")
        named = "finite numbers" in str(error) if fault == "NaN" else url in str(error)
        expect(named, f"unclear: {error}")
        expect(bool(fault) or len(spoiled) > retries, f"the run ended although an answer came: {error}")
        outcome = "wrong answer" if fault else "no answer in all tries"
        outcome += ": clear error, continued, equal"
    finally:
        bad.over.set()
        bad.shutdown()
        bad.server_close()
    ask = http_reward(f"http://127.0.0.1:{port}", retries=0)
    continue_run(place / "run", whole, ask, num_epochs=EPOCHS)
    kill(process)
    return outcome


def _killed_service(generator: random.Random, place: Path, whole: dict[str, Any]) -> str:
    """A service that is killed in the middle of a run, and started again or not."""
    process, port = _good_service(place)
    returns, call, calls = generator.random() < 0.5, generator.randrange(EPOCHS), iter(range(EPOCHS))
    ask = http_reward(f"http://127.0.0.1:{port}", timeout=10, retries=8 if returns else 2, backoff=0.05)
    helpers: list[threading.Thread] = []
    restarted: list[int] = []

    def restart() -> None:
        restarted.append(_good_service(place, port)[0])

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
        if next(calls) == call:
            kill(process)
            if returns:
                helpers.append(threading.Timer(0.1, restart))
                helpers[0].start()
        return ask(images, prompts, metadata)

    try:
        make_trainer(place / "run", reward, num_epochs=EPOCHS).train()
        expect(returns, "the run went on without a service")
    except ConnectionError as error:
        expect(is_clear(error, ConnectionError) and not returns, f"unclear: {error}")
    for thread in helpers:
        thread.join()
    if not restarted:
        restart()
    ask = http_reward(f"http://127.0.0.1:{port}", retries=0)
    continue_run(place / "run", whole, ask, num_epochs=EPOCHS)
    kill(restarted[0])
    if returns:
        return "service killed and started again: the run waited, equal"
    return "service killed: clear error, continued, equal"


def http_service(seed: int, cases: range, folder: Path) -> Counts:
    """Train on a reward service that hangs, breaks off, answers nonsense or is killed; then continue."""
    whole = whole_run(folder / "whole", bright_pixels, num_epochs=EPOCHS)

    def case(generator: random.Random, place: Path) -> str:
        chosen = _killed_service if generator.random() < 0.3 else _spoiled_answers
        return chosen(generator, place, whole)

    return each_case("http_service", case, seed, cases, folder)
