"""What each choice of the demo is worth: `python -m benchmarks.results.demo_ablations`.

Every variant changes one thing of the demo's settings and trains on as many samples, 12,800, from the same
seed. The judges look at 200 validation pictures now and then; rows go to demo_ablations.csv, and
what it already holds is not run again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from diffusers import DDIMScheduler

from benchmarks.common import Row, parse, run_all, scratch_config
from ddpo_lessons.app.demo import POLICY, SETTINGS, Exam, Img2Img
from ddpo_lessons.data.prompts import edit_requests
from ddpo_lessons.rewards import recolouring
from ddpo_lessons.tiny import load_tiny_sd, world
from ddpo_lessons.trainer import ImageDDPOTrainer

COLUMNS = ("variant", "seed", "samples", "reward_mean", "digit", "colours", "both", "second_judge")
SAMPLES, PICTURES = 12_800, 200
READINGS = 5  # of a run, beside the one before it


@dataclass(frozen=True)
class Variant:
    """What a run changes of the demo."""

    variant: str
    policy: Img2Img = POLICY
    config: Row = field(default_factory=dict)  # fields of DDPOConfig
    reward: Row = field(default_factory=dict)  # arguments of `recolouring`
    last_step: bool = False  # give the last step its noise, and train it
    seed: int = 0


VARIANTS = (
    Variant("the demo"),
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
    """Train a variant; return a row for every reading."""
    policy, pipeline, exam = variant.policy, load_tiny_sd(), Exam(world.draw_edits(PICTURES, "validation", 0))
    ends_clean = not variant.last_step
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, set_alpha_to_one=ends_clean)
    own = {"sample_guidance_scale": policy.guidance, "sample_num_steps": policy.steps, "seed": variant.seed}
    rows: list[Row] = []
    with scratch_config(SETTINGS, variant.config, own) as config:
        task = (recolouring(**variant.reward), edit_requests(variant.seed), pipeline)
        trainer = ImageDDPOTrainer(config, *task, noise_strength=policy.strength)
        epochs, position = SAMPLES // trainer.plan.total_samples, {"samples": 0, "reward_mean": ""}
        for epoch in range(epochs + 1):
            if epoch % (epochs // READINGS) == 0:
                shares = exam.shares(exam.images(pipeline, policy))
                rows.append({"variant": variant.variant, "seed": variant.seed, **position, **shares})
            if epoch < epochs:
                metrics = trainer.step(epoch)
                position = {"samples": metrics["samples_seen"], "reward_mean": metrics["reward_mean"]}
    return rows


if __name__ == "__main__":
    arguments = parse(__doc__, variants=[variant.variant for variant in VARIANTS])
    chosen = [variant for variant in VARIANTS if variant.variant in arguments.variants]
    run_all(train, chosen, COLUMNS, 2, Path(__file__).with_suffix(".csv"), arguments.processes)
