"""Tables of lessons 04 and 05 hold the numbers of the committed results that their figures draw."""

import runpy
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.common import Row, read_rows, where
from tests.helpers import cells_of

ROOT = Path(__file__).parents[1]


def prose(lesson: str) -> str:
    """The text of a lesson; its tables have no-break spaces in ranges."""
    text = "\n".join(source for kind, source in cells_of(lesson) if kind == "markdown")
    return text.replace("\xa0", " ")


def rows_of(path: str) -> list[Row]:
    return read_rows(ROOT / "benchmarks" / path)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a script that draws."""
    monkeypatch.syspath_prepend(str(ROOT / "images"))
    return runpy.run_path(str(ROOT / "images" / f"{name}.py"))


def by_seed(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["seed"], []).append(row)
    return found


def shift(run: list[Row]) -> float:
    return mean(float(row["shift"]) for row in run if row["shift"])


def between(values: Iterable[float], digits: int) -> str:
    found = [*values]
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def test_lesson_04_holds_what_clipping_csv_says(monkeypatch):
    readable_at = script("draw_04_ppo_clipping", monkeypatch)["readable_at"]
    text, data = prose("04_ppo_clipping"), rows_of("results/clipping.csv")

    def runs(variant: str, rate: str, inner_epochs: str, seeds: str) -> dict[str, list[Row]]:
        chosen = where(data, variant=variant, learning_rate=rate, inner_epochs=inner_epochs)
        return {seed: run for seed, run in by_seed(chosen).items() if seed in seeds}

    settings = [("0.0002", "4"), ("5e-05", "4"), ("0.0002", "1"), ("5e-05", "1")]
    rates = ("0.0001", "0.0002", "0.0004")
    for variant in ("clipped", "not clipped"):
        first = [runs(variant, *setting, "012").values() for setting in settings]
        shifts = " | ".join(f"{mean(shift(run) for run in each):.2f}" for each in first)
        assert f"| mean shift within an epoch, {variant} | {shifts} |" in text
        ends = [[readable_at(run) for run in each] for each in first]
        cells = " | ".join("not reached" if None in each else f"{mean(each):.0%}" for each in ends)
        assert f"| readable when redness first passes 0.5, {variant} | {cells} |" in text
        new = [runs(variant, rate, "4", "34567").values() for rate in rates]
        cells = " | ".join(between(map(shift, each), 2) for each in new)
        assert f"| mean shift within an epoch, {variant} | {cells} |" in text

    def leads_of(rate: str, inner_epochs: str, seeds: str, redness: float = 0.5) -> list[float]:
        """Return how many points the clipped run leads at a redness, of the pairs that can be compared."""
        pairs = [runs(variant, rate, inner_epochs, seeds) for variant in ("clipped", "not clipped")]
        ends = [{seed: readable_at(run, redness) for seed, run in each.items()} for each in pairs]
        both = [seed for seed in ends[0] if None not in (ends[0][seed], ends[1][seed])]
        return [100 * (ends[0][seed] - ends[1][seed]) for seed in both]

    leads = [leads_of(rate, "4", "34567") for rate in rates]
    cells = " | ".join(between(each, 0) for each in leads)
    assert f"| lead of the clipped run when redness first passes 0.5, in points | {cells} |" in text
    assert sum(map(len, leads)) == 12  # "twelve of the fifteen new pairs"
    once = leads_of("0.0002", "1", "01234567")
    (ahead,) = (lead for lead in once if lead > 0)
    behind = [-lead for lead in once if lead < 0]
    assert len(behind) == 5
    assert f"| 0.5, 1 (at 2e-4) | 6 of 8 | 1, by {ahead:.0f} | 5, by {between(behind, 1)} |" in text
    *near, some, many = sorted(leads_of("0.0002", "1", "01234567", 0.3))
    assert len(near) == 6
    assert max(map(abs, near)) < 5
    assert f"the clipped run leads by {some:.0f} and {many:.0f} points" in text
    low = {redness: [lead for rate in rates for lead in leads_of(rate, "4", "34567", redness)]
           for redness in (0.4, 0.45)}  # fmt: skip
    assert [len(each) for each in low.values()] == [13, 13]
    assert [[round(lead) for lead in each if lead < 0] for each in low.values()] == [[-1], [-1, -3]]


def test_lesson_05_holds_what_bridge_csv_says(monkeypatch):
    late = script("draw_05_text_ppo", monkeypatch)["late_redness"]
    text, data = prose("05_text_ppo_with_gae"), rows_of("text/bridge.csv")
    names = {"one advantage": "one advantage", "value": "value network, GAE"}
    names |= {"falling": "fixed, falling", "rising": "fixed, rising"}
    for variant, name in names.items():
        ends = [late(where(data, variant=variant), rate) for rate in (1e-4, 2e-4, 4e-4, 8e-4)]
        cells = [f"{mean(x):.2f} ({min(x):.2f}–{max(x):.2f}; {len(x)})" if x else "–" for x in ends]
        assert f"| {name} | {' | '.join(cells)} |" in text
    leads = {variant: bridge_leads(variant) for variant in names if variant != "one advantage"}
    means = " | ".join(f"{mean(each) + 1e-9:.2f}" for each in leads["falling"].values())
    assert f"| lead of falling | {means} |" in text
    won = {
        variant: [sum(lead > 0 for lead in each) for each in found.values()]
        for variant, found in leads.items()
    }
    assert won == {"falling": [8, 8, 4, 5], "value": [8, 8, 2, 0], "rising": [0, 0, 0, 0]}
    for variant, name in {"falling": "falling", "value": "value network"}.items():
        counts = zip(won[variant], leads[variant].values(), strict=True)
        assert f"| {name} leads in | {' | '.join(f'{n} of {len(each)}' for n, each in counts)} |" in text


def test_lesson_07_holds_what_bridge_csv_says():
    text = prose("07_img2img_ddpo")
    falling, branching = bridge_leads("falling"), bridge_leads("branching")
    for name, found in {"falling weights": falling, "branching": branching}.items():
        leads = [
            f"{mean(each) + 1e-9:.2f} ({sum(lead > 0 for lead in each)} of {len(each)})"
            for each in found.values()
        ]
        assert f"| {name} | {' | '.join(leads)} |" in text
    pairs = zip(branching["0.0001"], falling["0.0001"], strict=True)
    assert sum(mine > other for mine, other in pairs) == 5  # of eight
    for variant in ("falling", "branching", "value"):
        leads, rising = bridge_leads(variant), bridge_leads("rising")
        assert all(low < lead for rate in leads for low, lead in zip(rising[rate], leads[rate], strict=True))


def bridge_leads(variant: str) -> dict[str, list[float]]:
    """How far each seed of a variant ends above DDPO's, for each learning rate; epochs 8 to 10."""
    late = [row for row in rows_of("text/bridge.csv") if int(row["epoch"]) >= 8]
    leads: dict[str, list[float]] = {}
    for rate in ("0.0001", "0.0002", "0.0004", "0.0008"):
        for seed in sorted({row["seed"] for row in where(late, variant=variant, learning_rate=rate)}):
            ends = [
                mean(float(row["reward"]) for row in where(late, variant=name, learning_rate=rate, seed=seed))
                for name in (variant, "one advantage")
            ]
            leads.setdefault(rate, []).append(ends[0] - ends[1])
    return leads


