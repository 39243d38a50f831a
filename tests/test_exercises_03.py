"""Answers to the exercises of lesson 03: wrong ones are refused with a hint, right ones of any form pass."""

from tests.helpers import exercise_tests

ARGUMENTS = {1: "action, mean, std", 2: "old, new, action", 3: "v, t, x_t, share, z=None, action=None"}
# What answers are written with; d is the distance of the means and z the noise, in units of σ.
IMPORTS = """
import math, torch
from torch.distributions import Normal
from torch.nn.functional import gaussian_nll_loss
from ddpo_lessons.ddim import gaussian_kl, gaussian_log_prob

def wide(std):
    return std.view(-1, 1, 1, 1)

def each(action, mean, std):
    return Normal(mean, wide(std)).log_prob(action)

def over_latent(numbers):
    return numbers.mean(dim=(1, 2, 3))

def d_and_z(old, new, action):
    return (new.mean - old.mean) / wide(old.std), (action - old.mean) / wide(old.std)

def log_prob_of(step, action):
    return gaussian_log_prob(action, step.mean, step.std, "mean")
"""
BY_DENSITIES = """
def f(action, mean, std):
    z = (action.double() - mean) / wide(std)
    peak = 1 / (wide(std).double() * math.sqrt(2 * math.pi))
    return over_latent((peak * (-(z**2) / 2).exp()).log())
"""
BY_TORCHS_LOSS = """
def f(action, mean, std):
    variance = wide(std**2).expand_as(mean)
    return -over_latent(gaussian_nll_loss(mean, action, variance, full=True, reduction="none"))
"""
BY_THE_PACKAGE = """
def f(v, t, x_t, share, z=None, action=None):
    before, after = alpha_bars(t)
    std = (share * (1 - after)) ** 0.5
    mean = draft_mean(*draft_x0_and_noise(v, x_t, before), after, std)
    if action is None:
        with torch.no_grad():
            action = mean + std * z
    return action, gaussian_log_prob(action, mean, std.flatten(), "mean")
"""


def ratio(formula, returned="over_latent({})", new="new"):
    return f"""
def f(old, new, action):
    d, z = d_and_z(old, {new}, action)
    return {returned.format(formula)}
"""


def score(value, mean="mean"):
    return f"over_latent(Normal({mean}, std).log_prob({value}))"


SCORE = score("action")


def step(
    variance="share * (1 - after)",
    drawn="(mean + std * z).detach()",
    log_prob=SCORE,
    kept="(1 - after - std**2).sqrt()",
    returned="action",
):
    return f"""
def f(v, t, x_t, share, z=None, action=None):
    before, after = alpha_bars(t)
    x0 = before.sqrt() * x_t - (1 - before).sqrt() * v
    noise = before.sqrt() * v + (1 - before).sqrt() * x_t
    std = ({variance}).sqrt()
    mean = after.sqrt() * x0 + {kept} * noise
    action = {drawn} if action is None else action
    return {returned}, {log_prob}
"""


