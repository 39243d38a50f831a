"""Our text PPO beside numbers recorded from TRL 1.12's own lines (golden/trl_text_ppo.json)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_inputs import ARGS, CASES

from ddpo_lessons.advantages import gae, masked_whiten
from ddpo_lessons.text.text_ppo import Targets, shape_rewards, text_ppo_loss, token_log_probs

GOLDEN = Path(__file__).parent / "golden" / "trl_text_ppo.json"
RECORDED: dict[str, Any] = json.loads(GOLDEN.read_text("utf-8"))


def our_results(case: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL's stages are called here, from the same tensors."""
    mask = case["mask"]
    ids = torch.nn.functional.pad(case["responses"], (1, 0))  # (B, T + 1), a query of one token in front

    def log_probs_of(name: str) -> torch.Tensor:
        logits = torch.nn.functional.pad(case[f"{name}_logits"], (0, 0, 0, 1))  # (B, T + 1, V)
        return token_log_probs(logits, ids)

    old, new, reference = (log_probs_of(name) for name in ("old", "new", "ref"))
    rewards = shape_rewards(case["scores"], old - reference, mask, ARGS["kl_coef"])
    advantages, returns = gae(rewards, case["values"], ARGS["gamma"], ARGS["lam"], mask)
    whitened = masked_whiten(advantages, mask)
    targets = Targets(old, case["values"], whitened, returns, mask)
    loss, stats = text_ppo_loss(
        new,
        case["new_values"],
        torch.zeros_like(new),
        targets,
        ARGS["cliprange"],
        ARGS["cliprange_value"],
        ARGS["vf_coef"],
    )
    return {
        "log_probs": old.masked_fill(~mask, 0).tolist(),
        "rewards": rewards.tolist(),
        "advantages": advantages.tolist(),
        "returns": returns.tolist(),
        "whitened": whitened.tolist(),
        "policy_loss": stats["loss/policy"],
        "value_loss": stats["loss/value"],
        "loss": loss.item(),
    }


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "stage", ["log_probs", "advantages", "returns", "whitened", "policy_loss", "value_loss", "loss"]
)
def test_every_stage_gives_what_trl_gave(name: str, stage: str) -> None:
    close(our_results(CASES[name])[stage], RECORDED[name][stage])


def test_rewards_are_trls_where_responses_fill_the_batch() -> None:
    close(our_results(CASES["full"])["rewards"], RECORDED["full"]["rewards"])


def test_trl_puts_the_score_one_place_behind_the_last_token_of_a_shorter_response() -> None:
    case = CASES["ragged"]
    ours, theirs = torch.tensor(our_results(case)["rewards"]), torch.tensor(RECORDED["ragged"]["rewards"])
    last = case["mask"].sum(1) - 1  # (B,) the last token's place
    for row, place in enumerate(last.tolist()):
        behind = min(place + 1, ours.shape[1] - 1)
        moved = ours[row].clone()
        moved[place] -= case["scores"][row]
        moved[behind] += case["scores"][row]
        close(moved.tolist(), theirs[row].tolist())
        assert case["mask"][row, behind] == (behind == place)  # a place that no policy chose
