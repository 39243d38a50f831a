"""Fine-tuning on good examples in place of RL: `python -m benchmarks.text.positives`; two minutes.

As many optimizer steps as thirty iterations of the lesson's run, with next-token cross-entropy: on positive
reviews that the grammar writes, or on the policy's own answers that the reward model scores highest. Five
seeds; what the policy then answers to test queries goes to positives.csv.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, write_rows
from benchmarks.text.recipe import next_token_loss
from benchmarks.text.sweep import ITERATIONS, SEEDS, TEST_QUERIES, look
from ddpo_lessons.text import grammar
from ddpo_lessons.text.language_models import load_text_models
from ddpo_lessons.text.text_trainer import TextPPOConfig, answer

CONFIG = TextPPOConfig()
SAMPLES = ITERATIONS * CONFIG.batch_size  # the reward model scores as many texts
STEPS = ITERATIONS * CONFIG.inner_epochs * CONFIG.batch_size // CONFIG.minibatch_size
KEPT = 0.25  # fraction of the policy's own answers


def written(models: Any, seed: int) -> list[str]:
    """Positive reviews that the grammar writes."""
    reviews = grammar.reviews(4 * SAMPLES, "train", 10 + seed)
    return [text for text, kind in reviews if kind == "positive"][:SAMPLES]


def own(models: Any, seed: int) -> list[str]:
    """The best of the policy's own answers."""
    queries = grammar.queries(SAMPLES, "train", 10 + seed)
    texts = answer(models.policy, models.tokenizer, queries, CONFIG.max_new_tokens, seed)
    best = models.reward(texts).argsort(descending=True)[: int(KEPT * SAMPLES)]
    return [texts[row] for row in best.tolist()]


TEXTS = {"written": written, "own": own}


def train(name: str, seed: int) -> Row:
    models, reference = load_text_models(), load_text_models().policy
    texts = TEXTS[name](models, seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(models.policy.parameters(), CONFIG.learning_rate, weight_decay=0.0)
    for _ in range(STEPS):
        drawn = torch.randint(len(texts), (CONFIG.minibatch_size,), generator=generator).tolist()
        loss = next_token_loss(models.policy, models.tokenizer, [texts[row] for row in drawn])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models.policy.parameters(), CONFIG.max_grad_norm)
        optimizer.step()
    measured = look(models.policy, models, reference, grammar.queries(TEST_QUERIES, "test", seed=2))
    row = {"texts": name, "seed": seed, **measured}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [train(name, seed) for seed in SEEDS for name in TEXTS]
    write_rows(Path(__file__).with_suffix(".csv"), rows)
