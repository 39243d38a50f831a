"""Figure of lesson 10: where four losses push samples on a line.

The line, its policy and the losses are those of the lesson; here they run in 30 optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, main
from torch import nn

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
MEANS, WIDTH = torch.tensor([-1.0, 1.0]).double(), 0.3  # of the data's two halves
SAMPLES, OPTIMIZER_STEPS, RATE, SEED = 256, 30, 3e-3, 0
SHOWN = 60  # paths in a panel
Loss = Callable[..., torch.Tensor]


# ------------------------------------------------------------------------------------------- the line
class Policy(nn.Module):
    """The velocity of the line's data, exactly, plus a network that begins at 0."""

    def __init__(self) -> None:
        """Make it; always the same one."""
        super().__init__()
        torch.manual_seed(SEED)
        sizes = [nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)]
        self.change = nn.Sequential(*sizes).double()
        nn.init.zeros_(self.change[-1].weight)
        nn.init.zeros_(self.change[-1].bias)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return the velocity (B, 1) at x (B, 1) and noise levels (B,)."""
        level = level[:, None]
        variance = ((1 - level) * WIDTH) ** 2 + level**2
        offset = x - (1 - level) * MEANS  # (B, 2)
        share = (-(offset**2) / (2 * variance)).softmax(dim=1)
        velocity = (level - (1 - level) * WIDTH**2) / variance * offset - MEANS
        return (share * velocity).sum(1, keepdim=True) + self.change(torch.cat([x, level], dim=1))


@torch.no_grad()
def paths(policy: Policy, noise: torch.Tensor, steps: int = 20) -> torch.Tensor:
    """Follow the ODE from noise (B, 1): all states (B, steps + 1)."""
    states = [noise]
    for level in torch.linspace(1, 0, steps + 1).double()[:-1]:
        states.append(states[-1] - policy(states[-1], level.expand(len(noise))) / steps)
    return torch.cat(states, dim=1)


def draw_noise(seed: int, count: int) -> torch.Tensor:
    """Draw (count, 1) of standard normal noise."""
    return torch.randn(count, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----------------------------------------------------------------------------------------- the losses
def rwr(gap: torch.Tensor, old_gap: torch.Tensor, level: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """Imitate the good samples; gaps (B,) are v - v*, now and in the policy that sampled."""
    return ((sign > 0) / (sign > 0).double().mean() * gap**2).mean()


def signed(gap: torch.Tensor, old_gap: torch.Tensor, level: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """Weigh by praise and blame, and nothing else."""
    return (sign * level**2 * gap**2).mean()


def awm(gap: torch.Tensor, old_gap: torch.Tensor, level: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """Clip the ratio that the weighted errors stand for, at 1 ± 0.2."""
    ratio = (level**2 * (old_gap**2 - gap**2)).exp()
    return torch.maximum(-sign * ratio, -sign * ratio.clamp(0.8, 1.2)).mean()


def nft(gap: torch.Tensor, old_gap: torch.Tensor, level: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """Blame by a mirror image, with ζ = A_max = 1."""
    goodness = sign.clamp(-1, 1) / 2 + 0.5
    errors = [level * g for g in (gap, 2 * old_gap - gap)]
    good, bad = (error**2 / error.detach().abs().clamp(min=1e-5) for error in errors)
    return (goodness * good + (1 - goodness) * bad).mean()


def train(loss_of: Loss) -> Policy:
    """Take the optimizer steps, all on one set of samples."""
    policy, old = Policy(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=RATE)
    clean = paths(old, draw_noise(1, SAMPLES))[:, -1:]
    good = (clean[:, 0] > 0).double()
    sign = (good - good.mean()) / good.std(correction=0)
    for step in range(OPTIMIZER_STEPS):
        noise = draw_noise(100 + step, SAMPLES)
        generator = torch.Generator().manual_seed(200 + step)
        level = torch.rand(SAMPLES, generator=generator, dtype=torch.float64)
        x = (1 - level[:, None]) * clean + level[:, None] * noise
        gap, old_gap = ((net(x, level) - noise + clean)[:, 0] for net in (policy, old))
        loss = loss_of(gap, old_gap.detach(), level, sign)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


# ----------------------------------------------------------------------------------------- the figure
def draw_paths(axes: Axes, policy: Policy, name: str) -> None:
    """Draw paths from noise to data, and how many end above 0."""
    states = paths(policy, draw_noise(2, 2000))
    good = 100 * (states[:, -1] > 0).double().mean().item()
    across = torch.linspace(0, 1, states.shape[1]).tolist()
    for path in states[:SHOWN].round(decimals=2).tolist():  # rounded: the same drawing on every machine
        color = BLUE if path[-1] > 0 else RED
        axes.plot(across, path, color=color, linewidth=0.8, alpha=0.75)
    for mean in MEANS.tolist():
        axes.axhspan(mean - 2 * WIDTH, mean + 2 * WIDTH, color=MUTED, alpha=0.13, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_title(f"{name}\n{good:.0f}% good", fontsize=10.5, color=INK)
    axes.set(xlim=(0, 1), ylim=(-3, 5), xticks=[0.08, 0.92], xticklabels=["noise", "data"])
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.set_facecolor(CARD)
    axes.spines[["top", "right"]].set_visible(False)


def push() -> Figure:
    """Draw the paths before training, and after it by four losses."""
    figure = Figure(figsize=(9.6, 3.9), facecolor=CARD, layout="constrained")
    panels: dict[str, Loss | None] = {
        "before": None,
        "RWR: praise only": rwr,
        "praise and blame": signed,
        "AWM: clipped": awm,
        "NFT: mirrored": nft,
    }
    grid = figure.subplots(1, len(panels), sharey=True)
    for axes, (name, loss_of) in zip(grid, panels.items(), strict=True):
        draw_paths(axes, Policy() if loss_of is None else train(loss_of), name)
    grid[0].set_ylabel("grey: where 95% of the data lie", color=INK, fontsize=9.5)
    return figure


if __name__ == "__main__":
    main({"10-push": push})
