"""What lessons 02, 03 and 10 quote of measurements is what the committed files hold."""

import csv
import json
from pathlib import Path
from statistics import mean

from tests.helpers import cells_of

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def rows(name: str, **values: str) -> list[dict[str, str]]:
    """Return the rows of a CSV that have these values."""
    with open(RESULTS / name, newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if values.items() <= row.items()]


def prose(lesson: str) -> str:
    return "\n".join(source for kind, source in cells_of(lesson) if kind == "markdown")


def cells(seeds: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in seeds).replace("-", "−")


def test_rewards_of_lesson_02():
    text = prose("02_time_shuffling")
    orders = {
        "B": "first three", "C": "all seven", "E": "three, shared order", "A": "three, individual orders",
        "D": "last three",
    }  # fmt: skip
    for letter, order in orders.items():
        quoted = []
        for reward, rate in (("redness", "0.003"), ("redness", "0.001"), ("compressibility", "0.003")):
            ends = rows("orders.csv", reward=reward, learning_rate=rate, order=order, epoch="6")
            quoted.append(cells([float(row["mean_reward"]) for row in ends], ".2f"))
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {letter} | "))
        assert line.endswith(f" | {' | '.join(quoted)} |")
    for letter in "BCD":
        runs = {"reward": "redness", "order": orders[letter], "epoch": "6"}
        percents = (
            [100 * float(row["judge"]) for row in rows("orders.csv", learning_rate=rate, **runs)]
            for rate in ("0.003", "0.001")
        )
        assert f"| {orders[letter]} | {' | '.join(cells(p, '.0f') for p in percents)} |" in text


def test_gradients_of_lesson_02():
    text = prose("02_time_shuffling")
    rollouts = json.loads((RESULTS / "clocks.json").read_text("utf-8"))["rollouts"]
    for order in ("time order", "shuffled"):
        lengths = [rollout[order]["lengths"] for rollout in rollouts]
        assert f" {mean(max(each) / min(each) for each in lengths):.1f}" in text
        assert f" {mean(rollout[order]['first_three'] for rollout in rollouts):.2f}" in text

    def cosines(reward: str, steps: str) -> list[float]:
        return [float(row["cosine"]) for row in rows("gradient_signal.csv", reward=reward, steps=steps)]

    first, second = cosines("redness", "999"), cosines("redness", "874")
    assert f"{min(first):.2f} to {max(first):.2f} over the seeds" in text
    assert f"{min(second):.2f} to {max(second):.2f} in the second" in text
    later = [max(cosines("redness", t)) for t in ("749", "624", "499", "374", "249")]
    assert f"it is {max(later):.2f} or less" in text
    assert f"A cosine of {mean(cosines('redness', 'all seven')):.2f} for all seven" in text
    assert f"first three steps {mean(cosines('redness', 'first three')):.0%} repeats" in text
    sums = [max(cosines("compressibility", steps)) for steps in ("first three", "last three", "all seven")]
    assert f"no sum has a cosine above {max(sums):.2f}" in text


def test_log_probs_of_lesson_03():
    ends = {
        action: rows("log_probs.csv", action=action, steps="10")
        for action in ("stored", "resampled", "attached")
    }
    (start,) = {row["redness"] for row in rows("log_probs.csv", steps="0")}
    red = {action: [float(row["redness"]) for row in found] for action, found in ends.items()}
    quoted = f"from {float(start):.2f} to between {min(red['stored']):.2f} and {max(red['stored']):.2f}"
    assert quoted in prose("03_ddim_log_probs")
    assert max(red["resampled"]) < float(start)
    assert {*red["attached"]} == {float(start)}
    assert {f"{float(row['log_prob']):.2f}" for row in rows("log_probs.csv")} == {"-0.62"}
    lost = [1 - float(row["threes"]) / 0.7812 for row in ends["resampled"]]
    assert [share > 0.5 for share in sorted(lost)] == [False, False, True]


def test_distances_of_lesson_10():
    """With the old policy as sampler, as center or as both, at three learning rates."""
    text = prose("10_without_log_probs")
    runs = [("signed", "sampler"), ("AWM", "center"), ("PEPG", "center"), ("NFT", "center"), ("NFT", "both")]
    for rate in ("0.001", "0.003", "0.01"):
        found = {
            run: [
                float(row["distance"])
                for row in rows("lags.csv", learning_rate=rate, loss=run[0], lag=run[1])
            ]
            for run in runs
        }
        assert {len(seeds) for seeds in found.values()} == {5}
        spans = [f"{min(found[run]):.2f} to {max(found[run]):.2f}" for run in runs]
        assert f"| {rate} | {' | '.join(spans)} |" in text
        for loss in ("AWM", "PEPG"):
            pairs = zip(found[loss, "center"], found["signed", "sampler"], strict=True)
            nearer = {center < sampler for center, sampler in pairs}
            assert rate == "0.003" or nearer == {rate == "0.001"}
