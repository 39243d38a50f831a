"""What lessons 01 to 04, 06, 08 to 10 and 12 quote of measurements is what the committed files hold."""

import itertools
import json
from pathlib import Path
from statistics import mean, stdev

import pytest

from benchmarks.common import where
from benchmarks.speed.lessons import LESSONS, play
from tests.test_lesson_tables import prose, rows_of

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def rows(name: str, **values: str) -> list[dict[str, str]]:
    """Return the rows of a CSV of `RESULTS` that have these values."""
    return where(rows_of(f"results/{name}"), **values)


def cells(seeds: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in seeds).replace("-", "−")


def ends_of_orders(new: bool, column: str = "mean_reward", **values: str) -> list[float]:
    """Return a column of orders.csv after training, for the first three seeds or for the new ones."""
    ends = rows("orders.csv", epoch="6", **values)
    return [float(row[column]) for row in ends if (int(row["seed"]) > 2) == new]


def test_rewards_of_lesson_02():
    text = prose("02_time_shuffling")
    orders = {
        "B": "first three", "C": "all seven", "E": "three, shared order", "A": "three, individual orders",
        "D": "last three",
    }  # fmt: skip
    for letter, order in orders.items():
        quoted = []
        for reward, rate in (("redness", "0.003"), ("redness", "0.001"), ("compressibility", "0.003")):
            ends = ends_of_orders(False, reward=reward, learning_rate=rate, order=order)
            quoted.append(cells(ends, ".2f"))
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {letter} | "))
        assert line.endswith(f" | {' | '.join(quoted)} |")
    for letter in "BCD":
        runs = {"reward": "redness", "order": orders[letter]}
        percents = (
            [100 * part for part in ends_of_orders(False, "judge", learning_rate=rate, **runs)]
            for rate in ("0.003", "0.001")
        )
        assert f"| {orders[letter]} | {' | '.join(cells(p, '.0f') for p in percents)} |" in text


def test_new_seeds_of_lesson_02():
    text = prose("02_time_shuffling")
    names = {
        "first three": "first three", "all seven": "all seven",
        "three, one shared order": "three, shared order", "three, own orders": "three, individual orders",
        "last three": "last three",
    }  # fmt: skip
    ends = [
        [ends_of_orders(True, reward="redness", learning_rate=rate, order=order) for order in names.values()]
        for rate in ("0.003", "0.01")
    ]
    for name, *found in zip(names, *ends, strict=True):
        spans = [f"{min(seeds):.2f} to {max(seeds):.2f}" for seeds in found]
        assert f"| {name} | {' | '.join(spans)} |" in text
    for found in ends:
        seeds = [*zip(*found, strict=True)]  # of each seed the rewards of all orders
        assert [seed.index(max(seed)) for seed in seeds] == [0] * 5
        assert sum(min(seed) == seed[-1] for seed in seeds) == 4
    first_three = {"reward": "redness", "learning_rate": "0.003", "order": "first three"}
    threes = 48 * sum(ends_of_orders(True, "judge", **first_three))
    assert (round(threes), "in one of 240 images" in text) == (1, True)


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


def span(seeds: list[float], form: str) -> str:
    return f"{min(seeds):{form}} to {max(seeds):{form}}".replace("-", "−")


