"""Reward against KL for several prices of a nat: `python -m benchmarks.text.kl_sweep`, some minutes.

The same run with each coefficient, from the same seed. Now and then the policy answers test queries; score,
parse rate and KL go to kl_sweep.csv.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import write_rows
from ddpo_lessons.text import world
from ddpo_lessons.text.models import load_text_models
from ddpo_lessons.text.trainer import TextPPOConfig, TextPPOTrainer

COEFFICIENTS = (1.0, 0.0, 0.3, 3.0)
ITERATIONS, EVERY, TEST_QUERIES = 40, 10, 200


def run(kl_coef: float) -> list[dict[str, Any]]:
    models = load_text_models()
    config = TextPPOConfig(kl_coef=kl_coef)
    queries = world.queries(2000, "train", seed=1)
    trainer = TextPPOTrainer(config, models.policy, models.value, models.tokenizer, models.reward, queries)
    test, rows = world.queries(TEST_QUERIES, "test", seed=2), []
    for iteration in range(ITERATIONS + 1):
        if iteration % EVERY == 0:
            measured, texts = trainer.evaluate(test)
            kl = trainer.history[-1]["kl"] if trainer.history else 0.0
            rows.append({"kl_coef": kl_coef, "iteration": iteration, "kl": kl, **measured})
            print({name: round(value, 3) for name, value in rows[-1].items()}, texts[0], flush=True)
        if iteration < ITERATIONS:
            trainer.step()
    return rows


if __name__ == "__main__":
    write_rows(Path(__file__).with_suffix(".csv"), [row for c in COEFFICIENTS for row in run(c)])
