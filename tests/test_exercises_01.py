"""Answers to the exercises of lesson 01: wrong ones are refused with a hint, right ones of any form pass."""

from tests.helpers import cells_of, edited, exercise_tests

ARGUMENTS = {
    1: "log, plan, advantages", 2: "plan, generator",
    3: "policy, optimizer, samples, plan, generator, min_share", 4: "plan, limit",
}  # fmt: skip
IMPORTS = "import math\nfrom collections import Counter\n"
COLLECT = """
def f(log, plan, advantages):
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
    return exact and sizes and numbers and walks and own
"""
COUNTED = """
def f(log, plan, advantages):
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
"""
GRID = """
def f(log, plan, advantages):
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
"""
CUT = """
def f(plan, generator):
    steps, S, n = [], plan.total_samples, plan.samples_per_optimizer_step
    first = torch.randperm(S, generator=generator)
    for _ in range(plan.num_inner_epochs):
        steps += [order[k : k + n] for order in [ORDER] for k in range(0, S, n)]
    return steps
"""
BY_THE_PACKAGE = """
from ddpo_lessons.batching import minibatches, shuffle_samples
def f(plan, generator):
    ids, steps = {"id": torch.arange(plan.total_samples)}, []
    for _ in range(plan.num_inner_epochs):
        batches = minibatches(shuffle_samples(ids, generator), plan.train_batch_size)
        m = plan.gradient_accumulation_steps
        steps += [sum((b["id"].tolist() for b in batches[k : k + m]), []) for k in range(0, len(batches), m)]
    return steps
"""
FRESH = """
def f(policy, optimizer, samples, plan, generator, min_share):
    taken = 0
    for _ in range(plan.num_inner_epochs):
        for batch in minibatches(shuffle_samples(samples, generator), plan.samples_per_optimizer_step):
            with torch.no_grad():
                _, ratio = epoch_losses(policy, samples)
            if share_left(ratio) < min_share:
                return taken
            losses, now = epoch_losses(policy, batch)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
    return taken
"""
IN_ONE_PASS = """
def f(policy, optimizer, samples, plan, generator, min_share):
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
FIT = """
def f(plan, limit):
    s = largest_divisor(plan.total_samples, limit)
    t = largest_divisor(plan.samples_per_optimizer_step, limit)
    m = plan.samples_per_optimizer_step // t
    return replace(plan, num_processes=1, sample_batch_size=s, num_batches_per_epoch=plan.total_samples // s,
                   train_batch_size=t, gradient_accumulation_steps=m)
"""
BY_HAND = """
def f(plan, limit):
    s, t = min(plan.total_samples, limit), min(plan.samples_per_optimizer_step, limit)
    while plan.total_samples % s:
        s -= 1
    while plan.samples_per_optimizer_step % t:
        t -= 1
    return EpochPlan(s, plan.total_samples // s, t, plan.samples_per_optimizer_step // t,
                     plan.num_inner_epochs, plan.num_timesteps)
