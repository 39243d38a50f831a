"""Answers to the exercises of lesson 09: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

from tests.helpers import exercise_tests

ARGUMENTS = {1: "x, v, sigma", 2: "action, x, v, sigma, length, level", 3: "sigmas, eta", 4: "new, old"}
BY_PICTURE = """
def f(x, v, sigma):
    clean = x - sigma * v
    return ((1 - sigma) * clean - x) / sigma**2
"""
IN_FLOAT32 = """
def f(x, v, sigma):
    noise = x.float() + (1 - sigma) * v.float()
    return noise.div(-sigma)
"""


def log_prob_of(
    mean="x - v * length - drift", std="level * length**0.5", result="log_prob.flatten(1).mean(1)"
):
    """An answer to exercise 2, of which some parts are another's."""
    return f"""
def f(action, x, v, sigma, length, level):
    noise = x + (1 - sigma) * v
    drift = level**2 * length / (2 * sigma) * noise
    mean, std = {mean}, {std}
    log_prob = torch.distributions.Normal(mean, std).log_prob(action)
    return {result}
"""


BY_WEIGHTS = """
def f(action, x, v, sigma, length, level):
    pull = level**2 / (2 * sigma)
    mean = (1 - pull * length) * x - length * (1 + pull * (1 - sigma)) * v
    std = torch.tensor(level * length**0.5).double()
    per_number = -((action - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return per_number.flatten(1).mean(dim=1)
"""
FLOAT32 = """
def f(action, x, v, sigma, length, level):
    action, x, v = action.float(), x.float(), v.float()
    variance = level**2 * length
    error = action - (x - v * length - variance / (2 * sigma) * (x + (1 - sigma) * v))
    return -(error.square().mean((1, 2, 3)) / variance + math.log(variance) + math.log(2 * math.pi)) / 2
"""
BY_PARTS = """
def f(action, x, v, sigma, length, level):
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    mean = (1 - sigma + length) * clean + (sigma - length - level**2 * length / 2 / sigma) * noise
    std = level * math.sqrt(length)
    z = (action - mean) / std
    return torch.stack([(-0.5 * one**2).mean() for one in z]) - math.log(std * math.sqrt(2 * math.pi))
"""


def exact(
    std="torch.minimum(flow_coefficients(sigmas, eta)[2], after)",
    kept="(after**2 - std**2).sqrt()",
    extra="",
    kind="double",
):
    """An answer to exercise 3, of which some parts are another's."""
    return f"""
def f(sigmas, eta):
    now, after = sigmas[:-1].double(), sigmas[1:].double()
    std = {std}
    kept = {kept}
    weights = [1 - after + kept, (1 - now) * kept - now * (1 - after)]
    {extra}
    return torch.stack([*weights, std]).{kind}()
"""


