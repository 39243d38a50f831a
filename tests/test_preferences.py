"""PickScore, HPS v2 and ImageReward on random weights, against their formulas in plain torch."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import CLIP_MEAN, CLIP_SIZE, CLIP_STD, write_clip
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from ddpo_lessons import rewards

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ("a red three", "a cat")
NO_METADATA: tuple[dict[str, Any], ...] = ({}, {})
Weights = dict[str, torch.Tensor]


def pictures(size: int = CLIP_SIZE) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(3))


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (CLIP_MEAN, CLIP_STD))
    return (images - mean) / std


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A random CLIP with the activation of open_clip's ViT-H-14."""
    folder = write_clip(tmp_path_factory.mktemp("clip"))
    config = CLIPConfig.from_pretrained(folder)
    config.text_config.hidden_act = config.vision_config.hidden_act = "gelu"
    config.save_pretrained(folder)
    return folder


# ----------------------------------------------------------------------------------------- PickScore
def test_pick_score_is_clips_own_logit(clip_folder, tmp_path):
    model = CLIPModel.from_pretrained(clip_folder)
    model.logit_scale.data.fill_(4.6)  # about that of CLIP, and not that of a new one
    model.save_pretrained(tmp_path)  # without tokenizer and preprocessor
    tokens = CLIPTokenizer.from_pretrained(clip_folder)(list(PROMPTS), padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens, pixel_values=normalised(pictures())).logits_per_image
    score: Any = rewards.pick_score(tmp_path, clip_folder)(pictures(), PROMPTS, NO_METADATA)
    torch.testing.assert_close(score, logits.diag(), atol=1e-3, rtol=0)
    assert abs(score[0] - score[1]) > 0.1


# ------------------------------------------------------------------------------- open_clip, in torch
WIDTH, EMBEDDED, PATCH, LENGTH, VOCABULARY = 32, 768, 8, 24, 54


def open_clip_weights() -> Weights:
    """Random weights under the names of open_clip's CLIP, as its modules write them."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / (2 * math.sqrt(shape[-1]))

    weights = {
        "logit_scale": torch.tensor(4.6),
        "visual.class_embedding": random(WIDTH),
        "visual.positional_embedding": random((CLIP_SIZE // PATCH) ** 2 + 1, WIDTH),
        "visual.conv1.weight": random(WIDTH, 3, PATCH, PATCH),
        "visual.proj": random(WIDTH, EMBEDDED),
        "positional_embedding": random(LENGTH, WIDTH),
        "token_embedding.weight": random(VOCABULARY, WIDTH),
        "text_projection": random(WIDTH, EMBEDDED),
    }
    norms = ["visual.ln_pre", "visual.ln_post", "ln_final"]
    for tower in ("visual.transformer", "transformer"):
        for block in (f"{tower}.resblocks.0", f"{tower}.resblocks.1"):
            weights[f"{block}.attn.in_proj_weight"] = random(3 * WIDTH, WIDTH)
            weights[f"{block}.attn.in_proj_bias"] = random(3 * WIDTH)
            sizes = {"attn.out_proj": (WIDTH, WIDTH), "mlp.c_fc": (64, WIDTH), "mlp.c_proj": (WIDTH, 64)}
            for name, shape in sizes.items():
                weights[f"{block}.{name}.weight"] = random(*shape)
                weights[f"{block}.{name}.bias"] = random(shape[0])
            norms += [f"{block}.ln_1", f"{block}.ln_2"]
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + random(WIDTH), random(WIDTH)
    return weights


def norm(x: torch.Tensor, weights: Weights, name: str, eps: float = 1e-5) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def resblock(x: torch.Tensor, weights: Weights, name: str, mask: torch.Tensor | None) -> torch.Tensor:
    """transformer.py: ResidualAttentionBlock, whose attention is torch's own."""
    attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    own = f"{name}.attn."
    attention.load_state_dict({k.removeprefix(own): v for k, v in weights.items() if k.startswith(own)})
    y = norm(x, weights, f"{name}.ln_1")
    x = x + attention(y, y, y, attn_mask=mask, need_weights=False)[0]
    y = F.gelu(linear(norm(x, weights, f"{name}.ln_2"), weights, f"{name}.mlp.c_fc"))
    return x + linear(y, weights, f"{name}.mlp.c_proj")


