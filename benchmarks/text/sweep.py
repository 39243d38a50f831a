"""The lesson's run with one setting changed: `python -m benchmarks.text.sweep`, see benchmarks/README.md.

β is 1, 0.3 or 0; λ is 0.95, 0 or 1; without a value, every token of a text gets the same advantage, as in
DDPO, or the reward-to-go; the value model starts as a copy of the policy's trunk, or shares
that trunk, with two value coefficients. Five seeds each. The measurements
by reward model, grammar and reference on answers to test queries go to sweep.csv, appended run by run;
finished runs are skipped.

So far it contains seeds 3 to 7 of every β and of every value model, and three or four seeds of the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import Row, parse, product, run_all
from ddpo_lessons.advantages import masked_whiten, normalize
from ddpo_lessons.text import grammar
from ddpo_lessons.text.language_models import SharedTrunk, ValueModel, generate, load_text_models, read
from ddpo_lessons.text.text_ppo import action_mask
from ddpo_lessons.text.text_trainer import Rollout, TextPPOConfig, TextPPOTrainer, measure

SEEDS = [3, 4, 5, 6, 7]
ITERATIONS, EVERY, TEST_QUERIES = 30, 6, 128
COLUMNS = ("variant", "seed", "iteration", "kl", "score", "parses", "positive", "distinct")


class SameForEveryToken(TextPPOTrainer):
    """Every token's advantage is its text's total reward, normalized over the batch, as in DDPO."""

    def weigh(self, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return advantages (B, L - 1)."""
        return normalize(rewards.sum(1))[:, None].expand(mask.shape).masked_fill(~mask, 0)

    def rollout(self, queries: Sequence[str]) -> Rollout:
        rollout = super().rollout(queries)
        advantages = self.weigh(rollout.rewards, rollout.targets.mask)
        return replace(rollout, targets=replace(rollout.targets, advantages=advantages))


class RewardToGo(SameForEveryToken):
    """A token's advantage is its reward-to-go, whitened over the batch's tokens."""

    def weigh(self, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return masked_whiten(rewards.flip(1).cumsum(1).flip(1), mask)


@dataclass(frozen=True)
class Variant:
    settings: Row = field(default_factory=dict)
    trainer: type[TextPPOTrainer] = TextPPOTrainer
    value: Callable[[Any], nn.Module] | None = None  # of the policy; else a copy of the reward model


VARIANTS = {
    "plain": Variant(), "beta 0": Variant({"kl_coef": 0.0}), "lambda 0": Variant({"lam": 0.0}),
    "lambda 1": Variant({"lam": 1.0}), "same for every token": Variant(trainer=SameForEveryToken),
    "beta 0.3": Variant({"kl_coef": 0.3}), "reward to go": Variant(trainer=RewardToGo),
    "value from the policy": Variant(value=ValueModel.from_policy),
    "shared trunk": Variant(value=SharedTrunk),
    "shared trunk, value_coef 0.01": Variant({"value_coef": 0.01}, value=SharedTrunk),
}  # fmt: skip


@torch.no_grad()
def look(policy: Any, models: Any, reference: Any, queries: Sequence[str]) -> dict[str, float]:
    """Measure answers to test queries; `kl` is exact at each place and summed over a text, in nats."""
    batch = models.tokenizer(list(queries), padding=True, return_tensors="pt")
    generator = torch.Generator().manual_seed(0)
    ids, attention = generate(policy, batch.input_ids, batch.attention_mask, 20, generator)
    mask = action_mask(attention, batch.attention_mask.sum(1))  # (B, L - 1)
    new, old = (read(model, ids, attention)[:, :-1].log_softmax(-1) for model in (policy, reference))
    kl = ((new.exp() * (new - old)).sum(-1) * mask).sum(1).mean().item()
    texts = models.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return {"kl": kl, **measure(texts, models.reward(texts))}


def lesson_trainer(variant: Variant = VARIANTS["plain"], **settings: Any) -> tuple[Any, TextPPOTrainer]:
    models, queries = load_text_models(), grammar.queries(2000, "train", seed=1)
    value: Any = variant.value(models.policy) if variant.value else models.value
    config = TextPPOConfig(**variant.settings, **settings)
    return models, variant.trainer(config, models.policy, value, models.tokenizer, models.reward, queries)


def train(run: Row) -> list[Row]:
    models, trainer = lesson_trainer(VARIANTS[run["variant"]], seed=run["seed"])
    test, rows = grammar.queries(TEST_QUERIES, "test", seed=2), []
    for iteration in range(ITERATIONS + 1):
        if iteration % EVERY == 0:
            measured = look(models.policy, models, trainer.reference, test)
            rows.append({"iteration": iteration, **measured})
        if iteration < ITERATIONS:
            trainer.step()
    return rows


if __name__ == "__main__":
    path = Path(__file__).with_suffix(".csv")
    run_all(train, product(seed=SEEDS, variant=VARIANTS), COLUMNS, path, parse(__doc__).processes)
