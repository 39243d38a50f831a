"""`make gpu` rehearsed on the CPU, with tiny models; and the runs that are estimated."""

import dataclasses
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import logging
from helpers import make_flux_pipeline, make_pipeline, make_sd3_pipeline, make_xl_pipeline, on_meta

from benchmarks.common import Row
from benchmarks.speed import gpu, paper_run
from ddpo_lessons.cli import main as cli
from ddpo_lessons.cli import options
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def progress_bars():
    """The script switches them off for its process, which here is that of all tests."""
    yield
    logging.enable_progress_bar()


@pytest.fixture
def tiny(monkeypatch):
    """Give tiny models the names of the published ones."""
    makers = {"sd15": make_pipeline, "sdxl": make_xl_pipeline, "sd35_medium": make_sd3_pipeline}
    makers["flux_dev"] = make_flux_pipeline

    def published(name: str, device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
        pipeline = makers[name]()
        return on_meta(pipeline) if device == "meta" else pipeline.to(dtype)

    monkeypatch.setattr(paper_run, "published", published)
    monkeypatch.setitem(vars(gpu.PRESETS["flux"]), "resolution", 32)  # of a dataclass that is frozen


def merged(rows: Iterable[Row]) -> Row:
    return {name: value for row in rows for name, value in row.items()}


SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in ("sdxl", "flux_dev")]


@pytest.mark.parametrize("part", ["sd15-checkpointing", "sd35_medium", *SLOW])
def test_an_epoch_of_each_model_is_measured(part, tiny):
    """In fp16 accelerate trains on no CPU; compiled networks are `test_gpu.py`'s."""
    epoch = dataclasses.replace(gpu.EPOCHS[part], steps=4)
    row = merged(epoch.rows())
    assert row["ratio_error"] < 1e-3
    assert row["first_epoch_s"] > 0
    assert min(row[f"{phase}_s"] for phase in ("sampling", "training")) > 0
    assert min(row["training_tflop"], row["sampling_tflop"]) > 0
    assert {"peak_gb", "waits"}.isdisjoint(row)  # the CPU keeps no count
    config = DDPOConfig(**epoch.settings())
    plan = config.epoch_plan(num_timesteps=1)
    assert plan.total_samples == plan.samples_per_optimizer_step == epoch.samples
    method, start = "flow_grpo", FromNoise(resolution=32)
    if epoch.preset == "edit":
        method, start = "ddpo", FromImages(0.5)
    found = paper_run.estimate(paper_run.published(epoch.model), config, method, start)
    assert row["paper_gb"] == found.peak / 1e9


def test_settings_in_fp16_and_compiled_differ_in_that_alone():
    plain, compiled = gpu.EPOCHS["sd15"].settings(), gpu.EPOCHS["sd15-compiled"].settings()
    assert {k: v for k, v in compiled.items() if plain[k] != v} == {"torch_compile": True}
    plain, half = gpu.EPOCHS["sd35_medium"].settings(), gpu.EPOCHS["sd35_medium-fp16"].settings()
    assert {k: v for k, v in half.items() if plain[k] != v} == {"mixed_precision": "fp16"}


@pytest.mark.slow
def test_the_demo_is_run(monkeypatch):
    monkeypatch.setattr(gpu, "DEMO", {"epochs": 1, "eval_images": 8})
    small = {"sample_batch_size": 8, "train_batch_size": 8}
    monkeypatch.setitem(gpu.demo.SCHEDULES, "branching", small)
    row = merged(gpu.run_demo())
    assert row["seconds"] > 0
    assert 0 <= row["before_all"] <= 1


@pytest.mark.slow
def test_lessons_are_run_and_those_that_fail_are_named(tmp_path, monkeypatch):
    """A cell that succeeds, a magic and prose; then a lesson that stops, whose last cell is not reached."""
    cells = {
        "01_sound": ["import os", "%matplotlib inline", "assert os.environ['OMP_NUM_THREADS'] == '1'"],
        "02_faulty": ["x = 1", "raise ValueError(f'{x}\\nand more')", "import sys; sys.exit(0)"],
    }
    found = []
    for name, sources in cells.items():
        notebook = [{"cell_type": "code", "source": [source]} for source in sources]
        found.append(tmp_path / f"{name}.ipynb")
        text = {"cells": [{"cell_type": "markdown", "source": ["raise"]}, *notebook]}
        found[-1].write_text(json.dumps(text), "utf-8")
    monkeypatch.setattr(gpu.lessons, "LESSONS", found)
    row = merged(gpu.run_lessons())
    assert row["seconds"] > 0
    assert (row["passed"], row["result"]) == (1, "1 failed")
    assert row["failures"] == ["02_faulty, cell 2: ValueError: 1"]
    monkeypatch.setattr(gpu.lessons, "LESSONS", found[:1])
    assert merged(gpu.run_lessons())["result"] == "ok"


