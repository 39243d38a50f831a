"""Train GPT-2 with PPO to write positive reviews: `python -m ddpo_lessons.text.gpt2_reviews`.

It needs `pip install datasets`. Policy, sentiment classifier and reviews come from the hub, or from folders.
The output folder holds the newest checkpoint, from which the same command continues an interrupted run, and
the metrics up to it, metrics.jsonl. In the end the policy lies in `policy/`, as plain transformers loads it,
and answers from before and after training are printed.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ddpo_lessons.text.language_models import (
    HUB_POLICY,
    HUB_REWARD,
    HUB_TEXTS,
    load_text_models,
    read_queries,
)
from ddpo_lessons.text.text_trainer import TextPPOConfig, TextPPOTrainer, answer
from ddpo_lessons.training import checkpoint

SHOWN = 4  # answers


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; the defaults are those of a full run on a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--policy", default=HUB_POLICY, help="causal language model: a name on the hub, or a folder"
    )
    parser.add_argument(
        "--reward", default=HUB_REWARD, help="sentiment classifier: a name on the hub, or a folder"
    )
    parser.add_argument(
        "--reviews", default=HUB_TEXTS, help='data set with a column "text": a name, or a folder'
    )
    parser.add_argument("--iterations", type=int, default=194, help="of one batch each")
    parser.add_argument("--batch-size", type=int, default=128, help="texts per iteration")
    parser.add_argument("--minibatch-size", type=int, default=16, help="texts per optimizer step")
    parser.add_argument("--learning-rate", type=float, default=1.4e-5, help="of policy and value model")
    parser.add_argument(
        "--kl-target", type=float, default=6.0, help="nats per text that kl_coef is adapted to"
    )
    parser.add_argument("--save-every", type=int, default=20, help="iterations between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> TextPPOTrainer:
    """Run the command; return the trainer."""
    args = parse(arguments)
    models = load_text_models("hub", args.policy, args.reward)
    queries = read_queries(models.tokenizer, args.reviews, count=20_000)
    config = TextPPOConfig(
        batch_size=args.batch_size,
        minibatch_size=args.minibatch_size,
        min_new_tokens=4,
        max_new_tokens=16,
        learning_rate=args.learning_rate,
        value_learning_rate=args.learning_rate,
        kl_coef=0.2,
        kl_target=args.kl_target,
        seed=args.seed,
    )
    parts = (models.policy, models.value, models.tokenizer, models.reward)
    trainer = TextPPOTrainer(config, *parts, queries)
    for folder in checkpoint.list_checkpoints(args.output_dir)[-1:]:
        trainer.resume(folder)
        print(f"continue after iteration {len(trainer.history)}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    while len(trainer.history) < args.iterations:
        metrics = trainer.step()
        print(
            "  ".join(f"{name} {metrics[name]:.3f}" for name in ("score", "kl", "kl_coef", "policy/entropy"))
        )
        if len(trainer.history) % args.save_every == 0 or len(trainer.history) == args.iterations:
            trainer.save(args.output_dir)
            checkpoint.prune(args.output_dir, 1)
            lines = [json.dumps(record) + "\n" for record in trainer.history]
            (args.output_dir / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    trainer.model.policy.save_pretrained(args.output_dir / "policy")
    models.tokenizer.save_pretrained(args.output_dir / "policy")
    for name, policy in (("before", trainer.reference), ("after", trainer.model.policy)):
        print(
            name,
            *answer(policy, models.tokenizer, queries[:SHOWN], config.max_new_tokens, seed=0),
            sep="\n  ",
        )
    return trainer


if __name__ == "__main__":
    main()
