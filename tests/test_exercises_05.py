"""Answers to lesson 05's exercises: a check refuses a wrong one with a hint that names the mistake."""

from __future__ import annotations

import pytest
from helpers import check_of, hint_for

IMPORTS = "import torch\nfrom ddpo_lessons.advantages import gae, masked_whiten, normalize\n"
# Right answers are code; a wrong one is a word of the hint, then old and new code in the first right one.
Right, Wrong = list[str], dict[str, tuple[str, ...]]

GAE: Right = [
    """
def draft_gae(rewards, values, lam):
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for r, v in list(zip(rewards, values))[::-1]:
        next_advantage = r + next_value - v + lam * next_advantage
        next_value = v
        advantages.insert(0, next_advantage)
    return advantages
""",
    """
def draft_gae(rewards, values, lam):
    n, values = len(rewards), list(values) + [0]
    delta = [rewards[j] + values[j + 1] - values[j] for j in range(n)]
    return [sum(lam ** (l - j) * delta[l] for l in range(j, n)) for j in range(n)]
""",
    """
def draft_gae(rewards, values, lam):
    r, v = torch.tensor(rewards), torch.tensor(values, requires_grad=True)
    delta = r + torch.cat([v[1:], torch.zeros(1)]) - v
    j = torch.arange(len(r))
    gap = (j[None] - j[:, None]).clamp(min=0)
    return ((lam ** gap.float()) * (j[None] >= j[:, None])) @ delta
""",
    """
def draft_gae(rewards, values, lam):
    n, values = len(rewards), list(values) + [0]
    def k_step(j, k):
        return sum(rewards[j:j + k]) + values[j + k] - values[j]
    out = []
    for j in range(n):
        mixed = sum((1 - lam) * lam ** (k - 1) * k_step(j, k) for k in range(1, n - j))
        out.append(mixed + lam ** (n - j - 1) * k_step(j, n - j))
    return tuple(out)
""",
    """
def draft_gae(rewards, values, lam):
    return gae(torch.tensor(rewards), torch.tensor(values), gamma=1.0, lam=lam)[0]
""",
]
TD, MOVE, ADD = "r + next_value - v", "        next_value = v\n", "insert(0, next_advantage)"
WRONG_GAE: Wrong = {
    "nothing returned": ("return", "    return advantages\n", ""),
    "last decision first": ("order", ADD, "append(next_advantage)"),
    "returns": ("minus its value", ADD, "insert(0, next_advantage + v)"),
    "no value": ("minus its value", TD, "r"),
    "last value taken for what follows": ("nothing comes after", "0.0, 0.0\n", "values[-1], 0.0\n"),
    "average": ("average", TD, f"(1 - lam) * ({TD})"),
    "sign": ("sign", TD, "v - r - next_value"),
    "from the front": ("λ = 0", "[::-1]", "", ADD, "append(next_advantage)"),
    "no next value": ("λ = 0", TD, "r - v"),
    "never moves on": ("λ = 0", MOVE, ""),
    "the reward taken for the next value": ("λ = 0", "next_value = v", "next_value = r"),
    "discounted by λ": ("λ = 0", TD, "r + lam * next_value - v"),
    "0.95 for good": ("λ = 0", "lam * next", "0.95 * next"),
    "λ forgotten": ("λ = 0", "lam * next", "next"),
    "TD errors only": ("λ = 1", " + lam * next_advantage", ""),
    "two TD errors": (
        "λ = 1",
        f"next_advantage = {TD} + lam * next_advantage",
        f"delta = {TD}",
        ADD,
        "insert(0, delta + lam * next_advantage)\n        next_advantage = delta",
    ),
    "λ squared": ("A of the next", "lam * next", "lam ** 2 * next"),
    "one too few": ("shape", "return advantages", "return advantages[:-1]"),
    "NaN": ("NaN", "return advantages", "return [float('nan')] * len(rewards)"),
    "never below 0": ("below 0", "return advantages", "return torch.tensor(advantages).abs()"),
    "between one step and all, in a straight line": (
        "A of the next",
        "return advantages",
        "one, all_ = (gae(torch.tensor(rewards), torch.tensor(values), 1.0, x)[0] for x in (0.0, 1.0))\n"
        "    return (1 - lam) * one + lam * all_",
    ),
    "γ = 0.99": ("λ = 0", TD, "r + 0.99 * next_value - v"),
    "centred": ("minus its value", "return advantages", "return (x := torch.tensor(advantages)) - x.mean()"),
    "values made longer": ("work on copies", "    return", "    values.append(0.0)\n    return"),
    "emptied": ("work on copies", "    return", "    rewards.clear()\n    return"),
    "values below 0 left out": ("A of the next", "next_value = v\n", "next_value = max(v, 0.0)\n"),
    "TD errors cut at -2": ("A of the next", TD, f"max({TD}, -2)"),
    "three TD errors": (
        "A of the next",
        "return advantages",
        "d = gae(torch.tensor(rewards), torch.tensor(values), 1.0, 0.0)[0]\n"
        "    return [sum(lam**k * x for k, x in enumerate(d[j : j + 3])) for j in range(len(d))]",
    ),
    "λ² for all that is far": (
        "A of the next",
        "return advantages",
        "d = gae(torch.tensor(rewards), torch.tensor(values), 1.0, 0.0)[0]\n"
        "    return [sum(lam ** min(k, 2) * x for k, x in enumerate(d[j:])) for j in range(len(d))]",
    ),
    "rounded": ("A of the next", "return advantages", "return [round(x, 3) for x in advantages]"),
}  # fmt: skip