SWEEP = {  # variant in sweep.csv: how a row of lesson 05 begins
    "beta 0": "| PPO, β = 0 |",
    "beta 0.3": "| PPO, β = 0.3 |",
    "plain": "| PPO, β = 1 |",
    "same for every token": "| total reward, normalized: DDPO's way | none |",
    "reward to go": "| reward-to-go, whitened | none |",
    "lambda 0": "| GAE, λ = 0 | copy of the reward model |",
    "lambda 1": "| GAE, λ = 1 | copy of the reward model |",
    "value from the policy": "| GAE, λ = 0.95 | copy of the policy |",
    "shared trunk": "| GAE, λ = 0.95 | shared trunk, `value_coef` 0.1 |",
    "shared trunk, value_coef 0.01": "| GAE, λ = 0.95 | shared trunk, `value_coef` 0.01 |",
}


def cells(ends: list[Row]) -> str:
    """Seeds; mean, lowest and highest of positive reviews, score and KL."""
    parts = [f"{len(ends)}"]
    for name, scale, digits in (("positive", 100, 0), ("score", 1, 1), ("kl", 1, 1)):
        found = [scale * float(row[name]) for row in ends]
        low, high = (f"{limit:.{digits}f}" for limit in (min(found), max(found)))
        parts.append(f"{mean(found):.{digits}f} ({low}–{high})")
    return " | ".join(parts)


@pytest.mark.parametrize(
    ("variant", "row"), [*SWEEP.items(), ("plain", "| GAE, λ = 0.95 | copy of the reward model |")]
)
def test_lesson_05_holds_what_sweep_csv_says(variant, row):
    """Seeds 3 to 7 where there are all of them, else all seeds."""
    ends = where(rows_of("text/sweep.csv"), variant=variant, iteration="30")
    new = [end for end in ends if int(end["seed"]) >= 3]
    assert f"{row} {cells(new if len(new) == 5 else ends)} |" in prose("05_text_ppo_with_gae")


def test_lesson_05_holds_what_positives_csv_says():
    row = "| no RL: fine-tuning on the best quarter of its own answers |"
    found = cells(where(rows_of("text/positives.csv"), texts="own"))
    assert f"{row} {found} |" in prose("05_text_ppo_with_gae")
