"""The lesson's run by TRL 1.12's own PPOTrainer: `python -m benchmarks.text.trl`, see benchmarks/README.md.

As many iterations, texts, inner epochs and minibatches, β = 1, λ = 0.95 and a constant learning rate of 3e-4;
five seeds. What TRL does otherwise stays: one learning rate for both models, gradients unclipped, the score
behind the last token. The answers to test queries at the end go to trl.csv; finished runs are skipped.
"""

from pathlib import Path

from benchmarks.common import Row, parse, product, run_all
from benchmarks.text.sweep import COLUMNS, ITERATIONS, SEEDS, TEST_QUERIES, look
from ddpo_lessons.lessons.text_trl import train_with_trl
from ddpo_lessons.text import grammar
from ddpo_lessons.text.language_models import load_text_models
from ddpo_lessons.text.text_trainer import TextPPOConfig


def train(run: Row) -> list[Row]:
    config = TextPPOConfig(seed=run["seed"])
    models, _ = train_with_trl(config, ITERATIONS, grammar.queries(2000, "train", seed=1))
    test, reference = grammar.queries(TEST_QUERIES, "test", seed=2), load_text_models()
    return [{"iteration": ITERATIONS, **look(models.policy.eval(), reference, reference.policy, test)}]


if __name__ == "__main__":
    path = Path(__file__).with_suffix(".csv")
    run_all(train, product(variant=("TRL",), seed=SEEDS), COLUMNS, path, parse(__doc__).processes)