def test_training_and_baselines_of_lesson_09():
    text, columns = prose("09_flow_grpo").replace("**", ""), {"reward": ".2f", "lean": ".2f", "obeyed": ".0%"}
    settings = {
        "untrained, 10 steps": "10 steps", "3 steps": "3 steps", "guidance 4": "guidance 4",
        "best-of-8": "best-of-8", "the untrained images, sheared by a program": "sheared",
    }  # fmt: skip
    for name, setting in settings.items():
        (row,) = rows("flow_untrained.csv", setting=setting)
        assert f"| {name} | {' | '.join(cells([float(row[c])], f) for c, f in columns.items())} |" in text
    ends = {
        (method, rate): {
            c: [float(r[c]) for r in rows("flow.csv", method=method, learning_rate=rate, queries="1024")]
            for c in columns
        }
        for method, rate in itertools.product(("flow", "CPS"), ("0.001", "0.003", "0.01"))
        if (method, rate) in (("CPS", "0.003"), ("flow", rate))
    }
    found = ends["flow", "0.003"]
    assert {len(seeds) for method in ends.values() for seeds in method.values()} == {5}
    means = " | ".join(cells([mean(found[c])], f) for c, f in columns.items())
    assert f"| Flow-GRPO after 1,024 reward evaluations, mean | {means} |" in text
    assert f"lowest and highest seed | {' | '.join(span(found[c], f) for c, f in columns.items())} |" in text
    (best,) = rows("flow_untrained.csv", setting="best-of-8")
    for rate in ("0.001", "0.01"):
        reward, obeyed = ends["flow", rate]["reward"], ends["flow", rate]["obeyed"]
        assert f"| {rate} | {span(reward, '.2f')} | {span(obeyed, '.0%')} |" in text
        assert max(reward) < float(best["reward"])
    reward, obeyed = ends["CPS", "0.003"]["reward"], ends["CPS", "0.003"]["obeyed"]
    assert f"{cells([mean(reward)], '.2f')} ({span(reward, '.2f')}), and {mean(obeyed):.0%}" in text
    assert f"of the images obeyed the prompt ({span(obeyed, '.0%')})" in text


def test_timing_of_noise_in_lesson_09():
    text, windows = prose("09_flow_grpo"), (("1", "3"), ("4", "6"), ("7", "9"), ("1", "9"))
    names, leads = {"flow": "as in `flow`: 0.70 falling to 0.08", "same": "0.35 in each"}, {}
    for noise, name in names.items():
        draws = [rows("flow_timing.csv", noise=noise, first=first, last=last) for first, last in windows]
        assert {len(each) for each in draws} == {5}
        spreads = [[float(row["spread"]) for row in each] for each in draws]
        assert f"| {name} | {' | '.join(span(each, '.3f') for each in spreads)} |" in text
        assert span([float(row["obeyed"]) for row in draws[2]], ".0%") in text
        leads[noise] = [first / second for first, second in zip(*spreads[:2], strict=True)]
    assert f"spread the lean {span(leads['same'], '.1f')} times as much as the next three" in text
    assert f"With the σ of `flow` this factor is {span(leads['flow'], '.1f')}." in text
    pairs = zip(leads["same"], leads["flow"], strict=True)
    assert all(same - 1 < (flow - 1) / 2 for same, flow in pairs)  # "most of the lead"


def other_seeds(lesson: str, count: int = 5) -> dict[str, list[float]]:
    """Return what other_seeds.csv has of a lesson: each quantity's value for every seed."""
    found: dict[str, list[float]] = {}
    for row in rows("other_seeds.csv", lesson=lesson):
        found.setdefault(row["quantity"], []).append(float(row["value"]))
    assert {len(values) for values in found.values()} == {count}
    return found


def test_a_lesson_is_not_played_without_a_cell_that_is_asked_for():
    with pytest.raises(KeyError, match=r"01_batching\.ipynb has no code cell c999"):
        play(LESSONS[0], only=["c01", "c999"])


def test_other_seeds_of_lesson_01():
    wrong = [value for (value,) in other_seeds("01-wrong", 1).values()]
    assert (len(wrong), sum(value > -1.5 for value in wrong)) == (100, 5)
    assert "five of a hundred red runs end above −1.5" in prose("01_batching")
    found = other_seeds("01")
    assert all(map(float.__gt__, found["ESS ratio"], found["by formula"]))


def test_other_seeds_of_lesson_03():
    text, found = prose("03_ddim_log_probs"), other_seeds("03")
    for what in ("noise", "starts"):
        counts = [n for k in range(3) for n in found[f"changed by other {what}, {k}"]]
        assert f"other {what} changed {min(counts):.0f} to {max(counts):.0f}" in text
    rise = found["rise of redness"]
    assert f"by {min(rise):.2f} to {max(rise):.2f} in the six steps" in text


