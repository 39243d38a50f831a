"""imageddpo on recolor.py's task, an epoch at a time; started by `time_to_result`.

Runs in the other trainers' environment: the task comes from this package, the training does not. LoRA is
imageddpo's, of rank 4 in the attention layers, which no setting changes.
"""

import itertools
import sys

import torch
from safetensors.torch import save_file

from benchmarks.common import Row, seconds_of
from benchmarks.results.recolor import POLICY, SETTINGS
from benchmarks.speed.peer_environment import serve
from benchmarks.speed.peer_epochs import peer_trainer, trainable
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.rewards import recoloring

# The task, and the settings without which imageddpo does not run.
NEEDED: Row = {
    "sample_num_steps": POLICY.steps,
    # At its default of 1 the trainer reads steps that img2img has not taken: IndexError.
    "train_timestep_fraction": POLICY.strength,
    "mixed_precision": "no",  # the default, fp16, needs a GPU
    # Saving, by default after every epoch, fails with the default project_kwargs; here nobody saves.
    "save_freq": 10**9,
}
SHARED = ("sample_guidance_scale", "train_batch_size", "train_learning_rate", "train_clip_range")
# Beside NEEDED. And the pipeline's folder has set_alpha_to_one=False: a step without noise trains it on NaN.
VARIANTS: dict[str, Row] = {
    "imageddpo, gaussian-glasses": {  # rl/rl_trainer.py of the project that the README names as an example
        # Guidance: TRL's 5, as in its code; the 0 of its page is for empty prompts, and here they matter.
        "sample_batch_size": 4,
        "sample_num_batches_per_epoch": 64,
        "train_batch_size": 4,
        "train_gradient_accumulation_steps": 64,
        "train_learning_rate": 1e-4,
    },
    "imageddpo, recolor.py's settings": {
        **{name: SETTINGS[name] for name in SHARED},
        # As many samples in one batch, for one below train_batch_size is refused.
        "sample_batch_size": SETTINGS["sample_batch_size"] * SETTINGS["sample_num_batches_per_epoch"],
        "sample_num_batches_per_epoch": 1,
    },
}


def main() -> None:
    """Serve epochs of the variant, seed and folder that the command line names."""
    torch.set_num_threads(1)
    variant, seed, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    settings, task = {**NEEDED, **VARIANTS[variant], "seed": seed}, (recoloring(), edit_requests(seed))
    trainer = peer_trainer("imageddpo", settings, folder, *task, noise_strength=POLICY.strength)
    trainer.sd_pipeline.set_progress_bar_config(disable=True)
    samples = trainer.config.sample_batch_size * trainer.config.sample_num_batches_per_epoch
    numbers = itertools.count()

    def epoch(path: str) -> Row:
        """Do an epoch, and then write the adapter to the path."""
        number = next(numbers)
        seconds = seconds_of(lambda: trainer.step(number, number))
        save_file({name: p.detach().contiguous() for name, p in trainable(trainer).items()}, path)
        return {"seconds": seconds, "samples": samples}

    serve(epoch)


if __name__ == "__main__":
    main()