FALLING: Right = [
    """
def falling(rewards, num_steps):
    w = torch.arange(num_steps, 0, -1).float()
    w = w / w.square().mean().sqrt()
    a = normalize(rewards)
    return a[:, None] * w
""",
    """
def falling(rewards, num_steps):
    w = torch.linspace(1, 1 / num_steps, num_steps).double()
    return torch.outer(normalize(rewards).double(), w / w.square().mean().sqrt())
""",
    """
def falling(rewards, num_steps):
    a = normalize(rewards)[:, None] * torch.arange(num_steps, 0, -1)
    return a / a.square().mean().sqrt()
""",
    """
def falling(rewards, num_steps):
    a = ((rewards - rewards.mean()) / rewards.std(correction=0)).requires_grad_()
    size = (sum((t + 1) ** 2 for t in range(num_steps)) / num_steps) ** 0.5
    return torch.stack([a * (num_steps - t) / size for t in range(num_steps)], dim=1)
""",
    """
def falling(rewards, num_steps):
    size = (sum(t * t for t in range(1, num_steps + 1)) / num_steps) ** 0.5
    return [[a * t / size for t in range(num_steps, 0, -1)] for a in normalize(rewards).tolist()]
""",
]
LINE, SPREAD = "torch.arange(num_steps, 0, -1).float()", "a[:, None] * w"
UNIT, CENTRED = "normalize(rewards)", "rewards - rewards.mean()"
WRONG_FALLING: Wrong = {
    "nothing returned": ("return", "return ", ""),
    "weights only": ("pictures", SPREAD, "w"),
    "steps by pictures": ("pictures", SPREAD, "torch.outer(w, a)"),
    "rising": ("fall", LINE, "torch.arange(1, num_steps + 1).float()"),
    "the same for all": ("fall", LINE, "torch.ones(num_steps)"),
    "down to 0": ("weighed", LINE, "torch.arange(num_steps - 1, -1, -1).float()"),
    "off by one": ("weighed", LINE, "torch.arange(num_steps + 1, 1, -1).float()"),
    "geometric": ("weighed", LINE, "0.7 ** torch.arange(num_steps)"),
    "rewards as they are": ("normalize", UNIT, "rewards"),
    "mean taken, not divided": ("mean square", UNIT, CENTRED),
    "another deviation": ("mean square", UNIT, f"({CENTRED}) / rewards.std()"),
    "unscaled": ("mean square", "    w = w / w.square().mean().sqrt()\n", ""),
    "mean of 1": ("mean square", "w.square().mean().sqrt()", "w.mean()"),
    "sum of squares": ("mean square", "w.square().mean()", "w.square().sum()"),
    "sign": ("sign", SPREAD, "-a[:, None] * w"),
    "ranks": ("its reward", UNIT, "normalize(rewards.argsort().argsort().float())"),
    "sorted pictures": ("its reward", UNIT, "normalize(rewards).sort().values"),
    "the size of four steps": ("3 steps", "w.square().mean().sqrt()", "7.5**0.5"),
    "four weights, cut": ("3 steps", LINE, "torch.arange(4, 0, -1).float()[:num_steps]"),
    "one line for all tasks": ("3 steps", LINE, "torch.arange(4, 0, -1).float()"),
    "NaN": ("NaN", SPREAD, "a[:, None] * w / 0 * 0"),
    "in place": ("work on copies", UNIT, "normalize(rewards.sub_(rewards.mean()))"),
    "rewards above 0": ("its reward", UNIT, "normalize(rewards.clamp(min=0))"),
    "sizes of rewards": ("its reward", UNIT, "normalize(rewards.abs())"),
}

