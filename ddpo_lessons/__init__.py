"""Reinforcement learning of diffusion models: a course, and the package that it builds.

The names below are imported at their first use, so that `import ddpo_lessons` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "batching": "EpochPlan",
    "ddim": "DDIMSchedule",
    "ppo": "clipped_surrogate",
    "advantages": "PerPromptStatTracker gae normalize",
    "rollout": "Trajectory img2img_rollout text2img_rollout",
    "config": "DDPOConfig",
    "algorithms": "make_algorithm",
    "data.starts": "FromImages FromNoise",
    "trainer": "Trainer DDPOTrainer ImageDDPOTrainer",
    "rewards": "get_reward",
    "named_prompts": "get_prompts",
    "data.folders": "find_images ImagePrompts",
    "models": "load_pipeline",
    "worlds": "load_tiny_sd",
    "training.figure": "plot_run",
    "checks": "preflight",
    "smoke": "smoke_run",
    "training.costs": "cost",
    "training.memory": "what_fits",
    "hooks": "Hooks LivePlot Highest",
    "validation": "Validation",
    "cli.presets": "PRESETS",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from ddpo_lessons.advantages import PerPromptStatTracker as PerPromptStatTracker
    from ddpo_lessons.advantages import gae as gae
    from ddpo_lessons.advantages import normalize as normalize
    from ddpo_lessons.algorithms import make_algorithm as make_algorithm
    from ddpo_lessons.batching import EpochPlan as EpochPlan
    from ddpo_lessons.checks import preflight as preflight
    from ddpo_lessons.cli.presets import PRESETS as PRESETS
    from ddpo_lessons.config import DDPOConfig as DDPOConfig
    from ddpo_lessons.data.folders import ImagePrompts as ImagePrompts
    from ddpo_lessons.data.folders import find_images as find_images
    from ddpo_lessons.data.starts import FromImages as FromImages
    from ddpo_lessons.data.starts import FromNoise as FromNoise
    from ddpo_lessons.ddim import DDIMSchedule as DDIMSchedule
    from ddpo_lessons.hooks import Highest as Highest
    from ddpo_lessons.hooks import Hooks as Hooks
    from ddpo_lessons.hooks import LivePlot as LivePlot
    from ddpo_lessons.models import load_pipeline as load_pipeline
    from ddpo_lessons.named_prompts import get_prompts as get_prompts
    from ddpo_lessons.ppo import clipped_surrogate as clipped_surrogate
    from ddpo_lessons.rewards import get_reward as get_reward
    from ddpo_lessons.rollout import Trajectory as Trajectory
    from ddpo_lessons.rollout import img2img_rollout as img2img_rollout
    from ddpo_lessons.rollout import text2img_rollout as text2img_rollout
    from ddpo_lessons.smoke import smoke_run as smoke_run
    from ddpo_lessons.trainer import DDPOTrainer as DDPOTrainer
    from ddpo_lessons.trainer import ImageDDPOTrainer as ImageDDPOTrainer
    from ddpo_lessons.trainer import Trainer as Trainer
    from ddpo_lessons.training.costs import cost as cost
    from ddpo_lessons.training.figure import plot_run as plot_run
    from ddpo_lessons.training.memory import what_fits as what_fits
    from ddpo_lessons.validation import Validation as Validation
    from ddpo_lessons.worlds import load_tiny_sd as load_tiny_sd
else:  # hidden from type checkers, for which every name would exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
