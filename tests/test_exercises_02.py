"""Wrong answers to the exercises of lesson 02, with words of their hints; and right answers of other form."""

from __future__ import annotations

import functools

import pytest

from tests.helpers import check_of, hint_for

check = functools.cache(functools.partial(check_of, "02_time_shuffling"))

PICK = """
def pick_columns(how, b, t, k, generator):
    time = torch.arange(t)
    if how == "first":
        return FIRST
    if how == "last":
        return LAST
    if how == "shared":
        return SHARED
    return OWN
"""
RIGHT = {
    "FIRST": "time[:k].expand(b, -1)",
    "LAST": "time[-k:].expand(b, -1)",
    "SHARED": "torch.randperm(t, generator=generator)[:k].expand(b, -1)",
    "OWN": "torch.stack([torch.randperm(t, generator=generator)[:k] for _ in range(b)])",
}


def pick(**changes: str) -> str:
    code = PICK
    for name, text in (RIGHT | changes).items():
        code = code.replace(f"return {name}", f"return {text}")
    return code


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"FIRST": "time[:k]"}, "first: shape"),
        ({"FIRST": "time.expand(b, -1)"}, "first: shape"),
        ({"FIRST": "time[1 : k + 1].expand(b, -1)"}, "first"),
        ({"LAST": "time[t - k - 1 : -1].expand(b, -1)"}, "last 3 of 7"),
        ({"LAST": "time[:k].flip(0).expand(b, -1)"}, "last 3 of 7"),
        ({"SHARED": RIGHT["OWN"]}, "different orders"),
        (
            {"SHARED": "(torch.randint(t, (1,), generator=generator) + time[:k]).expand(b, -1) % t"},
            "each pair",
        ),
        (
            {
                "SHARED": "torch.randperm(t, generator=generator)[:k]"
                "[torch.rand(b, k, generator=generator).argsort(1)]"
            },
            "different orders",
        ),
        ({"OWN": f"{RIGHT['OWN']}[torch.arange(b) % 2]"}, "tells another's"),
        ({"SHARED": "torch.randint(t, (k,), generator=generator).expand(b, -1)"}, "twice"),
        ({"OWN": "torch.randint(t, (b, k), generator=generator)"}, "twice"),
        ({"OWN": RIGHT["SHARED"]}, "one order"),
        ({"OWN": "torch.randperm(b, generator=generator)[:, None].expand(b, k)"}, "own"),
        (
            {"OWN": "(torch.randperm(t, generator=generator)[:k] + torch.arange(b)[:, None]) % t"},
            "tells another's",
        ),
        ({"OWN": "torch.randint(t - k + 1, (b, 1), generator=generator) + time[:k]"}, "own"),
        ({"OWN": "torch.stack([torch.randperm(t)[:k] for _ in range(b)])"}, "other chance"),
        ({"OWN": "torch.rand(b, t, generator=generator).argsort(dim=0)[:, :k]"}, "twice"),
        (
            {"OWN": RIGHT["OWN"].replace("=generator)", "=generator.manual_seed(_))")},
            "tells another's",
        ),
        (
            {"SHARED": "(torch.rand(t, generator=generator) * (time + 1)).argsort()[:k].expand(b, -1)"},
            "each pair",
        ),
        ({"OWN": "torch.rand(b, t - k + 1, generator=generator).argsort(dim=1)[:, :1] + time[:k]"}, "own"),
        ({"FIRST": "time[:k].expand(b, -1).float()"}, "integers, not torch.float32"),
        ({"OWN": f"{RIGHT['OWN']}.double().numpy()"}, "integers, not torch.float64"),
        ({"FIRST": "list(range(k))"}, "first: shape"),
        ({"OWN": "None"}, "is there a `return`"),
    ],
)  # fmt: skip
def test_a_wrong_pick_is_refused(changes, word):
    assert word in hint_for(check(1), pick(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"OWN": "torch.rand(b, t, generator=generator).argsort(dim=1)[:, :k]"},
        {"SHARED": "torch.rand(t, generator=generator).topk(k).indices.repeat(b, 1)"},
        {"LAST": "torch.arange(t - k, t).flip(0).repeat(b, 1)"},
        {"OWN": "torch.multinomial(torch.ones(b, t), k, generator=generator)"},
        {"OWN": f"{RIGHT['OWN']}.sort(dim=1).values"},
        {"FIRST": "[list(range(k))] * b", "LAST": "[time[-k:]] * b"},
        {"SHARED": f"{RIGHT['SHARED']}.numpy()", "OWN": f"[*{RIGHT['OWN']}]"},
    ],
)
def test_a_right_pick_is_accepted(changes):
    assert hint_for(check(1), pick(**changes)) == ""


TORN = """
def torn_samples(samples, rewards, replay_function):
    ratio = (replay_function(samples) - samples["log_probs"]).exp()
    expected = normalize(rewards)[samples["id"]]
    off = samples["advantages"] - expected
    return RETURN
"""
RATIOS, ADVANTAGES = "~((ratio - 1).abs() <= 1e-4).all(dim=1)", "~(off.abs() <= 1e-4)"


