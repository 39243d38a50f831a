"""Hooks that a run calls after its epochs: several hooks as one, a live figure, the best images."""

import io
import json
from typing import Any

import torch
from accelerate.state import PartialState
from PIL import Image

from ddpo_lessons.trainer import ImageSamplesHook, Trainer
from ddpo_lessons.training.figure import plot_run
from ddpo_lessons.training.runlog import with_captions


class Hooks:
    """Combine several hooks into one `image_samples_hook`, which calls them in this order.

    A hook with the attribute `in_every_process`, such as `Validation`, is called in every process, and all
    others only in the main process. Raises a TypeError for a hook that cannot be called.

        trainer.image_samples_hook = Hooks(validation, my_hook, LivePlot(trainer))
    """

    in_every_process = True

    def __init__(self, *hooks: ImageSamplesHook) -> None:
        for hook in hooks:
            if not callable(hook):
                raise TypeError(f"Hooks takes functions, not {type(hook).__name__}: leave it out")
        self.hooks = hooks

    def __call__(self, batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        """Call all hooks."""
        is_main = PartialState().is_main_process
        for hook in self.hooks:
            if is_main or hasattr(hook, "in_every_process"):
                hook(batches, global_step, tracker)


class LivePlot:
    """Show the figure of `plot_run` in a notebook and update it during the run, as an `image_samples_hook`.

    The figure is updated after every `every` epochs and after the last one. For a resumed run it appears at
    once and includes the earlier epochs. Put this hook last in `Hooks`, so that it shows the records of the
    others. Raises RuntimeError outside a notebook, and ValueError if `every` is below 1.

        trainer.image_samples_hook = LivePlot(trainer)
        trainer.train()
    """

    def __init__(self, trainer: Trainer, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"LivePlot redraws every {every} epochs: give 1 or more")
        if not _is_notebook():
            raise RuntimeError(
                "LivePlot needs a notebook: leave it out, and look at plot.png in the run's folder, which is "
                "redrawn with every checkpoint"
            )
        self.trainer, self.every = trainer, every
        self._place: Any = None  # of the figure in the notebook
        if trainer.epochs_done:
            self.draw()

    def __call__(self, batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        """Update the figure if it is the turn of this epoch."""
        done = self.trainer.epochs_done
        if done % self.every == 0 or done == self.trainer.config.num_epochs:
            self.draw()

    def draw(self) -> None:
        """Show the figure in place of the previous one."""
        from IPython.display import Image as Shown
        from IPython.display import display

        image = Shown(_fewer_colors(plot_run(self.trainer.config.run_dir)), format="png")
        if self._place is None:
            self._place = display(image, display_id=True)
        else:
            self._place.update(image)


def _fewer_colors(figure: Any) -> bytes:
    """Render a figure as PNG with 256 colors, which takes a third of the bytes in a saved notebook."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(figure._repr_png_())) as image:
        image.convert("RGB").quantize(256).save(file, "png", optimize=True)
    return file.getvalue()


def _is_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return get_ipython() is not None


class Highest:
    """Save the images of an epoch with the highest rewards, one per group, as an `image_samples_hook`.

    After every `every` epochs and after the last one it writes `images/highest-NNNNNN` into the run's folder,
    with `count` images of the main process in the order of their rewards (in img2img each after its input). A
    JSON file beside it has their rewards and prompts. Raises ValueError if `count` or `every` is below 1.

        trainer.image_samples_hook = highest = Highest(trainer, count=8)
        trainer.train()
        image, captions = highest.read()
    """

    def __init__(self, trainer: Trainer, count: int = 8, every: int = 1) -> None:
        if count < 1 or every < 1:
            raise ValueError(f"Highest keeps {count} images every {every} epochs: give 1 or more of both")
        self.trainer, self.count, self.every = trainer, count, every

    def __call__(self, batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        """Write the images if it is the turn of this epoch."""
        trainer, done = self.trainer, self.trainer.epochs_done
        if done % self.every and done != trainer.config.num_epochs:
            return
        rewards = torch.cat([batch[3] for batch in batches])  # (N,)
        images = torch.cat([batch[0] for batch in batches])
        own = [trainer.contexts.newest[row] for row in trainer.sampler.share.rows.flatten().tolist()]
        first: dict[int, int] = {}  # the best sample of each context, which a group shares
        for row in rewards.argsort(descending=True, stable=True).tolist():
            first.setdefault(id(own[row]), row)
        best = list(first.values())[: self.count]
        contexts = [own[row] for row in best]
        tiles, captions = with_captions(contexts, images[best], rewards[best].tolist())
        trainer.write_grid("highest", done, tiles, captions)

    def read(self) -> tuple[Image.Image, list[str]]:
        """Return the newest grid and the captions of its tiles, also of a finished run.

        Raises ValueError if the run's folder has none.
        """
        folder = self.trainer.config.run_dir / "images"
        captions = sorted(folder.glob("highest-*.json"))
        if not captions:
            raise ValueError(f"{folder} holds no images of Highest: let it be the run's hook")
        (grid,) = (path for path in folder.glob(f"{captions[-1].stem}.*") if path.suffix != ".json")
        with Image.open(grid) as image:
            image.load()
        return image, json.loads(captions[-1].read_text(encoding="utf-8"))
