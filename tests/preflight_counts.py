"""What preflight alone sees of `make mutate`'s faults, and how often it cries wolf.

    python -m tests.preflight_counts mutations
    python -m tests.preflight_counts healthy tests/test_trainer.py ...

The first puts each mutation into the running package and does a first epoch. The second runs tests, and
looks at the first epochs of all runs in them. Both write `benchmarks/results/preflight_counts.json`.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline

from ddpo_lessons import checks
from ddpo_lessons.algorithms import ALGORITHMS, make_algorithm
from ddpo_lessons.data.starts import WithImages
from ddpo_lessons.lessons.faults import Fault, put_in
from ddpo_lessons.trainer import Trainer
from tests.helpers import NOT_CLIPPED, brightness, each_prompt, flow_trainer, make_config, make_pipeline
from tests.helpers import make_flux_pipeline as make_flux
from tests.mutations import MUTATIONS, ROOT

RESULT = ROOT / "benchmarks" / "results" / "preflight_counts.json"
ON_FLOW = ("flow_grpo", "awm", "nft", "pepg", "dpo")
KONTEXT = ("self.start.images(contexts),", "self.schedule(epoch, known)")


def algorithm_of(file: str, right: str) -> str:
    """Name the algorithm whose run uses the line that a mutation changes; "kontext" is Flow-GRPO of it."""
    name = Path(file).stem
    if name in ("flow", "flux"):
        return "flow_grpo"
    if right in KONTEXT:
        return "kontext"
    if name == "forward_process" or (name == "learner" and "share" not in right):  # of an older policy
        return "nft"
    return name if name in ALGORITHMS else "ddpo"


def make_trainer(name: str, folder: Path) -> Trainer:
    """Make a run of a random tiny model by an algorithm."""
    if name == "kontext":
        kontext = make_flux(kind=FluxKontextPipeline)
        return flow_trainer(folder, make_algorithm("flow_grpo"), WithImages(), kontext, sample_batch_size=4)
    if name in ON_FLOW:
        settings = {"sample_batch_size": 4, "train_batch_size": 2, "sample_group_size": 2}
        return flow_trainer(folder, make_algorithm(name), **settings)
    settings = {"sample_batch_size": 8, "train_batch_size": 4, "sample_group_size": 4}
    if name in ("rwr", "draft"):
        settings |= {**NOT_CLIPPED, "sample_group_size": 1}
    elif name == "ddpo":
        settings["train_kl_coefficient"] = 0.1
    parts = (make_config(folder, **settings), brightness, each_prompt(), make_pipeline())
    return Trainer(*parts, algorithm=make_algorithm(name))


def verdict(algorithm: str) -> list[str] | str:
    """Return the checks that fail, or the error that ended the run."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            findings = checks.preflight(make_trainer(algorithm, Path(folder)), plain=False)
            return [finding.check for finding in findings if not finding.passed]
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:100]


def count_mutations() -> list[dict[str, Any]]:
    """Try all of them; a run without any must pass."""
    torch.set_num_threads(1)
    names = [algorithm_of(mutation.file, mutation.right) for mutation in MUTATIONS]
    for name in dict.fromkeys(names):
        if healthy := verdict(name):
            raise RuntimeError(f"without a fault {name} gives {healthy}")
        print(name, "is healthy", flush=True)
    rows = []
    for name, mutation in zip(names, MUTATIONS, strict=True):
        file, right, wrong, _ = mutation
        with put_in(Fault(file, right, wrong, "", "")):
            rows.append({"file": file, "right": right, "wrong": wrong, "run": name, "seen": verdict(name)})
        print(*rows[-1].values(), sep=" | ", flush=True)
    return rows


class FirstEpochs:
    """A plugin of pytest that looks at what preflight says of every first epoch."""

    def __init__(self) -> None:
        self.test, self.count, self.alarms = "", 0, list[dict[str, Any]]()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Remember whose runs come next."""
        self.test = item.nodeid

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Look at each report."""
        report = Trainer._report_first

        def also(trainer: Trainer, *arguments: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report(trainer, *arguments)
            self.count += 1
            failed = [finding.check for finding in trainer.preflight if not finding.passed]
            if failed:
                self.alarms.append({"test": self.test, "failed": failed})

        patch.setattr(Trainer, "_report_first", also)


def count_alarms(words: list[str]) -> dict[str, Any]:
    """Run tests, and return how many first epochs there were, and which of them raised an alarm."""
    plugin = FirstEpochs()
    with pytest.MonkeyPatch.context() as patch:
        plugin.watch(patch)
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *words], plugins=[plugin])
    return {"tests": words, "first_epochs": plugin.count, "alarms": plugin.alarms}


def main(part: str, *words: str) -> None:
    """Write what a part counts beside what is there of the other."""
    found = json.loads(RESULT.read_text("utf-8")) if RESULT.exists() else {}
    found[part] = count_mutations() if part == "mutations" else count_alarms(list(words))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
