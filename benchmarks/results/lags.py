"""Lesson 10: which old policy keeps samples near the data, the sampler or the center of the loss?

    python -m benchmarks.results.lags --processes 1

Trains on the line with the notebook's own functions, its cells with the tag "line": a hundred epochs of one
optimizer step. The policy that samples, the policy at which the loss is centered, or both can be exponential
moving averages (EMA) of the newest policy, with a decay of 0.9. The authors' presets use less. In AWM's the
center of a penalty is an EMA whose decay grows by 0.001 per step up to 0.3; in NFT's and PEPG's both are one,
up to 0.5. The runs here have that limit from the first step on, or let the decay grow as the authors do.
The runs with a decay of 0.9 also have the next learning rate below and above the notebook's. lags.csv has,
for each loss, seed, learning rate and choice of old policies (`lag`), the fraction of good samples and the
distance from the data.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from benchmarks.common import Row, parse, product, run_all
from ddpo_lessons.advantages import normalize
from ddpo_lessons.algorithms.forward_process import Example
from ddpo_lessons.lessons import SEED, seeded
from ddpo_lessons.ppo import clipped_loss
from images.lessons import run_tagged

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("loss", "lag", "seed", "learning_rate", "good", "distance")
SEEDS, LOSSES = (3, 4, 5, 6, 7), ("signed", "AWM", "PEPG", "NFT", "penalty")
RATE, OTHER_RATES = 3e-3, (1e-3, 1e-2)
LAGS: dict[str, Row] = {
    "none": {},
    "sampler": {"sampler_decay": 0.9},
    "center": {"center_decay": 0.9},
    "both": {"sampler_decay": 0.9, "center_decay": 0.9},
}
NFT_LIMIT, AWM_LIMIT = {"sampler_decay": 0.5, "center_decay": 0.5}, {"center_decay": 0.3}
PRESETS: dict[str, dict[str, Row]] = {  # by loss: the decays of its authors
    "penalty": {"limit": AWM_LIMIT, "grows": {**AWM_LIMIT, "growth": 0.001}},
    "NFT": {"limit": NFT_LIMIT, "grows": {**NFT_LIMIT, "growth": 0.001}},
    "PEPG": {"limit": NFT_LIMIT, "grows": {**NFT_LIMIT, "growth": 0.001}},
}


def train(run: Row) -> list[Row]:
    used = (torch, nn, SimpleNamespace, Example, seeded, normalize, clipped_loss)
    names = {"SEED": SEED, **{thing.__name__.split(".")[-1]: thing for thing in used}}
    line = run_tagged("10_without_log_probs", "line", names)
    loss = line[f"{run['loss'].lower()}_loss"]
    lag = (LAGS | PRESETS.get(run["loss"], {}))[run["lag"]]
    own = {"seed": run["seed"], "learning_rate": run["learning_rate"]}
    policy = line["draft_train"](loss, epochs=100, steps=1, **own, **lag)
    good, distance = line["measure"](policy)
    return [{"good": good, "distance": distance}]


if __name__ == "__main__":
    runs = product(learning_rate=(RATE,), seed=SEEDS, lag=LAGS, loss=LOSSES)
    runs += product(learning_rate=(RATE,), seed=SEEDS, lag=("limit", "grows"), loss=PRESETS)
    runs += product(learning_rate=OTHER_RATES, seed=SEEDS, lag=LAGS, loss=LOSSES)
    run_all(train, runs, COLUMNS, RESULT, parse(__doc__).processes)
