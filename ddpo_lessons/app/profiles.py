"""Profiles: how large the lessons are on this machine.

`cpu` trains the embedded tiny-sd, `gpu` uses larger settings on a CUDA device, and `hub`, never chosen
by itself, adds the model hub: Stable Diffusion 1.5, gigabytes of downloads.
"""

import os

PROFILES = ("cpu", "gpu", "hub")
PROFILE_VARIABLE = "DDPO_LESSONS_PROFILE"


def pick_profile() -> str:
    """Choose "gpu" where there is a CUDA device, else "cpu".

    The environment variable `DDPO_LESSONS_PROFILE` overrides the choice, and only it chooses `hub`. It is a
    ValueError if it names no profile, a RuntimeError if it asks for a CUDA device, and there is none.
    """
    import torch

    cuda = torch.cuda.is_available()
    wanted = os.environ.get(PROFILE_VARIABLE)
    if not wanted:
        return "gpu" if cuda else "cpu"
    if wanted not in PROFILES:
        raise ValueError(f"{PROFILE_VARIABLE}={wanted!r} is no profile: use cpu, gpu or hub")
    if wanted != "cpu" and not cuda:
        raise RuntimeError(f"{PROFILE_VARIABLE}={wanted} needs a CUDA device, and torch sees none: use cpu")
    return wanted