FORMULA, LOG_PROB = "d * z - d**2 / 2", "over_latent(each(action, mean, std))"
ETA_ONE = "(lambda b, a: (1 - b / a) / (1 - b))(*alpha_bars(torch.tensor([499])))"
UNITS = "over_latent(-(((action - mean) / std) ** 2) / 2 - std.log() - 0.5 * math.log(2 * math.pi))"
RIGHT = [
    (1, LOG_PROB), (1, "gaussian_log_prob(action, mean, std, 'mean')"),
    (1, "gaussian_log_prob(action, mean, std, 'sum') / action[0].numel()"),
    (1, "torch.stack([Normal(m, s).log_prob(a).mean() for a, m, s in zip(action, mean, std)])"),
    (1, BY_DENSITIES), (1, "over_latent(each(action.double(), mean.double(), std.double()))"),
    (1, BY_TORCHS_LOSS), (2, ratio("(z**2 - (z - d) ** 2) / 2")),
    (2, ratio("d.double() * z - d.double() ** 2 / 2")), (2, ratio("d * (z - d / 2)")),
    (2, "log_prob_of(new, action) - log_prob_of(old, action)"), (2, "new.log_prob - old.log_prob"),
    (2, ratio("d * z", "over_latent({}) - gaussian_kl(new, old)")), (3, BY_THE_PACKAGE), (3, step()),
    (3, step(log_prob=f"{SCORE}.double()")), (3, step(log_prob=UNITS)),
    (3, step(drawn="mean + std * z", log_prob=score("action.detach()"), returned="action.detach()")),
    (3, step(kept="(1 - after - std**2).clamp(min=0).sqrt()")),
]  # fmt: skip
WRONG = [
    (1, "gaussian_log_prob(action, mean, std, 'sum')", "take the mean"),
    (1, "each(action, mean, std)", "shape"),
    (1, "over_latent(each(action, mean, std).exp())", "take its logarithm"),
    (1, f"{LOG_PROB}.exp()", "logarithm of each number"),
    (1, f"-{LOG_PROB}", "negative"),
    (1, f"{LOG_PROB} + 0.919", "without ½ log 2π"),
    (1, f"{LOG_PROB} - 0.919", "whole log 2π"),
    (1, f"{LOG_PROB} + std.log()", "without −log σ"),
    (1, f"{LOG_PROB} + 2 * std.log()", "+ log σ"),
    (1, "over_latent(-((action - mean) ** 2) / (2 * wide(std)) - wide(std).log()) - 0.9189", "σ² belongs"),
    (1, "over_latent(-((action - mean) ** 2) / wide(std) ** 2 - wide(std).log()) - 0.9189", "2σ²"),
    (1, "over_latent(-((action - mean) ** 2) / 2 * wide(std) ** 2 - wide(std).log()) - 0.9189", "brackets"),
    (1, f"{LOG_PROB}.half()", "float32"),
    (1, f"{LOG_PROB} + 0.05", "wanted tensor"),
    (1, "over_latent(each(action, mean.detach(), std))", "detached"),
    (1, "over_latent(each(action + mean - mean.detach(), mean, std))", "gradient with respect to"),
    (1, "over_latent((action - mean).log())", "nan"),
    (2, ratio(FORMULA, "256 * over_latent({})"), "take the mean"),
    (2, ratio(FORMULA, "({}).mean()"), "shape"),
    (2, ratio(FORMULA, "over_latent({}).exp()"), "its logarithm"),
    (2, ratio("d**2 / 2 - d * z"), "old over new"),
    (2, ratio("d * z"), "without − d²"),
    (2, ratio("d * z + d**2 / 2"), "d z + d²/2"),
    (2, ratio("d * z - d**2"), "half of d²"),
    (2, ratio("d * (z - d) - d**2 / 2"), "new mean"),
    (2, "over_latent((new.mean - old.mean) * (action - (new.mean + old.mean) / 2))", "dividing by σ"),
    (2, ratio(f"{FORMULA} + 0.05"), "wanted tensor"),
    (2, ratio("d.detach() * z - d**2 / 2"), "the gradient is not"),
    (2, ratio(FORMULA, new="new._replace(mean=new.mean.detach())"), "detached"),
    (3, step(log_prob=score("mean + (action - mean).detach()")), "the gradient is 0"),
    (3, step(drawn="mean + std * z"), "constant"),
    (3, step(log_prob=score("action", "mean.detach()")), "no gradient"),
    (3, step(log_prob="Normal(mean, std).log_prob(action).sum(dim=(1, 2, 3))"), "other log-probs"),
    (3, step(log_prob="Normal(mean, std).log_prob(action)"), "shape"),
    (3, step(kept="(1 - after).sqrt()"), "diffusers"),
    (3, step(f"{ETA_ONE} * (1 - after)"), "σ² = share · "),
    (3, step(log_prob=score("action", "(mean + mean.detach()) / 2")), "not that of"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "03_ddim_log_probs", IMPORTS, ARGUMENTS, RIGHT, WRONG
)
