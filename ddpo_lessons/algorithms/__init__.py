"""Algorithms: how rewards weigh samples, and the loss; one file each, to be read from top to bottom.

To add one, write a file with a subclass of `base.Algorithm` and register it here.
"""

from __future__ import annotations

from ddpo_lessons.algorithms.base import Algorithm as Algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.rwr import RWR

ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (DDPO, RWR)}
