"""Answers to the exercises of lesson 06: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

from tests.helpers import edited, exercise_tests

IMPORTS = "import math, torch\nimport numpy as np\nfrom ddpo_lessons.advantages import normalize\n"
ARGUMENTS = {1: "rewards, kind", 2: "curve, reward", 3: "kilobytes, log_p"}
BY_HAND = """
def f(rewards, kind):
    r = rewards.double()
    a = (r - r.mean()) / (r.std(correction=0) + 1e-8)
    if kind == "all":
        return a
    if kind == "negative":
        return torch.minimum(a, torch.zeros_like(a))
    positive = torch.where(a > 0, a, 0.0)
    return positive - positive.mean() if kind == "recentered" else positive
"""
LISTS = """
def f(rewards, kind):
    a = normalize(rewards).tolist()
    positive = [max(x, 0.0) for x in a]
    mean = sum(positive) / len(positive)
    negative = [min(x, 0.0) for x in a]
    recentered = [x - mean for x in positive]
    return {"all": a, "positive": positive, "recentered": recentered, "negative": negative}[kind]
"""
IN_PLACE = """
def f(rewards, kind):
    a = normalize(rewards)
    if kind in ("positive", "recentered"):
        a[a < 0] = 0
    if kind == "negative":
        a[a > 0] = 0
    return a - a.mean() if kind == "recentered" else a
"""
NUMPY = """
def f(rewards, kind):
    a = normalize(rewards).numpy()
    up = np.maximum(a, 0)
    return {"all": a, "positive": up, "recentered": up - up.mean(), "negative": a - up}[kind]
"""
BY_STEPS = """
def f(curve, reward):
    if curve[0][0] >= reward:
        return curve[0][1]
    for (r, k), (s, m) in zip(curve, curve[1:]):
        if r < reward <= s:
            share = (reward - r) / (s - r)
            return (1 - share) * k + share * m
"""
TENSORS = """
def f(curve, reward):
    r, k = torch.tensor(curve, dtype=torch.float64).unbind(1)
    reached = (r >= reward).nonzero().flatten()
    if not len(reached):
        return None
    n = reached[0]
    if n == 0:
        return k[0]
    return torch.lerp(k[n - 1], k[n], (reward - r[n - 1]) / (r[n] - r[n - 1]))
"""
INTERP = """
def f(curve, reward):
    for n in range(len(curve)):
        if curve[n][0] >= reward:
            low = max(n - 1, 0)
            return float(np.interp(reward, [curve[low][0], curve[n][0]], [curve[low][1], curve[n][1]]))
    return None
"""
RECURSIVE = """
def f(curve, reward):
    (r, k), *rest = curve
    if r >= reward:
        return k
    if not rest:
        return None
    s, m = rest[0]
    return k + (m - k) * (reward - r) / (s - r) if s >= reward else f(rest, reward)
"""
RIGHT = [
    *((1, answer) for answer in (BY_HAND, LISTS, IN_PLACE, NUMPY)),
    *((2, answer) for answer in (BY_STEPS, TENSORS, INTERP, RECURSIVE)),
    (3, "-kilobytes - 2 * (math.log(0.5) - log_p).clamp(min=0)"),
    (3, "-kilobytes.double() + 2 * torch.minimum(torch.zeros(()), log_p + math.log(2))"),
    (3, "-kilobytes - 2 * torch.relu(-log_p - 0.6931)"),
    (3, "[-k + 2 * min(0.0, p + math.log(2)) for k, p in zip(kilobytes.tolist(), log_p.tolist())]"),
]


def kinds(positive="up", recentered="up - up.mean()", negative="down", every="a"):
    """An answer to exercise 1 with some kinds of its own."""
    return f"""
def f(rewards, kind):
    a = normalize(rewards)
    up, down = a.clamp(min=0), a.clamp(max=0)
    return {{"all": lambda: {every}, "positive": lambda: {positive}, "recentered": lambda: {recentered},
            "negative": lambda: {negative}}}[kind]()
"""


def walk(found, first="curve[0][1]", never="None"):
    """An answer to exercise 2 that looks for the first two epochs with the reward between them."""
    return f"""
def f(curve, reward):
    if curve[0][0] >= reward:
        return {first}
    for (r, k), (s, m) in zip(curve, curve[1:]):
        if r < reward <= s:
            return {found}
    return {never}
"""


LINE = "k + (reward - r) / (s - r) * (m - k)"
PENALTY = "2 * (log_p - math.log(0.5)).clamp(max=0)"
WRONG = [
    (1, kinds(every="rewards - rewards.mean()"), "division"),
    (1, kinds(positive="down"), "the negative ones"),
    (1, kinds(positive="normalize(rewards.clamp(min=0))"), "not the rewards"),
    (1, kinds(positive="torch.where(rewards > rewards.median(), a, 0)"), "median"),
    (1, kinds(positive="normalize(up)"), "scale"), (1, kinds(positive="a.abs()"), "positive: other numbers"),
    (1, kinds(positive="up[up > 0]"), "one number for each"),
    (1, kinds(recentered="up"), "the positive ones"), (1, kinds(recentered="normalize(up)"), "scale"),
    (1, kinds(recentered="up - up[up > 0].mean()"), "zeros included"),
    (1, kinds(recentered="torch.where(a > 0, up - up.mean(), 0)"), "every sample"),
    (1, kinds(recentered="up + up.mean()"), "recentered: other numbers"),
    (1, kinds(negative="-down"), "below 0"), (1, kinds(negative="up"), "the positive ones"),
    (1, kinds(negative="down - down.mean()"), "negative: other numbers"),
    (1, kinds(every="rewards.sub_(rewards.mean())"), "work on copies"),
    (1, kinds(every="1.05 * a"), "all: other numbers"),
    (2, walk(LINE, first="max(k for r, k in curve)"), "starts at this"), (2, walk("m"), "along the line"),
    (2, walk("k"), "epoch before"), (2, walk("m + (reward - r) / (s - r) * (k - m)"), "other end"),
    (2, walk("(k + m) / 2"), "is wrong at"), (2, walk(LINE, never="0.0"), "None"),
    (2, walk("None"), "curve gets there"),
    (2, edited(walk(LINE), "    if curve", "    curve = sorted(curve)\n    if curve"), "order"),
    (3, f"kilobytes + {PENALTY}", "minus the size"), (3, f"-kilobytes - {PENALTY}", "lowers the reward"),
    (3, "-kilobytes + 2 * (log_p - math.log(0.5))", "no bonus"),
    (3, "-kilobytes + 2 * (log_p - math.log(0.5)).clamp(min=0)", "likely ones"),
    (3, "-kilobytes + 2 * log_p", "not at 1"),
    (3, "-kilobytes + 2 * (log_p - 0.5).clamp(max=0)", "logarithm of one half"),
    (3, "-kilobytes + 2 * (log_p.exp() - 0.5).clamp(max=0)", "already"),
    (3, f"-kilobytes + {PENALTY} / 2", "twice the guard"), (3, f"2 * -kilobytes + {PENALTY}", "is wrong for"),
    (3, "-kilobytes + 2 * (log_p - math.log10(0.5)).clamp(max=0)", "natural"),
    (3, f"(-kilobytes + {PENALTY}).mean()", "each image"),
    (3, f"kilobytes.neg_() + {PENALTY}", "work on copies"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "06_text_to_image_ddpo", IMPORTS, ARGUMENTS, RIGHT, WRONG
)
