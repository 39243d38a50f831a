from __future__ import annotations

import contextlib
import http.client
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each_prompt, make_config, make_pipeline

from ddpo_lessons.data.contexts import Context, check_rewards, score
from ddpo_lessons.rewards.service import http_reward, make_server, pack, time_limit, unpack, within
from ddpo_lessons.trainer import DDPOTrainer

IMAGES = torch.arange(24.0).view(2, 3, 2, 2) / 24
PROMPTS = ("a\nred three", "ü")
METADATA = ({"digit": 3}, None)


def first_pixel(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return images[:, 0, 0, 0]


@contextlib.contextmanager
def service(reward_function: Any) -> Iterator[str]:
    """Run a service in a thread; its address."""
    with make_server(reward_function, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that sends fixed bytes, one after the other; its address, and what it was asked."""
    left, asked = list(answers), []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline())
            answer = left.pop(0) if left else b""
            self.wfile.write(answer)
            time.sleep(0.05)  # what was not read would reset the connection before the answer arrives
            if answer == b"slow":
                over.wait()

    over = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        over.set()
        server.shutdown()


def response(body: Any, status: str = "200 OK") -> bytes:
    text = json.dumps(body).encode()
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text


GOOD = response({"rewards": [1.5, -2]})


# ------------------------------------------------------------------------------------------- what is sent
def test_what_is_unpacked_is_what_was_packed_to_the_bit():
    images, prompts, metadata = unpack(pack(IMAGES.half(), PROMPTS, METADATA))
    assert images.dtype == torch.float32
    assert torch.equal(images, IMAGES.half().float())
    assert (prompts, metadata) == (PROMPTS, METADATA)


def test_a_request_is_a_line_of_json_and_little_endian_floats():
    line, _, pixels = pack(IMAGES, PROMPTS, METADATA).partition(b"\n")
    assert json.loads(line) == {"shape": [2, 3, 2, 2], "prompts": [*PROMPTS], "metadata": [*METADATA]}
    assert np.frombuffer(pixels, "<f4").tolist() == IMAGES.flatten().tolist()


def test_metadata_that_json_does_not_hold_is_refused_before_anything_is_sent():
    with pytest.raises(TypeError, match=r"metadata cannot be sent .*Tensor.* what JSON holds"):
        http_reward("http://127.0.0.1:1")(IMAGES, PROMPTS, (torch.zeros(1), None))


HEAD = {"shape": [2, 3, 2, 2], "prompts": ["a", "b"], "metadata": [None, None]}


@pytest.mark.parametrize(
    ("head", "size", "message"),
    [
        (None, 96, "does not begin with a line of JSON"),
        ([1], 96, "does not begin with a line of JSON"),
        ({"shape": [2, 3, 2, 2]}, 96, "does not begin with a line of JSON"),
        ({**HEAD, "shape": [2, 3, 4]}, 96, r"send \[B, 3, H, W\]"),
        ({**HEAD, "shape": [2.0, 3, 2, 2]}, 96, r"send \[B, 3, H, W\]"),
        ({**HEAD, "shape": [-2, 3, -2, 2]}, 96, "96 bytes of pixels"),
        ({**HEAD, "shape": [2, 3, 10**9, 10**9]}, 96, "96 bytes of pixels"),
        (HEAD, 95, "95 bytes of pixels"),
        ({**HEAD, "prompts": ["a"]}, 96, "prompts must be a list of 2"),
        ({**HEAD, "prompts": "ab"}, 96, "prompts must be a list of 2"),
        ({**HEAD, "metadata": {}}, 96, "metadata must be a list of 2"),
        ({**HEAD, "prompts": ["a", 1]}, 96, "prompts must be texts"),
    ],
)
def test_requests_that_are_refused(head, size, message):
    body = b"\x80\x04pickle" if head is None else json.dumps(head).encode()
    with pytest.raises(ValueError, match=message):
        unpack(body + b"\n" + bytes(size))


# --------------------------------------------------------------------------------------------- both ends
def test_a_service_scores_as_the_function_itself():
    seen = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
        seen.append((prompts, metadata))
        return first_pixel(images, prompts, metadata), {"twice": 2 * images[:, 0, 0, 0], "object": object()}

    with service(reward) as url:
        rewards, info = http_reward(url)(IMAGES, PROMPTS, METADATA)
    assert torch.equal(rewards, torch.tensor([0.0, 0.5]))
    assert rewards.dtype == torch.float32
    assert info == {"twice": [0.0, 1.0]}
    assert seen == [(PROMPTS, METADATA)]


def test_training_on_a_service_gives_the_weights_of_training_on_the_function(tmp_path, one_thread):
    def train(name: str, reward: Any) -> list[torch.Tensor]:
        trainer = DDPOTrainer(make_config(tmp_path / name), reward, each_prompt(), make_pipeline())
        trainer.train()
        return list(trainer.learner.trainable.values())

    with service(first_pixel) as url:
        remote = train("remote", http_reward(url))
    assert all(map(torch.equal, remote, train("local", first_pixel)))


def test_nan_reaches_the_trainer_which_names_the_sample():
    contexts = [Context(p, m) for p, m in zip(PROMPTS, METADATA, strict=True)]
    with service(lambda i, p, m: [1.0, float("nan")]) as url:
        batch = score(http_reward(url), IMAGES, contexts)
    with pytest.raises(ValueError, match=r"nan for sample 1 .*prompt 'ü'"):
        check_rewards([batch])


def test_an_exception_in_the_service_is_told_and_the_service_goes_on():
    calls = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) <= 2:
            raise KeyError("digit")
        return first_pixel(images, prompts, metadata)

    with service(reward) as url:
        with pytest.raises(ConnectionError, match=rf"{url} failed 2 times.*500: KeyError \('digit'\)"):
            http_reward(url, retries=1, backoff=0)(IMAGES, PROMPTS, METADATA)
        assert http_reward(url, retries=0)(IMAGES, PROMPTS, METADATA)[0].tolist() == [0.0, 0.5]


@pytest.mark.parametrize("length", ["", "-1", "x", str(2**31)])
def test_a_request_without_a_sound_length_is_refused(length):
    with service(first_pixel) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        connection.putrequest("POST", "/")
        if length:
            connection.putheader("Content-Length", length)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 400
        assert "Content-Length" in json.loads(answer.read())["error"]
        connection.close()


# ---------------------------------------------------------------------------------- a service that fails
CUT = GOOD[:-3]
BROKEN = response({"error": "out of memory"}, "503 Busy")


@pytest.mark.parametrize("fault", [b"", b"\x00\r\n\r\n", CUT, BROKEN], ids=["ends", "no HTTP", "cut", "503"])
def test_a_request_is_sent_again_as_often_as_allowed(fault):
    with answering(fault, fault, GOOD) as (url, asked):
        rewards, _ = http_reward(url, retries=2, backoff=0)(IMAGES, PROMPTS, METADATA)
    assert rewards.tolist() == [1.5, -2.0]
    assert len(asked) == 3
    with answering(fault, fault, GOOD) as (url, asked):
        with pytest.raises(ConnectionError, match=rf"reward service {url} failed 2 times, .*resume_from"):
            http_reward(url, retries=1, backoff=0)(IMAGES, PROMPTS, METADATA)
        assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (response({"reward": [1, 2]}), "must answer JSON with 'rewards'"),
        (response([1, 2]), "must answer JSON with 'rewards'"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\n\x80\x04pickle", "must answer JSON with 'rewards'"),
        (response({"rewards": [1, 2, 3]}), "a list of 2 numbers"),
        (response({"rewards": [1, True]}), "a list of 2 numbers"),
        (response({"rewards": [1, "2"]}), "a list of 2 numbers"),
        (response({"rewards": [1, 2], "info": [3]}), "info .* must be an object"),
        (response({"error": "too dark"}, "422 No"), r"refuses the batch \(422\): too dark"),
        (response("what", "404 Not Found"), r"refuses the batch \(404\): "),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(answer, message):
    with answering(answer, GOOD) as (url, asked):
        with pytest.raises(ValueError, match=rf"reward service {url} .*{message}"):
            http_reward(url, retries=5, backoff=0)(IMAGES, PROMPTS, METADATA)
        assert len(asked) == 1


def test_a_service_that_hangs_or_drips_is_given_up_in_time():
    with (
        answering(b"slow", b"slow") as (url, asked),
        pytest.raises(ConnectionError, match=r"failed 2 times.*no whole answer within 0.2 s"),
    ):
        http_reward(url, timeout=0.2, retries=1, backoff=0)(IMAGES, PROMPTS, METADATA)
    assert len(asked) == 2


def test_waits_double(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("ddpo_lessons.rewards.service.time.sleep", waits.append)
    with pytest.raises(ConnectionError, match="failed 4 times"):
        http_reward("http://127.0.0.1:1", retries=3, backoff=0.5)(IMAGES, PROMPTS, METADATA)
    assert waits == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "file:///etc/hosts"}, "url='file:"),
        ({"url": "127.0.0.1:8000"}, "url='127"),
        ({"url": "http://"}, "url='http"),
        ({"url": "http://a:b"}, "url='http"),
        ({"url": None}, "url=None"),
        ({"timeout": 0}, "timeout=0 must be a positive"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"retries": -1}, "retries=-1"),
        ({"retries": 1.0}, "retries=1.0"),
        ({"backoff": -1}, "backoff=-1"),
    ],
)
def test_arguments_that_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        http_reward(**{"url": "http://127.0.0.1:1", **arguments})


# --------------------------------------------------------------------------------------- a limit of time
def test_a_reward_that_hangs_ends_with_an_error_that_names_it():
    over = threading.Event()

    def hanging(images: torch.Tensor, prompts: Any, metadata: Any) -> None:
        over.wait()

    with pytest.raises(TimeoutError, match=r"reward_function 'hanging' took longer than 0.05 s: raise its"):
        time_limit(hanging, 0.05)(IMAGES, PROMPTS, METADATA)
    over.set()


def test_within_its_limit_a_reward_is_as_without():
    assert torch.equal(time_limit(first_pixel, 60)(IMAGES, PROMPTS, METADATA), IMAGES[:, 0, 0, 0])

    def broken(images: torch.Tensor, prompts: Any, metadata: Any) -> None:
        raise KeyError("digit")

    with pytest.raises(KeyError, match="digit"):
        time_limit(broken, 60)(IMAGES, PROMPTS, METADATA)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_thread_keeps_the_callers_setting_of_gradients(enabled):
    with torch.set_grad_enabled(enabled):
        assert within(60, "", torch.is_grad_enabled) is enabled


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", None, True])
def test_a_limit_must_be_a_number_of_seconds(seconds):
    with pytest.raises(ValueError, match=r"seconds=.* must be a positive, finite number"):
        time_limit(first_pixel, seconds)
