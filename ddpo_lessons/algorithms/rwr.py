"""Lesson 06: reward-weighted regression (RWR), the method that DDPO is measured against.

RWR treats the reward as a weight: it samples, and then trains on its own samples with the ordinary
denoising loss, the better ones more (Peters and Schaal 2007; for diffusion models Lee et al. 2023, arXiv
2302.12192, and Black et al. 2023, arXiv 2305.13301, section 4.2). It never looks at the denoising steps that
were taken.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ddpo_lessons.algorithms.algorithm import Learner, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.forward_process import ForwardProcess


def rwr_weights(rewards: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights of RWR: ``w = N softmax(r / (temperature std(r)))``, so that their mean is 1; (N,) float32.

    Small temperatures train on the best samples only, large ones on all alike; a ValueError refuses one that
    is not positive. Source: Black et al. 2023, section 4.2, w_RWR, with rewards in standard deviations so
    that one temperature serves every reward.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; 1 is a usual value")
    rewards = rewards.double()
    std = rewards.std(correction=0).clamp(min=1e-8)
    return len(rewards) * (rewards / (temperature * std)).softmax(dim=0).float()


def sparse_rwr_weights(rewards: torch.Tensor, top_share: float) -> torch.Tensor:
    """Weights of sparse RWR: 1 / top_share for the best samples, 0 for the others; their mean is 1.

    (N,) float32; at least one sample is trained on, and a ValueError refuses a share outside (0, 1]. Source:
    Black et al. 2023, section 4.2, w_sparse, with the threshold put at a quantile of the epoch.
    """
    if not 0 < top_share <= 1:
        raise ValueError(f"top_share={top_share} must lie in (0, 1]")
    count = max(1, round(top_share * len(rewards)))
    weights = torch.zeros(len(rewards))
    weights[rewards.double().topk(count).indices.cpu()] = len(rewards) / count
    return weights


class RWR(ForwardProcess):
    """Reward-weighted regression on the same rollouts, prompts, rewards and settings as DDPO.

    Guidance samples, as in DDPO, and is not trained, as in ordinary fine-tuning; samples of a group share
    their start, as in DDPO. `temperature` is that of `rwr_weights`; `top_share` takes `sparse_rwr_weights` in
    its place; a ValueError refuses values that these refuse. `logit_normal` and `visited_states` are those of
    `ForwardProcess`.
    """

    name = "rwr"
    unused = (
        "train_kl_coefficient", "per_prompt_stat_tracking", "log_prob_reduction", "train_clip_range",
        "train_adv_clip_max",
    )  # fmt: skip

    def __init__(
        self,
        temperature: float = 0.2,
        top_share: float | None = None,
        logit_normal: bool = False,
        visited_states: bool = False,
    ) -> None:
        super().__init__(logit_normal, visited_states)
        self.temperature, self.top_share = temperature, top_share
        self.advantages(torch.zeros(1))  # refuses wrong settings before anything is loaded

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any] = ()) -> torch.Tensor:
        """Return the weight of each sample (N,) where DDPO has its advantage."""
        if self.top_share is not None:
            return sparse_rwr_weights(rewards, self.top_share)
        return rwr_weights(rewards, self.temperature)

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        """Return the weighted denoising loss of some examples: mean of w (target - prediction)^2."""
        error = self.example(samples, pairs).error(denoiser)  # (N,)
        return (samples.advantages[pairs["rows"]] * error).mean(), {"denoising_error": error.detach().mean()}
