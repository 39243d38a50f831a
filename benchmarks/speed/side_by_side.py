"""Side by side with other trainers: `python -m benchmarks.speed.side_by_side`.

Makes the other trainers' environment, unless it is there. Then the other trainer, this package, this package
with a compiled UNet, and the bare UNet take turns, an epoch each, in processes that live through all rounds.
The run is added to side_by_side.json, in the place of an earlier one of the same day. For every case and
batch size it has the seconds of each phase (median, smallest, largest), the seconds of the first compiled
epoch, and how far the gradients of an optimizer step are apart. This is the first step after the timed
epochs, because both matrices of LoRA then have gradients. If the other trainer fails, its error is recorded.
If more than half of its ratios leave the clip range before any update, its policy is not the one that
sampled, and gradients are not compared. If compared gradients differ, the script ends with an error.
`--without-compiled` leaves out the compiled UNet, which takes most of an hour.
"""

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from benchmarks.common import Row, machine, write_json
from benchmarks.speed.cases import CASES, Case
from benchmarks.speed.peer_environment import Worker, make_environment, versions
from ddpo_lessons.worlds import load_tiny_sd

RESULT = Path(__file__).with_suffix(".json")
ROUNDS = 5
WRONG_POLICY = 0.5  # of the first ratios outside the clip range; where both policies agree, none is
EQUAL = 1e-3  # how far gradients of the same step may be apart, relative to their norm
PHASES = ("sampling", "reward", "training", "whole")


def compare(case: Case, size: str, python: str, folder: Path, compiles: bool) -> Row:
    """Let all take turns, after an epoch to warm up; then compare gradients."""
    arguments = [case.name, size, str(folder)]
    command = [sys.executable, "-m", "benchmarks.speed.our_epochs", *arguments]
    with ExitStack() as stack:
        peer_command = [python, "-m", "benchmarks.speed.peer_epochs", *arguments]
        commands = {"peer": peer_command, "ours": command}
        commands |= {"compiled": [*command, "compiled"]} if compiles else {}
        workers = {name: stack.enter_context(Worker(words)) for name, words in commands.items()}
        peer = workers.pop("peer")
        recording = stack.enter_context(tempfile.TemporaryDirectory()) + "/step.safetensors"
        step = peer.ask(f"gradient {recording}", may_fail=True)
        if case.peer_error not in step.get("error", case.peer_error):
            raise RuntimeError(f"{case.peer} failed, and not as it is known to: {step['error']}")
        turns = {name: (worker, "epoch") for name, worker in workers.items()}
        turns["floor"] = workers["ours"], "floor"
        if "error" not in step:
            turns = {"peer": (peer, "epoch"), **turns}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
        for _ in range(ROUNDS + 1):  # the first is to warm up
            for name, (worker, line) in turns.items():
                times[name].append(worker.ask(line))
        if "error" not in step:
            step = peer.ask(f"gradient {recording}")
        found = outcome(step, workers, recording)
    if compiles:
        found |= {"first_compiled_epoch": round(times["compiled"][0]["whole"], 1)}
    found |= {name: summary(epochs[1:]) for name, epochs in times.items()}
    return {"case": case.name, "size": size, "against": case.peer, **found}


def outcome(step: Row, workers: dict[str, Worker], recording: str) -> Row:
    """Return how the other trainer's step fails, or how far our gradients are from its own.

    Raises:
        RuntimeError: if they are so far apart that the trainers do not compute the same thing.
    """
    if "error" in step:
        return {"error": step["error"]}
    apart = None
    if step["first_clip_fraction"] <= WRONG_POLICY:
        line, key = f"gradient {recording}", "gradient_difference"
        apart = {name: worker.ask(line)[key] for name, worker in workers.items()}
        if not all(value <= EQUAL for value in apart.values()):
            raise RuntimeError(f"these gradients are not the peer's: {apart}")
    return {"first_clip_fraction": step["first_clip_fraction"], "gradient_difference": apart}


def summary(epochs: list[dict[str, float]]) -> Row:
    columns = {phase: [epoch[phase] for epoch in epochs] for phase in PHASES}
    return {phase: [round(f(c), 4) for f in (statistics.median, min, max)] for phase, c in columns.items()}


def tiny_folder(folder: Path) -> Path:
    """Write tiny-sd for the other trainers: a last step with noise, and files that transformers 4 reads."""
    pipeline = load_tiny_sd()
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, set_alpha_to_one=False)
    pipeline.save_pretrained(folder)
    model = json.loads((folder / "tokenizer" / "tokenizer.json").read_text("utf-8"))["model"]
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n" + merges)
    # Without the older names it warns, and encodes prompts with random weights.
    encoder = folder / "text_encoder" / "model.safetensors"
    weights = {f"text_model.{name}": weight for name, weight in load_file(encoder).items()}
    save_file(weights, encoder, metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    compiles = "--without-compiled" not in sys.argv[1:]
    python, rows = make_environment(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_folder(Path(scratch, "tiny-sd"))
        for case in tqdm(CASES.values(), desc="cases"):
            for size in case.sizes:
                rows.append(compare(case, size, python, folder, compiles))
                tqdm.write(json.dumps(rows[-1]))
    run = {"day": date.today().isoformat(), "machine": machine(), "threads": torch.get_num_threads()}
    run |= {"rounds": ROUNDS, "peers": versions(python), "rows": rows}
    run["ours"] = {name: metadata.version(name) for name in ("torch", "diffusers", "peft")}
    others = [other for other in json.loads(RESULT.read_text("utf-8"))["runs"] if other["day"] != run["day"]]
    # The table shows the last run, which has compiled epochs; the README's sentence has the ranges of all.
    runs = sorted([*others, run], key=lambda run: ("compiled" in run["rows"][0], run["day"]))
    write_json(RESULT, {"runs": runs})
    print(f"wrote {RESULT}; now run: benchmarks.tables, images/draw_peers.py")
