"""Lesson 08's faults: what preflight finds of each, and three runs of ten epochs, one of which is broken.

    python -m benchmarks.results.silent_faults

Writes `silent_faults.json` (which checks fail), `silent_runs.csv` (a row per epoch) and `silent_*.png`.
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_rows
from ddpo_lessons import checks
from ddpo_lessons.image import to_pil
from ddpo_lessons.lessons.faults import FAULTS, put_in
from ddpo_lessons.lessons.run_sets import make_trainer
from ddpo_lessons.training.runlog import read_metrics

HERE = Path(__file__).parent
# Settings of healthy runs that may look like faults.
HEALTHY: dict[str, dict[str, Any]] = {
    "healthy": {}, "one step an epoch": {"train_gradient_accumulation_steps": 8},
    "warm-up": {"train_learning_rate_warmup_steps": 8}, "high rate": {"train_learning_rate": 0.01},
}  # fmt: skip
RUNS = {"X": ("empty file", {}), "Y": (None, HEALTHY["one step an epoch"]), "Z": (None, {"seed": 1})}
SHOWN = 6


def failed_checks(fault: str | None, **changes: Any) -> dict[str, bool]:
    """Return for each check of preflight whether it fails."""
    broken = put_in(FAULTS[fault]) if fault else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, broken:
        found = checks.preflight(make_trainer(folder, **changes), plain=False)
    return {finding.check: not finding.passed for finding in found}


def long_run(name: str) -> list[dict[str, Any]]:
    """Train one of the three; write its images before and after training, and from its saved file."""
    fault, changes = RUNS[name]
    broken = put_in(FAULTS[fault]) if fault else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, broken:
        trainer = make_trainer(folder, num_epochs=10, **changes)
        shown = list(trainer.contexts.of(0).values())[:SHOWN]
        rows = [trainer.sampler.draw(shown)]
        trainer.train()
        rows.append(trainer.sampler.draw(shown))
        trainer.save_pretrained(Path(folder, "lora"))
        rows.append(checks.draw_saved(trainer, shown, Path(folder, "lora"))[1])
        strip = torch.cat([torch.cat(list(images), dim=2) for images in rows], dim=1)  # (3, 3 H, SHOWN W)
        to_pil(strip).save(HERE / f"silent_{name}.png")
        steps, epochs = (read_metrics(folder, kind) for kind in ("step", "epoch"))
    rows = []
    for epoch in epochs:
        first, *_, last = 2 * [step for step in steps if step["epoch"] == epoch["epoch"]]
        row = {"run": name, "epoch": epoch["epoch"], "reward": epoch["reward_mean"]}
        row |= {"first_ratio_error": first["max_ratio_error"], "last_ratio_error": last["max_ratio_error"]}
        rows.append(row | {key: last[key] for key in ("clip_fraction", "grad_norm", "loss")})
    return rows


if __name__ == "__main__":
    write_rows(HERE / "silent_runs.csv", [row for name in RUNS for row in long_run(name)])
    found = {name: failed_checks(None, **changes) for name, changes in HEALTHY.items()}
    found |= {name: failed_checks(name) for name in FAULTS}
    (HERE / "silent_faults.json").write_text(json.dumps(found, indent=1) + "\n")
