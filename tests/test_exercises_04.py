"""Answers to the exercises of lesson 04: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

from tests.helpers import exercise_tests

IMPORTS = "import math, torch\nfrom statistics import NormalDist\nfrom torch.distributions import Normal\n"
ARGUMENTS = {
    1: "ratio, advantages, clip_range",
    2: "shift, aim, dims, clip_range, sign",
    3: "log_ratio, advantages, stiffness",
}
BY_AUTOGRAD = """
def f(ratio, advantages, clip_range):
    x = ratio.log().requires_grad_()
    return torch.autograd.grad(clipped_loss(x.exp(), advantages, clip_range).sum(), x)[0]
"""
PAIR_BY_PAIR = """
def f(ratio, advantages, clip_range):
    def one(r, a):
        return 0.0 if (r > 1 + clip_range if a > 0 else r < 1 - clip_range) else -a * r
    return [one(r, a) for r, a in zip(ratio.tolist(), advantages.tolist())]
"""
IN_PLACE = """
def f(ratio, advantages, clip_range):
    gradient = -advantages.double() * ratio.double()
    gradient[(advantages * (ratio - 1) > 0) & ((ratio - 1).abs() > clip_range)] = 0
    return gradient
"""
BY_ERFC = """
def f(shift, aim, dims, clip_range, sign):
    edge = abs(math.log1p(sign * clip_range)) - aim + sign * shift**2 / 2
    return math.erfc(edge * dims**0.5 / shift / 2**0.5) / 2
"""
FLOAT32 = """
def f(shift, aim, dims, clip_range, sign):
    normal = log_ratio_normal(torch.tensor(shift), dims)
    edge = torch.tensor(1 + sign * clip_range).log() - sign * aim
    return normal.cdf(edge) if sign < 0 else 1 - normal.cdf(edge)
"""
ADDED_IN_FLOAT64 = """
def f(log_ratio, advantages, stiffness):
    x = log_ratio.double()
    return (stiffness - advantages) * x.expm1() - advantages - stiffness * x
