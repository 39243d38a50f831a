"""What each choice of recolour.py is worth: `python -m benchmarks.results.recolour_ablations`.

Every variant changes one thing of its settings and trains on as many samples, 12,800, from the same seed.
Then the judges look at 200 validation pictures; rows go to recolour_ablations.csv, and what it already holds
is not run again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from diffusers import DDIMScheduler

from benchmarks.common import Row, parse, run_all, scratch_config
from benchmarks.results.recolour import POLICY, SETTINGS, Exam
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.app.demo import Img2Img
from ddpo_lessons.rewards import recolouring
from ddpo_lessons.tiny import load_tiny_sd, world
from ddpo_lessons.trainer import ImageDDPOTrainer

COLUMNS = ("variant", "digit", "colours", "both", "second_judge")
SAMPLES, PICTURES = 12_800, 200


@dataclass(frozen=True)
class Variant:
    """What a run changes of recolour.py."""

    variant: str
    policy: Img2Img = POLICY
    config: Row = field(default_factory=dict)  # fields of DDPOConfig
    reward: Row = field(default_factory=dict)  # arguments of `recolouring`
    last_step: bool = False  # give the last step its noise, and train it


VARIANTS = (
    Variant("nothing changed"),
    Variant("without guidance", replace(POLICY, guidance=1.0)),
    Variant("10 steps instead of 5", replace(POLICY, steps=10)),
    Variant("less noise: 2 of 8 steps", Img2Img(0.25, POLICY.guidance, 8)),
    Variant("reward without shape", reward={"shape_weight": 0.0}),
    Variant("reward with colours counted 3 instead of 10", reward={"colour_weight": 3.0}),
    Variant("no groups", config={"sample_group_size": 1}),
    Variant("attention only", config={"train_lora_target_modules": ("to_k", "to_q", "to_v", "to_out.0")}),
    Variant("last step trained too", last_step=True),
)


def train(variant: Variant) -> list[Row]:
    """Train a variant and return its row."""
    policy, pipeline, exam = variant.policy, load_tiny_sd(), Exam(world.draw_edits(PICTURES, "validation", 0))
    ends_clean = not variant.last_step
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, set_alpha_to_one=ends_clean)
    own = {"sample_guidance_scale": policy.guidance, "sample_num_steps": policy.steps}
    with scratch_config(SETTINGS, variant.config, own) as config:
        task = (recolouring(**variant.reward), edit_requests(seed=0), pipeline)
        trainer = ImageDDPOTrainer(config, *task, noise_strength=policy.strength)
        for epoch in range(SAMPLES // trainer.plan.total_samples):
            trainer.step(epoch)
    return [{"variant": variant.variant, **exam.shares(exam.images(pipeline, policy))}]


if __name__ == "__main__":
    run_all(train, VARIANTS, COLUMNS, 1, Path(__file__).with_suffix(".csv"), parse(__doc__).processes)
