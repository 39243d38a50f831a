"""One text and one image, decision by decision: `python -m benchmarks.text.strip`; a minute.

The lesson's live run stops after some iterations and answers test queries. Of the first answer that negates
and parses, every number that text PPO computes for its tokens goes to strip.json. For the image beside it,
strip.json has the states and log-probs of one rollout of tiny-sd, and its advantage among 32 images of its
prompt.
"""

import base64
from pathlib import Path

import torch

from benchmarks.common import Row, redness, write_json
from benchmarks.text.sweep import lesson_trainer
from ddpo_lessons.advantages import gae, normalize
from ddpo_lessons.models import family_of
from ddpo_lessons.rollout import SamplingSettings, text2img_rollout
from ddpo_lessons.text import grammar
from ddpo_lessons.text.language_models import read
from ddpo_lessons.text.text_ppo import shape_rewards, token_log_probs
from ddpo_lessons.text.text_trainer import Rollout
from ddpo_lessons.worlds import load_tiny_sd

ITERATIONS, STEPS, PROMPT, IMAGES = 12, 5, "a red three on blue", 32


def numbers(tensor: torch.Tensor) -> list[float]:
    return [round(number, 2) + 0.0 for number in tensor.tolist()]


def wanted(rollout: Rollout, row: int) -> bool:
    response = rollout.input_ids[row, 1:][rollout.targets.mask[row]]
    words = rollout.texts[row].split()[-len(response) + 1 :]
    return bool({"not", "never"} & set(words)) and grammar.parse(rollout.texts[row]) is not None


def text() -> Row:
    models, trainer = lesson_trainer()
    for _ in range(ITERATIONS):
        trainer.step()
    with torch.no_grad():
        rollout = trainer.rollout(grammar.queries(128, "test", seed=2))
        reference = read(trainer.reference, rollout.input_ids, rollout.attention_mask)
    row = next(row for row in range(128) if wanted(rollout, row))
    t, config = rollout.targets, trainer.config
    log_probs, ref_log_probs, values, scores = (
        tensor.round(decimals=2)  # first, so that a reader who adds up what is shown gets the rows below
        for tensor in (t.log_probs, token_log_probs(reference, rollout.input_ids), t.values, rollout.scores)
    )
    kl = log_probs - ref_log_probs
    rewards = shape_rewards(scores, kl, t.mask, config.kl_coef)
    advantages, returns = gae(rewards, values, config.gamma, config.lam, t.mask)
    columns = {
        "log_prob": log_probs, "ref_log_prob": ref_log_probs, "kl": kl, "reward": rewards, "value": values,
        "delta": gae(rewards, values, config.gamma, 0.0, t.mask)[0], "advantage": advantages,
        "return": returns,
    }  # fmt: skip
    kept = {name: numbers(column[row][t.mask[row]]) for name, column in columns.items()}
    whole = rollout.input_ids[row][rollout.attention_mask[row].bool()]
    words, count = models.tokenizer.convert_ids_to_tokens(whole), int(t.mask[row].sum())
    score = round(scores[row].item(), 2)
    return {"query": words[:-count], "tokens": words[-count:], "score": score, **kept}


@torch.no_grad()
def image() -> Row:
    family = family_of(load_tiny_sd())
    settings = SamplingSettings(num_inference_steps=STEPS, guidance_scale=4.0)
    made = [
        text2img_rollout(family, [PROMPT], settings, generator=torch.Generator().manual_seed(seed))[1]
        for seed in range(IMAGES)
    ]
    finished = torch.cat([family.decode(trajectory.final_latents) for trajectory in made])  # (32, 3, H, W)
    advantages = normalize(redness(finished.flip(1)))  # (32,) of how blue they are
    first = made[0]
    states = torch.cat([first.latents[0], first.final_latents])  # (T + 1 or T + 2, C, h, w)
    images = torch.cat([family.decode(state[None]) for state in states])
    pixels = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8)  # (states, H, W, 3)
    return {
        "prompt": PROMPT, "timesteps": first.timesteps[0].tolist(), "log_probs": numbers(first.log_probs[0]),
        "size": pixels.shape[1],
        "states": [base64.b64encode(frame.numpy().tobytes()).decode() for frame in pixels],
        "advantage": round(advantages[0].item(), 2),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_json(Path(__file__).with_suffix(".json"), {"text": text(), "image": image()})