"""
RIGHT = [
    (1, BY_AUTOGRAD),
    (1, PAIR_BY_PAIR),
    (1, IN_PLACE),
    (1, "-advantages * ratio * ~((advantages.sign() * (ratio - 1)) > clip_range)"),
    (1, "torch.where(-advantages * ratio >= -advantages * ratio.clamp(1 - clip_range, 1 + clip_range), "
        "-advantages * ratio, 0)"),
    (2, BY_ERFC),
    (2, FLOAT32),
    (2, "NormalDist(sign * shift**2 / 2 - aim, shift / dims**0.5)"
        ".cdf(-sign * math.log(1 + sign * clip_range))"),
    (2, "Normal(0.0, 1.0).cdf(-(torch.tensor(sign * shift**2 / 2 - aim) + abs(math.log1p(sign * clip_range)))"
        " * dims**0.5 / shift)"),
    (3, ADDED_IN_FLOAT64),
    (3, "-(advantages * torch.exp(log_ratio)) + stiffness * torch.expm1(log_ratio) - stiffness * log_ratio"),
    (3, "stiffness * (log_ratio.expm1() - log_ratio) - advantages - advantages * log_ratio.expm1()"),
    (3, "-advantages.float() * log_ratio.float().exp()"
        " + stiffness * (log_ratio.float().expm1() - log_ratio.float())"),
    (3, "torch.stack([s * (torch.expm1(x) - x) - a * x.exp() for x, a, s in zip(log_ratio, advantages, "
        "[stiffness] * len(log_ratio))])"),
]  # fmt: skip
FAR = "((ratio - 1).abs() > clip_range)"
CUT = f"((advantages * (ratio - 1) > 0) & {FAR})"
SPREAD = "shift / math.sqrt(dims)"
EDGE, OTHER_EDGE = "abs(math.log1p(sign * clip_range))", "abs(math.log1p(-sign * clip_range))"
WANTED = "aim - sign * shift**2 / 2"
STOPPED = f"NormalDist().cdf(({WANTED} - {EDGE}) / ({SPREAD}))"
OTHER = f"NormalDist().cdf((-({WANTED}) - {OTHER_EDGE}) / ({SPREAD}))"
K3 = "(torch.expm1(log_ratio) - log_ratio)"
WRONG = [
    (1, f"advantages * ratio * ~{CUT}", "sign"),
    (1, f"-advantages * ~{CUT}", "factor"),
    (1, "-advantages * ratio", "no gradient"),
    (1, f"-advantages * ratio * ~{FAR}", "may keep"),
    (1, f"-advantages * ratio * ~((advantages * (ratio - 1) < 0) & {FAR})", "maximum"),
    (1, f"-advantages * ratio * ~{CUT} / len(ratio)", "mean"),
    (1, f"-advantages * torch.where({CUT}, ratio.clamp(1 - clip_range, 1 + clip_range), ratio)", "constant"),
    (1, f"~{CUT}", "not whether"),
    (1, f"(-advantages * ratio * ~{CUT}).sum()", "each pair"),
    (1, f"-advantages * ratio * ~{CUT} * 1.05", "wrong at"),
    (1, f"-advantages.mul_(ratio) * ~{CUT}", "work on copies"),
    (2, f"NormalDist().cdf(({WANTED} - {EDGE}) / shift)", "scatters less"),
    (2, f"NormalDist().cdf(({WANTED} - {EDGE}) / (shift / dims))", "root"),
    (2, f"NormalDist().cdf(({WANTED} - {EDGE}) / (shift**2 / dims))", "wrong at"),
    (2, f"NormalDist().cdf(-{EDGE} / ({SPREAD}))", "center is missing"),
    (2, f"NormalDist().cdf((aim + sign * shift**2 / 2 - {EDGE}) / ({SPREAD}))", "center sinks by d²/2"),
    (2, f"NormalDist().cdf((aim - sign * shift**2 - {EDGE}) / ({SPREAD}))", "half of"),
    (2, f"NormalDist().cdf((-sign * shift**2 / 2 - {EDGE}) / ({SPREAD}))", "aim is missing"),
    (2, f"NormalDist().cdf((sign * aim - sign * shift**2 / 2 - {EDGE}) / ({SPREAD}))", "lowers bad"),
    (2, f"NormalDist().cdf(({WANTED} - clip_range) / ({SPREAD}))", "not of log"),
    (2, f"{STOPPED} + {OTHER}", "wanted side"),
    (2, f"1 - {STOPPED}", "keeps its gradient"),
    (2, f"{STOPPED} / 2", "wrong at"),
    (2, OTHER, "other sign"),
    (2, f"{STOPPED} + 4e-4", "wrong at"),
    (3, f"advantages * log_ratio.exp() + stiffness * {K3}", "falls"),
    (3, f"-advantages * log_ratio.exp() - stiffness * {K3}", "costs"),
    (3, "-advantages * log_ratio.exp() + stiffness * log_ratio**2 / 2", "approx_kl"),
    (3, "-advantages * log_ratio.exp() + stiffness * (log_ratio.exp() - log_ratio)", "0 at"),
    (3, "-advantages * log_ratio.exp() + stiffness * (log_ratio.expm1() + log_ratio)", "third term"),
    (3, f"-advantages * log_ratio.exp() + {K3}", "another loss"),
    (3, f"(-advantages * log_ratio.exp() + stiffness * {K3}).mean()", "before the mean"),
    (3, "-advantages * log_ratio.exp() + stiffness * (log_ratio.exp() - 1 - log_ratio)", "expm1"),
    (3, f"-advantages * log_ratio.exp().detach() + stiffness * {K3}", "detached"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "04_ppo_clipping", IMPORTS, ARGUMENTS, RIGHT, WRONG
)
