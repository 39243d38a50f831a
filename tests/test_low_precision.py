"""The first ratio is 1 in bf16 and fp16 too, whatever passes sampling and training make."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import brightness, counted_passes, make_config, make_pipeline, red_three, rounding_pipeline

from ddpo_lessons import Trainer
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.training.first_epoch import ROUNDING
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS: dict[str, Any] = {
    "sample_batch_size": 8, "sample_group_size": 4, "train_batch_size": 4, "train_clip_range": 1e-4,
    "train_learning_rate": 1e-3, "sample_num_steps": 4,
}  # fmt: skip


def steps_of(folder: Any, algorithm: str = "ddpo", **changes: Any) -> list[dict[str, Any]]:
    config = make_config(folder, **{**SETTINGS, **changes})
    parts = brightness, red_three, rounding_pipeline()
    Trainer(config, *parts, algorithm=make_algorithm(algorithm)).step(0)
    return read_metrics(folder, "step")


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("ddpo", {}),  # sampling shares the first prediction of a group, training not all of them
        ("ddpo", {"train_micro_batch_size": 1}),
        ("ddpo", {"train_micro_batch_size": 5}),
        ("ddpo", {"sample_guidance_scale": 3.0, "train_micro_batch_size": 2}),
        ("ddpo", {"train_num_inner_epochs": 2}),
        ("ddpo", {"train_timestep_fraction": 0.5}),
        (
            "ddpo",
            {"train_batch_size": 2, "train_gradient_accumulation_steps": 2, "train_micro_batch_size": 3},
        ),
        ("branching:window=2", {"train_micro_batch_size": 1}),
        ("branching:window=2", {"train_micro_batch_size": 3}),
    ],
)
def test_the_first_ratio_is_within_a_tenth_of_the_clip_range(algorithm, changes, tmp_path):
    first, *_ = steps_of(tmp_path, algorithm, mixed_precision="bf16", **changes)
    assert first["first_replay_max_ratio_error"] <= 1e-5
    assert first["max_sampling_error"] > 5e-5  # the passes of sampling did round differently


def test_in_float32_sampling_is_believed_and_its_error_shows(tmp_path):
    first, *_ = steps_of(tmp_path, train_micro_batch_size=1)
    assert first["first_replay_max_ratio_error"] > 1e-4
    assert "max_sampling_error" not in first


@pytest.mark.parametrize(
    ("off", "guidance", "passes"),
    [(1e-4, 1.0, True), (1e-3, 1.0, False), (1e-3, 5.0, True), (3e-3, 5.0, False)],
)
def test_preflight_sees_more_than_rounding_between_sampling_and_training(off, guidance, passes, tmp_path):
    """The first ratio no longer shows it, since both of its log-probs come from training's passes."""
    settings = {**SETTINGS, "sample_guidance_scale": guidance}
    config = make_config(tmp_path, mixed_precision="bf16", train_micro_batch_size=1, **settings)
    trainer = Trainer(config, brightness, red_three, rounding_pipeline(off), algorithm=make_algorithm("ddpo"))
    if passes:
        trainer.step(0)
    else:
        with pytest.warns(UserWarning, match="FAIL  log-probs of training and sampling agree up to rounding"):
            trainer.step(0)
    found = {finding.check: finding.passed for finding in trainer.preflight}
    assert found["the ratio is 1 before the first optimizer step"]
    assert found["log-probs of training and sampling agree up to rounding"] == passes


def test_the_old_log_probs_cost_one_forward_pass_per_group_of_pairs(tmp_path):
    settings = {**SETTINGS, "sample_group_size": 1, "train_batch_size": 8, "train_micro_batch_size": 6}
    settings |= {"sample_guidance_scale": 1.0}
    passes = {}
    for precision in ("no", "bf16"):
        config = make_config(tmp_path / precision, mixed_precision=precision, **settings)
        pipeline = make_pipeline()
        trainer = Trainer(config, brightness, red_three, pipeline, algorithm=make_algorithm("ddpo"))
        with counted_passes(pipeline.unet) as sizes:
            trainer.step(0)
        passes[precision] = sizes
    assert passes["no"] == [8] * 4 + [6] * 5 + [2]  # 32 pairs in six groups
    assert passes["bf16"] == [8] * 4 + 2 * ([6] * 5 + [2])


def test_the_lesson_quotes_what_was_measured_at_full_size():
    root = Path(__file__).parents[1]
    machines = json.loads((root / "benchmarks" / "speed" / "full_size.json").read_text("utf-8"))
    on_cpu, on_gpu = (machine["runs"] for machine in machines)
    lesson = json.loads((root / "notebooks" / "08_fails_in_silence.ipynb").read_text("utf-8"))
    (text,) = ("".join(c["source"]) for c in lesson["cells"] if "largest \\|ρ − 1\\|" in "".join(c["source"]))
    quoted = re.findall(r"^\| [a-z].* \| ([\d.e-]+) \| ([\d.e-]+) \| 0 \|$", text, re.MULTILINE)
    errors = [
        (one["sampling_error"], other["sampling_error"]) for one, other in zip(on_cpu, on_gpu, strict=True)
    ]
    assert [(float(a), float(b)) for a, b in quoted] == [
        (float(f"{a:.1e}"), float(f"{b:.1e}")) for a, b in errors
    ]
    assert all(run["first_ratio_error"] == 0 for run in on_cpu + on_gpu)  # after rescoring
    limit = ROUNDING * (2 * 5 - 1)
    assert f"`max_sampling_error` below {limit:.2f}" in "".join("".join(c["source"]) for c in lesson["cells"])
    assert max(run["sampling_error"] for run in on_gpu) < limit
