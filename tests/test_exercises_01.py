"""Wrong answers to the exercises of lesson 01, with words of their hints; and right answers of other form."""

from __future__ import annotations

import functools

import pytest

from tests.helpers import cells_of, check_of, hint_for

check = functools.cache(functools.partial(check_of, "01_batching"))

COLLECT = """
def is_sound(log, plan, advantages):
    steps, used = {}, {}
    for entry in log:
        steps.setdefault(entry["step"], []).extend((s, entry["j"]) for s in entry["ids"])
        for s, a in zip(entry["ids"], entry["advantages"]):
            used.setdefault(s, []).append(a)
    size, per = plan.samples_per_optimizer_step, plan.optimizer_steps // plan.num_inner_epochs
    T, every = plan.num_timesteps, plan.optimizer_steps
    whole = {k: [(s, j) for s in {s for s, _ in p} for j in range(T)] for k, p in steps.items()}
    exact = all(sorted(p) == sorted(whole[k]) for k, p in steps.items())
    sizes = all(len({s for s, _ in p}) == size for p in steps.values())
    numbers = sorted(steps) == list(range(1, plan.optimizer_steps + 1))
    walks = numbers and all(
        sorted(s for k in range(per) for s in {s for s, _ in steps[n + k]}) == list(range(plan.total_samples))
        for n in range(1, plan.optimizer_steps + 1, per)
    )
    own = all(abs(a - advantages[s].item()) <= 1e-4 for s, found in used.items() for a in found)
    return RETURN
"""


ALL = "exact and sizes and numbers and walks and own"


# Each looks at less than it should.
FIRST_WALK = (
    "sorted(s for k in range(per) for s in {s for s, _ in steps[k + 1]}) == list(range(plan.total_samples))"
)
LAST_WALK = FIRST_WALK.replace("k + 1", "every - k")
COUNTED = "all(sorted(j for _, j in p) == sorted(list(range(T)) * size) for p in steps.values())"
LENGTHS = "all(len(p) == size * T for p in steps.values())"
EACH = "all(abs(a - advantages[s]) <= 1e-4 for e in log for s, a in list(zip(e['ids'], e['advantages'])))"
SUMMED = "all(abs(sum(e['advantages']) - advantages[e['ids']].sum()) <= 1e-4 for e in log)"


def sound(returned: str, **changes: str) -> str:
    code = COLLECT.replace("RETURN", returned)
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    return code


def own(old: str, new: str) -> str:
    assert old in EACH
    return sound("exact and sizes and numbers and walks and " + EACH.replace(old, new))


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ("def is_sound(log, plan, advantages):\n    return True", "red loop"),
        ("def is_sound(log, plan, advantages):\n    return False", "this run is sound"),
        (sound("exact and sizes and numbers and walks"), "red loop"),
        (sound("sizes and numbers and walks and own"), "ran twice"),
        (sound("exact and numbers and own"), "step"),
        (sound("exact and sizes and own"), "half of the epoch"),
        (sound("exact and sizes and own and log and max(steps) == every"), "of step 1"),
        (sound("exact and sizes and own and set(steps) >= set(range(1, every + 1))"), "too many"),
        (sound("exact and numbers and walks and own"), "one of 6"),
        (sound("exact and sizes and numbers and own and " + FIRST_WALK), "[4, 5]"),
        (sound("exact and sizes and numbers and own and " + LAST_WALK), "[2, 3]"),
        (sound("sizes and numbers and walks and own and " + LENGTHS), "used j = 0"),
        (sound("sizes and numbers and walks and own and " + COUNTED), "j = 0 twice"),
        (own("in log", "in log[:T]"), "last"),
        (own("in log", "in log if e['step'] <= per"), "of the last inner epoch"),
        (own("in log", "in log if e['step'] > every - per"), "of the first inner epoch"),
        (
            sound(ALL, **{"in steps.items())\n    sizes": "in steps.items() if k <= per)\n    sizes"}),
            "of the last inner epoch",
        ),
        (own("in log", "in log if e['j'] == 0"), "last"),
        (own("in log", "in log[::T]"), "last"),
        (own("abs", ""), "too small"),
        (own("advantages'])))", "advantages']))[:1])"), "too large"),
        (own("advantages'])))", "advantages']))[1:])"), "too small"),
        (own("1e-4", "0.01 * abs(advantages[s])"), "0.0003"),
        (sound(ALL, **{"for a in found": "for a in found[:1]"}), "last"),
        (sound("exact and sizes and numbers and walks and " + SUMMED), "advantages exchanged"),
        (sound("exact and sizes and numbers and own"), "samples of step 1"),
        (sound(ALL, **{"<= 1e-4": "<= 0.005"}), "0.0003"),
        (sound(ALL, **{"<= 1e-4": "<= 5e-4"}), "0.0003"),
        (sound(ALL, **{"abs(a - advantages[s]": "abs(abs(a) - advantages[s].abs()"}), "other sign"),
        (
            sound(ALL, **{"all(abs(a": "not any(abs(a", "<= 1e-4": "> 1e-4"}),
            "NaN",
        ),
        (
            sound(ALL, **{"sorted(p) == sorted": "set(p) == set"}),
            "ran twice",
        ),
        (sound(ALL, **{'for s in entry["ids"])': 'for s in set(entry["ids"]))'}), "holds a sample twice"),
        (sound(ALL, **{"return exact": "exact"}), "is there a `return`"),
        (sound(ALL, **{"steps, used": "log.sort(key=lambda e: e['j'])\n    steps, used"}), "work on copies"),
        (
            "def is_sound(log, plan, advantages):\n    pairs = [(s, e['j']) for e in log for s in e['ids']]\n"
            "    return len(pairs) == len(set(pairs)) == plan.total_pairs",
            "red loop",
        ),
    ],
)  # fmt: skip
def test_a_wrong_verdict_on_logs_is_refused(answer, word):
    assert word in hint_for(check(1), answer)


