"""TRL 1.12's PPOTrainer and ours on one task: `python -m benchmarks.text.trl_ppo`, some minutes on two cores.

Same models, queries and settings; held-out measurements of both go to trl_ppo.csv, with the CPU
seconds of training on one thread, measuring left out. What differs: TRL has one learning rate for policy and
value model and does not clip gradients.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_rows
from ddpo_lessons.text import world
from ddpo_lessons.text.models import load_text_models
from ddpo_lessons.text.trainer import TextPPOConfig, TextPPOTrainer, answer, measure

ITERATIONS, EVERY, TEST_QUERIES = 40, 10, 200
CONFIG = TextPPOConfig(kl_coef=1.0)


class Watch:
    """Measures the policy now and then and stops the clock while it does."""

    def __init__(self, name: str, models: Any) -> None:
        self.name, self.models, self.rows = name, models, []
        self.queries = world.queries(TEST_QUERIES, "test", seed=2)
        self.seconds, self.started = 0.0, time.process_time()

    def look(self, iteration: int, policy: Any) -> None:
        self.seconds += time.process_time() - self.started
        if iteration % EVERY == 0:
            texts = answer(policy, self.models.tokenizer, self.queries, CONFIG.max_new_tokens, seed=0)
            measured = measure(texts, self.models.reward(texts))
            samples = iteration * CONFIG.batch_size
            self.rows.append({"trainer": self.name, "samples": samples, "seconds": self.seconds, **measured})
            print(self.name, iteration, {k: round(v, 3) for k, v in measured.items()}, flush=True)
        self.started = time.process_time()


def run_ours() -> list[dict[str, Any]]:
    models = load_text_models()
    queries = world.queries(2000, "train", seed=1)
    trainer = TextPPOTrainer(CONFIG, models.policy, models.value, models.tokenizer, models.reward, queries)
    watch = Watch("ours", models)
    watch.look(0, models.policy)
    for iteration in range(1, ITERATIONS + 1):
        trainer.step()
        watch.look(iteration, models.policy)
    return watch.rows


def run_trl() -> list[dict[str, Any]]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    models = load_text_models()
    value = copy.deepcopy(models.reward.model).requires_grad_(True)
    watch = Watch("TRL 1.12", models)

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            watch.look(state.global_step, trainer.model.policy)

    with tempfile.TemporaryDirectory() as folder:
        arguments = PPOConfig(
            output_dir=folder,
            per_device_train_batch_size=CONFIG.batch_size,
            num_mini_batches=CONFIG.batch_size // CONFIG.minibatch_size,
            num_ppo_epochs=CONFIG.inner_epochs,
            total_episodes=ITERATIONS * CONFIG.batch_size,
            local_rollout_forward_batch_size=CONFIG.batch_size,
            response_length=CONFIG.max_new_tokens,
            stop_token="eos",
            temperature=1.0,
            learning_rate=CONFIG.learning_rate,
            lr_scheduler_type="constant",
            kl_coef=CONFIG.kl_coef,
            gamma=CONFIG.gamma,
            lam=CONFIG.lam,
            cliprange=CONFIG.clip_range,
            cliprange_value=CONFIG.value_clip_range,
            vf_coef=CONFIG.value_coef,
            num_sample_generations=0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        rows = [{"input_ids": models.tokenizer(q).input_ids} for q in world.queries(2000, "train", seed=1)]
        trainer = PPOTrainer(
            *(arguments, models.tokenizer, models.policy, None, models.reward.model, Dataset.from_list(rows)),
            value,
            eval_dataset=Dataset.from_list(rows[: CONFIG.batch_size]),
            callbacks=[Look()],
        )
        watch.look(0, models.policy)
        trainer.train()
    return watch.rows


def main() -> None:
    torch.set_num_threads(1)
    write_rows(Path(__file__).with_suffix(".csv"), run_trl() + run_ours())


if __name__ == "__main__":
    main()
