"""Growth of time and memory: the fits, and what a trajectory holds beside what is counted on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import growth
from ddpo_lessons.ddim import step_std
from ddpo_lessons.rollout import make_schedule, text2img_rollout
from ddpo_lessons.tiny import load_tiny_sd

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_line_has_exponent_1_and_a_square_2() -> None:
    x = [1, 2, 5, 10]
    assert growth.exponent(x, [3 * n for n in x]) == pytest.approx(1)
    assert growth.exponent(x, [0.1 * n**2 for n in x]) == pytest.approx(2)
    assert growth.exponent([1, 2], [8, 4]) == pytest.approx(-1)


def test_a_constant_part_does_not_change_what_one_more_costs() -> None:
    assert growth.per_unit([16, 32, 64], [100 + 0.5 * n for n in (16, 32, 64)]) == pytest.approx(0.5)


def test_slopes_leave_out_what_was_loaded() -> None:
    def row(value: int) -> dict[str, float]:
        memory = {"stored_mb": value, "counted_mb": 5 + value, "loaded_mb": 400 + value}
        return {"value": value, "seconds": value**2, "tflop": value, "peak_mb": 500 + 3 * value, **memory}

    found = growth.slopes("samples", [row(1), row(2), row(4)])
    assert (found["time_expected"], found["time_by_flops"], found["time_measured"]) == (1, 1, 2)
    assert [found[f"kb_{name}"] for name in ("stored", "counted", "measured")] == [1000, 1000, 2000]


def test_bytes_on_paper_are_those_of_a_trajectory(tmp_path: Path) -> None:
    point = growth.Point(samples=16, steps=2, side=4)
    trainer = growth.make_trainer(point, str(tmp_path))
    images, trajectory = text2img_rollout(
        trainer.pipeline, [growth.PROMPT] * 16, num_inference_steps=3, guidance_scale=1
    )
    held = trajectory.latents.nbytes + images.nbytes + trajectory.prompt_embeds.nbytes
    # a sample: 3 latents (4, 4, 4), an image (3, 16, 16), embeddings (16, 64), 4 bytes each
    assert held == 16 * (3 * 4**3 + 3 * 16**2 + 16 * 64) * 4
    assert growth.count(trainer)["stored_mb"] == held / 1e6


def test_every_series_varies_one_number_and_keeps_the_optimizer_step() -> None:
    scheduler = load_tiny_sd().scheduler
    for name, series in growth.SERIES.items():
        values = [point.value(name) for point in series.points]
        assert values == sorted(set(values))
        for point in series.points:
            config = growth.make_config(point, "unused")
            timesteps = make_schedule(scheduler, config.sample_num_steps)
            assert (step_std(scheduler, timesteps, eta=1.0) > 0).sum() == point.steps
            plan = config.epoch_plan(point.steps, point.processes)
            assert plan.total_samples == point.samples
            assert plan.optimizer_steps == point.samples // 16
