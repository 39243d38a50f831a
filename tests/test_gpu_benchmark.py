"""The script that fills lesson 08's table, on the CPU: every row of it, and what is committed."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import logging

from benchmarks.speed import gpu, paper_run
from ddpo_lessons.app import budget, cli
from ddpo_lessons.app.presets import GPU_MEMORY
from ddpo_lessons.run.compiled import WrongGradientsError
from ddpo_lessons.tiny import load_tiny_sd

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def progress_bars() -> Iterator[None]:
    """The script switches them off for its process, which here is that of all tests."""
    yield
    logging.enable_progress_bar()


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_row_is_measured_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "table.csv"
    words = "--size tiny --batches 2 --gpu-memory 10 --samples 4 --repeats 1 --seed 3 --output"
    gpu.main([*words.split(), str(output)])
    rows = read(output)
    works = [(row["work"], row["batch"], row["checkpointing"]) for row in rows]
    assert works == [
        ("sampling pass", "2", ""),
        ("training pass", "2", "False"),
        ("training pass", "2", "True"),
        ("epoch: sampling", "2", "True"),
        ("epoch: reward", "", "True"),
        ("epoch: training", "2", "True"),
        ("epoch: whole", "2", "True"),
    ]
    for row in rows:
        assert row["result"] == "ok"
        assert float(row["seconds"]) > 0
        assert float(row["paper_gb"]) > 0
        assert row["peak_gb"] == ""  # the CPU keeps no count
    parts = sum(float(part["seconds"]) for part in rows[3:6])
    assert float(rows[6]["seconds"]) == pytest.approx(parts, abs=1e-4)
    step = budget.sampling_cost(budget.like(load_tiny_sd()).unet, 2, tokens=16)
    assert float(rows[0]["tflop"]) == pytest.approx(step.flops / 1e12, abs=1e-5)
    header = json.loads(output.with_suffix(".json").read_text())
    assert header["command"].startswith("python -m benchmarks.speed.gpu --size tiny --batches 2")
    assert (header["seed"], header["torch"]) == (3, torch.__version__)


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (WrongGradientsError("75% off"), "compiled gradients are wrong"),
        (RuntimeError("no kernel\nfor this"), "RuntimeError: no kernel"),
    ],
)
def test_failures_are_rows(error: Exception, result: str) -> None:
    def work() -> Any:
        raise error

    row = gpu.attempt({"work": "training pass", "batch": 16, "paper_gb": 20.0}, work)
    assert row["result"] == result
    assert (row["batch"], row["paper_gb"], row["seconds"]) == (16, 20.0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--samples", "6"], "multiple of 4"), ([], "--size tiny"), (["--gpu-memory", "17"], "invalid choice")],
)
def test_bad_input_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(words)
    assert message in capsys.readouterr().err


def test_the_committed_table_is_complete() -> None:
    rows = read(gpu.HERE / "gpu_cpu.csv")
    assert set(rows[0]) == set(gpu.COLUMNS)
    passes = [(int(row["batch"]), row["checkpointing"]) for row in rows if row["work"] == "training pass"]
    assert passes == [(batch, flag) for batch in (1, 2, 4, 8, 16) for flag in ("False", "True")]
    assert {int(row["gpu_memory"]) for row in rows if row["gpu_memory"]} <= set(GPU_MEMORY)
    whole = [row for row in rows if row["work"] == "epoch: whole"]
    assert all(row["seconds"] and row["result"] == "ok" for row in whole)
    assert json.loads((gpu.HERE / "gpu_cpu.json").read_text())["command"].endswith("--size tiny")


def test_the_smoke_run_on_paper_is_the_lessons_command() -> None:
    cells = json.loads((ROOT / "notebooks" / "08_full_gpu_run.ipynb").read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells)
    (command,) = re.findall(r"^ddpo-lessons (train .* --num-epochs 10 [^`]*)^```", text, re.MULTILINE)
    arguments = cli.parse(shlex.split(command.replace("\\\n", " ")))
    assert isinstance(arguments, cli.Train)
    config = arguments.make_config(arguments.choose_preset())
    expected, paper = paper_run.estimate("smoke", 24)
    assert config.to_dict() == {**expected.to_dict(), "output_dir": "smoke"}
    rows = json.loads(paper_run.RESULT.read_text("utf-8"))["runs"]
    (row,) = [row for row in rows if (row["run"], row["card"]) == ("smoke", "RTX 4090")]
    assert row["peak_gb"] == pytest.approx(paper.peak / 1e9, rel=0.01)
    assert row["training_s"] == pytest.approx(paper.seconds(165.2, 0.3)[1], rel=0.01)
