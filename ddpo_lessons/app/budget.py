"""Lesson 08: what a run costs in memory and time, worked out before it runs.

Networks live on the `meta` device, whose tensors have shapes and no memory, so that Stable Diffusion 1.5
can be counted on any machine. Parameters, moments and latents are counted to the byte. Activations and
FLOPs are those of the operations that PyTorch would run, one by one. What is not counted: the CUDA context,
workspaces of kernels, fragments of the allocator.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel, UNet2DConditionModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.families.stable_diffusion import vae_factor
from ddpo_lessons.families.stable_diffusion_3 import T5_TOKENS

AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# bitsandbytes keeps the moments of smaller tensors in 32 bits (its `min_8bit_size`).
SMALLEST_8BIT = 4096


# ------------------------------------------------------------------------------------------ networks
@dataclass
class Networks:
    """The networks of a pipeline, which is all of it that needs memory; subclasses add the denoiser."""

    vae: Any
    text_encoder: Any

    denoiser_name: ClassVar[str] = "unet"
    autocasts_vae: ClassVar[bool] = True
    embeds_in_float32: ClassVar[bool] = True  # whatever the precision: a normalisation makes them last
    rounds_steps_up: ClassVar[bool] = False  # of img2img, where strength times steps is not whole

    @property
    def denoiser(self) -> Any:
        """The network that is trained, or that carries the adapter."""
        return getattr(self, self.denoiser_name)

    @property
    def frozen(self) -> dict[str, Any]:
        """The others by name; one may be missing."""
        there = {name: part for name, part in vars(self).items() if isinstance(part, nn.Module)}
        return {name: network for name, network in there.items() if name != self.denoiser_name}

    @property
    def keeps_float32(self) -> frozenset[str]:
        """Names of the networks that float16 breaks."""
        return frozenset()

    @property
    def tokens(self) -> int:
        """How many tokens of a prompt the denoiser is told, L."""
        return self.text_encoder.config.max_position_embeddings


@dataclass
class Networks1(Networks):
    """The three networks of Stable Diffusion 1 and 2."""

    unet: Any


@dataclass
class NetworksXL(Networks1):
    """The four networks of Stable Diffusion XL."""

    text_encoder_2: Any

    autocasts_vae: ClassVar[bool] = False  # as the family does it

    @property
    def keeps_float32(self) -> frozenset[str]:
        """Names of the networks that float16 breaks."""
        return frozenset({"vae"} if self.vae.config.force_upcast else ())


@dataclass
class Networks3(Networks):
    """The networks of Stable Diffusion 3; T5, the third text encoder, may be missing."""

    transformer: Any
    text_encoder_2: Any
    text_encoder_3: Any = None
    t5_tokens: int = T5_TOKENS  # zeros where T5 is missing

    denoiser_name: ClassVar[str] = "transformer"
    embeds_in_float32: ClassVar[bool] = False
    rounds_steps_up: ClassVar[bool] = True

    @property
    def keeps_float32(self) -> frozenset[str]:
        """Names of the networks that float16 breaks."""
        return frozenset({"text_encoder_3"})

    @property
    def tokens(self) -> int:
        """CLIP's tokens, before those of T5."""
        return super().tokens + self.t5_tokens


def kind_of(parts: Collection[str]) -> type[Networks]:
    """Return the class of a pipeline's networks, by the names of its parts."""
    if "transformer" in parts:
        return Networks3
    return NetworksXL if "text_encoder_2" in parts else Networks1


def sd15_unet(device: str = "meta") -> UNet2DConditionModel:
    """Make the UNet of Stable Diffusion 1.5, with random weights: 859,520,964 parameters.

    Source: unet/config.json of the published model; what is not named here is diffusers' default.

    Args:
        device: "meta" for shapes only, or a device with memory for them.

    Returns:
        The UNet: latents (B, 4, 64, 64), text embeddings (B, 77, 768).
    """
    with torch.device(device):
        return UNet2DConditionModel(sample_size=64, cross_attention_dim=768)


