"""A limit of time for rewards that may hang, and rewards that another process computes, over HTTP.

A reward model that does not fit beside the policy, or needs other packages, runs as a service:
docs/howto/reward-service.md has its twenty lines. DDPO's authors score with LLaVA in this way (ddpo-pytorch,
rewards.py), but they exchange pickles, and whoever can send a pickle runs code in the process that reads it.
Here a request is a file of numpy's arrays, and the answer is JSON: neither can hold code.
"""

import functools
import io
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from urllib3 import PoolManager, Retry
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from ddpo_lessons.rewards.base import RewardFunction


# ---------------------------------------------------------------------------------- a limit of time
def _check_seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(f"{name}={value!r} must be a positive, finite number of seconds")


def time_limit(reward_function: RewardFunction, seconds: float) -> RewardFunction:
    """Give a reward function a limit of seconds for one call, so that one that hangs raises a TimeoutError.

    It runs in a thread of its own. Python cannot end a thread: one that hangs is left behind until the
    process ends, and keeps what it holds. A ValueError refuses `seconds` that are no positive number.
    """
    _check_seconds("seconds", seconds)
    name = getattr(reward_function, "__name__", type(reward_function).__name__)

    @functools.wraps(reward_function)  # a run is known by its reward's name
    def limited(images: torch.Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
        outcome: list[tuple[Any, BaseException | None]] = []
        # a thread starts with its own settings
        keeps_gradients = torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # -1: none

        def work() -> None:
            try:
                with torch.set_grad_enabled(keeps_gradients), torch.cuda.device(device):
                    outcome.append((reward_function(images, prompts, metadata), None))
            except BaseException as error:  # handed to the caller below
                outcome.append((None, error))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if not outcome:
            raise TimeoutError(
                f"reward_function {name!r} took longer than {seconds:g} s: raise its time_limit, or mend it"
            )
        rewards, error = outcome[0]
        if error is not None:
            raise error
        return rewards

    return limited


# --------------------------------------------------------------------------------------- over HTTP
def pack(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> bytes:
    """Make a request's body, a file of numpy's arrays (.npz) without pickles.

    "images" (B, 3, H, W) float32; for a tensor NAME of the metadata "metadata.NAME" (B, ...); and "json", a
    text that holds "prompts" and what else is in "metadata". Raises TypeError if JSON does not hold the
    metadata, or one sample lacks a tensor of another's shape.
    """
    arrays = {"images": _array(images)}
    rest = [dict(entry) if isinstance(entry, dict) else entry for entry in metadata]
    items = [item for entry in rest if isinstance(entry, dict) for item in entry.items()]
    try:
        for name in dict.fromkeys(name for name, value in items if isinstance(value, torch.Tensor)):
            arrays[f"metadata.{name}"] = np.stack([_array(entry.pop(name)) for entry in rest])
        told = json.dumps({"prompts": list(prompts), "metadata": rest})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TypeError(
            f"metadata cannot be sent to a reward service ({type(error).__name__}: {error}): let the prompt "
            "function return what JSON holds, and tensors of one shape under the same name in every sample"
        ) from error
    body = io.BytesIO()
    np.savez(body, allow_pickle=False, json=np.array(told), **arrays)
    return body.getvalue()


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def http_reward(url: str, timeout: float = 60.0, retries: int = 3, backoff: float = 1.0) -> RewardFunction:
    """Ask a reward service, such as `http://127.0.0.1:8000`, for the rewards of each batch.

    A request that gets no whole answer for `timeout` seconds, or one of status 500 and above, is sent again,
    `retries` times at most: at once, then after 2 `backoff`, 4 `backoff`, ... seconds; one that the service
    refuses (below 500) or answers wrongly is not. Proxies of the environment are not used. A ValueError
    refuses arguments that cannot work.

    The reward raises ConnectionError, naming the url, when the last try has failed, and ValueError when the
    service refuses the batch or answers wrongly. Rewards that are NaN or infinite are passed on: the trainer
    refuses them and names the sample.
    """
    if not _is_web_address(url):
        raise ValueError(f"url={url!r} must be text such as 'http://127.0.0.1:8000'")
    _check_seconds("timeout", timeout)
    if not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries={retries!r} must be a whole number, 0 or more")
    again = Retry(
        retries, backoff_factor=backoff, allowed_methods=None, status_forcelist=range(500, 600),
        raise_on_status=False, respect_retry_after_header=False,
    )  # fmt: skip
    pool = PoolManager()

    def reward(images: torch.Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
        body = pack(images, prompts, metadata)
        try:
            answer = pool.request("POST", url, body=body, timeout=timeout, retries=again)
            failure = f"{answer.status}: {answer.data[:300]!r}" if answer.status >= 500 else ""
        except HTTPError as error:
            failure = str(error)
        if failure:
            raise ConnectionError(
                f"the reward service {url} failed {retries + 1} times, at last with {failure}: see what it "
                "printed, or raise timeout or retries; then continue with resume_from='latest'"
            )
        if answer.status != 200:
            raise ValueError(
                f"the reward service {url} refuses the batch ({answer.status}): {answer.data[:300]!r}"
            )
        return _read_answer(url, answer.data, len(images))

    return reward


def _is_web_address(url: Any) -> bool:
    try:
        parts = parse_url(url)
    except (HTTPError, ValueError, TypeError, AttributeError):  # brackets that do not match, not text
        return False
    return parts.scheme in ("http", "https") and bool(parts.host) and parts.port != 0


def _read_answer(url: str, data: bytes, size: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Read an answer: {"rewards": B numbers, "info": {name: ...}}, the latter where there is any."""
    try:
        answer = json.loads(data)
        rewards, info = torch.tensor(answer["rewards"], dtype=torch.float64), answer.get("info", {})
    except (ValueError, KeyError, TypeError, RuntimeError):
        rewards, info = torch.empty(0), None
    if rewards.shape != (size,) or not isinstance(info, dict):
        raise ValueError(
            f"the reward service {url} answered {data[:200]!r} for {size} images: it must answer JSON with "
            f"'rewards', a list of {size} numbers"
        )
    return rewards.float(), info