@pytest.mark.parametrize(
    "answer",
    [
        sound(ALL),
        sound("bool(own and walks and numbers and sizes and exact)", **{"<= 1e-4": "< 1e-6"}),
        """
from collections import Counter
def is_sound(log, plan, advantages):
    if {e["step"] for e in log} != set(range(1, plan.optimizer_steps + 1)):
        return False
    count = Counter((e["step"], s, e["j"]) for e in log for s in e["ids"])
    per = plan.optimizer_steps // plan.num_inner_epochs
    walks = Counter(((step - 1) // per, s, j) for step, s, j in count)
    sizes = Counter((step, j) for step, s, j in count)
    return (
        set(count.values()) == {1} and set(walks.values()) == {1} and len(walks) == plan.total_pairs
        and set(sizes.values()) == {plan.samples_per_optimizer_step}
        and len({key[:2] for key in count}) * plan.num_timesteps == len(count)
        and all(torch.equal(torch.tensor(e["advantages"]), advantages[e["ids"]]) for e in log)
    )
""",
        """
def is_sound(log, plan, advantages):
    grid = torch.zeros(plan.optimizer_steps + 1, plan.total_samples, plan.num_timesteps)
    for e in log:
        if not 1 <= e["step"] <= plan.optimizer_steps:
            return False
        if not ((torch.tensor(e["advantages"]) - advantages[e["ids"]]).abs() < 1e-4).all():
            return False
        for s in e["ids"]:
            grid[e["step"], s, e["j"]] += 1
    grid = grid[1:]
    whole = (grid == grid[:, :, :1]).all() and grid.max() == 1
    size = (grid[:, :, 0].sum(1) == plan.samples_per_optimizer_step).all()
    walks = (grid[:, :, 0].unflatten(0, (plan.num_inner_epochs, -1)).sum(1) == 1).all()
    return bool(whole and size and walks)
""",
    ],
)
def test_a_right_verdict_on_logs_is_accepted(answer):
    assert hint_for(check(1), answer) == ""


CUT = """
def cut_epoch(plan, generator):
    steps, S, n = [], plan.total_samples, plan.samples_per_optimizer_step
    BEFORE
    for _ in range(plan.num_inner_epochs):
        order = ORDER
        steps += [order[k : k + n] for k in range(0, S, n)]
    return steps
"""


