"""Check within seconds whether the model hub answers, for which its client takes minutes."""

import ssl
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError


def hub_reachable(timeout: float = 3.0) -> bool:
    """Return whether the hub at `HF_ENDPOINT` answers within a time, unless `HF_HUB_OFFLINE` is set.

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
    """Return whether a model can only come from this machine, as a file or because the hub is silent."""
    return Path(model).exists() or not hub_reachable()


def explain(model: str | Path, error: Exception, remedy: str) -> RuntimeError:
    """Return the error for a model that cannot be loaded: its name, the cause, and the remedy."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError):
            reason = (
                f"no folder of this name, not whole in the hub's cache, no answer of {constants.ENDPOINT}"
            )
        cause = cause.__cause__ or cause.__context__
    return RuntimeError(f"the model {str(model)!r} could not be loaded ({reason}). {remedy}")
