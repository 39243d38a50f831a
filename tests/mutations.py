"""Faults that tests must catch: `make mutate` puts them into a copy of the package, one at a time.

Each line changes one place of a formula: log-probs, advantages, ratios, timesteps, old policy, KL, shares of
gradients. A fault that its tests do not notice "survives", and the command fails. Add one for every line that
decides weights, and name tests that take seconds. `test_mutations.py` holds that each still fits the source.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORKERS = 2


class Mutation(NamedTuple):
    """A fault.

    Attributes:
        file: of the package.
        right: a text that stands there once.
        wrong: what takes its place.
        tests: what must fail, as pytest's words.
    """

    file: str
    right: str
    wrong: str
    tests: str


# File, tests that must fail, and (what stands there once, what takes its place).
FAULTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("ddim.py", "test_ddim.py", [
        ("safe_std.square()) - constant", "safe_std.square())"),
        ("squared_error.shape[1]\n", "1\n"),
        ("eta**2 * (1 - alpha_bar_prev)", "eta * (1 - alpha_bar_prev)"),
        ("1 - alpha_bar_prev - variance", "1 - alpha_bar_prev"),
        ("prev_sample.detach().float()", "prev_sample.float()"),
    ]),
    ("ddim.py", "test_reference.py", [
        ("distance / (2 * safe_std.square())", "distance / safe_std.square()"),
    ]),
    ("flow.py", "test_flow.py", [
        ("level.square() / (2 * now)", "level.square() / now"),
        ("std = level * length.sqrt()", "std = level * length"),
        ("(1 - now) * kept - now * (1 - after)", "(1 - now) * kept"),
        ("lengths = self.sigmas[:-1] - self.sigmas[1:]", "lengths = self.sigmas[:-1]"),
        ("(1 - places).clamp", "places.clamp"),
    ]),
    ("models/flux.py", "test_flux.py -k plain_diffusers_d", [
        ("range(number, number + 1)", "range(0, 1)"),
        ("out[:, : tokens[0].shape[1]]", "out[:, -tokens[0].shape[1] :]"),
        ("(len(prompts),), guidance_scale,", "(len(prompts),), 1.0,"),
        ("self.latents_shape(size)", "self.latents_shape()"),
    ]),
    ("training/sampler.py", "test_flux.py -k 'tells_kontext or noise_levels_of'", [
        ("self.start.images(contexts),", "None,"),
        ("self.schedule(epoch, known)", "self.schedule(epoch)"),
    ]),
    ("ppo.py", "test_ppo.py", [
        ("torch.maximum(-adv", "torch.minimum(-adv"),
        ("ratio.clamp(1 - clip_range", "ratio.clamp(1 / (1 + clip_range)"),
        ("clamp(-adv_clip_max, adv_clip_max)", "clamp(max=adv_clip_max)"),
        ("old_log_prob.detach()", "old_log_prob"),
    ]),
    ("advantages.py", "test_advantages.py", [
        ("groups - groups.mean(1, keepdim=True)", "groups - groups.mean()"),
        ("differences.std(correction=0)", "differences.std()"),
        ("basis.std(correction=0)", "basis.std()"),
        ("[-max(self.buffer_size, len(new)) :]", "[-self.buffer_size :]"),
        ("delta + gamma * lam * next_advantage", "delta + lam * next_advantage"),
    ]),
    ("algorithms/branching.py", "test_branching.py", [
        (".diff(dim=1)", "[:, 1:] - leaves.mean()"),
    ]),
    ("algorithms/ddpo.py", "test_branching.py", [
        ('rows, pairs["columns"]]', 'rows, 0 * pairs["columns"]]'),
    ]),
    ("algorithms/rwr.py", "test_rwr.py", [
        ("len(rewards) / count", "1.0"),
    ]),
    ("rollout.py", "test_rollout.py", [
        ("noisy[0], noisy[-1] + 1", "noisy[0], noisy[-1]"),
    ]),
    ("rollout.py", "test_rollout.py test_flow_family.py", [
        ("if k == end - 1:", "if k == len(schedule.stds) - 1:"),
    ]),
    ("algorithms/ddpo.py", "test_trainer.py -k ratio_one", [
        ("[rows, columns + 1]", "[rows, columns]"),
    ]),
    ("algorithms/ddpo.py", "test_trainer.py test_branching.py -k 'predicted_once or ratio_is'", [
        ("owners = rows // alike * alike", "owners = rows"),
    ]),
    ("algorithms/ddpo.py", "test_algorithms.py -k actions_of_each", [
        ("[:, :num_train_timesteps]", "[:, : num_train_timesteps + 1]"),
    ]),
    ("algorithms/ddpo.py", "test_reference.py", [
        ("+ config.train_kl_coefficient * kl", "- config.train_kl_coefficient * kl"),
    ]),
    ("algorithms/flow_grpo.py", "test_algorithms.py -k cps", [
        ('self.sde == "cps"', 'self.sde != "cps"'),
    ]),
    ("algorithms/awm.py", "test_algorithms.py -k awm", [
        ("self.config.train_kl_coefficient * distance", "distance"),
        ("learner.update_old_policy(decay=0.0)", "pass"),
        ("**self.time_power) * error", ") * error"),
        ("(samples.first_step + 1)", "samples.first_step"),
        ("self.ema_kl_coefficient * moved", "moved"),
    ]),
    ("algorithms/forward_process.py", "test_rwr.py", [
        ("schedule.first_timestep + 1", "schedule.first_timestep"),
        ("samples.numbers[pairs", "(samples.numbers * 0)[pairs"),
    ]),
    ("algorithms/forward_process.py", "test_algorithms.py -k timesteps", [
        ("timesteps_at(1 - evenly)", "timesteps_at(0.9 - 0.9 * evenly)"),
    ]),
    ("algorithms/forward_process.py", "test_algorithms.py -k visited", [
        ("(noisy - kept) / scale", "noisy - kept"),
        ("[: trajectory.latents.shape[1]]", "[: trajectory.num_steps]"),
    ]),
    ("algorithms/nft.py", "test_algorithms.py -k nft", [
        ("example, old + step)", "example, old - step)"),
        ("self.decay_rate * samples.epoch", "self.decay_rate * (samples.epoch + 1)"),
    ]),
    ("algorithms/pepg.py", "test_algorithms.py -k pepg", [
        ("(advantages - log_ratio)", "(advantages + log_ratio)"),
        ("-log_ratio.exp()", "-1"),
    ]),
    ("algorithms/dpo.py", "test_algorithms.py -k dpo", [
        ("-F.logsigmoid(-self.beta", "-F.logsigmoid(self.beta"),
    ]),
    ("algorithms/draft.py", "test_draft.py", [
        ("latents[rows, total - steps]", "latents[rows, total - steps - 1]"),
    ]),
    ("training/learner.py", "test_algorithms.py -k 'old_policy or old_weights'", [
        ("self._use(new)", "pass"),
        ("lerp_(part_of(self.trainable[name]), 1 - decay)", "lerp_(part_of(self.trainable[name]), decay)"),
        ("torch.clear_autocast_cache()", "pass"),
    ]),
    ("training/learner.py", "test_rwr.py -k grouping_changes", [
        ("backward(value * share)", "backward(value / len(groups))"),
    ]),
]  # fmt: skip
MUTATIONS = [Mutation(file, *texts, tests) for file, tests, faults in FAULTS for texts in faults]


@contextmanager
def put_in(tree: Path, mutation: Mutation) -> Iterator[None]:
    """Have a fault in a copy of the package, for the time of a `with` block."""
    path = tree / "ddpo_lessons" / mutation.file
    source = path.read_text("utf-8")
    path.write_text(source.replace(mutation.right, mutation.wrong), "utf-8")
    try:
        yield
    finally:
        path.write_text(source, "utf-8")


def survives(tree: Path, mutation: Mutation) -> bool:
    """Tell whether its tests pass in a copy of the package with that fault."""
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider -m 'not slow' {mutation.tests}"
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with put_in(tree, mutation):
        done = subprocess.run(command, shell=True, cwd=tree / "tests", env=environment, capture_output=True)
    if done.returncode > 1:  # no test was run, or pytest itself failed
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def main() -> int:
    """Try all faults, and print those that survive; return 1 if any does."""
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(WORKERS):
            tree = Path(folder, str(number))
            for name in ("ddpo_lessons", "tests", "benchmarks"):
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", tree)
            trees.put(tree)

        def attempt(mutation: Mutation) -> bool:
            tree = trees.get()
            try:
                return survives(tree, mutation)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(WORKERS) as pool:
            results = list(pool.map(attempt, MUTATIONS))
    for mutation, survived in zip(MUTATIONS, results, strict=True):
        verdict = "SURVIVES" if survived else "caught  "
        print(f"{verdict} {mutation.file}: {mutation.right!r} -> {mutation.wrong!r}")
    print(f"{sum(results)} of {len(results)} faults survive")
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
