"""What every lesson starts with, its slider, and what its exercises answer with."""

import functools
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

SEED = 0  # of every random number in the lessons


def set_up(stay_on_cpu: bool = True) -> None:
    """Seed torch, stay on the CPU, silence libraries that load models, and set the style of figures.

    A RuntimeError says that this kernel already computes elsewhere. Lesson 13 uses a GPU if there is one.
    """
    import diffusers
    import matplotlib.pyplot as plt
    import transformers

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # silences a warning when processes start
    plt.style.use("ddpo_lessons.lessons.lesson")
    plt.switch_backend(plt.get_backend())  # so that a notebook's first figure is shown whoever makes it
    torch.manual_seed(SEED)
    if stay_on_cpu:
        _stay_on_cpu()


def has_gpu() -> bool:
    """Tell whether lesson 13 runs at full size: on a machine with CUDA."""
    return torch.cuda.is_available()


def _stay_on_cpu() -> None:
    """Let accelerate give trainers the CPU, also on a machine with a GPU, so that results are those printed.

    accelerate chooses once for a process. Commands that a cell starts read the variable.
    """
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_CPU"] = "true"
    device = PartialState(cpu=True).device  # made here, because it does not read the variable itself
    if device.type != "cpu":
        raise RuntimeError(
            f"this lesson computes on the CPU, but accelerate already uses {device} in this kernel: restart "
            "the kernel without ACCELERATE_TORCH_DEVICE, and run this cell first"
        )


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


def check_mine(check: Callable[[Any], None], answer: Callable[..., Any]) -> None:
    """Print "correct", or "not yet" and why the check refuses the reader's function: see `why_not`."""
    reason = why_not(check, answer)
    print(f"not yet: {reason}" if reason else "correct")


def why_not(check: Callable[[Any], None], answer: Callable[..., Any]) -> str:
    """Say why a check refuses an answer; "" if it accepts it.

    The stub is untouched; the answer changes its arguments, or returns None; or an assertion of the check
    failed. None may be right, so it is blamed only where it breaks the check or where nothing else came back.
    Any other exception is the answer's own, and is raised as it is.
    """
    nothing: list[bool] = []  # of each call whether None came back

    @functools.wraps(answer)
    def watched(*arguments: Any, **named: Any) -> Any:
        nothing.append(False)  # stays if the answer raises
        given = [*arguments, *named.values()]
        before = _contents(given)
        result = answer(*arguments, **named)
        assert _contents(given) == before, "your function changes its arguments: work on copies"
        nothing[-1] = result is None
        return result

    try:
        check(watched)
    except NotImplementedError as error:
        return str(error) or "your turn"
    except Exception as error:
        refused = isinstance(error, AssertionError)
        if nothing and (all(nothing) if refused else nothing[-1]):
            return "your function returned None: is there a `return`?"
        if not refused:
            raise
        return str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    return ""


def _contents(value: Any) -> Any:
    """What is another after a tensor, list or dict was changed in place; of anything else nothing."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, dict):
        return [(key, id(item), _contents(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(id(item), _contents(item)) for item in value]
    return None
