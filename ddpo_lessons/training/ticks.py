"""Choose the ticks of a run's figure: whole epochs, and numbers with equally many decimals."""

from __future__ import annotations

import math

LETTERS = 7  # of a number, for which there is room beside an axis
INTERVALS = 5  # at most, between the ticks of epochs
LOWEST = -7  # exponent of the smallest power of ten: rounding errors of float32 are of this size


def of_epochs(first: int, last: int) -> list[int]:
    """Return the first and the last epoch, and round epochs between them that are not too close to these."""
    span = last - first
    steps = (factor * 10**power for power in range(len(str(last)) + 1) for factor in (1, 2, 5))
    step = next(step for step in steps if INTERVALS * step >= span)
    room = span * (0.04 + 0.025 * len(str(last)))  # epochs that a number is wide
    between = range((first // step + 1) * step, last, step)
    return sorted({first, *(epoch for epoch in between if epoch - first >= room <= last - epoch), last})


def of_values(low: float, high: float) -> tuple[list[float], list[str], str]:
    """Return two to five ticks, their labels and the unit of the labels, such as "in 1e−4", or no unit.

    All labels have equally many decimals. If they would be too long, the first tick is subtracted from all,
    and the unit begins with its value, as in "minus 1234.501, in 1e−3".
    """
    from matplotlib.ticker import MaxNLocator

    found = [float(tick) for tick in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)]
    positions = [position for position in found if low <= position <= high]
    step = found[1] - found[0]
    labels, unit = _label(positions, step)
    if max(map(len, labels), default=0) <= LETTERS:
        return positions, labels, unit
    (start,) = _fixed(positions[:1], _decimals(step))
    labels, unit = _label([position - positions[0] for position in positions], step)
    return positions, labels, f"minus {start}" + (f", {unit}" if unit else "")


def of_powers(high: float) -> tuple[list[float], list[str]]:
    """Return 0 and at most three powers of ten up to `high`, for a scale that is linear around 0."""
    top = math.floor(math.log10(high))
    every = -(-(top + 1 - LOWEST) // 3)
    exponents = range(top, LOWEST + every - 2, -every)[::-1]  # 0 is where the next power would be
    labels = [minus(f"1e{exponent}") if exponent else "1" for exponent in exponents]
    return [0.0, *(float(f"1e{exponent}") for exponent in exponents)], ["0", *labels]


def minus(number: str) -> str:
    """Write a number with a minus sign instead of a hyphen."""
    return number.replace("-", "−")


def _label(values: list[float], step: float) -> tuple[list[str], str]:
    largest = max(map(abs, values), default=0.0)
    exponent = 0 if largest == 0 or 1e-3 <= largest < 1e6 else math.floor(math.log10(largest))
    scale = float(f"1e{exponent}")
    labels = _fixed([value / scale for value in values], _decimals(step / scale))
    return labels, minus(f"in 1e{exponent}") if exponent else ""


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-6))


def _fixed(values: list[float], decimals: int) -> list[str]:
    return [minus(f"{round(value, decimals) + 0.0:.{decimals}f}") for value in values]
