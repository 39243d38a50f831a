"""The model hub: whether it answers, which its client finds out in minutes and `hub_reachable` in seconds."""

import ssl
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError


def hub_reachable(timeout: float = 3.0) -> bool:
    """Tell whether the model hub answers in so many seconds, at `HF_ENDPOINT`, unless `HF_HUB_OFFLINE`.

    An error is an answer too: its client may know a certificate or an address that this does not.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=timeout):
            return True
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):  # no network; an address that is none
        return False


def only_here(model: str | Path) -> bool:
    """Tell whether a model can come from this machine alone: a folder or file, or the hub does not answer."""
    return Path(model).exists() or not hub_reachable()


def explain(model: str | Path, error: Exception, remedy: str) -> RuntimeError:
    """Return the error of a model that cannot be had: which, why, and what to do."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError):
            reason = (
                f"no folder of this name, not whole in the hub's cache, no answer of {constants.ENDPOINT}"
            )
        cause = cause.__cause__ or cause.__context__
    return RuntimeError(f"the model {str(model)!r} could not be loaded ({reason}). {remedy}")