SAME: Right = [
    """
def same_for_every_token(rewards, mask):
    each = normalize(rewards.sum(1))
    return each[:, None].expand(mask.shape).masked_fill(~mask, 0)
""",
    """
def same_for_every_token(rewards, mask):
    return normalize(rewards.sum(1))[:, None] * mask
""",
    """
def same_for_every_token(rewards, mask):
    each = normalize((rewards * mask).double().sum(1))
    return torch.where(mask, each[:, None], 0.0)
""",
    """
def same_for_every_token(rewards, mask):
    total = torch.stack([row.sum() for row in rewards.requires_grad_()])
    each = (total - total.mean()) / total.std(correction=0)
    return torch.stack([a * m.float() for a, m in zip(each, mask)])
""",
    """
def same_for_every_token(rewards, mask):
    return (normalize(rewards.sum(1))[:, None] * mask).numpy()
""",
]
TOTAL, EXPANDED = "rewards.sum(1)", "each[:, None].expand(mask.shape)"
WRONG_SAME: Wrong = {
    "nothing returned": ("return", "return ", ""),
    "one a text": ("shape", f"{EXPANDED}.masked_fill(~mask, 0)", "each"),
    "rows and columns": ("same number", EXPANDED, "each.expand(mask.shape)"),
    "reward to go": ("same number", EXPANDED, "masked_whiten(rewards.flip(1).cumsum(1).flip(1), mask)"),
    "no mask": ("did not choose", ".masked_fill(~mask, 0)", ""),
    "mask upside down": ("did not choose", "~mask", "mask"),
    "score only": ("sum of all", TOTAL, "rewards[:, -1]"),
    "mean in place of the sum": ("sum of all", TOTAL, "rewards.sum(1) / mask.sum(1)"),
    "not normalised": ("mean 0", f"normalize({TOTAL})", TOTAL),
    "only the mean taken": ("mean square", f"normalize({TOTAL})", "rewards.sum(1) - rewards.sum(1).mean()"),
    "another deviation": ("mean square", f"normalize({TOTAL})", f"(t := {TOTAL} - 0.75) / t.std()"),
    "over tokens": ("not tokens", f"normalize({TOTAL})", TOTAL, EXPANDED, f"masked_whiten({EXPANDED}, mask)"),
    "sign": ("sign", "each[:, None]", "-each[:, None]"),
    "NaN": ("NaN", "each[:, None]", "(each / 0)[:, None]"),
    "in place": ("work on copies", TOTAL, "rewards.mul_(mask).sum(1)"),
    "where a reward came": ("same number", "~mask", "rewards == 0"),
    "from the first choice on": ("did not choose", "~mask", "mask.cumsum(1) == 0"),
    "up to the last choice": ("mean 0", "~mask", "mask.flip(1).cumprod(1).flip(1) == 0"),
    "totals above 0": ("sum of all", TOTAL, "rewards.sum(1).clamp(min=0)"),
    "sizes of totals": ("sum of all", TOTAL, "rewards.sum(1).abs()"),
}  # fmt: skip
EXERCISES = {1: (GAE, WRONG_GAE), 2: (FALLING, WRONG_FALLING), 3: (SAME, WRONG_SAME)}
RIGHT = [(number, form) for number, (right, _) in EXERCISES.items() for form in range(len(right))]
WRONG = [(number, name) for number, (_, wrong) in EXERCISES.items() for name in wrong]


def hint(number: int, answer: str) -> str:
    return hint_for(check_of("05_text_ppo_with_gae", number), IMPORTS + answer)


@pytest.mark.parametrize(("number", "form"), RIGHT)
def test_right_answers_of_every_form_pass(number: int, form: int) -> None:
    assert hint(number, EXERCISES[number][0][form]) == ""


@pytest.mark.parametrize(("number", "name"), WRONG)
def test_wrong_answers_are_refused_by_name(number: int, name: str) -> None:
    right, wrong = EXERCISES[number]
    word, *changes = wrong[name]
    answer = right[0]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in answer
        answer = answer.replace(old, new)
    assert word in hint(number, answer)
