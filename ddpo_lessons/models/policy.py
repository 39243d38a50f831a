"""Lesson 06: prepare the trained weights in their precision, and save them for plain diffusers."""

import contextlib
import copy
import importlib
import inspect
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from diffusers.utils import logging
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import nn

from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.models.family import Family
from ddpo_lessons.models.lora import use_summed_weights
from ddpo_lessons.models.sharded import whole

_PRECISION = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loaded_dtype(config: DDPOConfig) -> torch.dtype:
    """Return the precision for loading all networks: bfloat16 if the run trains only LoRA in it.

    FLUX.1 has 17 billion parameters, 34 GB instead of 68. What is trained itself stays float32, and in
    float16 some networks do.
    """
    return torch.bfloat16 if config.mixed_precision == "bf16" and config.train_use_lora else torch.float32


def prepare_policy(
    unet: Any,
    frozen: Mapping[str, nn.Module],
    config: DDPOConfig,
    use_lora: bool,
    device: torch.device,
    keeps_float32: Collection[str] = (),
) -> dict[str, nn.Parameter]:
    """Freeze weights, set precisions, add the adapter, and return the trained parameters by name.

    Trained weights are float32; frozen ones have the precision that `mixed_precision` names, but for those in
    `keeps_float32`, which float16 breaks. An adapter that the UNet already carries is the policy; those of
    frozen networks stay as they are. Everything is in eval mode, always: dropout would make the policy that
    trains differ from the one that sampled. Raises ValueError if an adapter is there that the config does not
    describe or that an export could not hold, or the UNet has no layers for a new one.
    """
    dtype = _PRECISION[config.mixed_precision]
    for name, network in {"UNet": unet, **frozen}.items():
        _check_adapter(name, network, use_lora)
    adapter = _active_adapter(unet, config)
    if adapter:
        _check_adapted(unet, adapter, config.train_lora_target_modules)
    elif use_lora:
        _check_targets(unet, config.train_lora_target_modules)
    unet.requires_grad_(not use_lora)
    _move(unet, device, dtype if use_lora else torch.float32)
    for name, network in frozen.items():
        is_kept = dtype == torch.float16 and name in keeps_float32
        _move(network.requires_grad_(False).eval(), device, torch.float32 if is_kept else dtype)
    if adapter:
        for name, parameter in unet.named_parameters():
            parameter.requires_grad_("lora_" in name and f".{adapter}." in name)
    elif use_lora:
        lora = LoraConfig(
            r=config.train_lora_rank,
            lora_alpha=config.train_lora_alpha,
            init_lora_weights="gaussian",
            target_modules=list(config.train_lora_target_modules),
        )
        # A run that resumes without the folder of its first adapter goes on with peft's layers, as it began.
        if device.type == "cpu" and dtype == torch.float32 and not config.train_lora_from:
            use_summed_weights(lora)
        if not hasattr(unet, "add_adapter"):
            raise ValueError(
                f"train_use_lora=True: diffusers adds no adapter to a {type(unet).__name__}; train it whole, "
                "with train_use_lora=False"
            )
        unet.add_adapter(lora)
    cast_training_params(unet, dtype=torch.float32)
    if config.train_gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    unet.eval()
    return {name: p for name, p in unet.named_parameters() if p.requires_grad}


def prepare_networks(
    family: Family, config: DDPOConfig, use_lora: bool, policy_device: torch.device, device: torch.device
) -> dict[str, nn.Parameter]:
    """Prepare a family's networks for a run, whatever an earlier trainer did; see `prepare_policy`."""
    unet: Any = family.denoiser
    unwrap_forward(unet)
    trainable = prepare_policy(unet, family.frozen, config, use_lora, policy_device, family.keeps_float32)
    for network in family.frozen.values():
        network.to(device)
    if config.torch_compile:
        unet.compile(dynamic=False)  # a graph for every shape, so all are compared
    else:
        unet._compiled_call_impl = None  # of an earlier trainer: nn.Module has no other way
    return trainable


