"""Rewards that another process computes, over HTTP, and a limit of time for rewards that may hang.

A reward model that does not fit beside the policy, or needs other packages, runs as a service: `serve` there,
`http_reward` in training. DDPO's authors score with LLaVA in this way (ddpo-pytorch, rewards.py), but they
exchange pickles, and whoever can send a pickle runs code in the process that reads it. Here a request is one
line of JSON and raw float32 pixels, and the answer is JSON: neither can hold code.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch

from ddpo_lessons.rewards.base import RewardFunction, split_info

MAX_REQUEST_BYTES = 2**30
T = TypeVar("T")


# ---------------------------------------------------------------------------------- a limit of time
def within(seconds: float, message: str, compute: Callable[[], T]) -> T:
    """Return what `compute` returns, or raise TimeoutError after so many seconds.

    It runs in a thread of its own. Python cannot end a thread: one that hangs is left behind until the
    process ends, and keeps what it holds.

    Args:
        seconds: the limit.
        message: of the TimeoutError.
        compute: the function.

    Returns:
        Its result; what it raises is raised here.

    Raises:
        TimeoutError: if it takes longer.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    # a thread starts with its own settings
    keeps_gradients = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # -1: none

    def work() -> None:
        try:
            with torch.set_grad_enabled(keeps_gradients), torch.cuda.device(device):
                outcome.append((compute(), None))
        except BaseException as error:  # handed to the caller below
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(message)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _check_seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(f"{name}={value!r} must be a positive, finite number of seconds")


