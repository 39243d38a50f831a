"""Stop a run after Ctrl-C or SIGTERM at its next safe moment, so that nothing is lost."""

import signal
import threading
from typing import Any

from tqdm.auto import tqdm

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the keyboard's, and that of Slurm and of `accelerate launch`


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The run was stopped by a signal of this number."""

    def __init__(self, number: int) -> None:
        self.number = number


class DeferredInterrupt:
    """Set `requested` to the number of the first signal; raise KeyboardInterrupt at the second.

    Python delivers signals to the main thread only, so in another thread this does nothing.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._previous: dict[int, Any] = {}

    def _handle(self, signum: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = signum
        tqdm.write("stopping: this epoch is dropped, then the run is saved; Ctrl-C again stops at once")

    def __enter__(self) -> "DeferredInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