def sd15_vae(device: str = "meta") -> AutoencoderKL:
    """Make the autoencoder of Stable Diffusion 1.5, with random weights: 83,653,863 parameters.

    Args:
        device: as in `sd15_unet`.

    Returns:
        The autoencoder: images (B, 3, 512, 512), latents (B, 4, 64, 64).
    """
    with torch.device(device):
        return AutoencoderKL(
            sample_size=512,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )


def sd15_text_encoder(device: str = "meta") -> CLIPTextModel:
    """Make the text encoder of Stable Diffusion 1.5 (CLIP ViT-L/14's), with random weights: 123,060,480.

    Args:
        device: as in `sd15_unet`.

    Returns:
        The text encoder: token ids (B, 77) to embeddings (B, 77, 768).
    """
    config = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    with torch.device(device):
        return CLIPTextModel(config)


def sd15(device: str = "meta") -> Networks1:
    """Make the three networks of Stable Diffusion 1.5, with random weights."""
    return Networks1(unet=sd15_unet(device), vae=sd15_vae(device), text_encoder=sd15_text_encoder(device))


def sdxl() -> NetworksXL:
    """Make the four networks of Stable Diffusion XL base 1.0 on the `meta` device: a UNet of 2,567,463,684.

    Source: the config.json of each network of the published model, and its paper (arXiv 2307.01952, table 1).
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        return NetworksXL(
            unet=unet, vae=sd15_vae(), text_encoder=sd15_text_encoder(), text_encoder_2=_open_clip()
        )


def _open_clip() -> CLIPTextModelWithProjection:
    """Make OpenCLIP ViT-bigG/14's text encoder, the second one of Stable Diffusion XL and 3."""
    config = CLIPTextConfig(
        hidden_size=1280,
        intermediate_size=5120,
        num_hidden_layers=32,
        num_attention_heads=20,
        hidden_act="gelu",
        projection_dim=1280,
    )
    return CLIPTextModelWithProjection(config)


