"""Answers to the exercises of lesson 11: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.results import reward_gradient
from tests.helpers import edited, exercise_tests
from tests.test_notebooks import ROOT, bare, definitions, syntax_tree

IMPORTS = "import torch, math, numpy as np\nfrom torch.nn.functional import normalize\n"
ARGUMENTS = {
    1: "theta, length, total, steps",
    2: "claimed, measure, generator",
    3: "family, denoiser, trajectory, rows, steps",
}
BY_AUTOGRAD = """
def f(theta, length, total, steps):
    weight, state = torch.tensor(float(theta), requires_grad=True), torch.tensor(1.0)
    for k in range(total):
        state = (state.detach() if k == total - steps else state) * (1 - length * weight)
    return torch.autograd.grad(state, weight)[0]
"""
TERM_BY_TERM = """
def f(theta, length, total, steps):
    keep = 1 - length * theta
    return sum(-length * keep ** (total - j) * keep ** (j - 1) for j in range(1, steps + 1))
"""
# With the parts that wrong answers change.
SEES = """
def f(claimed, measure, generator):
    directions = normalize(DRAWN)
    measured = torch.tensor([measure(d) for d in directions])
    claims = directions @ claimed
    return RETURNED
"""
DRAWN, NEAR = (
    "torch.randn(40, len(claimed), generator=generator)",
    "(claims - measured).norm() <= 0.1 * measured.norm()",
)
SIGNS = "torch.randint(2, (64, len(claimed)), generator=generator) * 2.0 - 1"
ALL_AXES = """
def f(claimed, measure, generator):
    measured = torch.tensor([measure(axis) for axis in torch.eye(len(claimed))])
    return ((claimed - measured).norm() / measured.norm()).item() < 0.05
"""
ONE_BY_ONE = """
def f(claimed, measure, generator):
    typical = claimed.norm().item() / len(claimed) ** 0.5
    for _ in range(80):
        d = torch.randn(len(claimed), generator=generator).double()
        d /= d.norm()
        if not abs(measure(d) - float(claimed.double() @ d)) < 0.06 * typical:
            return False
    return True
"""
OWN = """
def f(claimed, measure, generator):
    return abs(measure(claimed / claimed.norm()) / claimed.norm() - 1) < 0.1
"""


def sees(drawn=DRAWN, returned=NEAR):
    return edited(SEES, "DRAWN", drawn, "RETURNED", returned)


# DRTune: how the network's input, the sum and the states are taken.
REPLAY = """
def f(family, denoiser, trajectory, rows, steps):
    schedule, total = trajectory.schedule, len(trajectory.schedule.stds)
    conditioning = {name: value[rows] for name, value in trajectory.conditioning.items()}
    latents, asked = trajectory.latents[rows, FIRST], []
    for number in range(FIRST, total):
        timesteps = schedule.timesteps[number].expand(len(rows))
        seen = INPUT
        output = family.predict(denoiser, seen, timesteps, conditioning, trajectory.guidance_scale)
        asked.append((seen, timesteps, OUTPUT))
        latents = NEXT
    return latents, asked
"""
PARTS = {
    "FIRST": "total - steps", "INPUT": "latents.detach()", "OUTPUT": "output",
    "NEXT": "schedule.step(output, timesteps, latents, noise=torch.zeros_like(latents)).mean",
}  # fmt: skip
MEAN = PARTS["NEXT"]
BY_GAINS = "latents + (schedule.sigmas[number + 1] - schedule.sigmas[number]) * output"


def replayed(**changes):
    return edited(REPLAY, *(word for part in (PARTS | changes).items() for word in part))


RIGHT = [
    (1, BY_AUTOGRAD), (1, TERM_BY_TERM),
    (1, "-(steps / total) * length * total * (1 - length * theta) ** (total - 1)"),
    (1, "np.float32(-steps * length) * math.pow(1 - length * theta, total - 1)"),
    (1, "torch.tensor(-steps * length * (1 - length * theta) ** (total - 1), requires_grad=True)"),
    (2, sees()), (2, sees(SIGNS)),
    (2, sees(returned="bool((claims / measured.norm() - measured / measured.norm()).norm() < 0.05)")),
    (2, ALL_AXES), (2, ONE_BY_ONE), (3, replayed()), (3, replayed(INPUT="torch.tensor(latents.tolist())")),
    (3, replayed(NEXT=BY_GAINS)), (3, replayed(NEXT=f"latents.clone() + ({BY_GAINS} - latents)")),
]  # fmt: skip
KEEP = "(1 - length * theta)"
WRONG = [
    (1, f"steps * length * {KEEP} ** (total - 1)", "sign"),
    (1, f"-total * length * {KEEP} ** (total - 1)", "whole derivative"),
    (1, f"-length * {KEEP} ** (total - 1)", "a term for each"),
    (1, f"-steps * length * {KEEP} ** total", "no factor of that step"),
    (1, f"-steps * length * {KEEP} ** (steps - 1)", "smaller than 1"),
    (1, f"-steps * {KEEP} ** (total - 1)", "gain is missing"),
    (1, "steps / total", "not its fraction"),
    (1, f"-(steps - 1) * length * {KEEP} ** (total - 1)", "is wrong at"),
    (2, OWN, "half of it is lost"),
    (2, sees(returned="(claims.abs() - measured.abs()).norm() <= 0.1 * measured.norm()"), "downhill"),
    (2, sees(returned="torch.cosine_similarity(claims, measured, dim=0) > 0.99"), "a fifth too long"),
    (2, sees(returned="not (claims - measured).norm() > 0.1 * measured.norm()"), "NaN"),
    (2, sees("torch.rand(40, len(claimed), generator=generator)"), "a tenth of it is lost"),
    (2, sees().replace("normalize(", "("), "length 1"),
    (2, sees("torch.eye(len(claimed))[::7]"), "one number is far off"),
    (2, sees("claimed.nan_to_num_(1e9) * 0 + " + DRAWN), "work on copies"),
    (2, "False", "refused"),
    (3, replayed(INPUT="latents"), "input is not detached"),
    (3, replayed(NEXT=MEAN.replace("latents, noise", "latents.detach(), noise")), "earlier steps are lost"),
    (3, replayed(NEXT=MEAN + ".detach()"), "no gradient"),
    (3, replayed(NEXT=BY_GAINS.replace(" + ", " - ", 1)), "other images"),
    (3, replayed(FIRST="0"), "of each step"),
    (3, replayed(NEXT=f"{BY_GAINS} + 0.5 * (output - output.detach())"), "not the sum"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "11_through_the_reward", IMPORTS, ARGUMENTS, RIGHT, WRONG
)


def test_lesson_and_experiment_measure_diversity_alike():
    lesson = syntax_tree(ROOT / "notebooks" / "11_through_the_reward.ipynb")
    experiment = ast.parse(Path(reward_gradient.__file__).read_text("utf-8"))
    one, other = (
        [bare(node) for node in definitions(t) if node.name == "apart"] for t in (lesson, experiment)
    )
    assert one == other != []
