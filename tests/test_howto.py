"""The pages' training commands, defaults and committed numbers are those of the code and its results."""

import json
import re
import shlex
from pathlib import Path

import pytest

from ddpo_lessons.cli.main import parse
from ddpo_lessons.cli.options import Train
from ddpo_lessons.config import DDPOConfig

HOWTO = Path(__file__).parents[1] / "docs" / "howto"


def commands(page: str) -> list[list[str]]:
    """The words of each command of a page's shell blocks."""
    text = (HOWTO / f"{page}.md").read_text("utf-8")
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [
        shlex.split(line, comments=True)
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if "train" in shlex.split(line)
    ]


def settings(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Check a command; return the samples of an epoch and of an optimizer step, over all its processes."""
    processes = int(words[words.index("--num_processes") + 1]) if words[0] == "accelerate" else 1
    monkeypatch.setenv("WORLD_SIZE", str(processes))  # as the launcher does: presets are divided by it
    train = parse(words[words.index("train") :])
    assert isinstance(train, Train)
    train.check()
    plan = train.make_config().epoch_plan(25, processes)
    return plan.total_samples, plan.samples_per_optimizer_step


EXPECTED = {
    "your-card": [
        (64, 32),
        (256, 128),
        (256, 128),
        (256, 128),
        (64, 32),
        (1152, 576),
    ],  # smoke, SD 1.5, SDXL, two of SD 3.5, FLUX.1
    "several-gpus": [(256, 128)],
    "sharded": [(1152, 576)],
    "resume": [(64, 64)],
}


@pytest.mark.parametrize("page", EXPECTED)
def test_commands_train_what_the_page_says(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("small", "large", "sd35-small"):  # the pages' folders of images, and of a model
        (tmp_path / name).mkdir()
    (tmp_path / "sd35-small" / "model_index.json").touch()
    assert [settings(words, monkeypatch) for words in commands(page)] == EXPECTED[page]


def test_defaults_of_flags_are_the_codes():
    """Wherever a page says "the default of `--flag` is N"."""
    found = [
        (flag.replace("-", "_"), float(number))
        for path in [HOWTO.parents[1] / "README.md", *HOWTO.parent.rglob("*.md")]
        for flag, number in re.findall(
            r"default of `--([\w-]+)` is (\d[\d.e-]*\d|\d)", " ".join(path.read_text("utf-8").split())
        )
    ]
    assert found
    assert found == [(name, DDPOConfig().to_dict()[name]) for name, _ in found]


def test_memory_of_flow_models_is_the_committed_one():
    found = json.loads((HOWTO.parents[1] / "ddpo_lessons/lessons/paper_run.json").read_text("utf-8"))
    page = " ".join((HOWTO / "your-card.md").read_text("utf-8").split())
    columns = ["networks", "samples", "activations", "peak", "card"]
    rows = [(row, [f"{row['resolution']}, {row['cards']}"], columns) for row in found["flux"]]
    for row in found["sd35"]:
        words = ["with" if row[name] else "without" for name in ("t5", "checkpointing")]
        rows.append((row, words, [name for name in columns if name != "samples"]))
        assert f"{row['reward_gb']:.1f} for the reward model and {row['samples_gb']:.1f} for 256" in page
    for row, words, shown in rows:
        cells = [*words, *(f"{row[f'{name}_gb']:.1f}" for name in shown)]
        assert f"| {' | '.join(cells)} |" in page
    for row in found["flux"]:
        assert f"all rows include {row['reward_gb']:.1f} for the reward model:" in page


def test_answers_repeat_other_tables():
    """The rewards of lesson 12 and the hours of the page on GPUs, in the page of questions."""
    faq = (HOWTO / "faq.md").read_text("utf-8")
    lesson = (HOWTO.parents[1] / "notebooks" / "12_which_algorithm.ipynb").read_text("utf-8")
    lesson = lesson.replace("\xa0", " ")
    for name in ("RWR", "DDPO", "online DPO"):
        (mean,) = re.findall(rf"^\| {name} \| ([^|]+) \|", faq, flags=re.MULTILINE)
        assert f"| {name} | {mean} |" in lesson
    hours = re.findall(r"^\| (RTX \d+), \d+ GB.* \| ([\d.]+) \| (\d+ to \d+) \|$", faq, flags=re.MULTILINE)
    assert len(hours) == 2
    page = (HOWTO / "your-card.md").read_text("utf-8")
    for gpu, memory, long_run in hours:
        assert re.search(rf"^\| {gpu} \|.*\| {memory} \|.*\| {long_run} \|$", page, flags=re.MULTILINE)


def test_hours_on_a_card_are_the_committed_ones():
    runs = json.loads((HOWTO.parents[1] / "ddpo_lessons/lessons/paper_run.json").read_text("utf-8"))["runs"]
    smoke = {run["card"]: run for run in runs if run["run"] == "smoke"}
    for run in (run for run in runs if run["run"] == "edit"):
        both = ((smoke[run["card"]]["hours"], ".2f"), (run["hours"], ".0f"))  # at 0.3 of the peak
        cells = [
            run["card"],
            run["gpu_memory"],
            f"{run['pairs']}{', with checkpointing' if run['checkpointing'] else ''}",
            f"{run['peak_gb']:.1f}",
            *(f"{low:{form}} to {low * 0.3 / 0.19:{form}}" for low, form in both),
        ]
        assert f"| {' | '.join(map(str, cells))} |" in (HOWTO / "your-card.md").read_text("utf-8")
    page = (HOWTO.parent / "full-size.md").read_text("utf-8")
    for run in (run for run in runs if run["run"] == "camouflage"):
        low = run["hours"]
        assert f"| {run['card']} | {low:.0f} to {low * 0.3 / 0.19:.0f} |" in page
