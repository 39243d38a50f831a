"""Lesson 05: load policy, value model and reward model, from the package or the hub."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.text.text_ppo import positions

CHECKPOINT = Path(__file__).parent / "checkpoint"
# On the hub: policy, reward model, texts.
HUB_POLICY, HUB_REWARD, HUB_TEXTS = "lvwerra/gpt2-imdb", "lvwerra/distilbert-imdb", "stanfordnlp/imdb"


def read(policy: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Run a causal language model over whole texts (B, L), padded on either side: logits (B, L, V)."""
    return _run(policy, input_ids, attention_mask).logits


def _run(network: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    numbers = positions(attention_mask)
    return network(input_ids=input_ids, attention_mask=attention_mask, position_ids=numbers, use_cache=False)


class ValueModel(nn.Module):
    """A language model's trunk with a linear head, which predicts the reward-to-go at each position."""

    def __init__(self, trunk: Any, head: nn.Linear) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    @classmethod
    def from_policy(cls, policy: Any) -> ValueModel:
        """Copy the policy's trunk, with a head of zeros, so that all values start at 0."""
        return cls(copy.deepcopy(policy.base_model), zero_head(policy))

    @classmethod
    def from_classifier(cls, classifier: Any) -> ValueModel:
        """Copy a causal classifier with one output, whose logit of a part predicts that of the whole."""
        return cls(copy.deepcopy(classifier.base_model), copy.deepcopy(classifier.score))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return values (B, L), in units of the score."""
        hidden = _run(self.trunk, input_ids, attention_mask).last_hidden_state  # (B, L, D)
        return self.head(hidden).squeeze(-1)


def zero_head(policy: Any) -> nn.Linear:
    """Make a value head for a policy's hidden states, whose values are 0 at first."""
    head = nn.Linear(policy.config.hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(policy.device)


class SharedTrunk(ValueModel):
    """A value head on the policy's own trunk, which the value loss then trains as well.

    Only the head is among its parameters; the trunk's belong to the policy.
    """

    def __init__(self, policy: Any) -> None:
        nn.Module.__init__(self)
        self.borrowed = (policy.base_model,)  # in a tuple a module is not registered
        self.head = zero_head(policy)

    @property
    def trunk(self) -> Any:
        """Return the policy's trunk."""
        return self.borrowed[0]


class ActorCritic(nn.Module):
    """The two models that are trained, as one module."""

    def __init__(self, policy: Any, value: ValueModel) -> None:
        super().__init__()
        self.policy = policy
        self.value = value

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (B, L, V) and values (B, L)."""
        return read(self.policy, input_ids, attention_mask), self.value(input_ids, attention_mask)


@torch.no_grad()
def generate(
    policy: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_new_tokens: int | torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a response to each query, token by token from the policy's own distribution.

    A response ends with the end-of-text token, or after `max_new_tokens`: one limit, or one per row (B,).

    Nothing is cut off or sharpened (no top-k, no temperature): what trains must be what sampled. The policy's
    config names the tokens that end and pad a text; queries (B, Q) are padded on the left, and the generator
    is of the CPU. Returns ids and attention mask (B, Q + n), with n at most the largest limit; after a row's
    end its ids are padding.
    """
    end, pad = policy.config.eos_token_id, policy.config.pad_token_id
    limits = torch.as_tensor(max_new_tokens, device=input_ids.device).expand(len(input_ids))  # (B,)
    cache, fed = None, input_ids
    running = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)  # (B,)
    for written in range(1, int(limits.max()) + 1):
        out = policy(
            input_ids=fed,
            attention_mask=attention_mask,
            position_ids=positions(attention_mask)[:, -fed.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        probabilities = out.logits[:, -1].float().softmax(-1).cpu()  # (B, V)
        drawn = torch.multinomial(probabilities, 1, generator=generator).to(input_ids.device)  # (B, 1)
        fed = torch.where(running[:, None], drawn, pad)
        input_ids = torch.cat([input_ids, fed], dim=1)
        attention_mask = torch.cat([attention_mask, running[:, None].to(attention_mask)], dim=1)
        running = running & (drawn[:, 0] != end) & (written < limits)
        if not running.any():
            break
    return input_ids, attention_mask


class SentimentReward:
    """Score texts by a classifier's logit of positive sentiment, which has no upper limit.

    Of a classifier with one output it is that logit, of one with two log p(positive) - log p(negative). The
    classifier's tokenizer may be another than the policy's.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if model.config.num_labels not in (1, 2):
            raise ValueError(f"a sentiment model has 1 or 2 outputs, this one has {model.config.num_labels}")
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Return scores (B,), float32, on the CPU."""
        limit = getattr(self.model.config, "max_position_embeddings", 512)
        how = {"padding": True, "padding_side": "right", "truncation": True, "max_length": limit}
        batch = self.tokenizer(list(texts), return_tensors="pt", **how)
        ids, mask = (batch[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
        logits = self.model(input_ids=ids, attention_mask=mask).logits.float().cpu()  # (B, 1 or 2)
        return logits[:, -1] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


@dataclass(frozen=True)
class TextModels:
    """Policy, reward model, a value model to start from, and the tokenizer that the policy reads with."""

    policy: Any
    reward: SentimentReward
    value: ValueModel
    tokenizer: Any


def load_text_models(
    profile: str = "cpu",
    policy: str | Path | None = None,
    reward: str | Path | None = None,
    device: str | torch.device | None = None,
) -> TextModels:
    """Load policy and reward model: the shipped ones, or for the profile `hub` gpt2-imdb and distilbert-imdb.

    The value model starts as a copy of the reward model where that is causal and has one output (Ouyang et
    al. 2022, arXiv 2203.02155, section 3.5), else as the policy's trunk with a head of zeros.

    `policy` and `reward`, a sequence classifier with one or two outputs, may be other names on the hub, or
    folders; an OSError says that a model is neither there nor reachable. They come in float32 and in eval
    mode, since dropout would make the policy that trains differ from the one that samples. The shipped ones,
    too small for anything else, go to the CPU, those of the hub to a GPU, unless `device` says otherwise.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    is_hub = profile == "hub"
    policy = policy or (HUB_POLICY if is_hub else CHECKPOINT / "policy")
    reward = reward or (HUB_REWARD if is_hub else CHECKPOINT / "reward")
    device = device or ("cuda" if is_hub and torch.cuda.is_available() else "cpu")
    with quiet_loading(bars=is_hub):
        tokenizer = AutoTokenizer.from_pretrained(policy)
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).to(device).eval()
        classifier = AutoModelForSequenceClassification.from_pretrained(reward, dtype=torch.float32)
        reward_tokenizer = AutoTokenizer.from_pretrained(reward)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:  # GPT-2 has none
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    classifier = classifier.to(device)
    if hasattr(classifier, "score") and classifier.config.num_labels == 1:  # causal, and one logit
        value = ValueModel.from_classifier(classifier)
    else:
        value = ValueModel.from_policy(model)
    sentiment = SentimentReward(classifier, reward_tokenizer)
    return TextModels(model, sentiment, value.requires_grad_(True), tokenizer)


def read_queries(
    tokenizer: Any, dataset: str | Path = HUB_TEXTS, split: str = "train", count: int = 1000
) -> list[str]:
    """Return the first 2 to 8 tokens of real reviews, for a policy to finish.

    It needs the package `datasets`, which this package does not bring: `dataset` is a name on the hub or a
    folder that it can read, and its column "text" is used. The reviews are taken at even distances, since
    IMDb's are sorted by sentiment.
    """
    from datasets import load_dataset

    texts = load_dataset(str(dataset), split=split)["text"]
    rows = torch.linspace(0, len(texts) - 1, min(count, len(texts))).long().tolist()
    tokens = [tokenizer(texts[row]).input_ids[: 2 + number % 7] for number, row in enumerate(rows)]
    return [tokenizer.decode(ids) for ids in tokens if len(ids) >= 2]
