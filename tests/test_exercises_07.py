"""Answers to the exercises of lesson 07: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

from tests.helpers import exercise_tests

IMPORTS = "import itertools, math, torch\n"
ARGUMENTS = {1: "noise, group_size, part_at", 2: "rewards, branches, depth", 3: "value, num_steps"}

LEAF_BY_LEAF = """
def f(rewards, branches, depth):
    def node(n, j):
        leaves = branches ** (depth - j)
        return rewards.double()[n // leaves * leaves:][:leaves].mean()
    return torch.tensor([[node(n, j + 1) - node(n, j) for j in range(depth)] for n in range(len(rewards))])
"""
FROM_THE_LEAVES = """
def f(rewards, branches, depth):
    columns, values = [], rewards
    for j in range(depth):
        parents = values.view(-1, branches).mean(1)
        step = values - parents.repeat_interleave(branches)
        columns.insert(0, step.repeat_interleave(branches ** j))
        values = parents
    return torch.stack(columns, dim=1)
"""
BY_MATRICES = """
def f(rewards, branches, depth):
    def average(leaves):
        return torch.kron(torch.eye(len(rewards) // leaves), torch.full((leaves, leaves), 1 / leaves))
    values = [average(branches ** (depth - j)) @ rewards for j in range(depth + 1)]
    return torch.stack([b - a for a, b in itertools.pairwise(values)], dim=1)
"""
BY_SHAPES = """
def f(rewards, branches, depth):
    trees = rewards.view(-1, *[branches] * depth)
    values = [trees]
    for j in range(depth):
        values.insert(0, trees.mean(dim=tuple(range(depth - j, depth + 1)), keepdim=True))
    return torch.stack([(b - a).expand_as(trees).flatten() for a, b in itertools.pairwise(values)], dim=1)
"""
VALUES = """
def f(rewards, branches, depth):
    sizes = [branches ** (depth - j) for j in range(depth + 1)]
    values = torch.stack([rewards.view(-1, s).{how}.repeat_interleave(s) for s in sizes], dim=1)
    return {give}
"""
ROLLOUT_BY_ROLLOUT = """
def f(noise, group_size, part_at):
    made = torch.empty_like(noise)
    for j in range(len(noise)):
        for n in range(noise.shape[1]):
            made[j, n] = noise[j, n if j == part_at else n - n % group_size]
    return made
"""
BY_NUMBERS = """
def f(noise, group_size, part_at):
    numbers = torch.arange(noise.shape[1]).repeat(len(noise), 1)
    first = numbers // group_size * group_size
    first[part_at] = numbers[part_at]
    return noise[torch.arange(len(noise))[:, None], first]
"""
BY_WHERE = """
def f(noise, group_size, part_at):
    groups = noise.unflatten(1, (-1, group_size))
    apart = (torch.arange(len(noise)) == part_at).view(-1, 1, 1, 1, 1, 1)
    return torch.where(apart, groups, groups[:, :, :1]).flatten(1, 2)
"""
BY_CAT = """
def f(noise, group_size, part_at):
    def share(part):
        return part[:, ::group_size].repeat_interleave(group_size, dim=1)
    return torch.cat([share(noise[:part_at]), noise[part_at : part_at + 1], share(noise[part_at + 1 :])])
"""
IN_PLACE = """
def f(noise, group_size, part_at):
    for j in range(len(noise)):
        if j != part_at:
            noise[j] = noise[j][::group_size].repeat_interleave(group_size, dim=0)
    return noise
"""
SHARED = "noise[:, ::group_size].repeat_interleave(group_size, dim=1)"
AVERAGED = "noise.unflatten(1, (-1, group_size)).mean(2).repeat_interleave(group_size, dim=1)"
PUT_BACK = """
def f(noise, group_size, part_at):
    shared = {shared}
    shared[{place}] = {source}
    return shared
"""
BY_WEIGHTS = """
def f(value, num_steps):
    shares = []
    for j in range(num_steps):
        share = 0.0
        for s in value:
            if j not in s:
                orders = math.factorial(len(s)) * math.factorial(num_steps - len(s) - 1)
                share += orders / math.factorial(num_steps) * (value[s | {j}] - value[s])
        shares.append(share)
    return shares
"""
BY_DIVIDENDS = """
def f(value, num_steps):
    gain = {}
    for s in sorted(value, key=len):
        gain[s] = value[s] - sum(gain[t] for t in gain if t < s)
    return torch.tensor([sum(gain[s] / len(s) for s in gain if j in s) for j in range(num_steps)])
"""
BY_RECURSION = """
def f(value, num_steps):
    def split(steps):
        if not steps:
            return {}
        shares = dict.fromkeys(steps, 0.0)
        for last in steps:
            before = split(steps - {last})
            for j in steps - {last}:
                shares[j] += before[j] / len(steps)
            shares[last] += (value[steps] - value[steps - {last}]) / len(steps)
        return shares
    shares = split(frozenset(range(num_steps)))
    return [shares[j] for j in range(num_steps)]
"""
BY_ORDERS = """
def f(value, num_steps):
    total, orders = torch.zeros(num_steps).double(), list(itertools.permutations(range(num_steps)))
    for order in orders:
        on = frozenset()
        for j in order:
            total[j] += {added}
            on |= {{j}}
    return total / {count}
"""
WHOLE, NONE = "value[frozenset(range(num_steps))]", "value[frozenset()]"
EACH = "[{} for j in range(num_steps)]"
RIGHT = [
    (2, LEAF_BY_LEAF), (2, FROM_THE_LEAVES), (2, BY_MATRICES), (2, BY_SHAPES), (1, ROLLOUT_BY_ROLLOUT),
    (1, BY_NUMBERS), (1, BY_WHERE), (1, BY_CAT), (3, BY_WEIGHTS), (3, BY_DIVIDENDS), (3, BY_RECURSION),
    (3, BY_ORDERS.format(added="value[on | {j}] - value[on]", count="len(orders)")),
]  # fmt: skip
MEAN = "mean(1)"
STEPS = "values.diff(dim=1)"
WRONG = [
    (1, IN_PLACE, "work on copies"),
    (1, SHARED, "no step parts"),
    (1, "noise.clone()", "one should"),
    (1, PUT_BACK.format(shared=SHARED, place="part_at - 1", source="noise[part_at - 1]"), "not at"),
    (1, PUT_BACK.format(shared=SHARED, place="part_at", source="torch.randn_like(noise[0])"), "its own draw"),
    (1, PUT_BACK.format(shared="noise[:, :1].repeat(1, noise.shape[1], 1, 1, 1)", place="part_at",
                        source="noise[part_at]"), "another group"),
    (1, PUT_BACK.format(shared=AVERAGED, place="part_at", source="noise[part_at]"), "spread"),
    (1, PUT_BACK.format(shared=f"{SHARED}.roll(1, 0)", place="part_at", source="noise[part_at]"), "same"),
    (1, "noise[:, ::group_size]", "shape"),
    (1, "torch.full_like(noise, math.nan)", "NaN"),
    (2, VALUES.format(how=MEAN, give="-values.diff(dim=1)"), "less where it leads"),
    (2, VALUES.format(how=MEAN, give="(values[:, -1:] - values[:, :1]).expand(-1, depth)"), "all actions"),
    (2, VALUES.format(how=MEAN, give="values.diff(dim=1).flip(1)"), "first column"),
    (2, VALUES.format(how=MEAN, give="values[:, 1:]"), "value of where it leads alone"),
    (2, VALUES.format(how=MEAN, give="values"), "one number for each leaf"),
    (2, VALUES.format(how=MEAN, give=f"{STEPS} / {STEPS}.std(0, correction=0)"), "divide"),
    (2, VALUES.format(how=MEAN, give=f"{STEPS}.abs()"), "add up"),
    (2, VALUES.format(how=MEAN, give=f"{STEPS}.mean(1, keepdim=True).expand(-1, depth)"), "wrong"),
    (2, VALUES.format(how=MEAN, give="rewards.zero_()[:, None] + values.diff(dim=1)"), "work on copies"),
    (3, EACH.format(f"value[frozenset({{j}})] - {NONE}"), "what it adds to others"),
    (3, EACH.format(f"{WHOLE} - value[frozenset(range(num_steps)) - {{j}}]"), "other orders"),
    (3, EACH.format(f"({WHOLE} - {NONE}) / num_steps"), "not all shares"),
    (3, BY_ORDERS.format(added="value[on] - value[on | {j}]", count="len(orders)"), "the sign"),
    (3, BY_ORDERS.format(added="value[on | {j}] - value[on]", count="1"), "average"),
    (3, "[sum(value[s | {j}] - value[s] for s in value if j not in s) / 2 ** (num_steps - 1) "
        "for j in range(num_steps)]", "equally frequent"),
    (3, BY_ORDERS.format(added="value[on | {j}]", count="len(orders)"), "together"),
    (3, EACH.format("value[frozenset(range(j + 1))] - value[frozenset(range(j))]"), "wrong with"),
    (3, f"{WHOLE} - {NONE}", "a number for each"),
    (3, BY_WEIGHTS.replace("    return", "    value.clear()\n    return"), "work on copies"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "07_img2img_ddpo", IMPORTS, ARGUMENTS, RIGHT, WRONG
)
