"""What a run prints: its numbers at the start; bars on a terminal; in a file one line per epoch."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from diffusers.utils import logging
from helpers import brightness, each_prompt, make_config, make_pipeline, make_sd3_pipeline, red_three

import ddpo_lessons.trainer
from ddpo_lessons.algorithms import ALGORITHMS, make_algorithm
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.plan import summary
from ddpo_lessons.trainer import DDPOTrainer, Trainer
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread", "bars")


# 8 samples in minibatches of 2; two minibatches make an optimizer step; each sample is used twice.
SIZES = {
    "sample_batch_size": 4, "sample_num_batches_per_epoch": 2, "train_batch_size": 2,
    "train_gradient_accumulation_steps": 2, "train_num_inner_epochs": 2, "num_epochs": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_begins_with_its_numbers_and_takes_so_many_steps(name, tmp_path, capsys):
    algorithm = make_algorithm(name)
    unused = {field: getattr(DDPOConfig, field) for field in algorithm.unused}
    config = make_config(tmp_path, **{"sample_group_size": 2, **unused, **SIZES})
    pipeline = make_sd3_pipeline() if name == "flow_grpo" else make_pipeline()
    trainer = Trainer(config, brightness, each_prompt(), pipeline, algorithm=algorithm)
    trainer.train()
    assert capsys.readouterr().out == (
        "samples: 8 per epoch, 4 per optimizer step\n"
        "optimizer steps: 4 per epoch in 2 inner epochs, 12 in all\n"
    )
    steps = [record["epoch"] for record in read_metrics(tmp_path, "step")]
    assert steps == [1] * 4 + [2] * 4 + [3] * 4
    assert [record["samples_seen"] for record in read_metrics(tmp_path, "epoch")] == [8, 16, 24]


def test_the_numbers_are_those_of_all_processes():
    plan = make_config("", **{**SIZES, "train_num_inner_epochs": 1}).epoch_plan(3, num_processes=4)
    assert summary(plan, num_epochs=1) == (
        "samples: 32 per epoch (8 in each of 4 processes), 16 per optimizer step\n"
        "optimizer steps: 2 per epoch, 2 in all"
    )


def test_without_a_terminal_an_epoch_is_a_line_and_the_first_has_a_second_one(tmp_path, capsys):
    DDPOTrainer(make_config(tmp_path, num_epochs=2), brightness, red_three, make_pipeline()).train()
    texts = re.split(r"\n(?=epoch )", capsys.readouterr().err.rstrip())
    for number, (text, record) in enumerate(zip(texts, read_metrics(tmp_path, "epoch"), strict=True), 1):
        said = f"epoch {number} of 2: reward {record['reward_mean']:.4g} (std {record['reward_std']:.3g}); "
        whole = r"\n  all 2 epochs take \d\d:\d\d" if number == 1 else ""
        assert re.fullmatch(re.escape(said) + r"\d+\.\d s, \d\d:\d\d left" + whole, text), text
    assert texts[-1].endswith("00:00 left")


@pytest.mark.parametrize("has_bars", [True, False])
def test_the_first_epoch_that_is_timed_tells_hours_and_money(has_bars, tmp_path, capsys, monkeypatch):
    """Epochs of half an hour: a resumed run of four takes two hours, which cost 6 at a price of 3."""
    config = make_config(tmp_path, num_epochs=4, price_per_hour=3.0, save_freq=9)
    trainer, clock = DDPOTrainer(config, brightness, red_three, make_pipeline()), [0]
    trainer.step(0)

    def step(epoch: int) -> dict[str, float]:
        clock[0], trainer.state.epochs_done = clock[0] + 1800, epoch + 1
        return {"reward_mean": 1.0, "reward_std": 0.0}

    monkeypatch.setattr(ddpo_lessons.trainer, "draws_bars", lambda: has_bars)
    monkeypatch.setattr(trainer, "step", step)
    monkeypatch.setattr(ddpo_lessons.trainer.time, "perf_counter", lambda: clock[0])
    trainer.train()
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if "left" in line and "epoch " in line]
    assert len(lines) == (1 if has_bars else 3)
    assert "1800.0 s, 1:00:00 left\n  all 4 epochs take 2:00:00, 6.00 at 3 per hour\n" in text
    assert text.count("take") == 1


def test_the_switch_of_diffusers_silences_numbers_bars_and_lines(tmp_path, capsys):
    logging.disable_progress_bar()
    try:
        DDPOTrainer(make_config(tmp_path), brightness, red_three, make_pipeline()).train()
    finally:
        logging.enable_progress_bar()
    assert capsys.readouterr() == ("", "")


def test_a_kernel_is_no_terminal_and_has_bars(tmp_path, capsys, monkeypatch):
    """By the module that tqdm looks for; without ipywidgets its bars are text."""
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys.modules[__name__])
    DDPOTrainer(make_config(tmp_path), brightness, red_three, make_pipeline()).train()
    errors = capsys.readouterr().err
    assert "epochs: 100%" in errors
    assert "epoch 1 of" not in errors


def command(folder: Path) -> list[str]:
    sizes = "--sample-batch-size 2 --sample-num-batches-per-epoch 1 --train-batch-size 2 --sample-num-steps 3"
    flags = f"{sizes} --train-gradient-accumulation-steps 1 --sample-group-size 1 --num-epochs 2"
    words = f"-m ddpo_lessons.cli train --model tiny-sd {flags} --output-dir".split()
    return [sys.executable, *words, str(folder)]


@pytest.mark.slow
def test_a_log_has_no_escape_codes(tmp_path):
    log = tmp_path / "log"
    with open(log, "wb") as file:
        subprocess.run(command(tmp_path / "run"), stdout=file, stderr=subprocess.STDOUT, check=True)
    text = log.read_text()
    assert "\x1b" not in text
    assert "\r" not in text
    places = [text.index(start) for start in ("samples: 2 per epoch", "epoch 1 of 2: ", "epoch 2 of 2: ")]
    assert places == sorted(places)  # as they were printed, although one is of stdout
    assert len(re.findall(r"^epoch \d", text, re.MULTILINE)) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_a_terminal_has_bars(tmp_path):
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, 120))
    with subprocess.Popen(command(tmp_path / "run"), stdout=theirs, stderr=theirs, stdin=theirs) as process:
        os.close(theirs)
        text = read_all(ours)
    assert process.returncode == 0
    assert re.search(r"epochs: 100%.* 2/2 \[", text)
    assert "sampling: " in text
    assert "\x1b[A" in text  # of bars within bars
    assert text.count("all 2 epochs take") == 1  # the hours of the run, once
    assert "epoch 2 of 2" not in text


def read_all(terminal: int) -> str:
    parts: list[Any] = []
    while not parts or parts[-1]:
        try:
            parts.append(os.read(terminal, 4096))
        except OSError:  # Linux's way to say that the other side is closed
            parts.append(b"")
    os.close(terminal)
    return b"".join(parts).decode()
