"""Rewards that learned what people prefer: PickScore, HPS v2 and ImageReward.

All of them run in transformers' own CLIP and BLIP classes. Checkpoints that are published under other names
are brought into these by the renamings below. What was checked: every reward against a computation of its own
in plain torch, on random weights of the published names and small sizes (tests/test_preferences.py); none
against its published checkpoint.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpo_lessons.rewards.base import Metadata, RewardFunction, checked_reward
from ddpo_lessons.rewards.models import (
    TEXT_FILES,
    Clip,
    load_clip,
    load_from_hub,
    resize_and_crop,
    score_head,
)

CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # what PickScore and HPS v2 were trained from
PICK_SCORE = "yuvalkirstain/PickScore_v1"
HPS_V2, HPS_FILE = "xswu/HPSv2", "HPS_v2.1_compressed.pt"
IMAGE_REWARD, IMAGE_REWARD_FILE = "THUDM/ImageReward", "ImageReward.pt"
BERT = "google-bert/bert-base-uncased"
Weights = dict[str, torch.Tensor]


def _read(file: Path) -> Any:
    """Read a checkpoint: safetensors, or a pickle, of which nothing is made but tensors and plain values."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def _renamed(weights: Mapping[str, torch.Tensor], rules: Iterable[tuple[str, str]]) -> Weights:
    """Rename weights: each rule is a pattern and what it becomes, one after the other."""
    renamed = {}
    for name, weight in weights.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        renamed[name] = weight
    return renamed


# ----------------------------------------------------------------------------------------- PickScore
def pick_score(model: str | Path = PICK_SCORE, processor: str | Path = CLIP_H) -> RewardFunction:
    """PickScore: CLIP's logit of image and prompt, from a CLIP that was trained on people's choices.

    exp(logit_scale) * cos(image, prompt), which is CLIPModel's `logits_per_image`; differences between images
    of one prompt are what it was trained on. `processor` has its tokenizer and preprocessor. Source: Kirstain
    et al. 2023, arXiv 2305.01569, equation 1. Checked against CLIPModel's own forward on random weights,
    never against the published checkpoint.
    """
    clip = load_clip(model, processor)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        return clip.cosines(images, prompts) * clip.model.logit_scale.exp()

    return reward


