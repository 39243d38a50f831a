"""Answers to the exercises of lesson 05: wrong ones are refused with a hint, right ones of any form pass."""

from tests.helpers import edited, exercise_tests

IMPORTS = "import torch\nfrom ddpo_lessons.advantages import gae, masked_whiten, normalize\n"
ARGUMENTS = {1: "rewards, values, lam", 2: "rewards, num_steps", 3: "rewards, mask"}
BACKWARDS = """
def f(rewards, values, lam):
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for r, v in list(zip(rewards, values))[::-1]:
        next_advantage = r + next_value - v + lam * next_advantage
        next_value = v
        advantages.insert(0, next_advantage)
    return advantages
"""
BY_SUMS = """
def f(rewards, values, lam):
    n, values = len(rewards), list(values) + [0]
    delta = [rewards[j] + values[j + 1] - values[j] for j in range(n)]
    return [sum(lam ** (l - j) * delta[l] for l in range(j, n)) for j in range(n)]
"""
BY_A_MATRIX = """
def f(rewards, values, lam):
    r, v = torch.tensor(rewards), torch.tensor(values, requires_grad=True)
    delta = r + torch.cat([v[1:], torch.zeros(1)]) - v
    j = torch.arange(len(r))
    gap = (j[None] - j[:, None]).clamp(min=0)
    return ((lam ** gap.float()) * (j[None] >= j[:, None])) @ delta
"""
MIXED = """
def f(rewards, values, lam):
    n, values = len(rewards), list(values) + [0]
    def k_step(j, k):
        return sum(rewards[j:j + k]) + values[j + k] - values[j]
    out = []
    for j in range(n):
        mixed = sum((1 - lam) * lam ** (k - 1) * k_step(j, k) for k in range(1, n - j))
        out.append(mixed + lam ** (n - j - 1) * k_step(j, n - j))
    return tuple(out)
"""
BY_WEIGHTS = """
def f(rewards, num_steps):
    w = torch.arange(num_steps, 0, -1).float()
    w = w / w.square().mean().sqrt()
    a = normalize(rewards)
    return a[:, None] * w
"""
BY_OUTER = """
def f(rewards, num_steps):
    w = torch.linspace(1, 1 / num_steps, num_steps).double()
    return torch.outer(normalize(rewards).double(), w / w.square().mean().sqrt())
"""
SCALED_LAST = """
def f(rewards, num_steps):
    a = normalize(rewards)[:, None] * torch.arange(num_steps, 0, -1)
    return a / a.square().mean().sqrt()
"""
COLUMNS = """
def f(rewards, num_steps):
    a = ((rewards - rewards.mean()) / rewards.std(correction=0)).requires_grad_()
    size = (sum((t + 1) ** 2 for t in range(num_steps)) / num_steps) ** 0.5
    return torch.stack([a * (num_steps - t) / size for t in range(num_steps)], dim=1)
"""
LISTS = """
def f(rewards, num_steps):
    size = (sum(t * t for t in range(1, num_steps + 1)) / num_steps) ** 0.5
    return [[a * t / size for t in range(num_steps, 0, -1)] for a in normalize(rewards).tolist()]
"""
FILLED = """
def f(rewards, mask):
    each = normalize(rewards.sum(1))
    return each[:, None].expand(mask.shape).masked_fill(~mask, 0)
"""
BY_WHERE = """
def f(rewards, mask):
    each = normalize((rewards * mask).double().sum(1))
    return torch.where(mask, each[:, None], 0.0)
"""
ROW_BY_ROW = """
def f(rewards, mask):
    total = torch.stack([row.sum() for row in rewards.requires_grad_()])
    each = (total - total.mean()) / total.std(correction=0)
    return torch.stack([a * m.float() for a, m in zip(each, mask)])
"""
RIGHT = [
    (1, BACKWARDS), (1, BY_SUMS), (1, BY_A_MATRIX), (1, MIXED),
    (1, "gae(torch.tensor(rewards), torch.tensor(values), gamma=1.0, lam=lam)[0]"), (2, BY_WEIGHTS),
    (2, BY_OUTER), (2, SCALED_LAST), (2, COLUMNS), (2, LISTS), (3, FILLED),
    (3, "normalize(rewards.sum(1))[:, None] * mask"), (3, BY_WHERE), (3, ROW_BY_ROW),
    (3, "(normalize(rewards.sum(1))[:, None] * mask).numpy()"),
]  # fmt: skip
TD, ADD = "r + next_value - v", "insert(0, next_advantage)"
LINE, WEIGHTED, UNIT = "torch.arange(num_steps, 0, -1).float()", "a[:, None] * w", "normalize(rewards)"
TOTAL, EXPANDED = "rewards.sum(1)", "each[:, None].expand(mask.shape)"


def given(*changes):
    return edited(BACKWARDS, *changes)


def falling(*changes):
    return edited(BY_WEIGHTS, *changes)


def same(*changes):
    return edited(FILLED, *changes)


WRONG = [
    (1, given(ADD, "append(next_advantage)"), "order"), (1, given(TD, "r"), "minus its value"),
    (1, given(TD, f"(1 - lam) * ({TD})"), "average"), (1, given(TD, "v - r - next_value"), "sign"),
    (1, given("lam * next", "next"), "λ = 0"), (1, given(" + lam * next_advantage", ""), "λ = 1"),
    (1, given("lam * next", "lam ** 2 * next"), "A of the next"),
    (1, given("return advantages", "return advantages[:-1]"), "shape"),
    (1, given("return advantages", "return [float('nan')] * len(rewards)"), "NaN"),
    (1, given("return advantages", "return torch.tensor(advantages).abs()"), "below 0"),
    (1, given("    return", "    rewards.clear()\n    return"), "work on copies"),
    (2, falling(WEIGHTED, "w"), "images"), (2, falling(LINE, "torch.ones(num_steps)"), "fall"),
    (2, falling(LINE, "0.7 ** torch.arange(num_steps)"), "weighted"),
    (2, falling(UNIT, "rewards"), "use normalize"),
    (2, falling(UNIT, "rewards - rewards.mean()"), "mean square"),
    (2, falling(WEIGHTED, "-a[:, None] * w"), "sign"),
    (2, falling(UNIT, "normalize(rewards.abs())"), "its reward"),
    (2, falling("w.square().mean().sqrt()", "7.5**0.5"), "3 steps"),
    (2, falling(WEIGHTED, "a[:, None] * w / 0 * 0"), "NaN"),
    (2, falling(UNIT, "normalize(rewards.sub_(rewards.mean()))"), "work on copies"),
    (3, same(f"{EXPANDED}.masked_fill(~mask, 0)", "each"), "shape"),
    (3, same(EXPANDED, "each.expand(mask.shape)"), "same number"),
    (3, same(".masked_fill(~mask, 0)", ""), "did not choose"),
    (3, same(TOTAL, "rewards[:, -1]"), "sum of all"), (3, same(f"normalize({TOTAL})", TOTAL), "mean 0"),
    (3, same(f"normalize({TOTAL})", "rewards.sum(1) - rewards.sum(1).mean()"), "mean square"),
    (3, same("each[:, None]", "-each[:, None]"), "sign"),
    (3, same("each[:, None]", "(each / 0)[:, None]"), "NaN"),
    (3, same(TOTAL, "rewards.mul_(mask).sum(1)"), "work on copies"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "05_text_ppo_with_gae", IMPORTS, ARGUMENTS, RIGHT, WRONG
)
