"""Reward functions that raise, hang, return NaN or are slow, and reward services that fail."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ddpo_lessons.rewards.service import http_reward, time_limit
from tests.torture import harness
from tests.torture.harness import Case, continue_run, expect, is_clear, make_trainer, whole_run

EPOCHS = 4
LIMIT = 1.5  # seconds
# What the trainer does: the error that the run ends with, and a part of its message.
ENDS: dict[str, tuple[type[Exception], str]] = {
    "raises": (KeyError, "a bug of the user's"),
    "hangs": (TimeoutError, f"took longer than {LIMIT:g} s"),
    "nan": (ValueError, "return finite numbers"),
    "inf": (ValueError, "return finite numbers"),
}


def reward_functions(folder: Path) -> Case:
    """Let the reward function misbehave in a random epoch; then mend it and continue."""
    whole = whole_run(folder / "whole", num_epochs=EPOCHS)

    def case(generator: random.Random, place: Path) -> str:
        kind, bad_call = generator.choice([*ENDS, "is slow"]), generator.randrange(EPOCHS)
        over, calls = threading.Event(), iter(range(EPOCHS))

        def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
            scores = harness.brightness(images, prompts, metadata)
            if next(calls) != bad_call:
                return scores
            if kind == "raises":
                raise KeyError("a bug of the user's")
            if kind == "hangs":
                over.wait()
            if kind == "is slow":
                time.sleep(0.02)
            return torch.full_like(scores, float(kind)) if kind in ("nan", "inf") else scores

        try:
            limited = time_limit(reward, LIMIT) if kind == "hangs" else reward
            make_trainer(place, limited, num_epochs=EPOCHS).train()
            expect(kind == "is slow", f"{kind}: the run went on")
        except tuple(error for error, _ in ENDS.values()) as error:
            expected, message = ENDS[kind]
            expect(isinstance(error, expected) and message in str(error), f"unclear: {error}")
        finally:
            over.set()
        continue_run(place, whole, num_epochs=EPOCHS)
        return f"{kind}: " + ("as without, equal" if kind == "is slow" else "error, continued, equal")

    return case


# ----------------------------------------------------------------------------------------- over HTTP
def bright_pixels(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Reward of the number of bright pixels: a sum that no layout in memory can round otherwise."""
    return (torch.as_tensor(images) > 0.5).sum(dim=(1, 2, 3)) / 16


def make_server(port: int = 0) -> Any:
    """Make the service that the how-to shows."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "reward-service.md"
    names: dict[str, Any] = {}
    exec(page.read_text("utf-8").split("```python\n")[1].split("```")[0], names)
    return names["make_server"](bright_pixels, port)


def _answer(status: str, content: Any) -> bytes:
    data = json.dumps(content).encode()
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


RIGHT = _answer("200 OK", {"rewards": [1.0, 2.0]})
PASSING = {  # faults after which the request is sent again
    "hangs": b"",
    "ends before": b"",
    "ends in the middle": RIGHT[:-5],
    "is no HTTP": b"\x00\x01\x02\r\n\r\n",
    "fails": _answer("500 Broken", {"error": "out of memory"}),
}
WRONG = {
    "no rewards": _answer("200 OK", {"reward": [1.0, 2.0]}),
    "too many rewards": _answer("200 OK", {"rewards": [1.0, 2.0, 3.0]}),
    "texts": _answer("200 OK", {"rewards": ["1", "2"]}),
    "a list": _answer("200 OK", [1.0, 2.0]),
    "NaN": _answer("200 OK", {"rewards": [1.0, float("nan")]}),
    "a refusal": _answer("422 No", {"error": "prompt too long"}),
}


@contextmanager
def _spoiled_service(faults: list[str]) -> Iterator[str]:
    """Run a service whose first answers are spoiled, each by a fault or by "" not at all; yield its URL."""
    server, over = make_server(), threading.Event()
    good: Any = server.RequestHandlerClass

    class Spoiled(good):
        def do_POST(self) -> None:  # noqa: N802
            fault = faults.pop(0) if faults else ""
            if not fault:
                super().do_POST()
                return
            self.rfile.read(int(self.headers["Content-Length"]))
            if fault == "hangs":
                over.wait()
            self.wfile.write((PASSING | WRONG)[fault])

    server.RequestHandlerClass = Spoiled
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # failing is its work
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def _spoiled_answers(generator: random.Random, place: Path, whole: dict[str, Any]) -> str:
    """A service that fails for a while: the run goes on, or ends with one error and can be continued."""
    retries, good = generator.randrange(4), [""] * generator.randrange(EPOCHS)
    fault = generator.choice(list(WRONG)) if generator.random() < 0.4 else ""
    spoiled = [fault] if fault else generator.choices(list(PASSING), k=generator.randrange(1, 5))
    faults = good + spoiled
    with _spoiled_service(faults) as url:
        try:
            ask = http_reward(url, timeout=LIMIT, retries=retries, backoff=0)
            make_trainer(place, ask, num_epochs=EPOCHS).train()
            outcome = "answers came late: as without faults, equal"
            expect(not fault and len(spoiled) <= retries, "the run went on without an answer")
        except (ValueError, ConnectionError) as error:
            named = ("finite numbers" if fault == "NaN" else url) in str(error)
            expect(is_clear(error, ValueError, ConnectionError) and named, f"unclear: {error}")
            expect(bool(fault) or len(spoiled) > retries, f"the run ended although an answer came: {error}")
            outcome = "wrong answer" if fault else "no answer in all tries"
            outcome += ": clear error, continued, equal"
        faults.clear()
        continue_run(place, whole, http_reward(url, retries=0), num_epochs=EPOCHS)
    return outcome


def _service(port: int = 0) -> tuple[int, int]:
    """Start a service in a process of its own; return the process and its port."""
    server = make_server(port)
    process = harness.fork(server.serve_forever)
    server.server_close()  # here; the process has a copy
    return process, server.server_port


def _killed_service(generator: random.Random, place: Path, whole: dict[str, Any]) -> str:
    """A service that is killed in the middle of a run, and started again or not."""
    process, port = _service()
    returns, call, calls = generator.random() < 0.5, generator.randrange(EPOCHS), iter(range(EPOCHS))
    ask = http_reward(f"http://127.0.0.1:{port}", timeout=10, retries=8 if returns else 2, backoff=0.05)
    started: list[int] = []
    restart = threading.Timer(0.1, lambda: started.append(_service(port)[0]))

    def reward(*arguments: Any) -> Any:
        if next(calls) == call:
            harness.kill(process)
            if returns:
                restart.start()
        return ask(*arguments)

    try:
        make_trainer(place, reward, num_epochs=EPOCHS).train()
        expect(returns, "the run went on without a service")
    except ConnectionError as error:
        expect(is_clear(error, ConnectionError) and not returns, f"unclear: {error}")
        restart.start()
    restart.join()
    continue_run(place, whole, http_reward(f"http://127.0.0.1:{port}", retries=0), num_epochs=EPOCHS)
    harness.kill(started[0])
    if returns:
        return "service killed and started again: the run waited, equal"
    return "service killed: clear error, continued, equal"


def http_service(folder: Path) -> Case:
    """Train on a reward service that hangs, breaks off, answers nonsense or is killed; then continue."""
    whole = whole_run(folder / "whole", bright_pixels, num_epochs=EPOCHS)

    def case(generator: random.Random, place: Path) -> str:
        chosen = _killed_service if generator.random() < 0.3 else _spoiled_answers
        return chosen(generator, place, whole)

    return case
