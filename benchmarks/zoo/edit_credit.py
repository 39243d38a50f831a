"""How much of an edit's reward each denoising step explains: `python -m benchmarks.zoo.edit_credit`.

Before training, groups of eight edits of the demo's task part at one step alone, and at all four that draw
noise. A draw has 24 validation images of its own; its rows have the reward's variance within groups, in the
mean over the images. Rows go to edit_credit.csv; finished draws are skipped.
"""

from pathlib import Path

import torch

from benchmarks.common import Row, parse, product, run_all
from ddpo_lessons.lessons.demo import BACKGROUND_WEIGHT, POLICY, VALIDATION
from ddpo_lessons.models import family_of
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.rollout import from_images, sample_trajectory
from ddpo_lessons.worlds import animals, load_tiny_zoo

RESULT = Path(__file__).with_suffix(".csv")
DRAWS, IMAGES, GROUP = 10, 24, 8
PARTS = {"all four": (0, 4), "1": (0, 1), "2": (1, 2), "3": (2, 3), "4": (3, 4)}


@torch.no_grad()
def measure(run: Row) -> list[Row]:
    """Edit the images of a draw, and return a row for each way to part."""
    family, edits = family_of(load_tiny_zoo()), animals.draw_edits(DRAWS * IMAGES, VALIDATION)
    own = [n for n in range(run["draw"] * IMAGES, (run["draw"] + 1) * IMAGES) for _ in range(GROUP)]
    prompts, facts = [edits.prompts[n] for n in own], [edits.metadata[n] for n in own]
    score = animal_alignment(background_weight=BACKGROUND_WEIGHT)
    plain = family.schedule(POLICY.steps, POLICY.strength)
    conditioning = family.condition(prompts, "", POLICY.guidance)
    rows = []
    for name, steps in PARTS.items():
        generator = torch.Generator().manual_seed(run["draw"])  # the same noise for every way to part
        latents = from_images(family, edits.images[own], plain, None, generator, GROUP)
        schedule = plain.with_actions(*steps)
        made = sample_trajectory(
            family, latents, schedule, conditioning, POLICY.guidance, generator, group_size=GROUP
        )
        rewards, _ = score(family.decode(made.final_latents), prompts, facts)
        rows.append({"step": name, "variance": rewards.view(-1, GROUP).var(dim=1).mean().item()})
    return rows


if __name__ == "__main__":
    processes = parse(__doc__).processes
    run_all(measure, product(draw=range(DRAWS)), ("draw", "step", "variance"), RESULT, processes)
