"""What each change for speed is worth: `python -m benchmarks.speed.candidates`.

Lets the trainer take turns with variants of itself, an epoch each: without one of its changes for speed, or
with one that it does not have. Writes candidates.json: seconds of an epoch (median, smallest,
largest) of every variant, and which operators an epoch spends its time in.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm

from benchmarks.common import machine
from benchmarks.peers.environment import started
from benchmarks.speed.cases import CASES, SIZES, serve
from benchmarks.speed.our_epochs import make_trainer
from benchmarks.speed.side_by_side import summary, tiny_folder
from ddpo_lessons.families import policy, stable_diffusion
from ddpo_lessons.families.stable_diffusion import StableDiffusion
from ddpo_lessons.trainer import DDPOTrainer

RESULT = Path(__file__).with_suffix(".json")
CASE_NAMES = ("text-to-image, guidance 5", "img2img, guidance 5, empty prompt")
SIZE = "TRL"
OPERATORS = 8  # listed
WARM_UP = 1  # epochs: torch.compile compiles in the first


def always_two_passes(family: Any, prompts: Any, negative_prompt: str, *others: Any) -> Any:
    """Embed both prompts, also where they are the same."""
    told, negative = (family._told(texts, None) for texts in (prompts, [negative_prompt] * len(prompts)))
    return {**told, **{f"negative_{name}": value for name, value in negative.items()}}


def without_summed_weights() -> None:
    """Let peft compute its layers."""
    policy.use_summed_weights = lambda config: None


def without_equal_prompts() -> None:
    """Take two passes with guidance, as imageddpo does."""
    StableDiffusion.condition = always_two_passes


def without_cache() -> None:
    """Forget every prompt at once."""
    stable_diffusion.CACHED_PROMPTS = 0


def weight_by_weight(trainer: DDPOTrainer) -> None:
    """Use AdamW's loop over weights."""
    trainer.learner.optimizer.param_groups[0]["fused"] = False


def channels_last(trainer: DDPOTrainer) -> None:
    """Keep the UNet's weights with their channels last."""
    trainer.learner.denoiser.to(memory_format=torch.channels_last)


# variant: (settings, what is done before the trainer is made, what is done to the trainer)
Change = tuple[dict[str, Any], Callable[[], None] | None, Callable[[DDPOTrainer], None] | None]
VARIANTS: dict[str, Change] = {
    "as it is": ({}, None, None),
    "trains minibatch by minibatch": (
        {"train_forward_size": SIZES[SIZE]["train_batch_size"]}, None, None,
    ),
    "samples batch by batch": ({"sample_forward_size": SIZES[SIZE]["sample_batch_size"]}, None, None),
    "peft's LoRA layers": ({}, without_summed_weights, None),
    "AdamW weight by weight": ({}, None, weight_by_weight),
    "two passes for equal prompts": ({}, without_equal_prompts, None),
    "prompts encoded again": ({}, without_cache, None),
    "channels_last": ({}, None, channels_last),
    "torch.compile": ({"torch_compile": True}, None, None),
    "bf16": ({"mixed_precision": "bf16"}, None, None),
}  # fmt: skip


def work(case_name: str, variant: str, folder: str) -> None:
    """Serve epochs of a variant to the main process."""
    settings, before, after = VARIANTS[variant]
    if before is not None:
        before()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(CASES[case_name], SIZE, folder, output_dir, **settings)
        if after is not None:
            after(trainer)
        epochs = 0

        def answer(line: str) -> dict[str, Any]:
            nonlocal epochs
            epochs += 1
            if line == "profile":
                return {"operators": operators(lambda: trainer.step(epochs))}
            begun = time.perf_counter()
            metrics = trainer.step(epochs)
            phases = {name: metrics[f"seconds_{name}"] for name in ("sampling", "reward", "training")}
            return {**phases, "whole": time.perf_counter() - begun}

        serve(answer)


def operators(run: Callable[[], Any]) -> dict[str, float]:
    """Return the operators that take most time of their own, with their shares."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    own = {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    largest = sorted(own, key=own.__getitem__, reverse=True)[:OPERATORS]
    return {name: round(own[name] / sum(own.values()), 3) for name in largest}


def compare(case_name: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Let the variants take turns."""
    command = [sys.executable, "-m", "benchmarks.speed.candidates", "--work", case_name]
    with ExitStack() as stack:
        workers = {name: stack.enter_context(started([*command, name, str(folder)])) for name in VARIANTS}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        for _ in range(WARM_UP + rounds):
            for name, worker in workers.items():
                times[name].append(worker.ask("epoch"))
        profiled = workers["as it is"].ask("profile")
    compiling = sum(epoch["whole"] for epoch in times["torch.compile"][:WARM_UP])
    seconds = {name: summary(epochs[WARM_UP:])["whole"] for name, epochs in times.items()}
    return {"case": case_name, "seconds": seconds, "compiling_seconds": round(compiling, 1), **profiled}


def main() -> None:
    """Compare the variants on both cases, or work for the process that does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=3, metavar=("CASE", "VARIANT", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_folder(Path(scratch, "tiny-sd"))
        rows = [compare(name, folder, arguments.rounds) for name in tqdm(CASE_NAMES)]
    result = {"machine": machine(), "rounds": arguments.rounds, "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