def cut(order: str, before: str = "pass") -> str:
    return CUT.replace("ORDER", order).replace("BEFORE", before)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (
            cut("first.roll(len(steps) // 2)", "first = torch.randperm(S, generator=generator)"),
            "stay together",
        ),
        (
            cut(
                "torch.cat([whole[i] for i in torch.randperm(len(whole), generator=generator)])",
                "whole = torch.arange(S).split(plan.train_batch_size)",
            ),
            "not minibatches",
        ),
        (
            cut("torch.randperm(S, generator=generator) if len(steps) * n < 2 * S else order"),
            "same order",
        ),
        (cut("first", "first = torch.randperm(S, generator=generator)"), "same order"),
        (
            cut(
                "torch.cat([first[i] for i in torch.randperm(len(first), generator=generator)])",
                "first = torch.randperm(S, generator=generator).split(n)",
            ),
            "stay together",
        ),
        (cut("torch.arange(S)"), "not shuffled"),
        (cut("torch.randint(S, (S,), generator=generator)"), "each sample once"),
        (cut("(torch.arange(S) + torch.randint(S, (1,), generator=generator)) % S"), "stay together"),
        (cut("torch.randperm(S, generator=generator) + 1"), "each sample once"),
        (
            cut(
                "torch.cat([ids[torch.randperm(n, generator=generator)] for ids in first])",
                "first = torch.randperm(S, generator=generator).split(n)",
            ),
            "stay together",
        ),
        (cut("torch.randperm(S)"), "only the generator"),
        (cut("torch.randperm(S, generator=torch.Generator().manual_seed(len(steps)))"), "not used"),
        (cut("torch.randperm(S, generator=generator)", "n = plan.train_batch_size"), "steps"),
        (cut("torch.randperm(S, generator=generator)").replace("plan.num_inner_epochs", "1"), "steps"),
        (
            "def cut_epoch(plan, generator):\n    n = plan.samples_per_optimizer_step\n"
            "    return [torch.randperm(plan.total_samples, generator=generator)[:n]\n"
            "            for _ in range(plan.optimizer_steps)]",
            "each sample once",
        ),
        (
            "def cut_epoch(plan, generator):\n    n, m = plan.train_batch_size, plan.optimizer_steps\n"
            "    order = torch.randperm(plan.total_samples, generator=generator)\n"
            "    return [order[:n] for _ in range(m)]",
            "m minibatches",
        ),
    ],
)
def test_a_wrong_cut_is_refused(answer, word):
    assert word in hint_for(check(2), answer)


@pytest.mark.parametrize(
    "answer",
    [
        cut("torch.randperm(S, generator=generator)"),
        cut("torch.randperm(S, generator=generator).tolist()"),
        cut("torch.rand(S, generator=generator).argsort()"),
        """
from ddpo_lessons.batching import minibatches, shuffle_samples
def cut_epoch(plan, generator):
    ids, steps = {"id": torch.arange(plan.total_samples)}, []
    for _ in range(plan.num_inner_epochs):
        batches = minibatches(shuffle_samples(ids, generator), plan.train_batch_size)
        m = plan.gradient_accumulation_steps
        steps += [sum((b["id"].tolist() for b in batches[k : k + m]), []) for k in range(0, len(batches), m)]
    return steps
""",
    ],
)
def test_a_right_cut_is_accepted(answer):
    assert hint_for(check(2), answer) == ""


FRESH = """
def train_while_fresh(policy, optimizer, samples, plan, generator, min_share):
    taken = 0
    for _ in range(plan.num_inner_epochs):
        for batch in minibatches(shuffle_samples(samples, generator), plan.samples_per_optimizer_step):
            with torch.no_grad():
                _, ratio = epoch_losses(policy, SEEN)
            if STOP:
                return taken
            losses, now = epoch_losses(policy, batch)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
    return taken
"""


def fresh(seen: str = "samples", stop: str = "share_left(ratio) < min_share") -> str:
    return FRESH.replace("SEEN", seen).replace("STOP", stop)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (fresh(stop="False"), "12 steps, expected 3"),
        (fresh(seen="batch"), "all pairs"),
        (fresh(stop="share_left(ratio) > min_share"), "0 steps"),
        (fresh(stop="share_left(ratio.log()) < min_share"), "steps, expected"),
        (fresh(stop="share_left(ratio) < min_share and taken % 4 == 0"), "steps, expected"),
        (fresh(stop="share_left(ratio.prod(1)) < min_share"), "steps, expected"),
        (fresh(stop="share_left(ratio[:, 0]) < min_share"), "steps, expected"),
        (fresh(stop="1 - share_left(ratio) > min_share"), "steps, expected"),
        (fresh().replace("losses.mean()", "losses.sum()"), "steps, expected"),
        (fresh().replace("taken += 1", "taken += 2"), "steps, expected"),
        (fresh().replace("            optimizer.zero_grad()\n", ""), "left over"),
        (
            fresh(stop="now.mean().backward() or share_left(ratio) < min_share").replace(
                "with torch.no_grad():\n                _", "now"
            ),
            "left over",
        ),
    ],
)  # fmt: skip
def test_training_on_stale_samples_is_refused(answer, word):
    assert word in hint_for(check(3), answer)


