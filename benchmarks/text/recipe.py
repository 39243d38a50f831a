"""Make the shipped text checkpoint: `python -m benchmarks.text.recipe`; two minutes on two idle cores.

The policy is a small GPT-2 that learned to write the grammar's reviews, the reward model a smaller one that
learned their sentiment from labeled reviews. Both are stored in float16. `evaluation.json` has their
accuracy on texts that neither was trained on.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from benchmarks.recipes import scaled, train
from ddpo_lessons.text import grammar
from ddpo_lessons.text.language_models import CHECKPOINT, TextModels, load_text_models
from ddpo_lessons.text.text_trainer import answer, measure

POLICY_STEPS, REWARD_STEPS, BATCH = 1500, 600, 64
MAX_NEW_TOKENS = 24
TARGETS: dict[grammar.Sentiment, float] = {"positive": 1.0, "mixed": 0.5, "negative": 0.0}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer: a token a word; padding is on the left, since a policy writes on the right."""
    special = {"pad_token": grammar.PAD, "eos_token": grammar.EOS, "unk_token": grammar.UNK}
    vocab = {word: index for index, word in enumerate([*special.values(), *grammar.vocabulary()])}
    core = Tokenizer(WordLevel(vocab, unk_token=grammar.UNK))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)


def make_config(tokenizer: Any, width: int, layers: int, **more: Any) -> Any:
    return GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=width, n_layer=layers, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **more,
    )  # fmt: skip


def next_token_loss(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Return the cross-entropy of texts that end, word by word."""
    ended = [f"{text} {grammar.EOS}" for text in texts]
    batch = tokenizer(ended, padding=True, padding_side="right", return_tensors="pt")
    logits = model(**batch).logits[:, :-1]  # (B, L - 1, V)
    mask = batch.attention_mask[:, 1:].bool()
    return F.cross_entropy(logits[mask], batch.input_ids[:, 1:][mask])


def train_policy(tokenizer: Any, steps: int, seed: int) -> Any:
    """Train a small GPT-2 on reviews, next word by next word."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(make_config(tokenizer, width=96, layers=3)).train()

    def loss_of(step: int) -> torch.Tensor:
        pairs = grammar.reviews(BATCH, "train", 1_000_000 * (seed + 1) + step)
        return next_token_loss(model, tokenizer, [text for text, _ in pairs])

    train("policy", model, loss_of, steps, 3e-3, warmup=0.1)
    return model


def train_reward_model(tokenizer: Any, steps: int, seed: int) -> Any:
    """Train a smaller GPT-2 to distinguish positive reviews from negative ones; mixed ones count half.

    Half of the texts end with the end-of-text token and half do not, so that the score depends on neither.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = GPT2ForSequenceClassification(make_config(tokenizer, width=64, layers=2, num_labels=1)).train()

    def loss_of(step: int) -> torch.Tensor:
        pairs = grammar.reviews(BATCH, "train", 1_000_000 * (seed + 1) + step)
        texts = [f"{text} {grammar.EOS}" if rng.random() < 0.5 else text for text, _ in pairs]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        target = torch.tensor([TARGETS[sentiment] for _, sentiment in pairs])
        return F.binary_cross_entropy_with_logits(model(**batch).logits[:, 0], target)

    train("reward model", model, loss_of, steps, 2e-3, warmup=0.1)
    return model


def evaluate(models: TextModels, count: int) -> dict[str, float]:
    """Measure both models on `count` test texts each.

    The reward model's accuracy is on positive and negative reviews, and on those of them that negate.
    """
    pairs = grammar.reviews(count, "test", seed=10)
    scores = models.reward([text for text, _ in pairs])
    truth = [sentiment for _, sentiment in pairs]
    right = (scores > 0) == torch.tensor([kind == "positive" for kind in truth])
    clear = torch.tensor([kind != "mixed" for kind in truth])
    negates = torch.tensor([bool({"not", "never"} & set(text.split())) for text, _ in pairs])
    table = {
        "reward model: accuracy": right[clear].float().mean().item(),
        "reward model: accuracy where negated": right[clear & negates].float().mean().item(),
    }
    for kind in grammar.SHARES:
        rows = torch.tensor([sentiment == kind for sentiment in truth])
        table[f"reward model: mean score, {kind}"] = scores[rows].mean().item()
    texts = answer(
        models.policy, models.tokenizer, grammar.queries(count, "test", 11), MAX_NEW_TOKENS, seed=12
    )
    return table | {f"policy: {name}": value for name, value in measure(texts, models.reward(texts)).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=CHECKPOINT)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the training steps")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    models = {
        "policy": train_policy(tokenizer, scaled(POLICY_STEPS, arguments.scale), seed=0),
        "reward": train_reward_model(tokenizer, scaled(REWARD_STEPS, arguments.scale), seed=1),
    }
    for name, model in models.items():
        model.half().save_pretrained(arguments.output / name)
        tokenizer.save_pretrained(arguments.output / name)
    folders = {name: arguments.output / name for name in models}
    table = evaluate(load_text_models(**folders), count=1000)
    table = {name: round(value, 4) for name, value in table.items()}
    (arguments.output / "evaluation.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
