"""The set-up of the lessons, their slider, and the checks of their exercises."""

import functools
import html
import json
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

SEED = 0  # of every random number in the lessons


def set_up(stay_on_cpu: bool = True) -> None:
    """Seed torch, stay on the CPU, silence the libraries that load models, and set the style of figures.

    Lesson 13 passes `stay_on_cpu=False` if there is a GPU. Raises a RuntimeError if this kernel already uses
    another device.
    """
    import diffusers
    import matplotlib.pyplot as plt
    import transformers

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # silences a warning when processes start
    plt.style.use("ddpo_lessons.lessons.lesson")
    plt.switch_backend(plt.get_backend())  # so that a notebook shows its first figure in any case
    torch.manual_seed(SEED)
    if stay_on_cpu:
        _stay_on_cpu()


def has_gpu() -> bool:
    """Return whether this machine has CUDA, so that lesson 13 runs at full size."""
    return torch.cuda.is_available()


def _stay_on_cpu() -> None:
    """Make accelerate use the CPU even if there is a GPU, so that results equal those in the lessons.

    accelerate chooses a device once per process. The variable is for commands that a cell starts.
    """
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_CPU"] = "true"
    device = PartialState(cpu=True).device  # created here, because it does not read the variable
    if device.type != "cpu":
        raise RuntimeError(
            f"this lesson computes on the CPU, but accelerate already uses {device} in this kernel: restart "
            "the kernel without ACCELERATE_TORCH_DEVICE, and run this cell first"
        )


def seeded(number: int = 0) -> torch.Generator:
    """Make a random generator with the seed `SEED + number`."""
    return torch.Generator().manual_seed(SEED + number)


def slider(figure: Any, draw: Callable[..., Any], values: Sequence[Any], name: str) -> Any:
    """Make a slider over `values`, each with the figure after `draw(value)`.

    The slider has the name on its left and the value on its right. It needs no kernel and no network:
    matplotlib's page would load icons for its play buttons, so the buttons are removed. Where scripts do not
    run, as in JupyterLab before the cell is run, the first figure is shown.
    """
    import matplotlib.pyplot as plt
    from IPython.display import HTML
    from matplotlib.animation import FuncAnimation

    page = FuncAnimation(figure, draw, values).to_jshtml(default_mode="once")
    plt.close(figure)
    for part in ("<link.*?>", '<div class="anim-buttons">.*?</div>', "<form.*?</form>"):
        page = re.sub(part, "", page, flags=re.DOTALL)
    first = re.findall(r'frames\[0\] = "(.*?)"', page, re.DOTALL)[0].replace("\\\n", "")
    page = page.replace("<img ", f'<img src="{first}" ', 1)
    texts = [str(value) for value in values]
    show = html.escape(f"this.nextElementSibling.value = {json.dumps(texts)}[this.value]; ")
    page = page.replace('oninput="', f'oninput="{show}', 1)
    value = f'<output style="display: inline-block; min-width: 3em; text-align: left">{texts[0]}</output>'
    return HTML(re.sub("<input .*?>", rf"<label>{name} \g<0> {value}</label>", page, flags=re.DOTALL))


def check_mine(check: Callable[[Any], None], answer: Callable[..., Any]) -> None:
    """Print "correct", or "not yet" with the reason why the check fails (see `why_not`)."""
    reason = why_not(check, answer)
    print(f"not yet: {reason}" if reason else "correct")


def why_not(check: Callable[[Any], None], answer: Callable[..., Any]) -> str:
    """Return the reason why a check fails for an answer, or "" if it passes.

    Reasons are: the stub is unchanged, the answer changes its arguments or returns None, or an assertion of
    the check fails. None may be a correct result, so it is the reason only if it causes an error in the
    check, or if the answer returned nothing else. Any other exception comes from the answer, and is raised
    as it is.
    """
    nothing: list[bool] = []  # for each call, whether it returned None

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
    """Return a value that differs after a tensor, list or dict is changed in place; None for other types."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, dict):
        return [(key, id(item), _contents(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(id(item), _contents(item)) for item in value]
    return None
