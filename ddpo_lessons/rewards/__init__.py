"""Reward functions: what the policy is trained to increase.

Every factory here returns a function of `(images, prompts, metadata)`. It takes float images
(B, 3, H, W) in [0, 1], B prompts and B dicts of metadata, and returns float32 rewards (B,) on the
images' device, or `(rewards, info)` with a dict of named (B,) tensors. Rewards carry no gradient:
DDPO uses their values only, so a reward may be anything that can be computed (Black et al. 2023,
arXiv 2305.13301, section 5).

To add one, write a factory with the decorator `@register(...)`, which registers its name and declares its
needs. Import its module here if it is new.
"""

from typing import Any

from ddpo_lessons.rewards.animal_world import animal_alignment as animal_alignment
from ddpo_lessons.rewards.animal_world import animal_margin as animal_margin
from ddpo_lessons.rewards.combined import edit as edit
from ddpo_lessons.rewards.combined import weighted_sum as weighted_sum
from ddpo_lessons.rewards.digit_world import prompt_alignment as prompt_alignment
from ddpo_lessons.rewards.digit_world import recoloring as recoloring
from ddpo_lessons.rewards.learned import aesthetic_score as aesthetic_score
from ddpo_lessons.rewards.learned import clip_change as clip_change
from ddpo_lessons.rewards.learned import clip_margin as clip_margin
from ddpo_lessons.rewards.learned import clip_score as clip_score
from ddpo_lessons.rewards.learned import distance_penalty as distance_penalty
from ddpo_lessons.rewards.learned import load_from_hub as load_from_hub
from ddpo_lessons.rewards.learned import pick_score as pick_score
from ddpo_lessons.rewards.order import check_order as check_order
from ddpo_lessons.rewards.pixels import colorfulness as colorfulness
from ddpo_lessons.rewards.pixels import jpeg_compressibility as jpeg_compressibility
from ddpo_lessons.rewards.pixels import jpeg_incompressibility as jpeg_incompressibility
from ddpo_lessons.rewards.pixels import pixel_penalty as pixel_penalty
from ddpo_lessons.rewards.reward import REWARDS as REWARDS
from ddpo_lessons.rewards.reward import Metadata as Metadata
from ddpo_lessons.rewards.reward import Registered as Registered
from ddpo_lessons.rewards.reward import RewardFunction as RewardFunction
from ddpo_lessons.rewards.reward import Rewards as Rewards
from ddpo_lessons.rewards.reward import register as register
from ddpo_lessons.rewards.views import AveragedOverViews as AveragedOverViews
from ddpo_lessons.words import similar


def get_reward(name: str, *arguments: Any, **settings: Any) -> RewardFunction:
    """Make the reward function with a name in `REWARDS`, with arguments of its factory.

    Raises ValueError if the name does not exist; the message lists those that do; RuntimeError if the reward
    needs a model that cannot be had.
    """
    if set(name) & set(":@=,"):
        raise ValueError(
            f"reward={name!r} is written for the command line. In Python import a function of your own and "
            "give it itself to the trainer; give models as arguments, as in get_reward('clip_score', "
            "'FOLDER'); and make sums with weighted_sum({NAME: (WEIGHT, FUNCTION)})"
        )
    if name not in REWARDS:
        known = ", ".join(sorted(REWARDS))
        raise ValueError(f"reward={name!r} does not exist{similar(name, REWARDS)}: use one of {known}")
    return REWARDS[name].make(*arguments, **settings)
