"""Leave out what diffusers and transformers print while they load models, unless a user can act on it."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

# The loggers of the messages that `_is_wanted` leaves out.
_LOGGERS = (
    "transformers.modeling_utils",
    "transformers.utils.import_utils",
    "diffusers.models.modeling_utils",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img",
)


def draws_bars() -> bool:
    """Return whether progress bars can be shown, which is on terminals and in notebooks."""
    return sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules


@contextlib.contextmanager
def quiet_loading(bars: bool = False) -> Iterator[None]:
    """Leave out progress bars and known messages of the libraries that load models, in a `with` block.

    With `bars`, which is for models of the hub, progress bars stay if they can be shown. Other messages, such
    as those about missing weights, stay. The settings of the libraries are afterwards as before.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_wanted)
    try:
        with warnings.catch_warnings(), contextlib.nullcontext() if bars and draws_bars() else _no_bars():
            warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks")  # by diffusers' own call
            yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if "LOAD REPORT" in text:  # of weights that the network does not use, or of weights that it lacks
        return any(fault in text for fault in ("MISSING", "MISMATCH", "CONVERSION"))
    return not any(
        noise in text
        for noise in (
            "requires torchvision",  # for image processors, which nothing here uses
            "An error occurred while trying to fetch",  # it is raised, too
            "You have disabled the safety checker",  # again, when parts of a pipeline are replaced
        )
    )


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    from diffusers.utils import logging as of_diffusers
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as of_transformers

    of_hub_are_off = are_progress_bars_disabled()  # transformers switches those of the hub with its own
    on = [library for library in (of_diffusers, of_transformers) if library.is_progress_bar_enabled()]
    for library in on:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in on:
            library.enable_progress_bar()
        if of_hub_are_off:
            disable_progress_bars()
