"""The settings and tensors that golden/trl_text_ppo.json was recorded on; the tensors follow from seeds.

TRL 1.12 computes KL, rewards, GAE and loss inside one long method. The recorder, tests/trl_lines.py of commit
2f3f135, cuts those lines out of its source and executes them: the numbers are TRL's, not those of a reading.
"""

from typing import Any

import torch

# Under TRL's names.
ARGS = {"gamma": 0.99, "lam": 0.9, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "kl_coef": 0.05}


def make_case(seed: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Draw the tensors of one minibatch, responses (B, 6) of 11 words, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    batch, places, vocabulary = len(lengths), 6, 11

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).round(decimals=4)

    old_logits = draw(batch, places, vocabulary)
    mask = torch.arange(places) < torch.tensor(lengths)[:, None]  # (B, T)
    return {
        "mask": mask,
        "responses": torch.randint(vocabulary, (batch, places), generator=generator),
        "old_logits": old_logits,
        "new_logits": old_logits + draw(batch, places, vocabulary, scale=0.3),
        "ref_logits": old_logits + draw(batch, places, vocabulary, scale=0.3),
        "values": draw(batch, places).masked_fill(~mask, 0),
        "new_values": draw(batch, places),
        "scores": draw(batch),
    }


CASES = {"full": make_case(0, (6, 6, 6, 6)), "ragged": make_case(1, (6, 3, 1, 5))}
