"""The script that measures lesson 08's runs, on the CPU; and the runs that are worked out on paper."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import logging

from benchmarks.common import read_rows
from benchmarks.speed import gpu, paper_run
from ddpo_lessons.app import budget, cli, memory, options
from ddpo_lessons.run.compiled import WrongGradientsError

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def progress_bars() -> Iterator[None]:
    """The script switches them off for its process, which here is that of all tests."""
    yield
    logging.enable_progress_bar()


@pytest.mark.slow
def test_a_row_is_measured_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "table.csv"
    gpu.main(["--size", "tiny", "--gpu-memory", "10", "--batches", "1", "--output", str(output)])
    (row,) = read_rows(output)
    assert (row["result"], row["checkpointing"], row["samples"]) == ("ok", "True", "4")
    assert (row["sampling_batch"], row["training_batch"]) == ("2", "2")
    assert all(float(row[f"{phase}_s"]) > 0 for phase in ("sampling", "reward", "training"))
    assert row["peak_gb"] == ""  # the CPU keeps no count
    # four samples of 20 actions, each a pass without guidance and VAE work on top
    unet = memory.find_pipeline("tiny-sd").unet
    inputs = torch.zeros(1, 4, 8, 8, device="meta"), 1, torch.zeros(1, 16, 64, device="meta")
    step = budget.cost(lambda: unet(*inputs)).flops
    assert float(row["sampling_tflop"]) > 4 * 20 * step / 1e12
    header = json.loads(output.with_suffix(".json").read_text())
    assert header["command"].startswith("python -m benchmarks.speed.gpu --size tiny --gpu-memory 10")
    assert header["torch"] == torch.__version__


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

    row = gpu.attempt(work)
    assert row == {"result": result, "sampling_s": "", "reward_s": "", "training_s": "", "peak_gb": ""}


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "--size tiny"), (["--gpu-memory", "17"], "invalid choice")],
)
def test_bad_input_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(words)
    assert message in capsys.readouterr().err


def test_the_smoke_run_on_paper_is_the_lessons_command() -> None:
    cells = json.loads((ROOT / "notebooks" / "08_full_gpu_run.ipynb").read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells)
    (command,) = re.findall(r"^ddpo-lessons (train .* --num-epochs 10 [^`]*)^```", text, re.MULTILINE)
    arguments = cli.parse(shlex.split(command.replace("\\\n", " ")))
    assert isinstance(arguments, options.Train)
    config = arguments.make_config(arguments.choose_preset())
    expected, paper = paper_run.estimate("smoke", 24)
    assert config.to_dict() == {**expected.to_dict(), "output_dir": "smoke"}
    rows = json.loads(paper_run.RESULT.read_text("utf-8"))["runs"]
    (row,) = [row for row in rows if (row["run"], row["card"]) == ("smoke", "RTX 4090")]
    assert row["peak_gb"] == pytest.approx(paper.peak / 1e9, rel=0.01)
    assert row["training_s"] == pytest.approx(paper.seconds(165.2, 0.3)[1], rel=0.01)
