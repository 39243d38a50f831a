"""Lesson 05: train a language model with PPO, from queries to optimizer steps.

One iteration samples responses, scores them, and trains on them for a few inner epochs. The four models are
the policy, the value model, the reference (the policy as it was at the start) and the reward
model.
"""

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from ddpo_lessons.advantages import gae, masked_whiten
from ddpo_lessons.batching import minibatches, shuffle_samples
from ddpo_lessons.text import grammar
from ddpo_lessons.text.language_models import ActorCritic, ValueModel, generate, read
from ddpo_lessons.text.text_ppo import (
    KLEstimator,
    Targets,
    action_mask,
    adapt_kl_coef,
    entropy_from_logits,
    kl_estimate,
    masked_mean,
    shape_rewards,
    text_ppo_loss,
    token_log_probs,
)
from ddpo_lessons.training import checkpoint

Reward = Callable[[Sequence[str]], torch.Tensor]


@dataclass(frozen=True)
class TextPPOConfig:
    """Settings of `TextPPOTrainer`; wrong values raise a ValueError that names the field."""

    batch_size: int = 64
    """Texts per iteration."""
    minibatch_size: int = 32
    """Texts per optimizer step."""
    inner_epochs: int = 4
    """Passes over the texts of an iteration."""
    max_new_tokens: int = 20
    """Longest response."""
    min_new_tokens: int | None = None
    """If set, the limit of each response is drawn evenly from this to `max_new_tokens`."""
    learning_rate: float = 3e-4
    """Of AdamW, for the policy."""
    value_learning_rate: float = 1e-3
    """Of AdamW, for the value model."""
    max_grad_norm: float = 1.0
    """The gradients of policy and value model are each scaled down to this norm."""
    kl_coef: float = 1.0
    """KL coefficient: the price of a nat between policy and reference, in units of the score."""
    kl_estimator: KLEstimator = "kl"
    """How the KL of a token is estimated, see `kl_estimate`."""
    kl_target: float | None = None
    """If set, the KL of a text, in nats, that `kl_coef` is adapted toward, see `adapt_kl_coef`."""
    kl_horizon: int = 640
    """The gain of this adaptation is batch_size / kl_horizon: 0.1 for 64 texts per iteration."""
    gamma: float = 1.0
    """Discount; texts are short, so nothing is discounted."""
    lam: float = 0.95
    """λ of GAE."""
    clip_range: float = 0.2
    """Of the ratio of one token's probabilities."""
    value_clip_range: float = 1.0
    """Of the values, in units of the score."""
    value_coef: float = 0.1
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ratio_threshold: float = 10.0
    """A minibatch whose mean ratio is above it is skipped."""
    seed: int = 0
    """Of sampling and shuffling."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "minibatch_size", "inner_epochs", "max_new_tokens", "kl_horizon"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.min_new_tokens is not None and not 1 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must be from 1 to max_new_tokens={self.max_new_tokens}"
            )
        if self.kl_estimator not in get_args(KLEstimator):
            names = ", ".join(get_args(KLEstimator))
            raise ValueError(f"kl_estimator={self.kl_estimator!r} must be one of {names}")
        if self.kl_target is not None and not self.kl_target > 0:
            raise ValueError(f"kl_target={self.kl_target} must be above 0 nats, or None for a fixed kl_coef")
        if self.batch_size % self.minibatch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} does not divide batch_size={self.batch_size}"
            )


@dataclass(frozen=True)
class Rollout:
    """The samples of an iteration: texts, tokens (B, L), and the training targets of their actions."""

    texts: list[str]
    input_ids: torch.Tensor  # (B, L)
    attention_mask: torch.Tensor  # (B, L)
    scores: torch.Tensor  # (B,)
    kl: torch.Tensor  # (B, L - 1), 0 where masked
    rewards: torch.Tensor  # (B, L - 1)
    targets: Targets  # (B, L - 1) each


class TextPPOTrainer:
    """Train a causal language model with PPO, with a reward for whole texts.

    Policy and value model are trained in place; a frozen copy of the policy becomes the reference. The
    policy's tokenizer pads on the left, the reward function scores query and response together, (B,), and
    each iteration draws from the queries.
    """

    def __init__(
        self,
        config: TextPPOConfig,
        policy: Any,
        value: ValueModel,
        tokenizer: Any,
        reward_function: Reward,
        queries: Sequence[str],
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.reward_function, self.queries = reward_function, list(queries)
        self.reference = copy.deepcopy(policy).eval().requires_grad_(False)
        self.device = next(policy.parameters()).device
        # Always eval: dropout would make the policy that trains differ from the one that sampled.
        self.model = ActorCritic(policy, value).to(self.device).eval()
        groups = [
            {"params": list(policy.parameters()), "lr": config.learning_rate},
            {"params": list(value.parameters()), "lr": config.value_learning_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.kl_coef = config.kl_coef
        self.history: list[dict[str, float]] = []

    # ------------------------------------------------------------------------------------ sampling
    @torch.no_grad()
    def rollout(self, queries: Sequence[str]) -> Rollout:
        """Sample responses to queries, and score the texts."""
        batch = self.tokenizer(list(queries), padding=True, return_tensors="pt").to(self.device)
        ids, attention = generate(
            self.model.policy,
            batch.input_ids,
            batch.attention_mask,
            self._limits(len(batch.input_ids)),
            self.generator,
        )
        return self.judge(ids, attention, batch.attention_mask.sum(1))

    def _limits(self, count: int) -> torch.Tensor:
        """Return the maximum number of tokens of each response, (B,)."""
        shortest, longest = self.config.min_new_tokens, self.config.max_new_tokens
        if shortest is None:
            return torch.full((count,), longest)
        return torch.randint(shortest, longest + 1, (count,), generator=self.generator)

    @torch.no_grad()
    def judge(self, ids: torch.Tensor, attention: torch.Tensor, query_lengths: torch.Tensor) -> Rollout:
        """Score texts (B, L) of the policy, and compute rewards, advantages and returns.

        A row's query is its first `query_lengths` (B,) tokens that are attended to.
        """
        config = self.config
        mask = action_mask(attention, query_lengths)  # (B, L - 1)
        log_probs, values, kl = self._judge(ids, attention)
        kl = kl.masked_fill(~mask, 0)
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        scores = self.reward_function(texts).to(self.device)  # (B,)
        rewards = shape_rewards(scores, kl, mask, self.kl_coef)
        advantages, returns = gae(rewards, values, config.gamma, config.lam, mask)
        targets = Targets(log_probs, values, masked_whiten(advantages, mask), returns, mask)
        return Rollout(texts, ids, attention, scores, kl, rewards, targets)

    def _judge(
        self, ids: torch.Tensor, attention: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probs, values and KL (B, L - 1) of texts, some rows at a time."""
        pieces = []
        size = self.config.minibatch_size
        for rows, mask in zip(ids.split(size), attention.split(size), strict=True):
            logits, values = self.model(rows, mask)
            kl = kl_estimate(logits, read(self.reference, rows, mask), rows, self.config.kl_estimator)
            pieces.append((token_log_probs(logits, rows), values[:, :-1], kl))
        log_probs, values, kl = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return log_probs, values, kl

    # ------------------------------------------------------------------------------------ training
    def update(self, rollout: Rollout) -> dict[str, float]:
        """Take the optimizer steps of one iteration; return the mean of each statistic over them.

        Also `policy/first_ratio_error`, of the first minibatch: above rounding, what trains is not what
        sampled.
        """
        records = []
        for _ in range(self.config.inner_epochs):
            rows = {"rows": torch.arange(len(rollout.texts))}
            for minibatch in minibatches(shuffle_samples(rows, self.generator), self.config.minibatch_size):
                records.append(self.train_minibatch(rollout, minibatch["rows"].to(self.device)))
        names = records[0].keys()
        means = {name: sum(record[name] for record in records) / len(records) for name in names}
        return means | {"policy/first_ratio_error": records[0]["policy/ratio_error"]}

    def train_minibatch(self, rollout: Rollout, rows: torch.Tensor) -> dict[str, float]:
        """Take one optimizer step on some rows of a rollout; return its statistics."""
        config = self.config
        ids = rollout.input_ids[rows]  # (M, L)
        logits, values = self.model(ids, rollout.attention_mask[rows])
        with torch.set_grad_enabled(config.entropy_coef != 0):
            entropy = entropy_from_logits(logits[:, :-1])  # (M, L - 1)
        loss, stats = text_ppo_loss(
            token_log_probs(logits, ids),
            values[:, :-1],
            entropy,
            rollout.targets[rows],
            config.clip_range,
            config.value_clip_range,
            config.value_coef,
            config.ratio_threshold,
            config.entropy_coef,
        )
        self.optimizer.zero_grad()
        loss.backward()
        norms = [
            torch.nn.utils.clip_grad_norm_(part.parameters(), config.max_grad_norm).item()
            for part in (self.model.policy, self.model.value)
        ]
        if not stats["policy/skipped"]:  # Adam would move on old momentum alone
            self.optimizer.step()
        return stats | {"policy/grad_norm": norms[0], "value/grad_norm": norms[1]}

    def step(self) -> dict[str, float]:
        """Run one iteration with random queries; return its metrics, which `history` keeps."""
        started = time.perf_counter()
        drawn = torch.randint(len(self.queries), (self.config.batch_size,), generator=self.generator)
        rollout = self.rollout([self.queries[row] for row in drawn.tolist()])
        sampled = time.perf_counter()
        stats = self.update(rollout)
        lengths = rollout.targets.mask.sum(1).float()
        metrics = {
            "iteration": len(self.history) + 1,
            "score": rollout.scores.mean().item(),
            "kl": rollout.kl.sum(1).mean().item(),
            "kl_coef": self.kl_coef,
            "kl_per_token": masked_mean(rollout.kl, rollout.targets.mask).item(),
            "reward": rollout.rewards.sum(1).mean().item(),
            "length": lengths.mean().item(),
            "seconds_sampling": sampled - started,
            "seconds_training": time.perf_counter() - sampled,
            **stats,
        }
        if self.config.kl_target is not None:
            gain = self.config.batch_size / self.config.kl_horizon
            self.kl_coef = adapt_kl_coef(self.kl_coef, metrics["kl"], self.config.kl_target, gain)
        self.history.append(metrics)
        return metrics

    # ----------------------------------------------------------------------------------- checkpoints
    def save(self, run_dir: str | Path) -> Path:
        """Save the complete state of the run to a folder of `run_dir`, and return this folder.

        An OSError says that it cannot be written; checkpoints before it are untouched.
        """
        tensors = {
            "policy": self.model.policy.state_dict(),
            "value": self.model.value.state_dict(),
            "optimizer": checkpoint.optimizer_tensors(self.optimizer, self._names()),
            "generator": {"state": self.generator.get_state()},
        }
        state = {"history": self.history, "kl_coef": self.kl_coef, "identity": self._identity()}
        return checkpoint.write(Path(run_dir), len(self.history), tensors, state)

    def resume(self, folder: str | Path) -> None:
        """Continue from a checkpoint of `save`, bitwise identical to a run without a stop.

        The trainer is built as the first one was, from the policy before any training. A ValueError says what
        differs, or that the folder holds no complete checkpoint.
        """
        tensors, state = checkpoint.read(Path(folder))
        remedy = "build the trainer with the models, queries and settings of its first step"
        checkpoint.check_identity(Path(folder), state["identity"], self._identity(), remedy)
        self.model.policy.load_state_dict(tensors["policy"])
        self.model.value.load_state_dict(tensors["value"])
        checkpoint.load_optimizer_tensors(self.optimizer, self._names(), tensors["optimizer"])
        self.generator.set_state(tensors["generator"]["state"])
        self.history, self.kl_coef = state["history"], state["kl_coef"]

    def _names(self) -> list[str]:
        """Return the names of the parameters, in the optimizer's order."""
        parts = {"policy": self.model.policy, "value": self.model.value}
        return [f"{part}.{name}" for part, model in parts.items() for name, _ in model.named_parameters()]

    def _identity(self) -> dict[str, Any]:
        """Return the settings that must be equal in a checkpoint and the trainer that resumes it."""
        weights = hashlib.blake2b(digest_size=8)
        for tensor in self.reference.state_dict().values():
            weights.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
        queries = hashlib.blake2b(json.dumps(self.queries).encode(), digest_size=8)
        ours = {"reference": weights.hexdigest(), "queries": queries.hexdigest()}
        return {**asdict(self.config), **ours}

    def evaluate(self, queries: Sequence[str], seed: int = 0) -> tuple[dict[str, float], list[str]]:
        """Respond to queries without training; return the result of `measure`, and the texts.

        The queries are best those of reviews that training does not draw from.
        """
        texts = answer(self.model.policy, self.tokenizer, queries, self.config.max_new_tokens, seed)
        return measure(texts, self.reward_function(texts)), texts


def answer(policy: Any, tokenizer: Any, queries: Sequence[str], max_new_tokens: int, seed: int) -> list[str]:
    """Complete queries with a policy; return query and response as one text each."""
    batch = tokenizer(list(queries), padding=True, return_tensors="pt").to(policy.device)
    generator = torch.Generator().manual_seed(seed)
    ids, _ = generate(policy, batch.input_ids, batch.attention_mask, max_new_tokens, generator)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def measure(texts: Sequence[str], scores: torch.Tensor) -> dict[str, float]:
    """Measure texts by the reward model's scores (B,) and by the grammar, which is not trained on.

    `score` is the mean; `parses` the share that the grammar could have written, none of texts of another
    world; `positive` the share that it could have written as a positive review; `distinct` different texts
    per text.
    """
    meanings = [grammar.parse(text) for text in texts]
    return {
        "score": scores.mean().item(),
        "parses": sum(meaning is not None for meaning in meanings) / len(texts),
        "positive": sum(meaning == "positive" for meaning in meanings) / len(texts),
        "distinct": len(set(texts)) / len(texts),
    }
