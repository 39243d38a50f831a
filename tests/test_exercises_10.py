"""Answers to the exercises of lesson 10: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

from tests.helpers import exercise_tests

ARGUMENTS = {1: "old, targets, advantages, zeta", 2: "push, rate, weight, decay", 3: "noisy, clean, levels"}
BY_AUTOGRAD = """
def f(old, targets, advantages, zeta):
    v = torch.tensor(float(old), requires_grad=True)
    optimizer = torch.optim.SGD([v], lr=0.5 / zeta)
    for _ in range(3):
        plus, minus = old + zeta * (v - old), old - zeta * (v - old)
        q = (advantages.float() + 1) / 2
        loss = (q * (plus - targets.float()) ** 2 + (1 - q) * (minus - targets.float()) ** 2).mean() / zeta
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return v
"""
ONE_BY_ONE = """
def f(old, targets, advantages, zeta):
    moves = [a * (t - old) / zeta for a, t in zip(advantages.tolist(), targets.tolist())]
    return old + sum(moves) / len(moves)
"""
SIMULATED = """
def f(push, rate, weight, decay):
    v = lag = torch.zeros(())
    for _ in range(2000):
        before = v
        v = v - rate * (push + 2 * weight * (v - lag))
        lag = lag.lerp(v, 1 - decay)
        v, lag, moved = v - lag, torch.zeros(()), v - before
    return moved
"""
LINEAR = """
def f(push, rate, weight, decay):
    # move + 2 rate weight gap = -rate push, and gap = decay (gap + move)
    matrix = torch.tensor([[1, 2 * rate * weight], [-decay, 1 - decay]]).double()
    return torch.linalg.solve(matrix, torch.tensor([-rate * push, 0.0]).double())[0]
"""
SAMPLE_BY_SAMPLE = """
def f(noisy, clean, levels):
    return torch.stack([(x - (1 - s) * c) / s for x, c, s in zip(noisy, clean, levels)])
"""
RIGHT = [
    (1, BY_AUTOGRAD),
    (1, ONE_BY_ONE),
    (1, "old + torch.mean(advantages * (targets - old) / zeta)"),
    (1, "old + (advantages @ (targets - old)).item() / len(targets) / zeta"),
    (2, SIMULATED),
    (2, LINEAR),
    (2, "-push / (1 / rate + 2 * weight * decay / (1 - decay))"),
    (2, "-rate * push * (1 - decay) / (1 - decay + 2 * rate * weight * decay)"),
    (3, SAMPLE_BY_SAMPLE),
    (3, "clean + (noisy - clean) / levels.view(-1, 1, 1, 1)"),
    (3, "(noisy.float() - (1 - levels.float())[:, None, None, None] * clean.float()) / "
        "levels.float()[:, None, None, None]"),
    (3, "torch.einsum('b,bchw->bchw', 1 / levels, noisy - torch.einsum('b,bchw->bchw', 1 - levels, clean))"),
]  # fmt: skip
PULL = "(advantages * (targets - old))"
S = "levels[:, None, None, None]"
WRONG = [
    (1, f"old - {PULL}.mean() / zeta", "toward its target"),
    (1, f"old + {PULL}.sum() / zeta", "not their sum"),
    (1, f"old + {PULL}.mean() * zeta", "keeps v near"),
    (1, "old + ((advantages + 1) / 2 * (targets - old)).mean() / zeta", "not q"),
    (1, f"old + 2 * {PULL}.mean() / zeta", "factor 2"),
    (1, "old + (advantages * targets).mean() / zeta", "v* - v_old"),
    (1, f"{PULL}.mean() / zeta", "v_old plus it"),
    (1, f"old + {PULL}.sum() / advantages.abs().sum() / zeta", "divide by the weights"),
    (1, "old + (advantages.clamp(min=0) * (targets - old)).mean() / zeta", "bad samples"),
    (1, f"old + {PULL} / zeta", "one number"),
    (1, "targets.mean()", ", for old="),
    (2, "rate * push / (1 + 2 * rate * weight * decay / (1 - decay))", "against the push"),
    (2, "-rate * push", "penalty slows it"),
    (2, "0.0", "a brake"),
    (2, "-rate * push / (1 + rate * weight * decay / (1 - decay))", "factor 2"),
    (2, "-rate * push / (1 + 2 * rate * weight / (1 - decay))", "after the step"),
    (2, "-rate * push / (1 + 2 * rate * weight * decay)", "not decay"),
    (2, "-rate * push * (1 - 2 * rate * weight * decay / (1 - decay))", "slowed moves"),
    (2, "-rate * push * decay / (1 - decay) / (1 + 2 * rate * weight * decay / (1 - decay))", "v - v_EMA"),
    (2, "-1.05 * rate * push / (1 + 2 * rate * weight * decay / (1 - decay))", "with a decay of"),
    (3, f"noisy - (1 - {S}) * clean", "divide by the level"),
    (3, f"(noisy - clean) / {S}", "not 1"),
    (3, f"(noisy - {S} * clean) / (1 - {S} + 1e-9)", "that of x_0"),
    (3, f"((1 - {S}) * clean - noisy) / {S}", "sign"),
    (3, f"(noisy + (1 - {S}) * clean) / {S}", "subtracted"),
    (3, f"(noisy - (1 - {S}).sqrt() * clean) / {S}.sqrt()", "roots"),
    (3, f"((noisy - (1 - {S}) * clean) / {S}).mean()", "shape"),
    (3, f"1.05 * (noisy - (1 - {S}) * clean) / {S}", "does not lead"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "10_without_log_probs", "import torch\n", ARGUMENTS, RIGHT, WRONG
)
