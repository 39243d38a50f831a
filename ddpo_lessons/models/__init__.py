"""Find the model family of a diffusers pipeline, which is the interface between it and training.

To add one, write a class with the interface `family.Family`, and register it here under the class name of its
pipeline.
"""

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

from ddpo_lessons import hub
from ddpo_lessons.embedded import CHECKPOINTS, no_model
from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.models.family import Family as Family
from ddpo_lessons.models.family import Schedule as Schedule
from ddpo_lessons.models.flux import Flux, FluxKontext
from ddpo_lessons.models.stable_diffusion import StableDiffusion, vae_factor
from ddpo_lessons.models.stable_diffusion_3 import StableDiffusion3
from ddpo_lessons.models.stable_diffusion_xl import StableDiffusionXL

FAMILIES: dict[str, type[Family]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionImg2ImgPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "StableDiffusionXLImg2ImgPipeline": StableDiffusionXL,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "StableDiffusion3Img2ImgPipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "FluxImg2ImgPipeline": Flux,
    "FluxKontextPipeline": FluxKontext,
}


def family_class(pipeline_class: str) -> type[Family]:
    """Return the family of a diffusers pipeline's class; raise a TypeError for an unknown class."""
    if pipeline_class not in FAMILIES:
        raise TypeError(
            f"the model is a {pipeline_class}, of a family that this package does not train: use one of "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[pipeline_class]


def family_of(pipeline: Any) -> Family:
    """Return a pipeline's family; raise a TypeError if none fits or a part is missing."""
    if isinstance(pipeline, Family):
        return pipeline
    if isinstance(pipeline, str | Path):
        raise TypeError(f"the pipeline must be a pipeline of diffusers: load_pipeline({str(pipeline)!r})")
    known = [base.__name__ for base in type(pipeline).__mro__ if base.__name__ in FAMILIES]
    return family_class(known[0] if known else type(pipeline).__name__)(pipeline)


def model_name(pipeline: Any) -> str | None:
    """Return the name with which `load_pipeline` loads a pipeline again; None if it has no source."""
    name = getattr(pipeline, "name_or_path", None)
    if not name or not Path(name).is_dir():
        return name or None
    place = Path(name).resolve()  # also from another working directory
    embedded = [model for model, folder in CHECKPOINTS.items() if place == folder.resolve()]
    return embedded[0] if embedded else str(place)


def image_size(pipeline: Any) -> int:
    """Return the side in pixels of the square images that a pipeline generates."""
    return family_of(pipeline).latents_shape()[-1] * vae_factor(pipeline.vae)


def load_pipeline(model: str | Path, revision: str = "main", dtype: torch.dtype = torch.float32) -> Any:
    """Load a pipeline of a known family on the CPU, with the family's scheduler and no safety checker.

    Only safetensors are read, no pickle; of a family that is not known, no weights. The model is "tiny-sd",
    "tiny-sd3" or "tiny-zoo", which are embedded, a folder, or a name on the hub, there with a branch, tag or
    commit. All networks get `dtype`; `policy.loaded_dtype` says what a run needs. Raises TypeError if the
    model is of no known family; RuntimeError if the model cannot be had; says why and what to do.
    """
    fault = no_model(str(model))
    if fault:
        raise RuntimeError(f"the model {fault}")
    place = str(CHECKPOINTS.get(str(model), model))
    is_local = hub.only_here(place)
    try:
        with quiet_loading(bars=model not in CHECKPOINTS):
            index = DiffusionPipeline.load_config(place, revision=revision, local_files_only=is_local)
            family = family_class(index["_class_name"])
            # diffusers needs the parts that were left out when the model was saved (often T5) as arguments.
            left_out = {part: None for part, classes in index.items() if classes == [None, None]}
            pipeline = getattr(diffusers, index["_class_name"]).from_pretrained(
                place,
                revision=revision,
                use_safetensors=True,
                local_files_only=is_local,
                dtype=dtype,
                **{**left_out, **family.without_checker},
            )
    except TypeError:
        raise
    except Exception as error:  # network, file and format errors share the remedy, but no base
        remedy = (
            "Give the path of a folder that holds a diffusers pipeline with safetensors: on a machine with "
            "a network `hf download MODEL --local-dir FOLDER` makes one; or set HF_HOME to a cache that "
            "already holds the model"
        )
        raise hub.explain(model, error, remedy) from error
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            nn.Module.to(part, dtype)  # some layers come in another one
    family(pipeline)  # gives it the scheduler that the family's steps need
    return pipeline
