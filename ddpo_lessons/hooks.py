"""What a run calls after its epochs: several hooks as one, a live figure for notebooks, the best images."""

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
    """Several hooks as one `image_samples_hook`, called in this order.

    A hook with the attribute `in_every_process`, such as `Validation`, is called in every process, all others
    in the main one. A TypeError refuses what cannot be called.

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
    """An `image_samples_hook` for notebooks: `plot_run`'s figure in one place, redrawn while the run goes on.

    It is redrawn after every `every` epochs and after the last one. The figure of a run that was resumed
    also shows its earlier epochs, and stands there at once. As the last of `Hooks` it shows what the others
    record. Raises RuntimeError outside a notebook; ValueError if `every` is below 1.

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
        """Redraw the figure if the epoch is one of those."""
        done = self.trainer.epochs_done
        if done % self.every == 0 or done == self.trainer.config.num_epochs:
            self.draw()

    def draw(self) -> None:
        """Show the figure, in the place of the older one."""
        from IPython.display import Image as Shown
        from IPython.display import display

        image = Shown(_fewer_colours(plot_run(self.trainer.config.run_dir)), format="png")
        if self._place is None:
            self._place = display(image, display_id=True)
        else:
            self._place.update(image)


def _fewer_colours(figure: Any) -> bytes:
    """Draw a figure as PNG with 256 colours, which a saved notebook holds in a third of the bytes."""
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
    """An `image_samples_hook` that keeps the images with the highest rewards of an epoch, one of each group.

    After every `every` epochs and after the last one it writes `images/highest-NNNNNN` with `count` images of
    the main process into the run's folder, for img2img behind their inputs, the highest reward first, and
    rewards and prompts beside it in a JSON file. Raises ValueError if `count` or `every` is below 1.

        trainer.image_samples_hook = highest = Highest(trainer, count=8)
        trainer.train()
        image, captions = highest.read()
    """

    def __init__(self, trainer: Trainer, count: int = 8, every: int = 1) -> None:
        if count < 1 or every < 1:
            raise ValueError(f"Highest keeps {count} images every {every} epochs: give 1 or more of both")
        self.trainer, self.count, self.every = trainer, count, every

    def __call__(self, batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        """Write the images if the epoch is one of those."""
        trainer, done = self.trainer, self.trainer.epochs_done
        if done % self.every and done != trainer.config.num_epochs:
            return
        rewards = torch.cat([batch[3] for batch in batches])  # (N,)
        images = torch.cat([batch[0] for batch in batches])
        own = [trainer.contexts.newest[row] for row in trainer.sampler.share.rows.flatten().tolist()]
        first: dict[int, int] = {}  # of each context, which a group shares, its best sample
        for row in rewards.argsort(descending=True, stable=True).tolist():
            first.setdefault(id(own[row]), row)
        best = list(first.values())[: self.count]
        contexts = [own[row] for row in best]
        tiles, captions = with_captions(contexts, images[best], rewards[best].tolist())
        trainer.write_grid("highest", done, tiles, captions)

    def read(self) -> tuple[Image.Image, list[str]]:
        """Return the newest grid and the captions of its tiles, also of a run that was done before.

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