def unwrap_forward(denoiser: Any) -> None:
    """Remove the precision that accelerate set for an earlier trainer's forward pass."""
    if "_original_forward" in vars(denoiser):
        denoiser.forward = vars(denoiser).pop("_original_forward")


def unread(denoiser: nn.Module) -> tuple[str, ...]:
    """Return the names of layers whose output is unused, so that their weights get no gradient.

    The last block of Stable Diffusion 3 computes queries of its text tokens and drops their output; diffusers
    calls this `context_pre_only`.
    """
    return tuple(
        f"{name}.{layer}."
        for name, module in denoiser.named_modules()
        for layer in ("add_q_proj", "norm_added_q")
        if getattr(module, "context_pre_only", None)
    )


def load_adapter(family: Family, config: DDPOConfig) -> None:
    """Load the LoRA weights of `config.train_lora_from` as the adapter of the family's denoiser.

    The config's rank, alpha and layers become the adapter's where they are the defaults. Raises ValueError if
    the weights do not fit the model, it has an adapter already, or a field that is no default is not what the
    adapter has.
    """
    unet, folder = family.denoiser, config.train_lora_from
    if getattr(unet, "peft_config", None):
        raise ValueError(
            f"train_lora_from={folder!r}, but the pipeline already has an adapter: load a fresh pipeline, or "
            "leave train_lora_from empty"
        )
    if not Path(folder, LORA_FILE).is_file():
        raise ValueError(f"train_lora_from={folder!r} holds no {LORA_FILE}: give the lora folder of a run")
    read_lora(family.pipeline, folder)
    if not getattr(unet, "peft_config", None):
        raise ValueError(
            f"train_lora_from={folder!r} has weights of a text encoder alone: give a LoRA of the "
            f"{type(unet).__name__}"
        )
    config.train_lora_from = str(Path(folder).resolve())  # also from another working directory
    found = unet.peft_config[unet.active_adapters()[0]]
    layers = found.target_modules
    for name, value in (
        ("train_lora_rank", found.r),
        ("train_lora_alpha", found.lora_alpha),
        ("train_lora_target_modules", (layers,) if isinstance(layers, str) else tuple(sorted(layers))),
    ):
        asked, default = getattr(config, name), getattr(DDPOConfig, name)
        same = set(asked) == set(value) if isinstance(asked, tuple) else asked == value
        if asked != default and not same:
            raise ValueError(f"{name}={asked}, but the adapter of {folder} has {value}: leave it out")
        if not same:
            setattr(config, name, value)


