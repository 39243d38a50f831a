import contextlib
import io
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each_prompt, howto_blocks, make_config, make_pipeline
from PIL import Image

from ddpo_lessons.data.contexts import Context, check_rewards, score
from ddpo_lessons.data.folders import ImagePrompts, find_images
from ddpo_lessons.rewards.service import http_reward, pack, time_limit
from ddpo_lessons.trainer import DDPOTrainer

IMAGES = torch.arange(24.0).view(2, 3, 2, 2) / 24
PROMPTS = ("a\nred three", "ü")
METADATA = ({"digit": 3}, None)
SERVE: dict[str, Any] = {}
exec(howto_blocks("reward-service", "python")[0], SERVE)


def first_pixel(images: Any, prompts: Any, metadata: Any) -> Any:
    return images[:, 0, 0, 0]


@contextlib.contextmanager
def service(reward_function: Any) -> Iterator[str]:
    """Run a service in a thread; its address."""
    with SERVE["make_server"](reward_function, port=0) as server:
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


# --------------------------------------------------------------------------------------------- both ends
def test_a_request_is_a_file_of_arrays_without_pickles():
    arrays = np.load(io.BytesIO(pack(IMAGES.half(), PROMPTS, METADATA)), allow_pickle=False)
    assert json.loads(arrays["json"].item()) == {"prompts": [*PROMPTS], "metadata": [*METADATA]}
    assert arrays["images"].dtype == np.float32
    assert np.array_equal(arrays["images"], IMAGES.half().float().numpy())


def test_a_service_is_asked_what_the_function_would_be_asked():
    """With tensors in the metadata, as those of `--images`."""
    seen = []

    def reward(images: Any, prompts: Any, metadata: Any) -> Any:
        seen.extend([images, prompts, metadata])
        return images[:, 0, 0, 0]

    metadata = tuple(
        {"id": n, "image": image.bfloat16(), "n": torch.tensor(n)} for n, image in enumerate(IMAGES)
    )
    with service(reward) as url:
        rewards, info = http_reward(url)(IMAGES, PROMPTS, metadata)
    assert rewards.dtype == torch.float32
    assert (rewards.tolist(), info) == ([0.0, 0.5], {})
    assert np.array_equal(seen[0], IMAGES.numpy())
    assert seen[1] == [*PROMPTS]
    assert [(entry["id"], entry["n"].item(), entry["image"].shape) for entry in seen[2]] == [
        (0, 0, (3, 2, 2)), (1, 1, (3, 2, 2)),
    ]  # fmt: skip
    assert np.array_equal(seen[2][1]["image"], IMAGES[1].bfloat16().float().numpy())
    assert "image" in metadata[0]  # the trainer's own is as it was


def test_metadata_of_image_folders_can_be_sent(tmp_path):
    (tmp_path / "three").mkdir()
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (32, 32), colour).save(tmp_path / "three" / name)
    draw = ImagePrompts(find_images(tmp_path), "a {label}", 16, seed=0, damages=("foggy",))
    prompts, images, metadata = zip(*(draw() for _ in range(2)), strict=True)

    def reward(images: Any, prompts: Any, metadata: Any) -> Any:
        assert prompts == ["a three"] * 2
        assert all(entry["label"] == "three" and entry["digit"] == 3 for entry in metadata)
        return [abs(entry["image"] - entry["target"]).mean() for entry in metadata]

    with service(reward) as url:
        rewards, _ = http_reward(url, retries=0)(torch.stack(images), prompts, metadata)
    by_hand = [(entry["image"] - entry["target"]).abs().mean().item() for entry in metadata]
    assert rewards.tolist() == pytest.approx(by_hand, abs=1e-6)
    assert min(by_hand) > 0.1


@pytest.mark.parametrize(
    "metadata",
    [(object(), None), ({"a": torch.zeros(1)}, None), ({"a": torch.zeros(1)}, {}),
     ({"a": torch.zeros(1)}, {"a": torch.zeros(2)}), ({"a": torch.zeros(1)}, {"a": 1})],
)  # fmt: skip
def test_metadata_that_cannot_be_sent_is_refused_before_anything_is(metadata):
    with pytest.raises(TypeError, match=r"metadata cannot be sent to a reward service .* what JSON holds"):
        http_reward("http://127.0.0.1:1")(IMAGES, PROMPTS, metadata)


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


def test_an_exception_in_the_service_is_printed_and_the_service_goes_on(capsys):
    calls = []

    def reward(images: Any, prompts: Any, metadata: Any) -> Any:
        calls.append(None)
        if len(calls) <= 2:
            raise KeyError("digit")
        return first_pixel(images, prompts, metadata)

    with service(reward) as url:
        with pytest.raises(ConnectionError, match=rf"{url} failed 2 times.*see what it printed"):
            http_reward(url, retries=1, backoff=0)(IMAGES, PROMPTS, METADATA)
        assert "KeyError: 'digit'" in capsys.readouterr().err
        assert http_reward(url, retries=0)(IMAGES, PROMPTS, METADATA)[0].tolist() == [0.0, 0.5]


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
        (response({"rewards": [1, "2"]}), "a list of 2 numbers"),
        (response({"rewards": [1, 2], "info": [3]}), "must answer JSON"),
        (response({"error": "too dark"}, "422 No"), r"refuses the batch \(422\): .*too dark"),
        (response("what", "404 Not Found"), r"refuses the batch \(404\): "),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(answer, message):
    with answering(answer, GOOD) as (url, asked):
        with pytest.raises(ValueError, match=rf"reward service {url} .*{message}"):
            http_reward(url, retries=5, backoff=0)(IMAGES, PROMPTS, METADATA)
        assert len(asked) == 1


def test_a_service_that_hangs_is_given_up_in_time():
    with (
        answering(b"slow", b"slow") as (url, asked),
        pytest.raises(ConnectionError, match=r"failed 2 times.*timeout=0.2"),
    ):
        http_reward(url, timeout=0.2, retries=1, backoff=0)(IMAGES, PROMPTS, METADATA)
    assert len(asked) == 2


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
        assert time_limit(lambda *batch: torch.is_grad_enabled(), 60)(IMAGES, PROMPTS, METADATA) is enabled


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", None, True])
def test_a_limit_must_be_a_number_of_seconds(seconds):
    with pytest.raises(ValueError, match=r"seconds=.* must be a positive, finite number"):
        time_limit(first_pixel, seconds)
