"""The cases of the speed comparison, for the other trainers' environment and for ours; imports neither.

The other trainers run as they are documented, but with fewer steps. TRL 0.21's example
(examples/scripts/ddpo.py) takes 6 samples at a time and 3 a minibatch. imageddpo's README names minibatches
of 4 and, as a complete example, gaussian-glasses, whose rl/rl_trainer.py takes 4 at a time and sums the
gradients of all 256 of an epoch into one optimizer step; here an epoch has 32. `large` is for users who have
the memory.
"""

from dataclasses import dataclass
from typing import Any

import torch

PROMPT = "a red three on a blue background"
NUMBERS = ("sample_batch_size", "sample_num_batches_per_epoch", "train_batch_size")
NUMBERS += ("train_gradient_accumulation_steps",)
SIZES = {"TRL": (6, 4, 3, 1), "gaussian-glasses": (4, 8, 4, 8), "large": (16, 2, 16, 1)}


@dataclass(frozen=True)
class Case:
    """One kind of training; `noise_strength` of None means text-to-image."""

    name: str
    guidance_scale: float
    prompt: str = PROMPT
    noise_strength: float | None = None
    num_steps: int = 10
    sizes: tuple[str, ...] = ()  # of SIZES; what the other trainer documents comes first
    peer_error: str = ""  # how the other trainer is known to fail

    @property
    def peer(self) -> str:
        """The trainer that ours is compared with."""
        return "TRL" if self.noise_strength is None else "imageddpo"

    @property
    def actions(self) -> int:
        """Denoising steps that are sampled and trained, per sample."""
        return round(self.num_steps * (self.noise_strength or 1))

    @property
    def evaluations(self) -> int:
        """UNet evaluations of a prediction: two with guidance, unless both prompts agree."""
        return 2 if self.guidance_scale > 1 and self.prompt else 1

    def settings(self, size: str) -> dict[str, Any]:
        """Fields that TRL's DDPOConfig and ours share."""
        return {
            **dict(zip(NUMBERS, SIZES[size], strict=True)), "num_epochs": 1000, "save_freq": 1000,
            "sample_num_steps": self.num_steps, "sample_guidance_scale": self.guidance_scale,
            "train_learning_rate": 3e-4, "mixed_precision": "no", "seed": 0,
        }  # fmt: skip


TEXT: dict[str, Any] = {"sizes": ("TRL", "large")}
IMAGE: dict[str, Any] = {"sizes": ("gaussian-glasses", "TRL", "large"), "noise_strength": 0.5}
AS_DOCUMENTED: dict[str, Any] = {**IMAGE, "sizes": ("gaussian-glasses",)}
CASES = {
    case.name: case
    for case in (
        Case("text-to-image, guidance 5", 5.0, **TEXT),
        Case("text-to-image, no guidance", 1.0, peer_error="The size of tensor", **TEXT),
        Case("img2img, guidance 5", 5.0, **IMAGE),
        # of gaussian-glasses' code, which leaves TRL's default of 5 as it is
        Case("img2img, guidance 5, empty prompt", 5.0, prompt="", **IMAGE),
        # of its page: "guidance scale: 0 (null prompts)"
        Case("img2img, no guidance, empty prompt", 0.0, prompt="", **AS_DOCUMENTED),
        Case("img2img, no guidance", 1.0, **AS_DOCUMENTED),
    )
}


def input_image() -> torch.Tensor:
    """An input image without a source: (3, 32, 32) in [0, 1]."""
    ramp = torch.linspace(0, 1, 32)
    return torch.stack([ramp.expand(32, 32), ramp[:, None].expand(32, 32), torch.full((32, 32), 0.5)])