def test_other_seeds_of_lesson_04():
    text, found = prose("04_ppo_clipping"), other_seeds("04")
    assert f"within {max(found['largest error of the formula with aim']):.2f} with five other seeds" in text
    assert {*found["timesteps beyond the limit"]} == {4, 5}
    assert max(abs(x - 1) for x in found["center / predicted, not clipped"]) < 0.05
    clipped, free = (span(found[f"mean shift, {name}"], ".2f") for name in ("clipped", "not clipped"))
    assert f"| mean shift | {clipped} | {free} |" in text
    sinks = [1 - x for x in found["center / predicted, clipped"]]
    assert f"sinks {min(sinks):.0%} to {max(sinks):.0%} less than predicted | within 5%" in text

    def times(toy: str, *rates: float) -> list[float]:
        return [value for rate in rates for value in found[f"times as far, {toy}, {rate}"]]

    every = (0.025, 0.05, 0.1, 0.2, 0.4)
    assert min(times("noisy rewards", *every)) > 2
    assert min(times("noisy rewards, falling learning rate", *every)) > 2
    assert max(times("noisy rewards, σ fixed at 1", *every)) < 1.2
    quiet = "rewards without noise"
    assert min(times(quiet, 0.025, 0.05)) > 1
    noisy = [f"noisy rewards{change}" for change in ("", ", falling learning rate", ", σ fixed at 1")]
    for toy in (quiet, *noisy):
        found_there = [[f"{bound(times(toy, rate)):.1f}" for bound in (min, max)] for rate in every]
        cells_there = (low if low == high else f"{low} to {high}" for low, high in found_there)
        assert f"| {toy} | {' | '.join(cells_there)} |" in text
    assert max(times(quiet, 0.4)) < 1
    assert all(min(times(quiet, rate)) < 1 < max(times(quiet, rate)) for rate in (0.1, 0.2))


def test_other_seeds_of_lesson_06():
    text, found = prose("06_text_to_image_ddpo"), other_seeds("06")
    assert all(map(float.__lt__, found["kB of others, after"], found["kB of others, before"]))
    named, foxes = found["recognized others"], found["recognized foxes"]
    assert f"recognized {min(named):.0f} to {max(named):.0f} of the others" in text
    assert f"and {min(foxes):.0f} to {max(foxes):.0f} of the foxes" in text
    assert sum(map(float.__lt__, named, foxes)) == 2  # "with two of the seeds"
    times = [value for n in range(4) for value in found[f"times the KL, action {n}"]]
    assert f"with five other seeds it is {min(times):.1f} to {max(times):.0f} times as large" in text


def test_other_seeds_of_lesson_08():
    found = other_seeds("08")
    assert {*found["outside in float32"]} == {0}
    assert {*found["outside in float16"]} == {0, 1, 2}
    assert {*found["outside in bfloat16"]} == {8}
    finds = {row["seed"] for row in rows("other_seeds.csv", lesson="08-preflight") if row["value"] == "1.0"}
    assert finds == {"11", "12", "16"}
    assert len(rows("other_seeds.csv", lesson="08-preflight")) == 10


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


