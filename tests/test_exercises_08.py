"""Answers to the exercises of lesson 08: wrong ones are refused with a hint, right ones of any form pass."""

from tests.helpers import edited, exercise_tests

IMPORTS = "import itertools, math\nimport numpy as np\nimport torch\n"
ARGUMENTS = {1: "steps", 2: "rewards, advantages", 3: "epoch, step, gigabytes, peak"}

BY_EPOCHS = """
def f(steps):
    epochs = [list(group) for _, group in itertools.groupby(steps, key=lambda step: step["epoch"])]
    firsts = [epoch[0]["max_ratio_error"] for epoch in epochs]
    if FIRST:
        return "another policy"
    if LATER:
        return "stale sampler"
    replayed = [
        step["max_ratio_error"]
        for epoch in epochs
        for n, step in enumerate(epoch)
        if MOVED
    ]
    if STAYS:
        return "ratio stays 1"
    return "fine"
"""
PARTS = {
    "FIRST": "firsts[0] > 1e-4", "LATER": "any(error > 1e-4 for error in firsts[1:])",
    "MOVED": 'any(before["lr"] > 0 for before in epoch[:n])', "STAYS": "replayed and max(replayed) <= 1e-6",
}  # fmt: skip


def by_epochs(**changes):
    return edited(BY_EPOCHS, *(word for part in (PARTS | changes).items() for word in part))


ONE_PASS = """
def f(steps):
    epoch, moved, seen, small, stale = None, False, False, True, False
    for step in steps:
        if step["epoch"] != epoch:
            epoch, moved = step["epoch"], False
            if step["max_ratio_error"] > 1e-4:
                if step["epoch"] == steps[0]["epoch"]:
                    return "another policy"
                stale = True
        elif moved:
            seen, small = True, small and step["max_ratio_error"] <= 1e-6
        moved = moved or step["lr"] > 0
    return "stale sampler" if stale else "ratio stays 1" if seen and small else "fine"
"""
BY_ARRAYS = """
def f(steps):
    errors, epochs, rates = (np.array([s[k] for s in steps]) for k in ("max_ratio_error", "epoch", "lr"))
    first = np.r_[True, np.diff(epochs) != 0]
    if errors[0] > 1e-4:
        return "another policy"
    if (errors[first] > 1e-4).any():
        return "stale sampler"
    before = np.array([rates[:n][epochs[:n] == epochs[n]].max(initial=0) for n in range(len(rates))])
    replayed = errors[~first & (before > 0)]
    return "ratio stays 1" if len(replayed) and replayed.max() < 1.5e-6 else "fine"
"""
BY_FIT = """
def f(rewards, advantages):
    r, a = np.asarray(rewards, float), np.asarray(advantages, float)
    r = r - r.mean()
    if not np.isfinite(a).all():
        return False
    if (r == 0).all():
        return not a.any()
    scale = (a * r).sum() / (r * r).sum()
    return scale > 0 and np.abs(a - scale * r).max() <= 1e-4 * np.abs(a).max()
"""
BY_NORMALISING = """
def f(rewards, advantages):
    expected = normalize(rewards)
    if not expected.any():
        return not advantages.any()
    scale = advantages.double().std(correction=0)
    if not scale > 0:
        return False
    return torch.allclose(advantages.double() / scale, expected.double(), rtol=0, atol=1e-4)
"""
FLOAT32 = """
def f(rewards, advantages):
    r = rewards.float() - rewards.float().mean()
    if (r == 0).all():
        return (advantages == 0).all()
    n = r.abs().argmax()
    scale = advantages[n] / r[n]
    return (scale > 0) & ((advantages - scale * r).abs().max() <= 1e-4 * advantages.abs().max())
"""
BY_COSINE = """
def f(rewards, advantages):
    r, a = rewards.double() - rewards.double().mean(), advantages.double()
    if not r.any():
        return not a.any()
    if not a.any():
        return False
    unit = r / r.norm()
    along = (a @ unit) * unit
    return bool((a @ unit > 0) and ((a - along).abs().max() <= 1e-4 * a.abs().max()))
"""
RIGHT = [
    (1, by_epochs()),
    (1, by_epochs(LATER="max(firsts) > 1e-4", STAYS="replayed and all(x <= 1e-6 for x in replayed)")),
    (1, ONE_PASS),
    (1, BY_ARRAYS),
    (2, BY_FIT),
    (2, BY_NORMALISING),
    (2, FLOAT32),
    (2, BY_COSINE),
    (3, "max((b for b in range(1, math.gcd(epoch, step) + 1)"
        " if epoch % b == step % b == 0 and peak(b) <= 0.85 * gigabytes - 1), default=0)"),
    (3, "next((b for b in range(step, 0, -1)"
        " if not epoch % b and not step % b and peak(b) + 1 <= 0.85 * gigabytes + 1e-9), 0)"),
    (3, "max([0] + [b for b in range(1, epoch + 1)"
        " if math.gcd(epoch, step) % b == 0 and peak(b) <= gigabytes * 0.85 - 1])"),
    (3, "sorted({0} | {d for k in range(1, step + 1) if step % k == 0 for d in [step // k]"
        " if epoch % d == 0 and peak(d) <= 0.85 * gigabytes - 1})[-1]"),
]  # fmt: skip

