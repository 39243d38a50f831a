"""The demo's task, digits in other colours, for three seeds: `python -m benchmarks.results.recolour`.

Writes recolour.json and images/07-before-after.png, which lesson 07 and the README show.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.common import ROOT, Row, machine, scratch_config, write_json
from ddpo_lessons.app.demo import POLICY, SETTINGS, SHOWN, UNTRAINED_BEST, WATCH_EVERY, Exam, untrained
from ddpo_lessons.app.plotting import plot_strip, save_figure
from ddpo_lessons.data.prompts import edit_requests
from ddpo_lessons.rewards import recolouring
from ddpo_lessons.tiny import load_tiny_sd, world
from ddpo_lessons.trainer import ImageDDPOTrainer

RESULT = Path(__file__).with_suffix(".json")
PICTURE = ROOT / "images" / "07-before-after.png"
SEEDS = (0, 1, 2)
TEST, WATCHED = (500, "test", 0), (100, "validation", 0)  # arguments of world.draw_edits


def train(seed: int) -> tuple[Row, dict[str, torch.Tensor]]:
    """Train a seed; return its verdicts with what it was made with, and the test pictures."""
    started = time.perf_counter()
    pipeline, test, watch = load_tiny_sd(), Exam(world.draw_edits(*TEST)), Exam(world.draw_edits(*WATCHED))
    images = {
        "untrained_best": untrained(pipeline, test.edits, UNTRAINED_BEST),
        "before": test.images(pipeline, POLICY),
    }
    with scratch_config(SETTINGS, seed=seed) as config:
        task = (recolouring(), edit_requests(seed), pipeline)
        trainer = ImageDDPOTrainer(config, *task, noise_strength=POLICY.strength)
        path: list[Row] = [{"epoch": 0, **watch.shares(watch.images(pipeline, POLICY))}]
        for epoch in range(1, config.num_epochs + 1):
            trainer.step(epoch - 1)
            if epoch % WATCH_EVERY == 0:
                path.append({"epoch": epoch, **watch.shares(watch.images(pipeline, POLICY))})
        settings = {name: config.to_dict()[name] for name in SETTINGS}
    images["after"] = test.images(pipeline, POLICY)
    row: Row = {"seed": seed, **{name: test.shares(made) for name, made in images.items()}}
    row["untrained_best"] |= asdict(UNTRAINED_BEST)
    made_with = {"samples": trainer.epochs_done * trainer.plan.total_samples, "settings": settings}
    made_with |= {"torch": torch.__version__, "device": str(trainer.accelerator.device), "path": path}
    row["run"] = {**asdict(POLICY), "seed": seed, "pictures": len(test.edits.prompts), **made_with}
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row, images


def draw(images: dict[str, torch.Tensor]) -> None:
    """Draw the first test pictures: what goes in, the untrained pipeline twice, and after RL."""
    edits = world.draw_edits(*TEST)
    rows = {
        "goes in": edits.pictures.images,
        f"untrained, strength {POLICY.strength}": images["before"],
        "untrained, best setting": images["untrained_best"],
        "after RL": images["after"],
    }
    save_figure(plot_strip(rows, edits.prompts, SHOWN), PICTURE)


def main() -> None:
    """Train the seeds one after the other."""
    rows = []
    for seed in SEEDS:
        row, images = train(seed)
        rows.append(row)
        if seed == SEEDS[0]:
            draw(images)
    write_json(RESULT, {"machine": machine(), "runs": rows})
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