def read_lora(pipeline: Any, folder: str | Path) -> None:
    """Load the LoRA weights of a folder; raise a ValueError if they do not fit, or cannot be read."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # diffusers prints, layer by layer, what it raises too
    try:
        # As peft calls the adapter of a fresh run: the names of weights in checkpoints hold it.
        pipeline.load_lora_weights(folder, weight_name=LORA_FILE, adapter_name="default")
    except RuntimeError as error:
        raise ValueError(f"the LoRA weights of {folder} do not fit the model: {error!s:.200}") from error
    except OSError as error:
        raise ValueError(
            f"the LoRA weights of {folder} cannot be read; {LORA_FILE} may be missing or damaged "
            f"({error!s:.200}). Give other weights, or resume the run to write its own again "
            "(on the command line as --resume-from auto)"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if "default" not in {name for names in pipeline.get_list_adapters().values() for name in names}:
        raise ValueError(
            f"the LoRA weights of {folder} do not fit the model: none of them is for a layer that a "
            f"{type(pipeline).__name__} has. Give the model that they were trained on"
        )
    networks = {part: m for part, m in pipeline.components.items() if isinstance(m, nn.Module)}
    weights = load_file(Path(folder, LORA_FILE))
    for name, parameter in nn.ModuleDict(networks).named_parameters():
        exact = weights.get(name.replace(".default", ""))
        if exact is not None:  # peft has rounded it to the precision of the layer below
            parameter.data = exact.to(parameter.device, torch.float32)


@contextlib.contextmanager
def adapter_off(denoiser: nn.Module) -> Iterator[None]:
    """Disable a network's adapter within a `with` block.

    peft's own switch also makes the adapter's weights ask for no gradient, and those that FSDP gathers for
    the first time while it is off never ask for one again.
    """
    layers: list[Any] = [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _check_adapter(part: str, network: Any, use_lora: bool) -> None:
    """Raise a ValueError for an adapter that an export would change."""
    if not getattr(network, "peft_config", None):
        return
    if not use_lora:
        raise ValueError(
            f"the {part} has an adapter, but train_use_lora=False trains the UNet itself: set "
            "train_use_lora=True, or call pipeline.fuse_lora() and then pipeline.unload_lora_weights()"
        )
    names = network.active_adapters()
    if len(names) != 1:
        raise ValueError(f"the {part} has the active adapters {names}: activate the one to train")
    layers: list[Any] = [module for module in network.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.disable_adapters for layer in layers):
        raise ValueError(f"the adapter of the {part} is switched off: call pipeline.enable_lora()")
    if any(layer.merged for layer in layers):
        raise ValueError(
            f"the adapter of the {part} is fused into its weights: call pipeline.unload_lora_weights() to "
            "train a new one above them, or pipeline.unfuse_lora() to train this one"
        )
    for layer in layers:
        rank = layer.r[names[0]]
        own = layer.lora_alpha[names[0]] / (math.sqrt(rank) if layer.use_rslora.get(names[0]) else rank)
        scale = layer.scaling[names[0]] / own
        if not math.isclose(scale, 1.0):
            raise ValueError(
                f"the adapter of the {part} has a weight of {scale:g}, and a LoRA's file holds none: "
                f"call pipeline.set_adapters({names[0]!r}, 1.0)"
            )


def _active_adapter(unet: Any, config: DDPOConfig) -> str | None:
    """Return the name of the adapter that the UNet already has, if it is the one to train."""
    if not getattr(unet, "peft_config", None):
        return None
    (active,) = unet.active_adapters()
    found = unet.peft_config[active]
    for name, value in (("rank", found.r), ("alpha", found.lora_alpha)):
        asked = getattr(config, f"train_lora_{name}")
        if value != asked:
            raise ValueError(
                f"the UNet already has an adapter of {name} {value}, but train_lora_{name}={asked}: load a "
                f"fresh pipeline, or set {value}"
            )
    return str(active)


def _check_adapted(unet: nn.Module, adapter: str, targets: Sequence[str]) -> None:
    """Raise a ValueError for an adapter of other layers than those of the config."""
    adapted = {path for path, module in unet.named_modules() if adapter in getattr(module, "lora_A", ())}
    paths = [path for path, _ in unet.named_modules()]
    named = {path for path in paths if any(f".{path}".endswith(f".{target}") for target in targets)}
    if adapted != named:
        raise ValueError(
            f"train_lora_target_modules and the UNet's adapter differ in {min(adapted ^ named)!r}: name the "
            "adapter's layers, or load a fresh pipeline"
        )


def _check_targets(unet: nn.Module, targets: Sequence[str]) -> None:
    """Refuse a name that peft would pass over if it finds another, and layers that it cannot adapt."""
    for target in targets:
        found = [m for path, m in unet.named_modules() if f".{path}".endswith(f".{target}")]
        if not found:
            raise ValueError(
                f"train_lora_target_modules: the UNet has no layer {target!r}; take it out, or give the name "
                "that ends a path of unet.named_modules(), such as 'to_q'"
            )
        wrong = [type(m).__name__ for m in found if not isinstance(m, (nn.Linear, nn.Conv2d))]
        if wrong:
            raise ValueError(
                f"train_lora_target_modules: {target!r} is a {wrong[0]}, which takes no adapter; name linear "
                "layers or convolutions, such as 'to_q', 'to_out.0' or 'conv1'"
            )


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move to the device and the precision, except for an adapter, which keeps its precision."""
    module.to(device)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and "lora_" not in name:
            tensor.data = tensor.data.to(dtype)