IN_ONE_PASS = """
def train_while_fresh(policy, optimizer, samples, plan, generator, min_share):
    def loss(s):
        ratio = (policy.log_prob(s["latents"], s["next_latents"]) - s["log_probs"]).exp()
        return -(s["advantages"][:, None] * ratio).mean(), ratio.detach().double()
    n, every = plan.samples_per_optimizer_step, plan.optimizer_steps // plan.num_inner_epochs
    for taken in range(plan.optimizer_steps):
        if taken % every == 0:
            order = torch.randperm(plan.total_samples, generator=generator)
        ratio = loss(samples)[1]
        if ratio.mean() ** 2 < min_share * (ratio**2).mean():
            return taken
        rows = order[taken % every * n :][:n]
        average, _ = loss({name: tensor[rows] for name, tensor in samples.items()})
        policy.shift.grad, = torch.autograd.grad(average, policy.shift)
        optimizer.step()
        policy.shift.grad.zero_()
    return taken + 1
"""


@pytest.mark.parametrize(
    "answer",
    [
        fresh(),
        fresh().replace("with torch.no_grad():", "if True:"),
        fresh(stop="(2 * ratio.log().logsumexp((0, 1)) - ratio.log().mul(2).logsumexp((0, 1))).exp() "
              "/ ratio.numel() < min_share"),
        IN_ONE_PASS,
    ],
)  # fmt: skip
def test_training_while_fresh_is_accepted(answer):
    assert hint_for(check(3), answer) == ""


FIT = """
import math
def fit_to_limit(plan, limit):
    s = largest_divisor(plan.total_samples, limit)
    t = largest_divisor(plan.samples_per_optimizer_step, limit)
    m = plan.samples_per_optimizer_step // t
    return replace(plan, num_processes=1, sample_batch_size=s, num_batches_per_epoch=plan.total_samples // s,
                   train_batch_size=t, gradient_accumulation_steps=m)
"""


def fit(*changes: tuple[str, str]) -> str:
    code = FIT
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    return code


T_IS, M_IS = (
    "t = largest_divisor(plan.samples_per_optimizer_step, limit)",
    "plan.samples_per_optimizer_step // t",
)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (fit((T_IS, "t = 1")), "train_batch_size is 1"),
        (fit((T_IS, "t = largest_divisor(plan.train_batch_size, limit)")), "train_batch"),
        (fit((T_IS, "t = math.gcd(plan.samples_per_optimizer_step, limit)")), "train_batch_size is 1; 2"),
        (fit((M_IS, "plan.gradient_accumulation_steps")), "changed"),
        (fit((M_IS, "1")), "changed"),
        (fit((M_IS, "plan.train_batch_size * plan.gradient_accumulation_steps // t")), "changed"),
        (fit(("num_processes=1, ", ""), (M_IS, f"{M_IS} // plan.num_processes")), "one process"),
        (fit(("num_processes=1", "num_processes=1, num_inner_epochs=1")), "optimizer_steps changed"),
        (fit(("s = largest_divisor(plan.total_samples, limit)", "s = 1")), "sample_batch_size is 1; 2"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_or_learns_otherwise_is_refused(answer, word):
    assert word in hint_for(check(4), answer)


BY_HAND = """
def fit_to_limit(plan, limit):
    s, t = min(plan.total_samples, limit), min(plan.samples_per_optimizer_step, limit)
    while plan.total_samples % s:
        s -= 1
    while plan.samples_per_optimizer_step % t:
        t -= 1
    return EpochPlan(s, plan.total_samples // s, t, plan.samples_per_optimizer_step // t,
                     plan.num_inner_epochs, plan.num_timesteps)
"""


@pytest.mark.parametrize(
    "answer",
    [
        fit(),
        BY_HAND,
        fit((M_IS, "next(m for m in range(1, 10**6) if plan.samples_per_optimizer_step == m * t)")),
        fit((T_IS, "t = max(math.gcd(plan.samples_per_optimizer_step, n) for n in range(1, limit + 1))")),
        fit((M_IS, "plan.train_batch_size * plan.gradient_accumulation_steps * plan.num_processes // t")),
    ],
)
def test_a_right_plan_is_accepted(answer):
    assert hint_for(check(4), answer) == ""


def test_the_first_screen_shows_the_loop_that_runs():
    cells = cells_of("01_batching")
    shown = cells[0][1].split("```python\n")[1].split("\n```")[0]
    assert ("code", shown) in cells