"""
ALL = "exact and sizes and numbers and walks and own"
SHUFFLED = "torch.randperm(S, generator=generator)"
STALE, T_IS = "share_left(ratio) < min_share", "largest_divisor(plan.samples_per_optimizer_step, limit)"
BY_LOGS = "(2 * ratio.log().logsumexp((0, 1)) - ratio.log().mul(2).logsumexp((0, 1))).exp() / ratio.numel()"
M_IS = "plan.samples_per_optimizer_step // t"
RIGHT = [
    (1, COLLECT),
    (1, edited(COLLECT, ALL, "bool(own and walks and numbers and sizes and exact)", "<= 1e-4", "< 1e-6")),
    (1, COUNTED),
    (1, GRID),
    (2, edited(CUT, "ORDER", SHUFFLED)),
    (2, edited(CUT, "ORDER", f"{SHUFFLED}.tolist()")),
    (2, edited(CUT, "ORDER", "torch.rand(S, generator=generator).argsort()")),
    (2, BY_THE_PACKAGE),
    (3, FRESH),
    (3, edited(FRESH, "with torch.no_grad():", "if True:")),
    (3, edited(FRESH, STALE, f"{BY_LOGS} < min_share")),
    (3, IN_ONE_PASS),
    (4, FIT),
    (4, BY_HAND),
    (4, edited(FIT, M_IS, "next(m for m in range(1, 10**6) if plan.samples_per_optimizer_step == m * t)")),
    (4, edited(FIT, T_IS,
               "max(math.gcd(plan.samples_per_optimizer_step, n) for n in range(1, limit + 1))")),
    (4, edited(FIT, M_IS,
               "plan.train_batch_size * plan.gradient_accumulation_steps * plan.num_processes // t")),
]  # fmt: skip
# Parts of verdicts that look at less than they should.
FIRST_WALK = (
    "sorted(s for k in range(per) for s in {s for s, _ in steps[k + 1]}) == list(range(plan.total_samples))"
)
LENGTHS = "all(len(p) == size * T for p in steps.values())"
COUNTS = "all(sorted(j for _, j in p) == sorted(list(range(T)) * size) for p in steps.values())"
SUMMED = "all(abs(sum(e['advantages']) - advantages[e['ids']].sum()) <= 1e-4 for e in log)"
EACH = "all(abs(a - advantages[s]) <= 1e-4 for e in log for s, a in zip(e['ids'], e['advantages']))"


def sound(verdict, *changes):
    return edited(COLLECT, ALL, verdict, *changes)


def own(*changes):
    return sound(f"exact and sizes and numbers and walks and {edited(EACH, *changes)}")


def cut(order, *changes):
    return edited(CUT, "ORDER", order, *changes)


def fresh(*changes):
    return edited(FRESH, *changes)


def fit(*changes):
    return edited(FIT, *changes)


WRONG = [
    (1, "True", "red loop"),
    (1, "False", "this run is sound"),
    (1, sound("sizes and numbers and walks and own"), "ran twice"),
    (1, sound("exact and numbers and walks and own"), "one of 6"),
    (1, sound("exact and sizes and own"), "half of the epoch"),
    (1, sound("exact and sizes and numbers and own"), "samples of step 1"),
    (1, sound("exact and sizes and own and set(steps) >= set(range(1, every + 1))"), "too many"),
    (1, sound(f"exact and sizes and numbers and own and {FIRST_WALK}"), "[4, 5] exchanged"),
    (1, sound(f"sizes and numbers and walks and own and {LENGTHS}"), "used j = 0"),
    (1, sound(f"sizes and numbers and walks and own and {COUNTS}"), "j = 0 twice"),
    (1, sound(f"exact and sizes and numbers and walks and {SUMMED}"), "advantages exchanged"),
    (1, own("in log", "in log if e['j'] == 0"), "last advantage 0.0003 too large"),
    (1, own("in log", "in log if e['step'] <= per"), "of the last inner epoch has wrong advantages"),
    (1, own("in log", "in log if e['step'] > every - per"), "of the first inner epoch has wrong advantages"),
    (1, own("abs", ""), "first advantage 0.0003 too small"),
    (1, sound(ALL, "in steps.items())\n    sizes", "in steps.items() if k <= per)\n    sizes"),
        "of the last inner epoch is missing"),
    (1, sound(ALL, "abs(a - advantages[s]", "abs(abs(a) - advantages[s].abs()"), "other sign"),
    (1, sound(ALL, "all(abs(a", "not any(abs(a", "<= 1e-4", "> 1e-4"), "NaN"),
    (1, sound(ALL, 'for s in entry["ids"])', 'for s in set(entry["ids"]))'), "holds a sample twice"),
    (1, sound(ALL, "steps, used", "log.sort(key=lambda e: e['j'])\n    steps, used"), "work on copies"),
    (2, cut("first.roll(len(steps) // 2)"), "stay together"),
    (2, cut("first"), "same order"),
    (2, cut("torch.arange(S)"), "not shuffled"),
    (2, cut(f"{SHUFFLED} + 1"), "each sample once"),
    (2, cut("torch.randperm(S)"), "only the generator"),
    (2, cut("torch.randperm(S, generator=torch.Generator().manual_seed(len(steps)))"), "not used"),
    (2, cut(SHUFFLED, "plan.num_inner_epochs", "1"), "steps; "),
    (2, "[torch.arange(plan.train_batch_size) for _ in range(plan.optimizer_steps)]", "m minibatches"),
    (3, fresh(STALE, "False"), "12 steps, expected 3"),
    (3, fresh("            optimizer.zero_grad()\n", ""), "left over"),
    (4, fit("num_processes=1, ", "", M_IS, f"{M_IS} // plan.num_processes"), "one process"),
    (4, fit(M_IS, "1"), "samples_per_optimizer_step changed"),
    (4, fit("num_processes=1", "num_processes=1, num_inner_epochs=1"), "optimizer_steps changed"),
    (4, fit(T_IS, "1"), "train_batch_size is 1; 2"),
    (4, fit("s = largest_divisor(plan.total_samples, limit)", "s = 1"), "sample_batch_size is 1; 2"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "01_batching", IMPORTS, ARGUMENTS, RIGHT, WRONG
)


def test_the_first_screen_shows_the_loop_that_runs():
    cells = cells_of("01_batching")
    shown = cells[0][1].split("```python\n")[1].split("\n```")[0]
    assert ("code", f"# @title The opening's red_phase\n{shown}") in cells
