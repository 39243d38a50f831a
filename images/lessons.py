"""The tables of lessons and their modules, badges, and the set-up cell, for README and notebooks.

`python -m benchmarks.tables` writes it into them.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
# Each lesson, the modules that it builds, and what it teaches.
LESSONS = """
01_batching | batching
DDPO's loop: samples, minibatches, gradient accumulation, and a bug that no log shows
02_time_shuffling | batching
Shuffling the denoising steps, and what it does to gradients and reward curves
03_ddim_log_probs | ddim
The log-prob of a DDIM step: computing it, replaying it, and learning from it
04_ppo_clipping | ppo advantages
Advantages, the clipped surrogate, and training with and without clipping
05_text_ppo_with_gae | text/text_ppo text/text_trainer
RLHF's PPO for text: value model, GAE and reward hacking, and what replaces GAE in DDPO
06_text_to_image_ddpo | algorithms/ddpo rollout algorithms/rwr
The whole loop on text-to-image, beside RWR: reward hacking, the KL penalty and early stopping
07_img2img_ddpo | algorithms/branching rollout lessons/demo
Editing images with RL: credit for each denoising step, and honest baselines
08_fails_in_silence | lessons/faults training/first_epoch cli/preflight
Eleven bugs that raise no error, how to find them, and what a long run costs
09_flow_grpo | flow algorithms/flow_grpo
RL of flow models: how an ODE becomes an SDE with log-probs, and how much noise to add
10_without_log_probs | algorithms/awm algorithms/nft algorithms/pepg algorithms/dpo
RWR, AWM, DiffusionNFT and PEPG: one gradient, the proximal term, and NFT as guidance
11_through_the_reward | algorithms/draft algorithms/refl
DRaFT, AlignProp and ReFL: the gradient of a differentiable reward, its cost, and when to stop
12_which_algorithm | algorithms/rwr
All algorithms compared on equal terms, a guide, and a project of your own
13_full_run | checks smoke hooks validation
From photographs to a LoRA: with Stable Diffusion on a GPU, or in small on a CPU
"""
# What the first code cell of every lesson begins with.
SETUP = """\
# @title Set-up
# Finds the package: installed, in the checkout around this notebook, or in a wheel or zip beside it.
import importlib.util
from pathlib import Path

SOURCE = {source}  # what pip installs instead, once the project is published
if importlib.util.find_spec("ddpo_lessons") is None:
    files = [path for path in Path().resolve().glob("ddpo[-_]lessons*") if path.suffix in (".whl", ".zip")]
    here = ".." if Path("../ddpo_lessons/lessons/lesson.mplstyle").exists() else max(files, default=None)
    source = f"{{here}}[lessons]" if here else SOURCE
    if source is None:
        raise ModuleNotFoundError("ddpo_lessons: put its wheel or zip beside this notebook, and run again")
    %pip install -q "{{source}}"
"""


def address() -> str | None:
    """Return the repository's address on GitHub, where Colab opens notebooks, once pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = project.get("urls", {}).get("Repository")
    if found and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+(?<!\.git)", found):
        raise ValueError(f"Repository in pyproject.toml is {found}: write https://github.com/OWNER/NAME")
    return found


def badge(name: str) -> str:
    """Return a badge that opens a lesson in Colab: its copy with figures, on the branch that CI writes."""
    if (repository := address()) is None:
        return ""
    colab = "https://colab.research.google.com"
    lesson = f"{colab}/github/{repository.removeprefix('https://github.com/')}/blob/colab/{name}.ipynb"
    return f"<br>[![Open in Colab]({colab}/assets/colab-badge.svg)]({lesson})"


def setup_cell() -> str:
    """Return how every lesson's first code cell begins; it knows the repository's address if there is one."""
    source = f'"ddpo-lessons[lessons] @ git+{address()}"' if address() else "None"
    return SETUP.format(source=source)


def heading(name: str) -> str:
    """Return number and subject of a lesson's title, such as "01 · Batching"."""
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    return notebook["cells"][0]["source"][0].removeprefix("# ").split(":")[0].strip()


def minutes(name: str) -> int:
    """Return the minutes that a reader needs, exercises included, from the lesson's first cell."""
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    text = "".join(notebook["cells"][0]["source"])
    found = re.search(r"\*\*your time\*\* (?:about )?(\d+) minutes(?:, and (half an hour|\d+) more)?", text)
    if found is None:
        raise ValueError(f"{name} has no time of its reader: write **your time** about N minutes")
    return int(found[1]) + int((found[2] or "0").replace("half an hour", "30"))


def listed() -> list[tuple[str, list[str], str]]:
    """Return name, modules and subject of each lesson."""
    lines = LESSONS.strip().splitlines()
    abouts = [about.split(" | ") for about in lines[::2]]
    return [(name, modules.split(), line) for (name, modules), line in zip(abouts, lines[1::2], strict=True)]


def lesson_rows() -> list[list[str]]:
    """Return the rows of the README's table of lessons."""
    return [
        [f"[{heading(name)}](notebooks/{name}.ipynb), {minutes(name)}\xa0min{badge(name)}", teaches]
        for name, _, teaches in listed()
    ]


def module_rows() -> list[list[str]]:
    """Return which modules each lesson builds, as rows of a table in docs."""
    rows = []
    for name, modules, _ in listed():
        links = ", ".join(f"[`{Path(m).name}`](../ddpo_lessons/{m}.py)" for m in modules)
        rows.append([f"[{heading(name)}](../notebooks/{name}.ipynb)", links])
    return rows


def run_tagged(name: str, tag: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook's cells that have a tag, beside names that they use; return all names."""
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if tag in cell["metadata"].get("tags", []):
            exec("".join(cell["source"]), names)
    return names