def sd35_medium() -> Networks3:
    """Make the networks of Stable Diffusion 3.5 medium on the `meta` device, a transformer of 2,243,171,520.

    Source: the config.json of each network of the published model, and the paper of Stable Diffusion 3
    (arXiv 2403.03206). T5-XXL has 4,762,310,656 of the 8 billion parameters.
    """
    with torch.device("meta"):
        transformer = SD3Transformer2DModel(
            sample_size=128,
            in_channels=16,
            out_channels=16,
            num_layers=24,
            num_attention_heads=24,
            attention_head_dim=64,
            joint_attention_dim=4096,
            caption_projection_dim=1536,
            pooled_projection_dim=2048,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        )
        vae = AutoencoderKL(
            sample_size=1024,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=16,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        clip = CLIPTextConfig(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            projection_dim=768,
        )
        t5 = T5Config(
            d_model=4096,
            d_ff=10240,
            d_kv=64,
            num_layers=24,
            num_heads=64,
            vocab_size=32128,
            feed_forward_proj="gated-gelu",
        )
        return Networks3(
            transformer=transformer,
            vae=vae,
            text_encoder=CLIPTextModelWithProjection(clip),
            text_encoder_2=_open_clip(),
            text_encoder_3=T5EncoderModel(t5),
        )


def like(pipeline: Any) -> Networks:
    """Make networks of a pipeline's architecture on the `meta` device; adapters are left out."""
    parts, made = pipeline.components, dict[str, Any]()
    with torch.device("meta"):
        for spec in fields(kind_of(parts)):
            if (network := parts.get(spec.name)) is not None:
                make = getattr(type(network), "from_config", type(network))  # diffusers', or transformers'
                made[spec.name] = make(network.config)
    if parts.get("tokenizer_3") is not None:
        made["t5_tokens"] = min(T5_TOKENS, parts["tokenizer_3"].model_max_length)
    return kind_of(parts)(**made)


# -------------------------------------------------------------------------------------------- counts
def parameter_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors: number of elements times the size of one."""
    return sum(p.numel() * p.element_size() for p in parameters)


def weights(network: nn.Module) -> list[torch.Tensor]:
    """Return what a network holds in the precision of its policy: parameters, and buffers of floats."""
    return [*network.parameters(), *(b for b in network.buffers() if b.is_floating_point())]


def moment_bytes(parameters: Iterable[torch.Tensor], eight_bit: bool = False) -> int:
    """Return the bytes of AdamW's two moments, which are as large as the parameter, each.

    Args:
        parameters: what is trained, in float32.
        eight_bit: one byte a moment where a tensor has 4,096 elements or more, as bitsandbytes does it;
            its tables of scales are left out.

    Returns:
        Bytes.
    """
    if not eight_bit:
        return 2 * parameter_bytes(parameters)
    return sum(2 * p.numel() * (1 if p.numel() >= SMALLEST_8BIT else 4) for p in parameters)


def count_flops(run: Callable[[], Any]) -> int:
    """Return the FLOPs of what a function runs: 2 for each multiply-add of a product or convolution.

    Args:
        run: takes nothing; may go forward and backward.

    Returns:
        Floating point operations; elementwise ones count 0.
    """
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def saved_bytes(run: Callable[[], Any], parameters: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes that autograd keeps for the backward pass of what a function runs.

    Several saved tensors can share one storage: each storage counts once. With gradient checkpointing
    this is what is kept between forward and backward, and not what is made anew then.

    Args:
        run: goes forward; takes nothing.
        parameters: tensors that are there anyway, which do not count.

    Returns:
        Bytes.
    """
    there = {p.untyped_storage()._cdata for p in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in there:
            kept[storage._cdata] = storage  # held, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, while they live; `peak` is the largest sum.

    On a GPU, `torch.cuda.max_memory_allocated` measures the same from the allocator's side.

    Args:
        parameters: tensors that are there anyway, which do not count.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._there = [p.untyped_storage() for p in parameters]
        self._known = {id(storage) for storage in self._there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it made."""
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, out)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._known:  # a view
            return
        self._known.add(id(storage))
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, id(storage), storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(run: Callable[[], Any], parameters: Iterable[torch.Tensor] = ()) -> int:
    """Return the most bytes that live at one time while a function runs, parameters left out."""
    counter = LiveBytes(parameters)
    with counter:
        run()
    return counter.peak


# ---------------------------------------------------------------------------- what a GPU would choose
# Lists of autocast that matter in a UNet and a VAE; torch.amp's documentation, "CUDA Ops that can autocast".
_TO_LOW = ("linear", "conv2d", "scaled_dot_product_attention")
_TO_FLOAT32 = ("group_norm", "layer_norm")


@contextlib.contextmanager
def as_on_cuda(autocast: torch.dtype | None = None) -> Iterator[None]:
    """Let meta tensors take the ways that CUDA tensors take: fused attention, and autocast.

    On `meta`, attention would write out its (B, heads, L, L) matrix; on a GPU the fused kernel (Dao et al.
    2022, arXiv 2205.14135) never does, and computes it again in the backward pass. And autocast knows no
    meta tensors, so its two lists are applied here: products in the low precision, normalisations in float32.

    Args:
        autocast: the low precision, or None for no autocast.
    """

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **no_mask: Any) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    changed: dict[str, Any] = {"scaled_dot_product_attention": fused}
    if autocast is not None:
        for names, dtype in ((_TO_LOW, autocast), (_TO_FLOAT32, torch.float32)):
            changed |= {name: _cast_first(changed.get(name, getattr(F, name)), dtype) for name in names}
    usual = {name: getattr(F, name) for name in changed}
    for name, function in changed.items():
        setattr(F, name, function)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(F, name, function)


def _cast_first(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def with_cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        return function(*args, **kwargs)

    return with_cast


# ---------------------------------------------------------------------------------- parts of an epoch
@dataclass(frozen=True)
class Cost:
    """FLOPs of a piece of work, and the most bytes of activations that live at one time in it."""

    flops: int
    peak: int


def _cost(run: Callable[[], Any], network: nn.Module, autocast: torch.dtype | None) -> Cost:
    there = weights(network)
    for parameter in network.parameters():
        if parameter.requires_grad:  # as in accumulation, whose gradients count elsewhere
            parameter.grad = torch.zeros_like(parameter)
            there.append(parameter.grad)
    with as_on_cuda(autocast):  # one after the other, for the counter of FLOPs keeps tensors alive
        cost = Cost(count_flops(run), peak_bytes(run, there))
    network.zero_grad()
    return cost


def unet_inputs(unet: Any, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make inputs of the right shapes: latents (N, C, h, w), timesteps (N,), embeddings (N, L, D)."""
    first, config = next(unet.parameters()), unet.config
    make = {"device": first.device, "dtype": first.dtype}
    latents = torch.zeros(rows, config.in_channels, config.sample_size, config.sample_size, **make)
    embeds = torch.zeros(rows, tokens, config.cross_attention_dim, **make)
    return latents, torch.zeros(rows, dtype=torch.long, device=first.device), embeds


def added_inputs(unet: Any, rows: int) -> dict[str, Any]:
    """Make what Stable Diffusion XL's UNet is told besides: pooled embeddings (N, P), sizes (N, 6)."""
    config = unet.config
    if config.addition_embed_type != "text_time":
        return {}
    first = next(unet.parameters())
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    sizes = {"text_embeds": (rows, pooled), "time_ids": (rows, 6)}
    added = {name: torch.zeros(s, device=first.device, dtype=first.dtype) for name, s in sizes.items()}
    return {"added_cond_kwargs": added}


def denoiser_inputs(denoiser: Any, rows: int, tokens: int) -> dict[str, Any]:
    """Make what a denoiser is called with: latents and timesteps first, then what it is told of the prompt.

    Args:
        denoiser: a UNet, or Stable Diffusion 3's transformer.
        rows: N.
        tokens: of a prompt, L.

    Returns:
        Keyword arguments of its `forward`, zeros of the right shapes.
    """
    config = denoiser.config
    if "joint_attention_dim" not in config:
        latents, timesteps, embeds = unet_inputs(denoiser, rows, tokens)
        told = {"encoder_hidden_states": embeds, **added_inputs(denoiser, rows)}
        return {"sample": latents, "timestep": timesteps, **told}
    first = next(denoiser.parameters())
    shapes = {
        "hidden_states": (rows, config.in_channels, config.sample_size, config.sample_size),
        "timestep": (rows,),
        "encoder_hidden_states": (rows, tokens, config.joint_attention_dim),
        "pooled_projections": (rows, config.pooled_projection_dim),
    }
    return {
        name: torch.zeros(shape, device=first.device, dtype=first.dtype) for name, shape in shapes.items()
    }


def sampling_cost(denoiser: Any, rows: int, tokens: int = 77, autocast: torch.dtype | None = None) -> Cost:
    """Count one forward pass without gradients.

    Args:
        denoiser: on the `meta` device.
        rows: latents that pass together, N; with guidance two for each sample.
        tokens: of a prompt, L.
        autocast: the low precision of products, or None.

    Returns:
        The cost.
    """

    def run() -> None:
        with torch.no_grad():
            denoiser(**denoiser_inputs(denoiser, rows, tokens))

    return _cost(run, denoiser, autocast)


def training_cost(denoiser: Any, rows: int, tokens: int = 77, autocast: torch.dtype | None = None) -> Cost:
    """Count one forward and backward pass.

    Where all weights are trained, the backward pass costs two forward passes: one product for the gradient
    of a layer's input, one for that of its weights. Frozen weights need the first alone.

    Args:
        denoiser: on the `meta` device, prepared as the policy.
        rows: as in `sampling_cost`.
        tokens: as in `sampling_cost`.
        autocast: as in `sampling_cost`.

    Returns:
        The cost; the parameters' own gradients are not part of the peak.
    """

    def run() -> None:
        denoiser(**denoiser_inputs(denoiser, rows, tokens)).sample.float().mean().backward()

    return _cost(run, denoiser, autocast)


def decoding_cost(vae: Any, images: int, size: int, autocast: torch.dtype | None = None) -> Cost:
    """Count what makes images (B, 3, size, size) of latents."""
    first, side = next(vae.parameters()), size // vae_factor(vae)

    def run() -> None:
        with torch.no_grad():
            shape = (images, vae.config.latent_channels, side, side)
            vae.decode(torch.zeros(shape, device=first.device, dtype=first.dtype))

    return _cost(run, vae, autocast)


def encoding_cost(vae: Any, images: int, size: int, autocast: torch.dtype | None = None) -> Cost:
    """Count what makes latents of images (B, 3, size, size)."""
    first = next(vae.parameters())

    def run() -> None:
        with torch.no_grad():
            vae.encode(torch.zeros(images, 3, size, size, device=first.device, dtype=first.dtype))

    return _cost(run, vae, autocast)


# ---------------------------------------------------------------------------------------- the budget
@dataclass(frozen=True)
class Budget:
    """Bytes on one device, and FLOPs of one epoch of one process.

    Attributes:
        frozen: weights of denoiser, VAE and text encoders that are not trained, and the denoiser's copy that
            a KL penalty holds on to where the denoiser itself is trained.
        trained: weights that are.
        gradients: of those.
        moments: AdamW's two.
        latents: of an epoch, float32 (N, T+1, C, h, w).
        images: of an epoch, float32 (N, 3, H, W), which wait for the report.
        embeddings: of an epoch's prompts, (N, L, D), twice with guidance; those that the family remembers
            are not counted.
        reward: what the reward model holds.
        activations_sampling: peak of a denoising step, of encoding or of decoding.
        activations_training: peak of forward and backward.
        flops_sampling: of an epoch.
        flops_training: of an epoch.
    """

    frozen: int
    trained: int
    gradients: int
    moments: int
    latents: int
    images: int
    embeddings: int
    reward: int
    activations_sampling: int
    activations_training: int
    flops_sampling: int
    flops_training: int

    @property
    def activations(self) -> int:
        """The larger peak: sampling and training come one after the other."""
        return max(self.activations_sampling, self.activations_training)

    @property
    def resident(self) -> int:
        """What stays for a whole epoch."""
        weights = self.frozen + self.trained + self.gradients + self.moments
        return weights + self.latents + self.images + self.embeddings + self.reward

    @property
    def peak(self) -> int:
        """All of it."""
        return self.resident + self.activations

    def seconds(self, peak_tflops: float, utilisation: float) -> tuple[float, float]:
        """Return seconds of sampling and of training in an epoch.

        Args:
            peak_tflops: what the device can do, in 1e12 operations a second.
            utilisation: share of it that is reached, an assumption until it is measured.

        Returns:
            FLOPs / (peak * utilisation), for both.

        Raises:
            ValueError: if utilisation lies outside (0, 1].
        """
        if not 0 < utilisation <= 1:
            raise ValueError(f"utilisation={utilisation} must lie in (0, 1]")
        rate = peak_tflops * 1e12 * utilisation
        return self.flops_sampling / rate, self.flops_training / rate


def estimate(
    networks: Networks,
    config: DDPOConfig,
    num_timesteps: int,
    from_images: bool,
    reward_bytes: int = 0,
    keeps_old: bool = False,
) -> Budget:
    """Work out what an epoch of one process costs.

    Args:
        networks: on the `meta` device; their precision and adapters become those of the policy.
        config: the settings.
        num_timesteps: actions of a trajectory, T: the steps that are run, less a last one without noise.
        from_images: img2img, whose images are encoded first.
        reward_bytes: what a reward model holds on the device.
        keeps_old: whether the algorithm keeps the weights of an older policy, as AWM and NFT do.

    Returns:
        The budget.

    Raises:
        ValueError: if networks are not on the `meta` device, or num_timesteps is below 1.
    """
    if not isinstance(networks, Networks) or networks.denoiser.device.type != "meta":
        raise ValueError("networks are not on the meta device: count sd15() or like(pipeline)")
    if num_timesteps < 1:
        raise ValueError(f"num_timesteps={num_timesteps} must be at least 1")
    meta, kept = torch.device("meta"), networks.keeps_float32
    denoiser, vae, tokens = networks.denoiser, networks.vae, networks.tokens
    prepared = prepare_policy(denoiser, networks.frozen, config, config.train_use_lora, meta, kept)
    trained = list(prepared.values())
    everything = parameter_bytes(w for net in (denoiser, *networks.frozen.values()) for w in weights(net))
    # The policy before training needs a copy where it cannot be had by switching a new adapter off.
    has_reference = config.train_kl_coefficient > 0 and bool(
        config.train_lora_from or not config.train_use_lora
    )
    everything += (has_reference + keeps_old) * parameter_bytes(trained)
    samples = config.sample_batch_size * config.sample_num_batches_per_epoch
    latent = denoiser.config.in_channels * denoiser.config.sample_size**2  # elements of one
    side = denoiser.config.sample_size * vae_factor(vae)  # pixels
    _, _, *told = denoiser_inputs(denoiser, 1, tokens).values()
    low = None if networks.embeds_in_float32 else AUTOCAST[config.mixed_precision]
    embedding = sum(t.numel() for t in tree_leaves(told)) * (low or torch.float32).itemsize
    sampling, training = _epoch_costs(networks, config, num_timesteps, from_images, latent, side, tokens)
    return Budget(
        frozen=everything - parameter_bytes(trained),
        trained=parameter_bytes(trained),
        gradients=parameter_bytes(trained),
        moments=moment_bytes(trained, config.train_use_8bit_adam),
        latents=samples * (num_timesteps + 1) * latent * 4,
        images=samples * 3 * side**2 * 4,
        embeddings=samples * embedding * _passes(config),
        reward=reward_bytes,
        activations_sampling=sampling.peak,
        activations_training=training.peak,
        flops_sampling=sampling.flops,
        flops_training=training.flops,
    )


def _passes(config: DDPOConfig) -> int:
    """Return how many latents the denoiser sees for each sample: two with guidance."""
    return 2 if config.sample_guidance_scale > 1 else 1


def _epoch_costs(
    networks: Networks,
    config: DDPOConfig,
    num_timesteps: int,
    from_images: bool,
    latent: int,
    side: int,
    tokens: int,
) -> tuple[Cost, Cost]:
    """Return FLOPs of an epoch and peaks, of sampling and of training."""
    autocast, passes = AUTOCAST[config.mixed_precision], _passes(config)
    samples = config.sample_batch_size * config.sample_num_batches_per_epoch
    batch, size = config.forward_sizes(latent)
    step = sampling_cost(networks.denoiser, batch * passes, tokens, autocast)
    of_vae = autocast if networks.autocasts_vae else None
    coded = [decoding_cost(networks.vae, batch, side, of_vae)]
    if from_images:
        coded.append(encoding_cost(networks.vae, batch, side, of_vae))
    sampling = Cost(
        (num_timesteps * step.flops + sum(cost.flops for cost in coded)) * samples // batch,
        max(step.peak, *(cost.peak for cost in coded)),
    )
    forward = training_cost(networks.denoiser, size * passes, tokens, autocast)
    trained_steps = int(num_timesteps * config.train_timestep_fraction + 1e-6)
    pairs = samples * trained_steps * config.train_num_inner_epochs
    flops = forward.flops * pairs // size
    if config.train_kl_coefficient > 0:  # the reference takes a forward pass as well
        flops += step.flops * pairs // batch
    return sampling, Cost(flops, forward.peak)
