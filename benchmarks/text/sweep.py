"""The lesson's run with one setting changed: `python -m benchmarks.text.sweep`, see benchmarks/README.md.

β is 1, 0.3 or 0; λ is 0.95, 0 or 1; or every token of a text gets the same advantage, as in DDPO. Each with
three seeds. What reward model, grammar and reference say of answers to test queries goes to sweep.csv,
appended run by run; runs that it holds are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, run_all
from ddpo_lessons.advantages import normalize
from ddpo_lessons.text import world
from ddpo_lessons.text.models import generate, load_text_models, read
from ddpo_lessons.text.ppo import action_mask, kl_penalty
from ddpo_lessons.text.trainer import Rollout, TextPPOConfig, TextPPOTrainer, measure

VARIANTS: dict[str, Row] = {
    "plain": {},
    "beta 0": {"kl_coef": 0.0},
    "lambda 0": {"lam": 0.0},
    "lambda 1": {"lam": 1.0},
    "same for every token": {},
    "beta 0.3": {"kl_coef": 0.3},
}
SEEDS = [0, 1, 2]
ITERATIONS, EVERY, TEST_QUERIES = 30, 6, 128
COLUMNS = ("variant", "seed", "iteration", "kl", "score", "parses", "positive", "distinct")


@dataclass(frozen=True)
class Run:
    variant: str
    seed: int


class SameForEveryToken(TextPPOTrainer):
    """Every token's advantage is its text's total reward, normalised over the batch, as in DDPO."""

    def rollout(self, queries: Sequence[str]) -> Rollout:
        rollout = super().rollout(queries)
        mask = rollout.targets.mask
        advantages = normalize(rollout.rewards.sum(1))[:, None].expand(mask.shape).masked_fill(~mask, 0)
        return replace(rollout, targets=replace(rollout.targets, advantages=advantages))


@torch.no_grad()
def look(policy: Any, models: Any, reference: Any, queries: Sequence[str]) -> dict[str, float]:
    """Measure answers to test queries; `kl` is exact at each place and summed over a text, in nats."""
    batch = models.tokenizer(list(queries), padding=True, return_tensors="pt")
    generator = torch.Generator().manual_seed(0)
    ids, attention = generate(policy, batch.input_ids, batch.attention_mask, 20, generator)
    mask = action_mask(attention, batch.attention_mask.sum(1))  # (B, L - 1)
    pair = (read(model, ids, attention)[:, :-1].log_softmax(-1) for model in (policy, reference))
    kl = (kl_penalty(*pair, "full") * mask).sum(1).mean().item()
    texts = models.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return {"kl": kl, **measure(texts, models.reward(texts))}


def lesson_trainer(kind: Any = TextPPOTrainer, **settings: Any) -> tuple[Any, TextPPOTrainer]:
    """Return the lesson's models, and a trainer of them."""
    models, queries = load_text_models(), world.queries(2000, "train", seed=1)
    parts = (models.policy, models.value, models.tokenizer, models.reward)
    return models, kind(TextPPOConfig(**settings), *parts, queries)


def train(run: Run) -> list[Row]:
    kind = SameForEveryToken if run.variant == "same for every token" else TextPPOTrainer
    models, trainer = lesson_trainer(kind, seed=run.seed, **VARIANTS[run.variant])
    test, rows = world.queries(TEST_QUERIES, "test", seed=2), []
    for iteration in range(ITERATIONS + 1):
        if iteration % EVERY == 0:
            measured = look(models.policy, models, trainer.reference, test)
            rows.append({**vars(run), "iteration": iteration, **measured})
        if iteration < ITERATIONS:
            trainer.step()
    return rows


def main() -> None:
    runs = [Run(variant, seed) for seed in SEEDS for variant in VARIANTS]
    run_all(train, runs, COLUMNS, 2, Path(__file__).with_suffix(".csv"), parse(__doc__).processes)


if __name__ == "__main__":
    main()