@torch.no_grad()
def open_clip_cosines(weights: Weights, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """model.py: CLIP.encode_image and CLIP.encode_text."""
    x = F.conv2d(images, weights["visual.conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    x = torch.cat([weights["visual.class_embedding"].expand(len(x), 1, -1), x], dim=1)
    x = norm(x + weights["visual.positional_embedding"], weights, "visual.ln_pre")
    for number in range(2):
        x = resblock(x, weights, f"visual.transformer.resblocks.{number}", None)
    seen = norm(x[:, 0], weights, "visual.ln_post") @ weights["visual.proj"]
    x = weights["token_embedding.weight"][tokens] + weights["positional_embedding"]
    for number in range(2):
        x = resblock(
            x, weights, f"transformer.resblocks.{number}", torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        )
    x = norm(x, weights, "ln_final")
    read = x[torch.arange(len(x)), tokens.argmax(dim=1)] @ weights["text_projection"]
    return F.cosine_similarity(seen, read)


def letters(folder: Path, prompts: tuple[str, ...]) -> torch.Tensor:
    """open_clip's tokens: start, text, end, which has the highest number, and zeros."""
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])


@pytest.mark.parametrize("form", ["folder", "file", "safetensors"])
def test_hps_v2_is_the_cosine_of_open_clips_model(clip_folder, tmp_path, form):
    weights = open_clip_weights()
    file = tmp_path / "HPS_v2.1_compressed.pt"
    if form == "safetensors":
        file = file.with_suffix(".safetensors")
        save_file(weights, file)
    else:
        torch.save({"epoch": 3, "name": "a run", "state_dict": weights}, file)
    expected = open_clip_cosines(weights, normalised(pictures()), letters(clip_folder, PROMPTS))
    model = tmp_path if form == "folder" else file
    score: Any = rewards.hps_v2(model, clip_folder)(pictures(), PROMPTS, NO_METADATA)
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)
    swapped: Any = rewards.hps_v2(model, clip_folder)(pictures(), PROMPTS[::-1], NO_METADATA)
    assert (score - swapped).abs().min() > 1e-3


def test_half_precision_weights_compute_in_float32(clip_folder, tmp_path):
    half = {name: weight.half() for name, weight in open_clip_weights().items()}
    torch.save({"state_dict": half}, tmp_path / "half.pt")
    whole = {name: weight.float() for name, weight in half.items()}
    expected = open_clip_cosines(whole, normalised(pictures()), letters(clip_folder, PROMPTS))
    score: Any = rewards.hps_v2(tmp_path / "half.pt", clip_folder)(pictures(), PROMPTS, NO_METADATA)
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("exploded").touch, ())


def test_a_checkpoint_that_would_run_code_is_refused(clip_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": open_clip_weights(), "more": Bomb()}, "bomb.pt", pickle_module=pickle)
    with pytest.raises(RuntimeError, match="could not be loaded"):
        rewards.hps_v2("bomb.pt", clip_folder)
    assert not Path("exploded").exists()


def test_weights_of_another_model_are_refused(clip_folder, tmp_path):
    weights = open_clip_weights()
    del weights["visual.proj"]
    torch.save({"state_dict": weights}, tmp_path / "lacks.pt")
    with pytest.raises(RuntimeError, match=r"Missing key.*visual_projection\.weight"):
        rewards.hps_v2(tmp_path / "lacks.pt", clip_folder)


# ------------------------------------------------------------------------------ ImageReward, in torch
MED = {
    "vocab_size": 40, "hidden_size": 768, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 12, "max_position_embeddings": 64, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "pad_token_id": 0, "type_vocab_size": 2, "add_cross_attention": True, "encoder_width": 768,
}  # fmt: skip
SEEN = 128  # the ViT's width: two heads of 64
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "three", "cat"]


