"""Algorithms: how rewards weigh samples, and the loss; one file each, to be read from top to bottom.

To add one, write a file with a subclass of `base.Algorithm` and register it here. Modules are imported when
an algorithm is made: the command line has the names before torch loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpo_lessons.algorithms.base import Algorithm

ALGORITHMS = {  # module: class
    "ddpo": "DDPO",
    "rwr": "RWR",
    "flow_grpo": "FlowGRPO",
    "awm": "AWM",
    "nft": "NFT",
    "dpo": "DPO",
    "draft": "DRaFT",
    "refl": "ReFL",
}


def make_algorithm(name: str, **settings: Any) -> Algorithm:
    """Make an algorithm by its name, which is that of its module.

    Args:
        name: a key of `ALGORITHMS`.
        settings: arguments of its class.

    Returns:
        The algorithm.

    Raises:
        ValueError: if the name does not exist; the message lists those that do.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm={name!r} does not exist: use one of {', '.join(ALGORITHMS)}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), ALGORITHMS[name])(**settings)