def time_limit(reward_function: RewardFunction, seconds: float) -> RewardFunction:
    """Give a reward function a limit of time, so that one that hangs ends the run with an error.

    What hangs is left behind in a thread (see `within`); a service that is asked with `http_reward` can be
    killed and started again without the trainer.

    Args:
        reward_function: the function.
        seconds: the limit of one call, which scores one batch.

    Returns:
        The same function; it raises TimeoutError after so many seconds.

    Raises:
        ValueError: if `seconds` is no positive number.
    """
    _check_seconds("seconds", seconds)
    name = getattr(reward_function, "__name__", type(reward_function).__name__)
    message = f"reward_function {name!r} took longer than {seconds:g} s: raise its time_limit, or mend it"

    @functools.wraps(reward_function)  # a run is known by its reward's name
    def limited(images: torch.Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
        return within(seconds, message, lambda: reward_function(images, prompts, metadata))

    return limited


# ------------------------------------------------------------------------------------- what is sent
def pack(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> bytes:
    r"""Make a request's body: a line of JSON, b"\n", the pixels as little-endian float32.

    Args:
        images: (B, 3, H, W).
        prompts: B texts.
        metadata: B values that JSON holds.

    Returns:
        The body; the line holds "shape", "prompts" and "metadata".

    Raises:
        TypeError: if JSON does not hold the metadata.
    """
    try:
        head = {"shape": list(images.shape), "prompts": list(prompts), "metadata": list(metadata)}
        line = json.dumps(head)  # escapes every line break
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metadata cannot be sent to a reward service ({error}): let the prompt function return what "
            "JSON holds"
        ) from error
    pixels = images.detach().float().cpu().numpy().astype("<f4", copy=False)
    return line.encode() + b"\n" + pixels.tobytes()


def unpack(body: bytes) -> tuple[torch.Tensor, tuple[str, ...], tuple[Any, ...]]:
    """Read what `pack` made, after checking it.

    Args:
        body: the request's body.

    Returns:
        images (B, 3, H, W) float32, prompts and metadata.

    Raises:
        ValueError: if it is anything else.
    """
    line, _, pixels = body.partition(b"\n")
    try:
        head = json.loads(line)
        shape, prompts, metadata = (head[name] for name in ("shape", "prompts", "metadata"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            "the request does not begin with a line of JSON: shape, prompts, metadata"
        ) from error
    if not isinstance(shape, list) or len(shape) != 4 or not all(type(side) is int for side in shape):
        raise ValueError(f"shape is {shape!r:.100}: send [B, 3, H, W]")
    if min(shape) < 1 or shape[1] != 3 or 4 * math.prod(shape) != len(pixels):
        raise ValueError(f"shape {shape!r:.100} with {len(pixels)} bytes of pixels: send 4 * B * 3 * H * W")
    for name, values in (("prompts", prompts), ("metadata", metadata)):
        if not isinstance(values, list) or len(values) != shape[0]:
            raise ValueError(f"{name} must be a list of {shape[0]}, one for each image")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts must be texts")
    array = np.frombuffer(pixels, "<f4").reshape(shape).astype(np.float32)  # a copy, which may be written
    return torch.from_numpy(array), tuple(prompts), tuple(metadata)


# ---------------------------------------------------------------------------------------- the client
def http_reward(url: str, timeout: float = 60.0, retries: int = 3, backoff: float = 1.0) -> RewardFunction:
    """Ask a reward service, as `serve` is one, for the rewards of each batch.

    A request that gets no whole answer in time, or one of status 500 and above, is sent again after
    `backoff`, 2 `backoff`, 4 `backoff`, ... seconds; one that the service refuses (below 500) or answers
    wrongly is not. Proxies of the environment are not used.

    Args:
        url: of the service, such as "http://127.0.0.1:8000".
        timeout: seconds that one request may take, from connecting to the last byte.
        retries: how many times a request is sent again.
        backoff: seconds before the first of them.

    Returns:
        The reward function. It raises ConnectionError, naming the url, when the last try has failed, and
        ValueError when the service refuses the batch or answers wrongly. Rewards that are NaN or infinite are
        passed on: the trainer refuses them and names the sample.

    Raises:
        ValueError: if an argument cannot work.
    """
    if not _is_web_address(url):
        raise ValueError(f"url={url!r} must be text such as 'http://127.0.0.1:8000'")
    _check_seconds("timeout", timeout)
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"retries={retries!r} must be a whole number, 0 or more")
    if backoff:
        _check_seconds("backoff", backoff)

    def reward(images: torch.Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
        body = pack(images, prompts, metadata)
        for attempt in range(retries + 1):
            try:
                answer = within(
                    timeout, f"no whole answer within {timeout:g} s", lambda: _post(url, body, timeout)
                )
            except (OSError, HTTPException) as error:
                last = error
                if attempt < retries:
                    time.sleep(backoff * 2**attempt)
            else:
                return _rewards_of(url, answer, len(images))
        raise ConnectionError(
            f"the reward service {url} failed {retries + 1} times, at last with {_describe(last)}: see that "
            "it runs, or raise timeout or retries; then continue with resume_from='latest'"
        ) from last

    return reward


def _is_web_address(url: Any) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, TypeError, AttributeError):  # no such port, brackets that do not match, not text
        return False


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _post(url: str, body: bytes, timeout: float) -> bytes:
    """Send one request and return the answer's bytes."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/octet-stream"})
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise ConnectionError(f"{error.code}: {_message(error.read())}") from error
        message = _message(error.read())
        raise ValueError(f"the reward service {url} refuses the batch ({error.code}): {message}") from error


def _message(body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']:.300}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return repr(body[:300])


def _describe(error: BaseException) -> str:
    text = "".join(letter if letter.isprintable() else " " for letter in str(error)).strip()
    return f"{type(error).__name__} ({text})" if text else type(error).__name__


def _rewards_of(url: str, answer: bytes, size: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Read an answer: {"rewards": B numbers, "info": {name: ...}}."""
    try:
        found = json.loads(answer)
        rewards, info = found["rewards"], found.get("info", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"the reward service {url} answered {answer[:200]!r}: it must answer JSON with 'rewards'"
        ) from error
    is_row = isinstance(rewards, list) and all(type(value) in (int, float) for value in rewards)
    if not is_row or len(rewards) != size:
        raise ValueError(
            f"the reward service {url} returned {rewards!r:.200} for {size} images: it must return a list of "
            f"{size} numbers"
        )
    if not isinstance(info, dict):
        raise ValueError(f"the reward service {url} returned info {info!r:.200}: it must be an object")
    return torch.tensor(rewards, dtype=torch.float64).float(), info


# --------------------------------------------------------------------------------------- the service
def make_server(reward_function: RewardFunction, port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Make the other end of `http_reward`; `serve_forever()` starts it.

    One batch is scored at a time, whoever asks, so that the function needs no locks. An exception in it is
    answered as status 500 with its message, and the service goes on.

    Args:
        reward_function: as for a trainer. What JSON does not hold of its info is left out.
        port: where to listen; 0 takes a free one, which `server_port` names.
        host: where requests may come from; "127.0.0.1" is this machine only. There is no password: "0.0.0.0"
            lets in the whole network.

    Returns:
        The server.

    Raises:
        OSError: if the port is taken.
    """
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # seconds without a byte, after which a client is dropped

        def do_POST(self) -> None:
            """Score one batch."""
            try:
                request = unpack(self._body())
            except ValueError as error:
                self._answer(400, {"error": str(error)})
                return
            try:
                with one_at_a_time:
                    answer = _score(reward_function, *request)
            except Exception as error:
                self._answer(500, {"error": _describe(error)})
            else:
                self._answer(200, answer)

        def _body(self) -> bytes:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MAX_REQUEST_BYTES:
                raise ValueError(f"Content-Length is {length!r:.50}: send 0 to {MAX_REQUEST_BYTES} bytes")
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                raise ValueError(f"the request ended after {len(body)} of {length} bytes")
            return body

        def _answer(self, status: int, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print no line for each request; who asks is told of errors."""

    return _Server((host, port), Handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client that hangs does not keep the process alive

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line that a client went away, instead of a traceback."""
        print(f"{client_address[0]}: {_describe(sys.exc_info()[1] or Exception())}", file=sys.stderr)


def _score(
    reward_function: RewardFunction, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]
) -> dict[str, Any]:
    returned = reward_function(images, tuple(prompts), tuple(metadata))
    rewards, info = split_info(returned)
    rewards = torch.as_tensor(rewards, dtype=torch.float32).detach().cpu().tolist()
    named = {str(key): value.tolist() if hasattr(value, "tolist") else value for key, value in info.items()}
    return {"rewards": rewards, "info": {k: v for k, v in named.items() if _is_json(v)}}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def serve(reward_function: RewardFunction, port: int, host: str = "127.0.0.1") -> None:
    """Answer `http_reward` until Ctrl-C; arguments as in `make_server`."""
    with make_server(reward_function, port, host) as server:
        print(f"scoring at http://{host}:{server.server_port}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("the service has ended")