def image_reward_weights() -> Weights:
    """Random weights under the names of the published checkpoint, with those that the reward does not use."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    eye, mind = "blip.visual_encoder.", "blip.text_encoder."
    weights = {
        f"{eye}cls_token": random(1, 1, SEEN),
        f"{eye}pos_embed": random(1, 5, SEEN),
        f"{mind}embeddings.position_ids": torch.arange(64)[None],
        f"{mind}embeddings.word_embeddings.weight": random(40, 768),
        f"{mind}embeddings.position_embeddings.weight": random(64, 768),
    }
    sizes: dict[str, tuple[int, ...]] = {
        f"{eye}patch_embed.proj": (SEEN, 3, 16, 16),
        "blip.vision_proj": (8, SEEN),
        "blip.text_proj": (8, 768),
    }
    norms = {f"{eye}norm": SEEN, f"{mind}embeddings.LayerNorm": 768}
    for block in (f"{eye}blocks.0.", f"{eye}blocks.1."):
        sizes |= {f"{block}attn.qkv": (3 * SEEN, SEEN), f"{block}attn.proj": (SEEN, SEEN)}
        sizes |= {f"{block}mlp.fc1": (4 * SEEN, SEEN), f"{block}mlp.fc2": (SEEN, 4 * SEEN)}
        norms |= {f"{block}norm1": SEEN, f"{block}norm2": SEEN}
    for layer in (f"{mind}encoder.layer.0.", f"{mind}encoder.layer.1."):
        for kind, source in (("attention", 768), ("crossattention", SEEN)):
            sizes |= {f"{layer}{kind}.self.query": (768, 768), f"{layer}{kind}.output.dense": (768, 768)}
            sizes |= {f"{layer}{kind}.self.{name}": (768, source) for name in ("key", "value")}
            norms[f"{layer}{kind}.output.LayerNorm"] = 768
        sizes |= {f"{layer}intermediate.dense": (96, 768), f"{layer}output.dense": (768, 96)}
        norms[f"{layer}output.LayerNorm"] = 768
    widths = {0: (1024, 768), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}
    sizes |= {f"mlp.layers.{number}": shape for number, shape in widths.items()}
    for name, shape in sizes.items():
        weights[f"{name}.weight"], weights[f"{name}.bias"] = random(*shape), random(shape[0])
    for name, width in norms.items():
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + random(width), random(width)
    return weights


def heads(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)  # (B, heads, length, width)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, number: int, keep: Any = None) -> torch.Tensor:
    scores = heads(q, number) @ heads(k, number).mT / math.sqrt(q.shape[-1] / number)
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
    return (scores.softmax(-1) @ heads(v, number)).transpose(1, 2).flatten(2)


def vit(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """vit.py: VisionTransformer, which normalises before each part and adds."""
    eye = "blip.visual_encoder."
    name = f"{eye}patch_embed.proj"
    x = F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=16).flatten(2).mT
    x = torch.cat([w[f"{eye}cls_token"].expand(len(x), -1, -1), x], dim=1) + w[f"{eye}pos_embed"]
    for block in (f"{eye}blocks.0.", f"{eye}blocks.1."):
        q, k, v = linear(norm(x, w, f"{block}norm1", 1e-6), w, f"{block}attn.qkv").chunk(3, dim=-1)
        x = x + linear(attend(q, k, v, 2), w, f"{block}attn.proj")
        y = F.gelu(linear(norm(x, w, f"{block}norm2", 1e-6), w, f"{block}mlp.fc1"))
        x = x + linear(y, w, f"{block}mlp.fc2")
    return norm(x, w, f"{eye}norm", 1e-6)


def med(tokens: torch.Tensor, seen: torch.Tensor, w: Weights) -> torch.Tensor:
    """med.py: BertModel in mode 'multimodal', which adds and normalises after each part."""
    mind, keep = "blip.text_encoder.", tokens != 0
    x = w[f"{mind}embeddings.word_embeddings.weight"][tokens]
    x = x + w[f"{mind}embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = norm(x, w, f"{mind}embeddings.LayerNorm", 1e-12)
    for layer in (f"{mind}encoder.layer.0.", f"{mind}encoder.layer.1."):
        for kind, source, mask in (("attention", None, keep), ("crossattention", seen, None)):
            own = f"{layer}{kind}.self."
            source = x if source is None else source
            k, v = linear(source, w, f"{own}key"), linear(source, w, f"{own}value")
            y = attend(linear(x, w, f"{own}query"), k, v, 12, mask)
            y = linear(y, w, f"{layer}{kind}.output.dense")
            x = norm(x + y, w, f"{layer}{kind}.output.LayerNorm", 1e-12)
        y = linear(F.gelu(linear(x, w, f"{layer}intermediate.dense")), w, f"{layer}output.dense")
        x = norm(x + y, w, f"{layer}output.LayerNorm", 1e-12)
    return x


def image_reward_by_hand(images: torch.Tensor, tokens: torch.Tensor, w: Weights) -> torch.Tensor:
    x = med(tokens, vit(normalised(images), w), w)[:, 0]
    for number in (0, 2, 4, 6, 7):
        x = linear(x, w, f"mlp.layers.{number}")
    return (x[:, 0] - 0.16717362830052426) / 1.0333394966054072  # ImageReward.py


@pytest.fixture
def image_reward_folders(tmp_path):
    model, bert = tmp_path / "model", tmp_path / "bert"
    model.mkdir()
    bert.mkdir()
    torch.save(image_reward_weights(), model / "ImageReward.pt")
    (model / "med_config.json").write_text(json.dumps(MED))
    (bert / "vocab.txt").write_text("\n".join(WORDS))
    return model, bert


def test_image_reward_is_the_authors_formula(image_reward_folders):
    images = pictures(32)
    tokens = torch.tensor([[2, 5, 6, 7, 3, 0], [2, 5, 8, 3, 0, 0]])  # the mask hides however much padding
    expected = image_reward_by_hand(images, tokens, image_reward_weights())
    score: Any = rewards.image_reward(*image_reward_folders)(images, PROMPTS, NO_METADATA)
    torch.testing.assert_close(score, expected, atol=1e-4, rtol=1e-4)
    assert abs(score[0] - score[1]) > 0.01
    other: Any = rewards.image_reward(*image_reward_folders)(images, PROMPTS[::-1], NO_METADATA)
    assert (score - other).abs().min() > 0.01  # it reads the prompt


def test_image_reward_cuts_prompts_at_35_tokens(image_reward_folders):
    reward: Any = rewards.image_reward(*image_reward_folders)
    prompts = ("a " * 33, "a " * 33 + "red cat", "a " * 32 + "red")  # 33 words between start and end
    fits, cut, other = reward(pictures(32)[:1].expand(3, -1, -1, -1), prompts, ({},) * 3).tolist()
    assert cut == pytest.approx(fits, abs=1e-5)
    assert abs(other - fits) > 1e-3
