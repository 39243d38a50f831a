"""Run lines of TRL 1.12's PPOTrainer on given tensors: `python tests/trl_lines.py` records them.

TRL computes KL, rewards, GAE and loss inside one long method. Here the lines in question are cut out of its
source and executed, so that what is compared is TRL's code and not a reading of it.
"""

import importlib.metadata
import inspect
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Row = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden/trl_text_ppo.json"
VERSION = "1.12.0"
# The settings of every case, under TRL's names.
ARGS = {"gamma": 0.99, "lam": 0.9, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1}
ARGS |= {"kl_coef": 0.05, "kl_estimator": "k1"}


def make_case(seed: int, lengths: tuple[int, ...], places: int = 6, vocabulary: int = 11) -> Row:
    """Draw the tensors of one minibatch, responses (B, T) padded on the right to `places`."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).round(decimals=4)

    old_logits = draw(batch, places, vocabulary)
    mask = torch.arange(places) < torch.tensor(lengths)[:, None]  # (B, T)
    return {
        "mask": mask,
        "responses": torch.randint(vocabulary, (batch, places), generator=generator),
        "old_logits": old_logits,
        "new_logits": old_logits + draw(batch, places, vocabulary, scale=0.3),
        "ref_logits": old_logits + draw(batch, places, vocabulary, scale=0.3),
        "values": draw(batch, places).masked_fill(~mask, 0),
        "new_values": draw(batch, places),
        "scores": draw(batch),
    }


CASES = {"full": make_case(0, (6, 6, 6, 6)), "ragged": make_case(1, (6, 3, 1, 5))}


def is_installed() -> bool:
    try:
        return importlib.metadata.version("trl") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


def run_lines(first: str, last: str, names: Row) -> Row:
    """Execute TRL's lines from the one that begins with `first` to the one that begins with `last`."""
    from trl.experimental.ppo import ppo_trainer

    lines = inspect.getsource(ppo_trainer.PPOTrainer.train).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(i for i, line in enumerate(lines) if i >= start and line.strip().startswith(last))
    names = {**vars(ppo_trainer), "args": SimpleNamespace(**ARGS), **names}
    exec(textwrap.dedent("\n".join(lines[start : stop + 1])), names)
    return names


def trl_results(case: Row) -> Row:
    """Return what TRL computes from a case, stage by stage."""
    from trl.experimental.ppo.ppo_trainer import masked_whiten, selective_log_softmax

    padding = ~case["mask"]
    log_probs, new, ref = (
        selective_log_softmax(case[f"{name}_logits"], case["responses"]).masked_fill(padding, 1.0)
        for name in ("old", "new", "ref")
    )
    lengths = case["mask"].sum(1) - 1  # TRL's "sequence length" is the index of the last token
    given = {"logprobs": log_probs, "ref_logprobs": ref, "scores": case["scores"]}
    given |= {"sequence_lengths": lengths, "sequence_lengths_p1": lengths + 1}
    shaped = run_lines("logr =", "rewards[actual_start", given)
    # GAE and loss get our rewards, so that they are compared whatever is thought of the score's place.
    rewards = torch.where(case["mask"], shaped["non_score_reward"], 0)
    rewards[torch.arange(len(rewards)), lengths] += case["scores"]
    given = {
        "rewards": rewards,
        "values": case["values"],
        "gen_length": rewards.shape[1],
        "responses": rewards,
    }
    estimated = run_lines("lastgaelam = 0", "returns =", given)
    advantages = masked_whiten(estimated["advantages"], case["mask"]).masked_fill(padding, 0)
    given = {"vpred": case["new_values"], "mb_values": case["values"], "mb_return": estimated["returns"]}
    given |= {"new_logprobs": new, "mb_logprobs": log_probs, "mb_advantage": advantages}
    given |= {"padding_mask": padding, "padding_mask_p1": padding, "micro_batch_inds": slice(None)}
    trained = run_lines("vpredclipped =", "loss = pg_loss", given)
    return {
        "log_probs": log_probs.masked_fill(padding, 0).tolist(),
        "rewards": shaped["rewards"].tolist(),
        "advantages": estimated["advantages"].masked_fill(padding, 0).tolist(),
        "returns": estimated["returns"].masked_fill(padding, 0).tolist(),
        "whitened": advantages.tolist(),
        "policy_loss": trained["pg_loss"].item(),
        "value_loss": trained["vf_loss"].item(),
        "loss": trained["loss"].item(),
    }


def main() -> None:
    rows = {name: trl_results(case) for name, case in CASES.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    main()
