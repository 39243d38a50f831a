"""The lesson's run by TRL 1.12's own PPOTrainer: `python -m benchmarks.text.trl`, see benchmarks/README.md.

As many iterations, texts, inner epochs and minibatches, β = 1, λ = 0.95 and a constant rate of 3e-4; three
seeds. What TRL does otherwise stays: one rate for both models, gradients unclipped, the score behind the last
token. The answers to test queries at the end go to trl.csv; runs that it holds are skipped.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Row, parse, product, run_all
from benchmarks.text.sweep import COLUMNS, ITERATIONS, SEEDS, TEST_QUERIES, look
from ddpo_lessons.text import grammar
from ddpo_lessons.text.language_models import load_text_models
from ddpo_lessons.text.text_trainer import TextPPOConfig

OURS = TextPPOConfig()
SETTINGS: Row = {
    "total_episodes": ITERATIONS * OURS.batch_size, "per_device_train_batch_size": OURS.batch_size,
    "gradient_accumulation_steps": 1, "num_mini_batches": OURS.batch_size // OURS.minibatch_size,
    "num_ppo_epochs": OURS.inner_epochs, "response_length": OURS.max_new_tokens, "stop_token": "eos",
    "temperature": 1.0, "learning_rate": OURS.learning_rate, "lr_scheduler_type": "constant",
    "kl_coef": OURS.kl_coef, "gamma": OURS.gamma, "lam": OURS.lam, "cliprange": OURS.clip_range,
    "cliprange_value": OURS.value_clip_range, "vf_coef": OURS.value_coef, "num_sample_generations": 0,
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def train(run: Row) -> list[Row]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    models, reference, judge = load_text_models(), load_text_models(), load_text_models()
    queries = grammar.queries(2000, "train", seed=1)
    dataset = Dataset.from_list([{"input_ids": models.tokenizer(query).input_ids} for query in queries])
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(output_dir=folder, use_cpu=True, bf16=False, seed=run["seed"], **SETTINGS)
        trainer = PPOTrainer(
            args=config, processing_class=models.tokenizer, train_dataset=dataset, eval_dataset=dataset,
            model=models.policy, ref_model=reference.policy, reward_model=judge.reward.model,
            value_model=models.reward.model.requires_grad_(True),
        )  # fmt: skip
        assert config.batch_size == OURS.batch_size
        trainer.train()
    test: Any = grammar.queries(TEST_QUERIES, "test", seed=2)
    measured = look(models.policy.eval(), reference, reference.policy, test)
    return [{"iteration": ITERATIONS, **measured}]


if __name__ == "__main__":
    path = Path(__file__).with_suffix(".csv")
    run_all(train, product(variant=("TRL",), seed=SEEDS), COLUMNS, path, parse(__doc__).processes)
