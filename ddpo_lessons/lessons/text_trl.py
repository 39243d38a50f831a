"""Compare text PPO with TRL (lesson 05): TRL's trainer on our models, and ours on the texts of TRL."""

import contextlib
import functools
import io
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ddpo_lessons.text.language_models import TextModels, ValueModel, load_text_models
from ddpo_lessons.text.text_trainer import TextPPOConfig, TextPPOTrainer


def trl_settings(config: TextPPOConfig, iterations: int) -> dict[str, Any]:
    """Return the settings of TRL's `PPOConfig` that are equivalent to our config."""
    return {
        "total_episodes": iterations * config.batch_size,
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": config.batch_size // config.minibatch_size,
        "num_ppo_epochs": config.inner_epochs,
        "response_length": config.max_new_tokens,
        "stop_token": "eos",
        "temperature": 1.0,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "constant",
        "kl_coef": config.kl_coef,
        "gamma": config.gamma,
        "lam": config.lam,
        "cliprange": config.clip_range,
        "cliprange_value": config.value_clip_range,
        "vf_coef": config.value_coef,
        "seed": config.seed,
    }


def train_with_trl(
    config: TextPPOConfig, iterations: int, queries: Sequence[str]
) -> tuple[TextModels, list[dict[str, Any]]]:
    """Train the shipped models with TRL 1.12's `PPOTrainer`; return them and a record of each iteration.

    A record has TRL's metrics and the sampled texts: "input_ids" and "attention_mask" (B, L), and
    "query_lengths" (B,). This needs the package `trl`.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import DataCollatorWithPadding
    from transformers.trainer_callback import PrinterCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    models, reference, judge = load_text_models(), load_text_models(), load_text_models()
    dataset = Dataset.from_list([{"input_ids": models.tokenizer(query).input_ids} for query in queries])
    texts, lengths, pad = [], [], DataCollatorWithPadding(models.tokenizer)

    def collate(rows: Any) -> Any:
        batch = pad(rows)
        lengths.append(batch.attention_mask.sum(1))
        return batch

    def record(module: Any, args: Any, kwargs: Any) -> None:
        texts.append({name: kwargs[name].long() for name in ("input_ids", "attention_mask")})

    judge.reward.model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        settings = PPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            num_sample_generations=0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **trl_settings(config, iterations),
        )
        trainer = PPOTrainer(
            args=settings,
            processing_class=models.tokenizer,
            train_dataset=dataset,
            model=models.policy,
            ref_model=reference.policy,
            reward_model=judge.reward.model,
            value_model=models.reward.model.requires_grad_(True),
            data_collator=collate,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = trainer.state.log_history[:iterations]
    return models, [
        {"query_lengths": length, **text, **log}
        for length, text, log in zip(lengths, texts, logs, strict=False)
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress TRL's output and its deprecation warnings."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def train_on_its_texts(config: TextPPOConfig, records: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Train the shipped models with `TextPPOTrainer` on TRL's texts; return its metrics by TRL's names.

    As in TRL, both models have one learning rate, gradients are not clipped, and the reward is the score at
    the last token, which may be end-of-text.
    """
    models = load_text_models()
    score_of, found = ValueModel.from_classifier(models.reward.model), []
    same = replace(config, value_learning_rate=config.learning_rate, max_grad_norm=float("inf"))
    trainer = TextPPOTrainer(same, models.policy, models.value, models.tokenizer, models.reward, [])
    for record in records:
        ids, attention = record["input_ids"], record["attention_mask"]
        with torch.no_grad():
            scores = score_of(ids, attention)  # (B, L)
        trainer.reward_function = functools.partial(_at_the_last_token, scores, attention)
        rollout = trainer.judge(ids, attention, record["query_lengths"])
        stats, mask = trainer.update(rollout), rollout.targets.mask
        found.append(
            {
                "objective/scores": rollout.scores.mean().item(),
                "objective/kl": rollout.kl.sum(1).mean().item(),
                "objective/entropy": -(rollout.targets.log_probs * mask).sum(1).mean().item(),
                "loss/policy_avg": stats["loss/policy"],
                "loss/value_avg": stats["loss/value"],
                "policy/clipfrac_avg": stats["policy/clip_fraction"],
                "val/clipfrac_avg": stats["value/clip_fraction"],
            }
        )
    return found


def _at_the_last_token(scores: torch.Tensor, attention: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
    """Select the score (B,) of each text at its last token from the scores (B, L) at all tokens."""
    last = attention.shape[1] - 1 - attention.flip(1).argmax(1)  # (B,)
    return scores.gather(1, last[:, None])[:, 0]
