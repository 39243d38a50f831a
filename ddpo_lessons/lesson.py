"""What every lesson starts with, its slider, and what its exercises answer with."""

import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

SEED = 0  # of every random number in the lessons


def set_up() -> None:
    """Seed torch, silence what libraries say while they load models, and give figures the course's style."""
    import diffusers
    import matplotlib.pyplot as plt
    import transformers

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # silences a warning when processes start
    plt.style.use("ddpo_lessons.lesson")
    plt.switch_backend(plt.get_backend())  # so that a notebook's first figure is shown whoever makes it
    torch.manual_seed(SEED)


def seeded(number: int = 0) -> torch.Generator:
    """Make a random generator of its own for one purpose, whose seed is `SEED` + number."""
    return torch.Generator().manual_seed(SEED + number)


def slider(figure: Any, draw: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Make a slider over what `draw(value)` does to a figure; it needs neither a kernel nor a network.

    Matplotlib's page loads icons for buttons that play the frames. The buttons go, the frames stay.
    """
    import matplotlib.pyplot as plt
    from IPython.display import HTML
    from matplotlib.animation import FuncAnimation

    page = FuncAnimation(figure, draw, values).to_jshtml(default_mode="once")
    plt.close(figure)
    for part in ("<link.*?>", '<div class="anim-buttons">.*?</div>', "<form.*?</form>"):
        page = re.sub(part, "", page, flags=re.DOTALL)
    return HTML(page)


def check_mine(check: Callable[[Any], None], answer: Any) -> None:
    """Print "correct", or "not yet" and why: the stub is untouched, or which assertion of the check failed.

    Any other exception is the answer's own, and is raised as it is.

    Args:
        check: takes the answer and raises AssertionError where it is wrong.
        answer: the reader's function.
    """
    try:
        check(answer)
    except NotImplementedError as error:
        print(f"not yet: {error}")
    except AssertionError as error:
        failed = traceback.extract_tb(error.__traceback__)[-1].line
        print(f"not yet: {error or failed}")
    else:
        print("correct")
