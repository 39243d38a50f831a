"""The page of a run: what its folder holds is on it, and it needs nothing else."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import brightness, make_config, make_pipeline, noisy_image, red_three
from matplotlib.figure import Figure

from ddpo_lessons.app import report
from ddpo_lessons.app.cli import main
from ddpo_lessons.rewards.combined import judged
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import RunLog
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of two of three epochs: from noise, with a judge; from images, a hundred times the rate."""
    folder = tmp_path_factory.mktemp("runs")
    darkness = judged(brightness, lambda images, *_: 1 - brightness(images, None, None))
    settings = {"num_epochs": 3, "image_grid_freq": 1}
    first = DDPOTrainer(make_config(folder / "a<b", **settings), darkness, red_three, make_pipeline())
    second = ImageDDPOTrainer(
        make_config(folder / "second", train_learning_rate=0.1, **settings), brightness, noisy_image,
        make_pipeline(), noise_strength=1.0,
    )  # fmt: skip
    for trainer in (first, second):
        trainer.step(0)
        trainer.step(1)
    return [folder / "a<b", folder / "second"]


def test_page_holds_what_the_folders_hold_and_asks_for_nothing(runs, tmp_path):
    report.write(tmp_path / "page.html", [report.read(folder) for folder in runs])
    page = (tmp_path / "page.html").read_text()
    assert (
        re.findall(r"(?:src|href)=[\"']?(?!data:|#)\S+", page.split("</style>")[1]) == []
    )  # SVG links inside itself
    assert "a&lt;b" in page
    assert "a<b" not in page
    rewards = [row["reward_mean"] for row in report.read(runs[0]).epochs]
    assert (
        f"reward {rewards[0]:.4g} → {rewards[1]:.4g}, judge {1 - rewards[0]:.4g} → {1 - rewards[1]:.4g} "
        "(means of the first and of the last epoch, each over its own samples)" in page
    )
    assert page.count("· a red three</figcaption>") == 4  # two pictures, two epochs
    assert page.count("<figcaption>input</figcaption>") == 4
    assert page.count('<input type="range"') == 2
    assert "every weight gets a gradient" in page
    assert f"--config {runs[1]}/config.json --output-dir {runs[1]} --resume-from latest" in page
    marked = re.findall(r"<tr class=differs><th>(\w+)", page)
    assert {"output_dir", "train_learning_rate", "start"} <= set(marked)
    assert "num_epochs" not in marked


@pytest.mark.parametrize("name", ["FULL_BODY", "TITLE", "BODY TITLE"])
def test_a_run_may_be_called_as_the_template_s_places_are(runs, tmp_path, name):
    shutil.copytree(runs[0], tmp_path / name)
    report.write(tmp_path / "page.html", [report.read(tmp_path / name)])
    page = (tmp_path / "page.html").read_text()
    assert re.findall("<title>(.*)</title>", page) == re.findall("<h1>(.*)</h1>", page) == [name]


def test_the_band_of_rewards_is_their_middle_and_of_older_records_the_standard_deviation():
    older = {"epoch": 1, "reward_mean": 2.0, "reward_std": 0.5}
    newer = {"epoch": 2, "reward_mean": 2.0, "reward_std": 0.5, "reward_q05": -3.0, "reward_q95": 2.25}
    axis = Figure().subplots()
    report._draw_rewards(axis, report.Run(Path("x"), {}, {}, [older, newer], [], [], []), "black")
    (band,) = axis.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(1.0, 1.5), (1.0, 2.5), (2.0, -3.0), (2.0, 2.25)}


@pytest.mark.parametrize(
    ("count", "style", "last"),
    [
        (1, "--columns:1;--rows:1;--ratio:1.5", ("0%", "0%")),
        (3, "--columns:3;--rows:1;--ratio:1.5", ("100%", "0%")),
        (10, "--columns:8;--rows:2;--ratio:1.5", (f"{100 / 7:.4g}%", "100%")),  # the second of eight columns
    ],
)
def test_tiles_are_cut_where_their_pictures_lie(count, style, last, tmp_path):
    log = RunLog(make_config(tmp_path), None, 0)
    log.images(1, torch.zeros(count, 3, 96, 144), captions=["red"] * count)
    (grid,) = report.find_grids(tmp_path, "epoch")
    page = report.slider([grid])
    assert style in page
    assert re.findall(r"background-position:(\S+) (\S+)\"", page)[-1] == last


def test_a_long_run_shows_its_first_and_last_grid_and_some_between(tmp_path):
    (tmp_path / "images").mkdir()
    for epoch in range(1, 101):
        (tmp_path / f"images/epoch-{epoch:06d}.png").touch()
    shown = [int(path.stem[-6:]) for path in report.find_grids(tmp_path, "epoch")]
    assert shown == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]


def test_command_writes_the_page_or_says_what_is_missing(runs, tmp_path, capsys):
    assert main(["report", *map(str, runs)]) == 0
    assert (runs[0] / "report.html").is_file()
    for output in (tmp_path, tmp_path / "no" / "page.html"):
        assert main(["report", str(runs[0]), "--output", str(output)]) == 2
        assert "name a page in a folder that is there, such as report.html" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no config.json: give the folder of a run" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_costs_a_warning_and_no_epoch(tmp_path, model, capsys):
    (tmp_path / "run" / "report.html").mkdir(parents=True)  # where the page would be
    sizes = "--sample-num-steps 3 --sample-batch-size 2 --sample-num-batches-per-epoch 1 --train-batch-size 2"
    flags = [
        *sizes.split(),
        "--model",
        model,
        "--reward",
        "colourfulness",
        "--prompt",
        "",
        "--num-epochs",
        "2",
    ]
    with pytest.warns(UserWarning, match=r"report\.html.*IsADirectoryError.*the run goes on") as caught:
        assert main(["train", *flags, "--output-dir", str(tmp_path / "run")]) == 0
    assert {str(warning.message) for warning in caught} == {str(caught[0].message)}  # shown once, therefore
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "run")] == [
        "checkpoint-000001",
        "checkpoint-000002",
    ]
    assert (tmp_path / "run" / "lora").is_dir()
    assert "ddpo-lessons sample --run" in capsys.readouterr().out


def test_a_judge_is_recorded_without_gradient():
    images = torch.rand(3, 3, 4, 4, requires_grad=True)
    rewards, info = judged(brightness, brightness)(images, ("",) * 3, ({},) * 3)
    assert rewards.requires_grad
    assert torch.equal(info["judge"], rewards.detach())
    assert not info["judge"].requires_grad
    with pytest.raises(ValueError, match="'judge' have shape"):
        judged(brightness, lambda *_: torch.zeros(2))(images, ("",) * 3, ({},) * 3)