START = """
def f(rewards, advantages):
    if (rewards == rewards[0]).all():
        return not advantages.any()
    r, a = rewards.double() - rewards.double().mean(), advantages.double()
    s = (a @ r) / (r @ r)
    wrong, allowed, alike = a - s * r, 1e-4 * a.abs().max(), torch.corrcoef(torch.stack([r, a]))[0, 1]
    return """
FITS = "peak(b) <= 0.85 * gigabytes - 1"
BATCHES = f"max((b for b in range(1, step + 1) if epoch % b == step % b == 0 and {FITS}), default=0)"
BY_QUOTIENTS = """
def f(rewards, advantages):
    d = rewards.double() - rewards.double().mean()
    if not d.any():
        return not advantages.any()
    q = advantages / d
    return """
WRONG = [
    (1, "'fine'", "fine"),
    (1, by_epochs(FIRST="max(firsts) > 1e-4"), "later epoch"),
    (1, by_epochs(FIRST="False"), "first step"),
    (1, by_epochs(LATER="firsts[1:] and firsts[1] > 1e-4"), "third epoch"),
    (1, by_epochs(LATER="firsts[-1] > 1e-4 and len(epochs[0]) > 1"), "one step per epoch"),
    (1, by_epochs(FIRST="firsts[0] > 0"), "healthy run"),
    (1, by_epochs(FIRST="firsts[0] > 5e-3"), "also if later"),
    (1, by_epochs(MOVED="n > 0"), "rate of 0"),
    (1, by_epochs(MOVED="True"), "one step per epoch"),
    (1, by_epochs(MOVED="n > 0 and step['lr'] > 0"), "fine"),
    (1, by_epochs(STAYS="replayed and min(replayed) <= 1e-6"), "fine"),
    (1, by_epochs(STAYS="replayed and max(replayed) == 0"), "rounding"),
    (1, by_epochs(STAYS="replayed and max(replayed) <= 1e-4"), "more than rounding"),
    (1, by_epochs(STAYS="replayed and sum(replayed) / len(replayed) <= 1e-6"), "their mean"),
    (1, by_epochs(STAYS="replayed and replayed[-1] <= 1e-6"), "not only the last one"),
    (1, by_epochs(MOVED="n > 0 and epoch[n - 1]['lr'] > 0"), "all steps of the epoch follow it"),
    (1, by_epochs(LATER="sum(firsts[1:]) > 1e-4"), "do not add up"),
    (1, by_epochs(LATER="max(firsts) > 1e-3"), "2e-4"),
    (2, "True", "equal rewards"),
    (2, f"{START}bool(alike > 0.99999)", "stale mean"),
    (2, f"{START}bool(a.mean().abs() < 1e-4 and a.std() > 0)", "sign"),
    (2, f"{START}bool((r.argsort() == a.argsort()).all() and a.mean().abs() < 1e-4)", "order"),
    (2, "torch.allclose(normalize(rewards), advantages, atol=1e-4)", "above 0"),
    (2, f"{START}bool(s > 0 and wrong.max() < allowed)", "too high"),
    (2, f"{START}bool(s > 0 and wrong.abs().max() < 1e-4)", "of small advantages"),
    (2, f"{START}bool(s > 0 and wrong.abs().max() <= 3 * allowed)", "2e-4 of the largest"),
    (2, f"{START}bool(s > 0 and wrong.mean().abs() < allowed)", "neighbors"),
    (2, f"{START}not bool((s <= 0) | (wrong.abs().max() > allowed))", "not a number"),
    (2, f"{START}wrong.abs() <= allowed", "one answer"),
    (2, f"{START}bool(wrong.abs().max() <= allowed)", "all 0"),
    (2, f"{BY_QUOTIENTS}bool((q > 0).all() and q.max() - q.min() <= 1e-4 * q.max())", "is the mean"),
    (3, "1", "edit"),
    (3, "max((b for b in (1, 2, 4, 8, 16, 32, 64) if epoch % b == step % b == 0 and "
        f"{FITS}), default=0)", "powers of two"),
    (3, f"max((b for b in range(1, epoch + 1) if epoch % b == 0 and {FITS}), default=0)", "divi"),
    (3, BATCHES.replace("<=", "<"), "at most"),
    (3, BATCHES.replace(" - 1)", ")").replace("gigabytes - 1", "gigabytes"), "1 GB"),
    (3, BATCHES.replace("default=0", "default=1"), "nothing fits"),
    (3, BATCHES.replace("0.85 * gigabytes - 1", "0.85 * (gigabytes - 1)"), "85%"),
    (3, f"float({BATCHES})", "int"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "08_fails_in_silence", IMPORTS, ARGUMENTS, RIGHT, WRONG
)