@pytest.mark.slow
def test_outcomes_of_tests_are_counted(tmp_path, monkeypatch):
    file = tmp_path / "test_made_up.py"
    tests = ("pass", "assert 0", "pytest.skip()")
    lines = [f"def test_{number}(): {body}" for number, body in enumerate(tests)]
    file.write_text("\n".join(["import pytest", *lines]))
    alone = ("-p", "no:cacheprovider", "-p", "no:nbval")
    options = ("-q", "-c", os.devnull, "--rootdir", str(tmp_path), *alone, str(file))
    monkeypatch.setattr(gpu, "TESTS", options)
    row = merged(gpu.run_tests())
    assert (row["result"], row["passed"], row["failed"], row["skipped"]) == ("1 failed", 1, 1, 1)
    assert row["failures"] == ["test_made_up.py::test_1"]
    file.unlink()
    assert merged(gpu.run_tests())["result"] == "pytest ended with 4"


def test_waits_are_those_that_torch_tells(monkeypatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (of .item)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert gpu.count_waits(work) == 3
    assert modes == ["warn", "default"]


CHILD = """
import json, os, sys, time
name = sys.argv[-1]
print(json.dumps({"paper_gb": 1.5}), flush=True)
if name == "sd15": raise SystemExit(0)
if name == "sdxl": raise RuntimeError("no kernel\\nfor this")
if name == "demo": sys.exit("torch.OutOfMemoryError: CUDA out of memory.")
if name == "tests": os.kill(os.getpid(), 9)
if name == "flux_dev": time.sleep(60)
print(json.dumps({"result": "2 failed"}))
"""


@pytest.fixture
def card(monkeypatch):
    """A GPU that is only named, and parts that only say something."""
    monkeypatch.setattr(gpu, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu, "header", lambda: {"hardware": "a card", "libraries": {"torch": "3"}})
    monkeypatch.setattr(gpu, "COMMAND", (sys.executable, "-c", CHILD))
    monkeypatch.setitem(gpu.LIMITS, "flux_dev", 1)


@pytest.mark.slow
def test_every_part_gets_its_row_also_if_it_fails(tmp_path, card):
    output = tmp_path / "gpu.json"
    gpu.main(["--output", str(output)])
    found = json.loads(output.read_text("utf-8"))
    assert found["hardware"] == "a card"
    assert list(found["parts"]) == list(gpu.PARTS)
    rows = {name: found["parts"][name] for name in ("sd15", "sdxl", "demo", "tests", "flux_dev", "sdxl-fp16")}
    assert {name: row["result"] for name, row in rows.items()} == {
        "sd15": "ok",
        "sdxl": "RuntimeError: no kernel",
        "demo": "out of memory",
        "tests": "killed by signal 9",
        "flux_dev": "not done within 1 s",
        "sdxl-fp16": "2 failed",
    }
    assert all(row["paper_gb"] == 1.5 for row in rows.values())  # what was known before


def test_parts_that_have_a_row_are_left_out(tmp_path, card, monkeypatch):
    output, done = tmp_path / "gpu.json", list[str]()

    def launch(name: str) -> Row:
        if name == "sdxl" and len(done) < 10:
            raise KeyboardInterrupt
        done.append(name)
        return {"result": len(done)}

    monkeypatch.setattr(gpu, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--output", str(output)])
    before = list(gpu.PARTS)[: list(gpu.PARTS).index("sdxl")]
    assert done == list(json.loads(output.read_text())["parts"]) == before
    done += [""] * 10
    gpu.main(["--output", str(output)])
    assert [name for name in done if name] == list(gpu.PARTS)
    gpu.main(["--output", str(output), "--parts", "demo"])
    assert done[-1] == "demo"
    monkeypatch.setattr(gpu, "header", lambda: {"hardware": "another card"})
    with pytest.raises(SystemExit):
        gpu.main(["--output", str(output)])
    assert list(tmp_path.iterdir()) == [output]


def test_all_parts_end_within_45_minutes():
    assert gpu.LIMITS.keys() == gpu.PARTS.keys()
    assert sum(gpu.LIMITS.values()) <= 45 * 60


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "on_gpu", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd35_medium", "flux_dev"])
def test_networks_are_made_in_the_precision_of_the_run(name):
    pipeline = paper_run.published(name, dtype=torch.bfloat16)
    networks = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert {weight.dtype for network in networks for weight in network.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


SMOKE = r"^ddpo-lessons (train [^`]* --num-epochs 10 [^`]*)^```"


@pytest.mark.parametrize(
    ("run", "command"),
    [("smoke", SMOKE), ("edit", r"`ddpo-lessons (train --preset edit [^`]*)`")],
)
def test_estimated_runs_are_the_lessons_commands(run, command):
    cells = json.loads((ROOT / "notebooks" / "08_fails_in_silence.ipynb").read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells)
    (command,) = re.findall(command, text, re.MULTILINE)
    arguments = cli.parse(shlex.split(command.replace("\\\n", " ")))
    assert isinstance(arguments, options.Train)
    config = arguments.make_config()
    preset, changes = paper_run.RUNS[run]
    expected = DDPOConfig(**{**gpu.PRESETS[preset].config, **changes, "output_dir": config.output_dir})
    assert config == expected
