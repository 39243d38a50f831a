"""Ctrl-C that loses nothing: the first one asks the loop to stop at its next good moment."""

from __future__ import annotations

import signal
import threading
from typing import Any

from tqdm.auto import tqdm


class DeferredInterrupt:
    """While entered, the first Ctrl-C sets `requested`; the second raises KeyboardInterrupt as usual.

    Python delivers signals to the main thread only, so in another thread this does nothing.
    """

    def __init__(self, message: str) -> None:
        """Remember what to tell the user at the first Ctrl-C."""
        self.message = message
        self.requested = False
        self._previous: Any = None

    def _handle(self, signum: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        tqdm.write(self.message)

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