def test_img2img_of_lesson_10():
    """All eight seeds for the directions; the five seeds that did not choose a learning rate for training."""
    text, kinds = prose("10_without_log_probs"), ("re-noised", "visited timesteps", "visited states")

    def cosines(method: str, kind: str, guidance: str) -> list[float]:
        found = rows("forward_starts.csv", method=method, examples=kind, guidance=guidance)
        assert len(found) == 8
        return [float(row["cosine"]) for row in found]

    for guidance in ("1.0", "2.0"):
        for name in ("RWR", "all alike"):
            assert (
                max(cosines(name, "re-noised", guidance) + cosines(name, "visited timesteps", guidance)) < 0
            )
        assert min(cosines("RWR", "visited states", guidance)) > 0.2
        assert min(cosines("all alike", "visited states", guidance)) > 0
        for name in ("AWM", "NFT"):
            for kind in kinds[:2]:
                assert min(cosines(name, kind, guidance)) < 0 < max(cosines(name, kind, guidance))
            lowest, *others = sorted(cosines(name, "visited states", guidance))
            assert lowest > -0.1
            assert min(others) > 0.1

    def ends(method: str, kind: str, column: str = "reward") -> list[float]:
        found = rows("forward_starts_runs.csv", method=method, examples=kind, split="test", epoch="20")
        found.sort(key=lambda row: int(row["seed"]))
        return [float(row[column]) for row in found if int(row["seed"]) > 2]

    quoted = {"RWR": kinds[2:], "all alike": kinds[2:], "AWM": (kinds[0], kinds[2]), "DDPO": ("actions",)}
    for method, examples in quoted.items():
        for kind in examples:
            reward, right = ends(method, kind), [100 * share for share in ends(method, kind, "right")]
            named = (
                {"all alike": "equal weights"}.get(method, method),
                kind.replace("actions", "recorded actions"),
            )
            shares = f"{min(right):.0f} to {max(right):.0f}%"
            assert f"| {named[0]} | {named[1]} | {span(reward, '.1f')} | {shares} |" in text
            assert len(reward) == 5
    untrained = -19.8
    assert f"| untrained | – | {cells([untrained], '.1f')} |" in text
    for method in ("AWM", "NFT", "RWR", "PEPG"):
        assert max(ends(method, "re-noised")) < min(ends("DDPO", "actions"))
    assert max(ends("RWR", "re-noised")) < untrained
    assert min(ends("RWR", "visited states")) > max(ends("DDPO", "actions"))
    assert min(ends("AWM", "visited states")) > max(ends("AWM", "re-noised"))
    pairs = [(("AWM", kinds[0]), ("AWM", kinds[1]))]
    pairs += [((name, a), (name, b)) for name in ("NFT", "PEPG") for a, b in itertools.combinations(kinds, 2)]
    for one, other in pairs:  # these ranges overlap
        assert max(min(ends(*one)), min(ends(*other))) <= min(max(ends(*one)), max(ends(*other)))
    gains = [mean(ends(method, "visited states")) - untrained for method in ("all alike", "RWR")]
    assert gains[0] > gains[1] / 2
    right = [ends(method, "visited states", "right") for method in ("all alike", "RWR")]
    assert mean(right[1]) > 2 * mean(right[0])
    for method, quoted in (("NFT", "0.7 ± 0.3"), ("PEPG", "1.1 ± 0.8")):
        pairs_of_seeds = zip(ends(method, "visited states"), ends(method, "re-noised"), strict=True)
        gained = [visited - renoised for visited, renoised in pairs_of_seeds]
        assert f"{mean(gained):.1f} ± {stdev(gained) / 5**0.5:.1f}" == quoted
        assert quoted in text


def test_seeds_above_the_baselines_of_lesson_12():
    text = (RESULTS.parents[1] / "notebooks" / "12_which_algorithm.ipynb").read_text("utf-8")
    untrained = {row["setting"]: row for row in rows("equal_terms_untrained.csv", task="edit")}
    for method in ("DDPO", "branching", "ReFL", "DRaFT"):
        ends = rows("equal_terms.csv", task="edit", method=method, evaluations="1024")
        found = {name: [float(row[name]) for row in ends] for name in ("judge", "second")}
        cells = [f"{mean(values):.0%}" for values in found.values()]
        for baseline in ("strength 0.625, guidance 3, 8 steps", "best-of-8"):
            least = {name: float(untrained[baseline][name]) for name in found}
            counts = [sum(value > least[name] for value in found[name]) for name in found]
            cells.append(f"{counts[0]} and {counts[1]}")
        assert f"| {method}, mean | {' | '.join(cells)} |" in text
