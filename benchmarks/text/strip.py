"""One text and one picture, decision by decision: `python -m benchmarks.text.strip`; a minute.

The lesson's live run stops after some iterations and answers test queries. Of the first answer that negates
and parses, every number that text PPO makes of its tokens goes to strip.json; and, for the picture beside
it, the states and log-probs of one rollout of tiny-sd, and its advantage among 32 pictures of its prompt.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_json
from ddpo_lessons.advantages import gae, normalize
from ddpo_lessons.families import family_of
from ddpo_lessons.rollout import text2img_rollout
from ddpo_lessons.text import world
from ddpo_lessons.text.models import load_text_models, read
from ddpo_lessons.text.ppo import token_log_probs
from ddpo_lessons.text.trainer import Rollout, TextPPOConfig, TextPPOTrainer
from ddpo_lessons.tiny import load_tiny_sd

ITERATIONS, STEPS, PROMPT, PICTURES = 12, 5, "a red three on blue", 32


def numbers(tensor: torch.Tensor) -> list[float]:
    return [round(number, 2) + 0.0 for number in tensor.tolist()]


def wanted(rollout: Rollout, row: int) -> bool:
    response = rollout.input_ids[row, 1:][rollout.targets.mask[row]]
    words = rollout.texts[row].split()[-len(response) + 1 :]
    return bool({"not", "never"} & set(words)) and world.parse(rollout.texts[row]) is not None


@torch.no_grad()
def text() -> dict[str, Any]:
    models, queries = load_text_models(), world.queries(2000, "train", seed=1)
    config = TextPPOConfig()
    trainer = TextPPOTrainer(config, models.policy, models.value, models.tokenizer, models.reward, queries)
    for _ in range(ITERATIONS):
        with torch.enable_grad():
            trainer.step()
    rollout = trainer.rollout(world.queries(128, "test", seed=2))
    row = next(row for row in range(128) if wanted(rollout, row))
    ids, attention, t = rollout.input_ids, rollout.attention_mask, rollout.targets
    reference = token_log_probs(read(trainer.reference, ids, attention), ids)
    advantages, returns = gae(rollout.rewards, t.values, config.gamma, config.lam, t.mask)
    td, _ = gae(rollout.rewards, t.values, config.gamma, 0.0, t.mask)
    columns = {
        "log_prob": t.log_probs,
        "ref_log_prob": reference,
        "kl": rollout.kl,
        "reward": rollout.rewards,
        "value": t.values,
        "delta": td,
        "advantage": advantages,
        "return": returns,
    }
    tokens = models.tokenizer.convert_ids_to_tokens(ids[row, 1:][t.mask[row]])
    real = int(attention[row].sum())
    query = models.tokenizer.convert_ids_to_tokens(ids[row][attention[row].bool()][: real - len(tokens)])
    kept = {name: numbers(values[row][t.mask[row]]) for name, values in columns.items()}
    return {"query": query, "tokens": tokens, "score": round(rollout.scores[row].item(), 2), **kept}


def picture() -> dict[str, Any]:
    pipeline = load_tiny_sd()
    family = family_of(pipeline)
    trajectories = [
        text2img_rollout(
            pipeline,
            [PROMPT],
            num_inference_steps=STEPS,
            guidance_scale=4.0,
            generator=torch.Generator().manual_seed(seed),
        )[1]
        for seed in range(PICTURES)
    ]
    with torch.no_grad():
        finished = torch.cat([family.decode(made.final_latents) for made in trajectories])  # (32, 3, H, W)
    red, green, blue = finished.mean((2, 3)).unbind(1)
    advantage = normalize(blue - (red + green) / 2)[0].item()
    trajectory = trajectories[0]
    states = torch.cat([trajectory.latents[0], trajectory.final_latents])  # (T + 1 or T + 2, C, h, w)
    with torch.no_grad():
        images = torch.cat([family.decode(state[None]) for state in states])
    pixels = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8)  # (states, H, W, 3)
    coded = [base64.b64encode(image.numpy().tobytes()).decode() for image in pixels]
    scored = {"advantage": round(advantage, 2)}
    told = {"prompt": PROMPT, "timesteps": trajectory.timesteps[0].tolist()}
    return {
        **told,
        "log_probs": numbers(trajectory.log_probs[0]),
        "size": pixels.shape[1],
        "states": coded,
        **scored,
    }


def main() -> None:
    torch.set_num_threads(1)
    write_json(Path(__file__).with_suffix(".json"), {"text": text(), "picture": picture()})


if __name__ == "__main__":
    main()
