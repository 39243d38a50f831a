"""Answers to the exercises of lesson 02: wrong ones are refused with a hint, right ones of any form pass."""

from tests.helpers import edited, exercise_tests

ARGUMENTS = {
    1: "how, b, t, k, generator", 2: "samples, rewards, replay_function", 3: "lengths, num_kept, generator",
}  # fmt: skip
PARTS = {
    "FIRST": "time[:k].expand(b, -1)",
    "LAST": "time[-k:].expand(b, -1)",
    "SHARED": "torch.randperm(t, generator=generator)[:k].expand(b, -1)",
    "OWN": "torch.stack([torch.randperm(t, generator=generator)[:k] for _ in range(b)])",
}
SHARED, OWN = PARTS["SHARED"], PARTS["OWN"]


def pick(**changes):
    code = """
def f(how, b, t, k, generator):
    time = torch.arange(t)
    if how == "first":
        return FIRST
    if how == "last":
        return LAST
    if how == "shared":
        return SHARED
    return OWN
"""
    return edited(code, *(word for part in (PARTS | changes).items() for word in part))


def torn(returned):
    return f"""
def f(samples, rewards, replay_function):
    ratio = (replay_function(samples) - samples["log_probs"]).exp()
    expected = normalize(rewards)[samples["id"]]
    off = samples["advantages"] - expected
    return {returned}
"""


DRAWN = "torch.multinomial(p, num_kept, replacement=True, generator=generator)"


def drawn(weights, columns=DRAWN, p="lengths / lengths.sum()"):
    return f"""
def f(lengths, num_kept, generator):
    p = {p}
    columns = {columns}
    return columns, {weights}
"""


RATIOS, ADVANTAGES = "~((ratio - 1).abs() <= 1e-4).all(dim=1)", "~(off.abs() <= 1e-4)"
BOTH = f"({RATIOS} | {ADVANTAGES})"
RIGHT = [
    (1, pick()),
    (1, pick(OWN="torch.rand(b, t, generator=generator).argsort(dim=1)[:, :k]")),
    (1, pick(SHARED="torch.rand(t, generator=generator).topk(k).indices.repeat(b, 1)")),
    (1, pick(LAST="torch.arange(t - k, t).flip(0).repeat(b, 1)")),
    (1, pick(OWN="torch.multinomial(torch.ones(b, t), k, generator=generator)")),
    (1, pick(OWN=f"{OWN}.sort(dim=1).values")),
    (1, pick(FIRST="[list(range(k))] * b", LAST="[time[-k:]] * b")),
    (1, pick(SHARED=f"{SHARED}.numpy()", OWN=f"[*{OWN}]")),
    (2, torn(BOTH)),
    (2, torn(f"~(ratio.log().abs() < 1e-4).all(dim=1) | {ADVANTAGES}")),
    (2, torn("~torch.isclose(ratio.double(), torch.ones(1).double(), rtol=0, atol=1e-4).all(1) | "
             + ADVANTAGES)),
    (2, torn("torch.tensor([not (abs(a) <= 1e-4 and all(abs(p - 1) <= 1e-4 for p in row)) "
             "for a, row in zip(off.tolist(), ratio.tolist())])")),
    (2, torn(f"{BOTH}.tolist()")),
    (2, torn(f"[*{BOTH}]")),
    (2, torn(f"{BOTH}.numpy()")),
    (2, torn("((ratio - 1).abs() > 1e-4).any(1) | ratio.isnan().any(1) | (off.abs() > 1e-4) | off.isnan()")),
    (3, drawn("1 / (num_kept * p[columns])")),
    (3, drawn("(1 / (num_kept * p[columns])).tolist()")),
    (3, drawn("1 / (num_kept * p.double()[columns])", f"{DRAWN}.tolist()")),
    (3, drawn("torch.autograd.grad(p.requires_grad_().log().sum(), p)[0][columns] / num_kept")),
    (3, drawn("torch.stack([lengths.sum() / lengths[k] for k in columns]) / num_kept",
              "torch.searchsorted(p.cumsum(0)[:-1], torch.rand(num_kept, generator=generator))")),
]  # fmt: skip
WRONG = [
    (1, pick(FIRST="time[:k]"), "first: shape"),
    (1, pick(FIRST="time[1 : k + 1].expand(b, -1)"), "first 3 of 7"),
    (1, pick(LAST="time[:k].flip(0).expand(b, -1)"), "last 3 of 7"),
    (1, pick(SHARED=OWN), "different orders"),
    (1, pick(SHARED="(torch.rand(t, generator=generator) * (time + 1)).argsort()[:k].expand(b, -1)"),
        "each pair"),
    (1, pick(SHARED="torch.randint(t, (k,), generator=generator).expand(b, -1)"), "shared: a step twice"),
    (1, pick(OWN="torch.randint(t, (b, k), generator=generator)"), "own: a step twice"),
    (1, pick(OWN=f"{OWN}[torch.arange(b) % 2]"), "determines another's"),
    (1, pick(OWN="torch.stack([torch.randperm(t)[:k] for _ in range(b)])"), "use only"),
    (1, pick(FIRST="time[:k].expand(b, -1).float()"), "first: columns are integers, not torch.float32"),
    (1, pick(OWN=f"{OWN}.double().numpy()"), "own: columns are integers, not torch.float64"),
    (2, torn(RATIOS), "another sample's"),
    (2, torn(ADVANTAGES), "log-probs"),
    (2, torn(f"((ratio - 1) > 1e-4).any(dim=1) | {ADVANTAGES}"), "0.0003 below 1"),
    (2, torn(f"((1 - ratio) > 1e-4).any(dim=1) | {ADVANTAGES}"), "0.0003 above 1"),
    (2, torn(f"((ratio - 1).abs() > 1e-4).any(dim=1) | {ADVANTAGES}"), "a log-prob is NaN"),
    (2, torn(f"(ratio != 1).any(dim=1) | {ADVANTAGES}"), "nothing is torn"),
    (2, torn(f"{RATIOS} | ~(off.abs() <= 5e-4)"), "0.0003 too high"),
    (2, torn(f"{RATIOS} | (off.abs() > 1e-4)"), "advantage is NaN"),
    (2, torn(f"{RATIOS} | ~((samples['advantages'].abs() - expected.abs()).abs() <= 1e-4)"), "other sign"),
    (2, torn(f"{RATIOS} ^ {ADVANTAGES}"), "row 9 in two ways"),
    (2, torn(f"{BOTH}.any()"), "one bool per sample"),
    (2, torn(f"{BOTH}.float()"), "return bools"),
    (3, drawn("1 / p[columns]"), "the average is not"),
    (3, drawn("torch.full((num_kept,), len(lengths) / num_kept)", p="torch.ones(len(lengths))"),
        "squared error"),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "02_time_shuffling", "", ARGUMENTS, RIGHT, WRONG
)