def make_optimizer(config: DDPOConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the AdamW of the config; raise an ImportError if the 8-bit variant lacks bitsandbytes."""
    kind: Any = partial(torch.optim.AdamW, fused=True)  # all weights in one pass: adapters are many and small
    if config.train_use_8bit_adam:
        try:
            kind = importlib.import_module("bitsandbytes").optim.AdamW8bit
        except ImportError as error:
            raise ImportError("train_use_8bit_adam needs bitsandbytes: pip install bitsandbytes") from error
    return kind(
        parameters,
        lr=config.train_learning_rate,
        betas=(config.train_adam_beta1, config.train_adam_beta2),
        weight_decay=config.train_adam_weight_decay,
        eps=config.train_adam_epsilon,
    )


def originals(family: Family, config: DDPOConfig, use_lora: bool) -> dict[str, nn.Module]:
    """Return copies of the frozen networks that an export of the whole pipeline needs.

    Half precision rounds them in place, and an export must not. With an adapter nothing is kept: what plain
    diffusers loads of it has no networks in it.
    """
    if use_lora or config.mixed_precision == "no":
        return {}
    return {name: copy.deepcopy(network).cpu() for name, network in family.frozen.items()}


def with_parts(pipeline: Any, parts: Mapping[str, Any]) -> Any:
    """Return a pipeline with some parts replaced, without copying or casting."""
    known = inspect.signature(type(pipeline).__init__).parameters
    settings = {k: v for k, v in pipeline.config.items() if k in known and k not in pipeline.components}
    with quiet_loading():
        return type(pipeline)(**{**pipeline.components, **settings, **parts})


def copy_of(pipeline: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a pipeline with separate modules that share the weights of this one.

    Adapters can be loaded into the copy, or taken from it. With a `dtype` its weights are cast to that.
    """
    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    weights = [w for network in networks.values() for w in (*network.parameters(), *network.buffers())]
    # `deepcopy` takes what is in its memo for copied.
    memo = {id(weight): weight if dtype is None else _cast(weight, dtype) for weight in weights}
    copied = copy.copy(pipeline)
    for name, network in copy.deepcopy(networks, memo).items():
        setattr(copied, name, network)
    return copied


def _cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not weight.is_floating_point():
        return weight
    cast = weight.detach().to(dtype)
    return nn.Parameter(cast, weight.requires_grad) if isinstance(weight, nn.Parameter) else cast


def save_policy(
    family: Family,
    folder: str | Path,
    originals: Mapping[str, nn.Module] = MappingProxyType({}),
    writes: bool = True,
) -> None:
    """Save the trained weights for plain diffusers; equal weights give identical files.

    LoRA weights, those of text encoders among them, load with `pipeline.load_lora_weights(folder)`. A fully
    trained denoiser is written with its whole pipeline, for `from_pretrained(folder)`, and `originals` in the
    place of frozen networks. A process that does not write gives its part of the weights alone.
    """
    if Path(folder).is_file():  # diffusers would log an error, and save nothing
        raise ValueError(f"cannot save into {folder}, which is a file: give a folder")
    adapted = with_adapters(family.pipeline)
    if not adapted:
        if writes:
            with_parts(family.pipeline, originals).save_pretrained(folder)
        return
    layers: dict[str, Any] = {}
    for part, network in adapted.items():
        (name,) = network.active_adapters()
        # Under peft's own names. diffusers' older ones exist for attention only, and a file that mixes both
        # loads without its attention layers.
        found = get_peft_model_state_dict(network, adapter_name=name)
        weights = {key: whole(tensor) for key, tensor in found.items()}
        settings = network.peft_config[name].to_dict()
        # peft holds the layers' names as a set, whose order changes from run to run.
        ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        layers |= {f"{part}_lora_layers": weights, f"{part}_lora_adapter_metadata": ordered}
    if not writes:
        return
    family.pipeline.save_lora_weights(folder, **layers)
    for file in Path(folder).glob("*.safetensors"):
        _sort_header(file)


def with_adapters(pipeline: Any) -> dict[str, Any]:
    """Return the networks of a pipeline that have an adapter, by name."""
    return {part: m for part, m in pipeline.components.items() if getattr(m, "peft_config", None)}


def _sort_header(file: Path) -> None:
    """Put a safetensors file's metadata in order: its library writes them as they hash in this process."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