# -------------------------------------------------------------------------------------------- HPS v2
_OPEN_CLIP = (
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^text_projection$", "text_projection.weight"),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),  # sic
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


def open_clip_to_clip_model(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Bring the weights of open_clip's `CLIP`, with a ViT, into names and shapes of a `CLIPModel`.

    Both projections are stored the other way round there, and query, key and value in one matrix.
    """
    renamed = {}
    for name, weight in _renamed(weights, _OPEN_CLIP).items():
        before, packed, kind = name.partition(".attn.in_proj_")
        if packed:
            for part, rows in zip("qkv", weight.chunk(3), strict=True):
                renamed[f"{before}.self_attn.{part}_proj.{kind}"] = rows
        else:
            renamed[name] = weight.T if name.endswith("_projection.weight") else weight
    return renamed


def hps_v2(model: str | Path = HPS_V2, processor: str | Path = CLIP_H) -> RewardFunction:
    """HPS v2: cosine of image and prompt, from a CLIP ViT-H that was trained on people's choices.

    Some 0.2 to 0.4; compare images of one prompt only. The checkpoint is open_clip's (.pt, .safetensors, or
    HPS_v2.1_compressed.pt in a folder or repository), in half precision, and computes in float32 here;
    config, tokenizer and preprocessor are those of `processor`, the CLIPModel that it was trained from.
    Resizing is that of CLIP's preprocessor; the authors' package resizes tensors, with antialiasing or
    without, as its torchvision does. Source: Wu et al. 2023, arXiv 2306.09341, and img_score.py of
    tgxs002/HPSv2. Checked against open_clip's formulas on random weights, never against the published
    checkpoint. Raises RuntimeError if one of them cannot be had, or the weights are none of this model.
    """
    checkpoint = load_from_hub(model, lambda path: _read(_inside(path, HPS_FILE)), (HPS_FILE,))

    def load(folder: Path) -> Clip:
        from transformers import CLIPConfig, CLIPModel

        network = CLIPModel(CLIPConfig.from_pretrained(folder))
        network.load_state_dict(open_clip_to_clip_model(checkpoint.get("state_dict", checkpoint)))
        return Clip(network, folder)

    clip = load_from_hub(processor, load, TEXT_FILES)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        return clip.cosines(images, prompts)

    return reward


def _inside(path: Path, name: str) -> Path:
    """Return a file, or the one of that name in a folder."""
    return path if path.is_file() else path / name


# --------------------------------------------------------------------------------------- ImageReward
_BLIP_VISION = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"^norm\.", "post_layernorm."),
)
# The training rewards were brought to mean 0 and standard deviation 1 with these (ImageReward.py).
_REWARD_MEAN, _REWARD_STD = 0.16717362830052426, 1.0333394966054072
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HEAD_WIDTH = 64  # of an attention head, in both ViTs of BLIP
_TOKENS = 35  # of a prompt; what is longer is cut


def _part(weights: Mapping[str, torch.Tensor], prefix: str) -> Weights:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


class ImageRewardModel(nn.Module):
    """BLIP's image encoder, its text encoder that attends to the image, and a head on the first token."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, weights: Mapping[str, torch.Tensor], text_config: Mapping[str, Any]) -> None:
        super().__init__()
        vision = _part(weights, "blip.visual_encoder.")
        text = _part(weights, "blip.text_encoder.")
        text.pop("embeddings.position_ids", None)  # 0, 1, 2, ..., which is no weight
        self.vision = _make_vision(vision)
        self.vision.load_state_dict(_renamed(vision, _BLIP_VISION))
        self.text = _make_text(text_config, self.vision.config.hidden_size)
        self.text.load_state_dict(text)
        self.head = score_head(weights, "mlp.layers.")
        self.register_buffer("mean", torch.tensor(_MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(_STD)[:, None, None])
        self.eval().requires_grad_(False)

    def forward(self, images: torch.Tensor, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Images (B, 3, H, W) in [0, 1] and the tokens of B prompts, with their mask, to rewards (B,)."""
        size = self.vision.config.image_size
        pixels = (resize_and_crop(images, size, size) - self.mean) / self.std
        seen = self.vision(pixel_values=pixels).last_hidden_state  # (B, patches + 1, width)
        read = self.text(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], encoder_hidden_states=seen
        ).last_hidden_state  # (B, length, 768)
        return (self.head(read[:, 0])[:, 0] - _REWARD_MEAN) / _REWARD_STD


def _make_vision(weights: Mapping[str, torch.Tensor]) -> Any:
    """Make BLIP's ViT of the sizes that its weights have."""
    from transformers import BlipVisionConfig, BlipVisionModel

    width, _, patch, _ = weights["patch_embed.proj.weight"].shape
    patches = weights["pos_embed"].shape[1] - 1
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=len(weights["blocks.0.mlp.fc1.weight"]),
        num_hidden_layers=sum(name.endswith("attn.qkv.weight") for name in weights),
        num_attention_heads=width // _HEAD_WIDTH,
        image_size=patch * round(patches**0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,  # vit.py; transformers' default is another one
    )
    return BlipVisionModel(config)


def _make_text(settings: Mapping[str, Any], image_width: int) -> Any:
    """Make BLIP's text encoder; `is_decoder` gives it the attention to images, and no causal mask."""
    from transformers import BlipTextConfig, BlipTextModel

    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "hidden_act", "layer_norm_eps", "pad_token_id",
    )  # fmt: skip
    config = BlipTextConfig(
        **{name: settings[name] for name in sizes}, encoder_hidden_size=image_width, is_decoder=True
    )
    return BlipTextModel(config, add_pooling_layer=False)


def image_reward(model: str | Path = IMAGE_REWARD, tokenizer: str | Path = BERT) -> RewardFunction:
    """ImageReward: how well people would rate the image for the prompt; mean 0, standard deviation 1.

    (head(first token of BLIP's text encoder, which reads the prompt and attends to the image) - m) / s, with
    m and s of the training set. The model is a folder or repository with ImageReward.pt and med_config.json,
    the tokenizer BERT's. Source: Xu et al. 2023, arXiv 2304.05977, and ImageReward.py, vit.py and med.py of
    THUDM/ImageReward. Checked against the formulas of that code on random weights, never against the
    published checkpoint. Raises RuntimeError if one of them cannot be had, or the weights are none of this
    model.
    """
    scorer = load_from_hub(model, _load_image_reward, (IMAGE_REWARD_FILE, "med_config.json"))
    encode = load_from_hub(tokenizer, _load_bert_tokenizer, TEXT_FILES)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        tokens = encode(
            list(prompts), padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt"
        ).to(images.device)
        return scorer.to(images.device)(images, tokens)

    return reward


def _load_image_reward(folder: Path) -> ImageRewardModel:
    settings = json.loads((folder / "med_config.json").read_text("utf-8"))
    return ImageRewardModel(_read(folder / IMAGE_REWARD_FILE), settings)


def _load_bert_tokenizer(folder: Path) -> Any:
    from transformers import BertTokenizer

    return BertTokenizer.from_pretrained(folder)
