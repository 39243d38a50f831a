"""Reward against KL for several prices of a nat: `python -m benchmarks.text.kl_sweep`, some minutes.

The same run with each coefficient, from the same seed. Now and then the policy answers test queries; score,
parse rate and KL go to kl_sweep.csv.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from ddpo_lessons.text import world
from ddpo_lessons.text.models import load_text_models
from ddpo_lessons.text.trainer import TextPPOConfig, TextPPOTrainer

RESULT = Path(__file__).with_suffix(".csv")
COEFFICIENTS = (1.0, 0.0, 0.3, 3.0)
ITERATIONS, EVERY, TEST_QUERIES = 40, 10, 200


def run(kl_coef: float, iterations: int) -> list[dict[str, Any]]:
    models = load_text_models()
    config = TextPPOConfig(kl_coef=kl_coef)
    queries = world.queries(2000, "train", seed=1)
    trainer = TextPPOTrainer(config, models.policy, models.value, models.tokenizer, models.reward, queries)
    test, rows = world.queries(TEST_QUERIES, "test", seed=2), []
    for iteration in range(iterations + 1):
        if iteration % EVERY == 0:
            measured, texts = trainer.evaluate(test)
            kl = trainer.history[-1]["kl"] if trainer.history else 0.0
            rows.append({"kl_coef": kl_coef, "iteration": iteration, "kl": kl, **measured})
            print({name: round(value, 3) for name, value in rows[-1].items()}, texts[0], flush=True)
        if iteration < iterations:
            trainer.step()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rows = [row for coefficient in COEFFICIENTS for row in run(coefficient, arguments.iterations)]
    with arguments.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: round(value, 4) for name, value in row.items()} for row in rows)


if __name__ == "__main__":
    main()
