"""Answers to the exercises of lesson 03: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import check_of
from torch.distributions import Normal
from torch.nn.functional import gaussian_nll_loss

from ddpo_lessons.ddim import gaussian_kl, gaussian_log_prob
from ddpo_lessons.lesson import why_not

LESSON = "03_ddim_log_probs"
Answer = Callable[..., Any]
check = functools.cache(functools.partial(check_of, LESSON))


def wide(std: torch.Tensor) -> torch.Tensor:
    return std.view(-1, 1, 1, 1)


def each(action: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return Normal(mean, wide(std)).log_prob(action)


def over_latent(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.mean(dim=(1, 2, 3))


def one_by_one(action: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    rows = zip(action, mean, std, strict=True)
    return torch.stack([Normal(m, s).log_prob(a).mean() for a, m, s in rows])


def by_densities(action: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    z = (action.double() - mean) / wide(std)
    peak = 1 / (wide(std).double() * math.sqrt(2 * math.pi))
    return over_latent((peak * (-(z**2) / 2).exp()).log())


def by_torchs_loss(action: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    variance = wide(std**2).expand_as(mean)
    return -over_latent(gaussian_nll_loss(mean, action, variance, full=True, reduction="none"))


LOG_PROB_RIGHT: dict[str, Answer] = {
    "torch's Gaussian": lambda a, m, s: over_latent(each(a, m, s)),
    "the package's": lambda a, m, s: gaussian_log_prob(a, m, s, "mean"),
    "sum over D divided by D": lambda a, m, s: gaussian_log_prob(a, m, s, "sum") / a[0].numel(),
    "one by one": one_by_one,
    "logarithm of densities, in float64": by_densities,
    "in float64": lambda a, m, s: over_latent(each(a.double(), m.double(), s.double())),
    "torch's loss": by_torchs_loss,
}
LOG_PROB_WRONG: dict[str, tuple[Answer, str]] = {
    "sum": (lambda a, m, s: gaussian_log_prob(a, m, s, "sum"), "take the mean"),
    "one number": (lambda a, m, s: each(a, m, s).mean(), "shape"),
    "no mean": (each, "shape"),
    "density": (lambda a, m, s: over_latent(each(a, m, s).exp()), "logarithm"),
    "density of the mean log-prob": (lambda a, m, s: over_latent(each(a, m, s)).exp(), "logarithm"),
    "sign": (lambda a, m, s: -over_latent(each(a, m, s)), "negative"),
    "no 2π": (lambda a, m, s: over_latent(each(a, m, s)) + 0.919, "2π"),
    "all of log 2π": (lambda a, m, s: over_latent(each(a, m, s)) - 0.919, "whole log 2π"),
    "no log σ": (lambda a, m, s: over_latent(each(a, m, s)) + s.log(), "log σ"),
    "plus log σ": (lambda a, m, s: over_latent(each(a, m, s)) + 2 * s.log(), "log σ"),
    "σ for σ²": (
        lambda a, m, s: over_latent(-((a - m) ** 2) / (2 * wide(s)) - wide(s).log()) - 0.9189,
        "σ² belongs",
    ),
    "no 2": (lambda a, m, s: over_latent(-((a - m) ** 2) / wide(s) ** 2 - wide(s).log()) - 0.9189, "2σ²"),
    "no brackets": (
        lambda a, m, s: over_latent(-((a - m) ** 2) / 2 * wide(s) ** 2 - wide(s).log()) - 0.9189, "brackets"
    ),
    "no return": (lambda a, m, s: None, "return"),
    "in float16": (lambda a, m, s: over_latent(each(a, m, s)).half(), "float32"),
    "log σ²": (lambda a, m, s: over_latent(each(a, m, s)) - s.log(), "wanted"),
    "median": (lambda a, m, s: each(a, m, s).flatten(1).median(1).values, "wanted"),
    "error of the mean": (lambda a, m, s: Normal(0.0, s).log_prob(over_latent(a - m)), "wanted"),
    "no square": (
        lambda a, m, s: over_latent(-(a - m) / (2 * wide(s) ** 2) - wide(s).log()) - 0.9189, "wanted"
    ),
    "abs": (lambda a, m, s: over_latent(-(a - m).abs() / wide(s) / 2 - wide(s).log()) - 0.9189, "wanted"),
    "a little off": (lambda a, m, s: over_latent(each(a, m, s)) + 0.05, "wanted"),
    "detached": (lambda a, m, s: over_latent(each(a, m.detach(), s)), "detached"),
    "a gradient of the action": (
        lambda a, m, s: over_latent(each(a + m - m.detach(), m, s)), "the gradient with respect to the mean"
    ),
    "NaN": (lambda a, m, s: over_latent((a - m).log()), "nan"),
}  # fmt: skip


def drift_and_draw(old: Any, new: Any, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (new.mean - old.mean) / wide(old.std), (action - old.mean) / wide(old.std)


def ratio(formula: Answer) -> Answer:
    """Make an answer of a formula in d and z."""
    return lambda old, new, action: over_latent(formula(*drift_and_draw(old, new, action)))


def in_float64(old: Any, new: Any, action: torch.Tensor) -> torch.Tensor:
    d, z = drift_and_draw(old, new, action)
    return over_latent(d.double() * z - d.double() ** 2 / 2)


def log_prob_of(step: Any, action: torch.Tensor) -> torch.Tensor:
    return gaussian_log_prob(action, step.mean, step.std, "mean")


def detached_mean(old: Any, new: Any, action: torch.Tensor) -> torch.Tensor:
    return ratio(lambda d, z: d * z - d**2 / 2)(old, new._replace(mean=new.mean.detach()), action)


def without_sigma(old: Any, new: Any, action: torch.Tensor) -> torch.Tensor:
    d, z = new.mean - old.mean, action - old.mean
    return over_latent(d * z - d**2 / 2)


def detached_drift(old: Any, new: Any, action: torch.Tensor) -> torch.Tensor:
    d, z = drift_and_draw(old, new, action)
    return over_latent(d * z - d.detach() * d / 2)


def formula(d: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return d * z - d**2 / 2


RATIO_RIGHT: dict[str, Answer] = {
    "squares": ratio(lambda d, z: (z**2 - (z - d) ** 2) / 2),
    "in float64": in_float64,
    "factored": ratio(lambda d, z: d * (z - d / 2)),
    "two log-probs": lambda old, new, action: log_prob_of(new, action) - log_prob_of(old, action),
    "the steps' own": lambda old, new, action: new.log_prob - old.log_prob,
    "with the KL": lambda old, new, action: (
        ratio(lambda d, z: d * z)(old, new, action) - gaussian_kl(new, old)
    ),
}
RATIO_WRONG: dict[str, tuple[Answer, str]] = {
    "sum": (lambda o, n, a: 256 * ratio(lambda d, z: d * z - d**2 / 2)(o, n, a), "take the mean"),
    "one number": (lambda o, n, a: ratio(lambda d, z: d * z - d**2 / 2)(o, n, a).mean(), "shape"),
    "ratio": (lambda o, n, a: ratio(lambda d, z: d * z - d**2 / 2)(o, n, a).exp(), "its logarithm"),
    "sign": (ratio(lambda d, z: d**2 / 2 - d * z), "old over new"),
    "no return": (lambda old, new, action: None, "return"),
    "the old step's action": (lambda o, n, a: ratio(formula)(o, n, o.prev_sample), "wanted"),
    "the new step's action": (lambda o, n, a: ratio(formula)(o, n, n.prev_sample), "wanted"),
    "no square": (ratio(lambda d, z: d * z), "without"),
    "plus": (ratio(lambda d, z: d * z + d**2 / 2), "d z \\+ d²/2"),
    "no half": (ratio(lambda d, z: d * z - d**2), "half"),
    "z of the new mean": (ratio(lambda d, z: d * (z - d) - d**2 / 2), "new mean"),
    "no σ": (without_sigma, "dividing by σ"),
    "means first": (
        lambda o, n, a: (
            over_latent(d := drift_and_draw(o, n, a)[0])
            * (over_latent(drift_and_draw(o, n, a)[1]) - over_latent(d) / 2)
        ),
        "wanted",
    ),
    "one σ for all": (
        lambda o, n, a: ratio(lambda d, z: d * z - d**2 / 2)(o._replace(std=o.std[:1]), n, a),
        "wanted",
    ),
    "size of d": (ratio(lambda d, z: d.abs() * z - d**2 / 2), "wanted"),
    "draw detached": (ratio(lambda d, z: d.detach() * z - d**2 / 2), "gradient"),
    "d backwards": (ratio(lambda d, z: -d * z - d**2 / 2), "wanted"),
    "a little off": (ratio(lambda d, z: d * z - d**2 / 2 + 0.05), "wanted"),
    "detached": (detached_mean, "detached"),
    "half detached": (detached_drift, "gradient"),
    "NaN": (ratio(lambda d, z: (d * z).log()), "nan"),
}


def alpha_bars(timesteps: torch.Tensor) -> Any:
    return check(3).__globals__["alpha_bars"](timesteps)


def eta_one() -> Any:
    """Return the share of σ² in the noise at t = 499, (1, 1, 1, 1), if η is 1."""
    before, after = alpha_bars(torch.tensor([499]))
    return (1 - before / after) / (1 - before)


def share_answer(
    share_of: Answer = lambda share, after: share * (1 - after),
    drawn: Answer = lambda mean, std, z: (mean + std * z).detach(),
    score: Answer = lambda action, mean, std: over_latent(Normal(mean, std).log_prob(action)),
    weight: Answer = lambda after, std: (1 - after - std**2).sqrt(),
    shares: Answer = alpha_bars,
    returned: Answer = lambda action: action,
) -> Answer:
    """Make an answer to exercise 3, of which one part differs."""

    def answer(v: Any, t: Any, x_t: Any, share: float, z: Any = None, action: Any = None) -> Any:
        before, after = shares(t)
        x0 = before.sqrt() * x_t - (1 - before).sqrt() * v
        noise = before.sqrt() * v + (1 - before).sqrt() * x_t
        std = share_of(share, after).sqrt()
        mean = after.sqrt() * x0 + weight(after, std) * noise
        action = drawn(mean, std, z) if action is None else action
        return returned(action), score(action, mean, std)

    return answer


def by_the_package(v: Any, t: Any, x_t: Any, share: float, z: Any = None, action: Any = None) -> Any:
    """With the notebook's own parts."""
    parts = check(3).__globals__
    before, after = alpha_bars(t)
    std = (share * (1 - after)) ** 0.5
    mean = parts["draft_mean"](*parts["draft_x0_and_noise"](v, x_t, before), after, std)
    if action is None:
        with torch.no_grad():
            action = mean + std * z
    return action, gaussian_log_prob(action, mean, std.flatten(), "mean")