KAPPA = """
def f(sigmas, eta):
    now, after = sigmas[:-1], sigmas[1:]
    room = torch.where(now == 1, 1 - after, 1 - now)
    std = (eta * (now / room).sqrt() * (now - after).sqrt()).clamp(max=after)
    kept = (after - std).sqrt() * (after + std).sqrt()
    return torch.stack((1 - after + kept, kept * (1 - now) - now + now * after, std))
"""
NOT_CUT = "flow_coefficients(sigmas, eta)[2].double()"
MOVED = "(new.mean - old.mean).square().flatten(1).mean(1)"
LOG = "(new.log_prob - old.log_prob)"
BY_NOISE = """
def f(new, old):
    z = (old.prev_sample - old.mean) / old.std.view(-1, 1, 1, 1)
    return ((new.mean - old.mean) * z).mean((1, 2, 3)).exp()
"""
BY_SAMPLE = """
def f(new, old):
    ratios = []
    for n, std in enumerate(old.std.tolist()):
        bias = (new.mean[n] - old.mean[n]).double().pow(2).mean() / 2 / std**2
        ratios.append(torch.exp(std * (new.log_prob[n].double() - old.log_prob[n].double() + bias)))
    return torch.stack(ratios)
"""
RIGHT = [
    (1, BY_PICTURE), (1, IN_FLOAT32), (1, "-x / sigma - (1 / sigma - 1) * v"),
    (1, "torch.stack([-(a + b - sigma * b) / sigma for a, b in zip(x, v)])"), (2, BY_WEIGHTS), (2, FLOAT32),
    (2, BY_PARTS), (2, log_prob_of()), (3, exact()), (3, exact(kind="float")), (3, KAPPA),
    (3, exact(kept="after * torch.nan_to_num((1 - (std / after) ** 2).clamp(min=0).sqrt())")), (4, BY_NOISE),
    (4, BY_SAMPLE), (4, f"(({LOG} + {MOVED} / (2 * old.std**2)) * old.std).exp()"),
    (4, f"torch.exp({LOG} * new.std + {MOVED} / new.std / 2)"),
]  # fmt: skip
WRONG = [
    (1, "(x + (1 - sigma) * v) / sigma", "sign"),
    (1, "-(x + (1 - sigma) * v)", "units"),
    (1, "-(x + (1 - sigma) * v) / sigma**2", "once"),
    (1, "-(x + v) / sigma", "not x + v"),
    (1, "-(x + sigma * v) / sigma", "neither"),
    (1, "-v / sigma", "not ε"),
    (1, "-(x - sigma * v) / sigma", "in the place of"),
    (1, "-(1 - sigma) * v / sigma", "x itself"),
    (1, "-1.05 * (x + (1 - sigma) * v) / sigma", "another score"),
    (1, "(-(x + (1 - sigma) * v) / sigma).mean()", "each x"),
    (2, log_prob_of("x - v * length"), "nothing makes room"),
    (2, log_prob_of("x - v * length + drift"), "removes old noise"),
    (2, log_prob_of("x - v * length - 2 * drift"), "the 2"),
    (2, log_prob_of("x - v * length - drift / level"), "not κ"),
    (2, log_prob_of("x - v * length - drift * sigma"), "divided by"),
    (2, log_prob_of("x - v * length - drift / length"), "times Δ"),
    (2, log_prob_of("x - v * length - level**2 * length / (2 * sigma) * v"), "not v"),
    (2, log_prob_of("x - v * length - level**2 * length / (2 * sigma) * x"), "not x"),
    (2, log_prob_of("x + v * length - drift"), "against"),
    (2, log_prob_of(std="level"), "not κ"),
    (2, log_prob_of(std="level * length"), "κΔ"),
    (2, log_prob_of(std="level**2 * length"), "square"),
    (2, log_prob_of(result="(log_prob + math.log(std)).flatten(1).mean(1)"), "-log σ"),
    (2, log_prob_of(result="(log_prob + math.log(2 * math.pi) / 2).flatten(1).mean(1)"), "2π"),
    (2, log_prob_of(result="(log_prob - ((action - mean) / std) ** 2 / 2).flatten(1).mean(1)"), "2σ²"),
    (2, log_prob_of(result="log_prob.flatten(1).sum(1)"), "not the sum"),
    (2, log_prob_of(result="log_prob.mean()"), "each latent"),
    (2, log_prob_of(result="log_prob.detach().flatten(1).mean(1)"), "detached"),
    (2, log_prob_of("x - v * length - drift.detach()"), "gradient with respect to v"),
    (2, log_prob_of(result="1.05 * log_prob.flatten(1).mean(1)"), "another log-prob"),
    (3, exact(std=NOT_CUT), "not a number"),
    (3, exact(std=NOT_CUT, kept="(after**2 - std**2).clamp(min=0).sqrt()"), "is above"),
    (3, exact(std="torch.zeros_like(after)"), "that of flow"),
    (3, exact(std="torch.minimum(flow_coefficients(sigmas, 0.7)[2], after)"), "another η"),
    (3, exact(kept="after"), "variance of the noise"),
    (3, exact(kept="-(after**2 - std**2).sqrt()"), "other root"),
    (3, exact(extra="weights[1] = -weights[1]"), "weight of the image"),
    (3, exact(extra="std = std[:-1]; weights = [w[:-1] for w in weights]"), "ten steps"),
    (4, f"{LOG}.exp()", "plain"),
    (4, f"({LOG} + {MOVED} / (2 * old.std**2)).exp()", "not multiplied"),
    (4, f"({LOG} * old.std).exp()", "not centered"),
    (4, f"(({LOG} - {MOVED} / (2 * old.std**2)) * old.std).exp()", "add it back"),
    (4, f"(({LOG} + {MOVED} / old.std**2) * old.std).exp()", "has a 2"),
    (4, f"(({LOG} + {MOVED} / 2) * old.std).exp()", "units of σ"),
    (4, f"({LOG} + {MOVED} / (2 * old.std**2)) * old.std", "another ratio"),
    (4, f"(({LOG} + {MOVED} / (2 * old.std**2)) * old.std).exp().detach()", "detached"),
    (4, f"(({LOG} + {MOVED} / (2 * old.std**2)) * old.std).exp().mean()", "each sample"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "09_flow_grpo", "import math, torch\n", ARGUMENTS, RIGHT, WRONG
)