@pytest.mark.parametrize(
    ("returned", "word"),
    [
        (RATIOS, "another sample's"),
        (ADVANTAGES, "log-probs"),
        (f"{RATIOS} & {ADVANTAGES}", "log-probs"),
        (f"((ratio - 1) > 1e-4).any(dim=1) | {ADVANTAGES}", "0.0003 below 1"),
        (f"((1 - ratio) > 1e-4).any(dim=1) | {ADVANTAGES}", "0.0003 above 1"),
        (f"((ratio - 1).abs() > 1e-4).any(dim=1) | {ADVANTAGES}", "NaN"),
        (f"((ratio - 1).abs() > 1e-4).all(dim=1) | {ADVANTAGES}", "is torn"),
        (f"((ratio.mean(dim=1) - 1).abs() > 1e-3) | {ADVANTAGES}", "0.0003 below 1"),
        (f"~((ratio - 1).abs().mean(dim=1) <= 1e-4) | {ADVANTAGES}", "one ratio is 0.0003"),
        (f"~((ratio - 1).abs().sum(dim=1) <= 1e-4) | {ADVANTAGES}", "nothing is torn"),
        (f"~((ratio.prod(dim=1) - 1).abs() <= 1e-4) | {ADVANTAGES}", "nothing is torn"),
        (f"~((ratio - 1).abs() <= 0.05).all(dim=1) | {ADVANTAGES}", "0.0003 below 1"),
        (f"(ratio != 1).any(dim=1) | {ADVANTAGES}", "nothing is torn"),
        (f"{RATIOS} | ~(off.abs() <= 0.05)", "0.0003 too high"),
        (f"{RATIOS} | ~(off.abs() <= 5e-4)", "0.0003 too high"),
        (f"({RATIOS} | {ADVANTAGES}).any()", "one bool per sample"),
        (f"({RATIOS} | {ADVANTAGES})[:, None]", "one bool per sample"),
        (f"({RATIOS} | {ADVANTAGES}).float()", "return bools"),
        ("None", "is there a `return`?"),
        (f"{RATIOS} ^ {ADVANTAGES}", "row 9 in two ways"),
        (f"({RATIOS} | {ADVANTAGES})[samples['id'].argsort()]", "is torn"),
        (f"{RATIOS} | (off > 1e-4)", "is torn, you found []"),
        (f"{RATIOS} | (off.abs() > 1e-4)", "advantage is NaN"),
        (f"{RATIOS} | (samples['advantages'].sign() != expected.sign())", "0.0003 too high"),
        (f"{RATIOS} | ~((samples['advantages'].abs() - expected.abs()).abs() <= 1e-4)", "other sign"),
        (f"{RATIOS} | ~((samples['advantages'] - normalize(rewards)).abs() <= 1e-4)", "looked up by id"),
        (f"{RATIOS} | ~((samples['advantages'] - rewards[samples['id']]).abs() <= 1e-4)", "of `normalize`"),
    ],
)  # fmt: skip
def test_a_check_that_overlooks_a_tear_is_refused(returned, word):
    assert word in hint_for(check(2), TORN.replace("RETURN", returned))


@pytest.mark.parametrize(
    "returned",
    [
        f"{RATIOS} | {ADVANTAGES}",
        f"~(ratio.log().abs() < 1e-4).all(dim=1) | {ADVANTAGES}",
        f"~torch.isclose(ratio.double(), torch.ones(1).double(), rtol=0, atol=1e-4).all(1) | {ADVANTAGES}",
        "torch.tensor([not (abs(a) <= 1e-4 and all(abs(p - 1) <= 1e-4 for p in row)) "
        "for a, row in zip(off.tolist(), ratio.tolist())])",
        f"({RATIOS} | {ADVANTAGES}).tolist()",
        f"[*({RATIOS} | {ADVANTAGES})]",
        f"({RATIOS} | {ADVANTAGES}).numpy()",
        "((ratio - 1).abs() > 1e-4).any(1) | ratio.isnan().any(1) | (off.abs() > 1e-4) | off.isnan()",
    ],
)
def test_another_right_check_is_accepted(returned):
    assert hint_for(check(2), TORN.replace("RETURN", returned)) == ""


DRAW = """
def draw_columns(lengths, num_kept, generator):
    p = lengths / lengths.sum()
    columns = torch.multinomial(p, num_kept, replacement=True, generator=generator)
    return columns, WEIGHTS
"""


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        ("torch.full((num_kept,), len(lengths) / num_kept)", "on average"),
        ("1 / p[columns]", "on average"),
        ("p[columns] / num_kept", "on average"),
        ("torch.ones(num_kept)", "on average"),
        ("1 / (num_kept * lengths[columns])", "on average"),
        ("1 / (len(lengths) * p[columns])", "on average"),
        ("(w := 1 / p[columns]) / w.sum() * len(p)", "on average"),
        ("1 / (1 - (1 - p[columns]) ** num_kept)", "on average"),
    ],
)
def test_weights_that_are_biased_are_refused(weights, word):
    assert word in hint_for(check(3), DRAW.replace("WEIGHTS", weights))


def test_even_chances_without_bias_are_refused_for_their_error():
    even = DRAW.replace("WEIGHTS", "torch.full((num_kept,), len(lengths) / num_kept)").replace(
        "p = lengths / lengths.sum()", "p = torch.ones(len(lengths))"
    )
    assert "squared error" in hint_for(check(3), even)


@pytest.mark.parametrize(
    ("columns", "weights"),
    [
        (None, "1 / (num_kept * p[columns])"),
        (None, "(1 / (num_kept * p[columns])).tolist()"),
        ("torch.multinomial(p, num_kept, replacement=True, generator=generator).tolist()",
         "1 / (num_kept * p.double()[columns])"),
        (None, "torch.autograd.grad(p.requires_grad_().log().sum(), p)[0][columns] / num_kept"),
        ("torch.searchsorted(p.cumsum(0)[:-1], torch.rand(num_kept, generator=generator))",
         "torch.stack([lengths.sum() / lengths[k] for k in columns]) / num_kept"),
    ],
)  # fmt: skip
def test_weights_without_bias_are_accepted(columns, weights):
    drawn = "torch.multinomial(p, num_kept, replacement=True, generator=generator)"
    answer = DRAW.replace("WEIGHTS", weights)
    assert drawn in answer
    assert hint_for(check(3), answer.replace(drawn, columns or drawn)) == ""