def in_units_of_sigma(action: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return over_latent(-(((action - mean) / std) ** 2) / 2 - std.log() - 0.5 * math.log(2 * math.pi))


def detached_score(action: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return over_latent(Normal(mean, std).log_prob(action.detach()))


def moves_along(action: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """An action that keeps its place beside the mean: the log-prob is right, its gradient 0."""
    return over_latent(Normal(mean, std).log_prob(mean + (action - mean).detach()))


SHARE_RIGHT: dict[str, Answer] = {
    "the notebook's parts": by_the_package,
    "torch's Gaussian": share_answer(),
    "in float64": share_answer(score=lambda a, m, s: over_latent(Normal(m, s).log_prob(a).double())),
    "in units of σ": share_answer(score=in_units_of_sigma),
    "detached at the end": share_answer(
        drawn=lambda mean, std, z: mean + std * z, score=detached_score, returned=torch.Tensor.detach
    ),
    "one minus share": share_answer(weight=lambda after, std: (1 - after - std**2).clamp(min=0).sqrt()),
}
SHARE_WRONG: dict[str, tuple[Answer, str]] = {
    "attached action": (
        share_answer(drawn=lambda mean, std, z: mean + std * z, returned=torch.Tensor.detach), "is 0"
    ),
    "attached and returned so": (share_answer(drawn=lambda mean, std, z: mean + std * z), "constant"),
    "moves along": (share_answer(score=moves_along), "is 0"),
    "detached mean": (
        share_answer(score=lambda a, m, s: over_latent(Normal(m.detach(), s).log_prob(a))), "no gradient"
    ),
    "sum": (
        share_answer(score=lambda a, m, s: Normal(m, s).log_prob(a).sum(dim=(1, 2, 3))), "log-probs"
    ),
    "no reduction": (share_answer(score=lambda a, m, s: Normal(m, s).log_prob(a)), "shape"),
    "σ² is the share": (
        share_answer(lambda share, after: share + 0 * after, score=in_units_of_sigma), "diffusers"
    ),
    "σ of η = 1": (share_answer(lambda share, after: eta_one() * (1 - after)), "share · "),
    "share of the σ": (
        share_answer(share_of=lambda share, after: share**2 * (1 - after)), "diffusers"
    ),
    "share of the picture": (share_answer(share_of=lambda share, after: share * after), "diffusers"),
    "all noise stays": (share_answer(weight=lambda after, std: (1 - after).sqrt()), "diffusers"),
    "no noise stays": (share_answer(weight=lambda after, std: 0 * after), "diffusers"),
    "before and after": (
        share_answer(shares=lambda t: alpha_bars(t)[::-1]), "diffusers"
    ),
    "the draw forgotten": (share_answer(drawn=lambda mean, std, z: mean.detach()), "diffusers"),
    "half a gradient": (
        share_answer(score=lambda a, m, s: over_latent(Normal((m + m.detach()) / 2, s).log_prob(a))),
        "not that of",
    ),
    "log-prob of z": (
        share_answer(score=lambda a, m, s: over_latent(Normal(0.0, 1.0).log_prob(a - m) - s.log())),
        "log-probs",
    ),
    "minus z": (share_answer(drawn=lambda mean, std, z: (mean - std * z).detach()), "diffusers"),
}  # fmt: skip


RIGHT = {1: LOG_PROB_RIGHT, 2: RATIO_RIGHT, 3: SHARE_RIGHT}
WRONG = {1: LOG_PROB_WRONG, 2: RATIO_WRONG, 3: SHARE_WRONG}


@pytest.mark.parametrize(("number", "name"), [(n, name) for n, answers in RIGHT.items() for name in answers])
def test_right_answers_of_another_form_pass(number: int, name: str) -> None:
    assert why_not(check(number), RIGHT[number][name]) == ""


@pytest.mark.parametrize(("number", "name"), [(n, name) for n, answers in WRONG.items() for name in answers])
def test_wrong_answers_are_refused_with_a_hint(number: int, name: str) -> None:
    answer, hint = WRONG[number][name]
    assert re.search(hint, why_not(check(number), answer))
