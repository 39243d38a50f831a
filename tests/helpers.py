"""Random tiny pipelines and settings that train in a tenth of a second; importable in child processes."""

import ast
import contextlib
import copy
import functools
import json
import math
import os
import re
import shlex
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.utils.torch_utils import randn_tensor
from IPython.core.inputtransformer2 import TransformerManager
from PIL import Image
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5EncoderModel,
)

from benchmarks import recipes
from benchmarks.tiny import recipe
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.cli.main import main
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromNoise, WithImages
from ddpo_lessons.ddim import DDIMSchedule, DDIMStep
from ddpo_lessons.lessons import why_not
from ddpo_lessons.rollout import SamplingSettings, Trajectory
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from ddpo_lessons.training.runlog import read_metrics

SCHEDULE: dict[str, Any] = {
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
PROMPTS = ("a red three", "", "a blue four on a white background", "a green digit")
CLIP_SIZE = 32
T5_LENGTH = 5  # tokens
FLUX_LENGTH = 24
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def howto_blocks(page: str, language: str) -> list[str]:
    """Return the code of a page of docs/howto in a language, block by block."""
    text = (Path(__file__).parents[1] / "docs" / "howto" / f"{page}.md").read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@functools.cache
def make_tokenizer() -> CLIPTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return recipe.make_tokenizer(Path(folder))


def ddim_step(
    scheduler: DDIMScheduler, model_output: Any, timestep: Any, sample: Any, eta: float = 1.0,
    prev_sample: Any = None, generator: Any = None, **settings: Any,
) -> DDIMStep:  # fmt: skip
    """Take one step of the scheduler's whole schedule, or replay it; `timestep` is one or (B,)."""
    schedule = DDIMSchedule(scheduler, scheduler.timesteps, eta, sample.device)
    noise = randn_tensor(sample.shape, generator, sample.device, torch.float32)
    timesteps = torch.as_tensor(timestep).to(sample.device).expand(len(sample))
    return schedule.step(model_output, timesteps, sample, noise, prev_sample, **settings)


def make_clip(
    tokenizer: CLIPTokenizer, width: int, pooled: int, layers: int, heads: int, inside: int, **more: Any
) -> CLIPTextModelWithProjection:
    """Make a text encoder whose projection has `pooled` numbers."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=inside, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=recipes.LENGTH, projection_dim=pooled,
        **{name: getattr(tokenizer, name) for name in names}, **more,
    )  # fmt: skip
    return enlarged(CLIPTextModelWithProjection(config))


def make_t5(tokenizer: CLIPTokenizer, width: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )


def enlarged(network: Any) -> Any:
    """Enlarge the small initial weights, which would embed everything alike."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return network


def quiet(pipeline: Any) -> Any:
    """Switch off progress bars and dropout."""
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def on_meta(pipeline: Any) -> Any:
    """Move a pipeline's networks to the `meta` device, where they have shapes and no memory."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.to("meta")
    return pipeline


def make_pipeline(seed: int = 0, dropout: float = 0.0, **scheduler: Any) -> StableDiffusionPipeline:
    """Make a pipeline of random weights, 32x32 images; `scheduler` overrides its config."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=recipes.WIDTH,
            attention_head_dim=2,
            norm_num_groups=8,
            dropout=dropout,
        )
        pipeline = StableDiffusionPipeline(
            vae=recipes.make_vae(),
            text_encoder=recipes.make_text_encoder(tokenizer),
            tokenizer=tokenizer,
            unet=unet,
            scheduler=DDIMScheduler(**{**SCHEDULE, **scheduler}),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    return quiet(pipeline)


def rounding_pipeline(off: float = 1e-3) -> Any:
    """Return a pipeline whose UNet is off by so much for every row of its batch.

    On a GPU, and with Stable Diffusion's shapes also on a CPU, a network in bf16 rounds differently in a
    batch of another size. A tiny UNet does not.
    """
    pipeline = make_pipeline()
    forward = pipeline.unet.forward

    def rounded(latents: torch.Tensor, *others: Any, **named: Any) -> Any:
        out = forward(latents, *others, **named)
        out.sample = out.sample * (1 + off * len(latents))
        return out

    pipeline.unet.forward = rounded
    return pipeline


def make_xl_pipeline(**scheduler: Any) -> StableDiffusionXLPipeline:
    """Make a Stable Diffusion XL of random weights, 32x32 images; `scheduler` overrides its config.

    As in the real one, the encoders differ in width, and the second tokenizer pads with another token.
    """
    tokenizer = make_tokenizer()
    tokenizer_2 = copy.deepcopy(tokenizer)
    tokenizer_2.pad_token = "!"
    width, pooled, time_width = 48, 40, 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        second = make_clip(tokenizer_2, width, pooled, layers=3, heads=4, inside=2 * width, hidden_act="gelu")
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=recipes.WIDTH + width,
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            norm_num_groups=8,
            addition_embed_type="text_time",
            addition_time_embed_dim=time_width,
            projection_class_embeddings_input_dim=pooled + 6 * time_width,
        )
        pipeline = StableDiffusionXLPipeline(
            vae=recipes.make_vae(),
            text_encoder=recipes.make_text_encoder(tokenizer),
            text_encoder_2=second,
            tokenizer=tokenizer,
            tokenizer_2=tokenizer_2,
            unet=unet,
            scheduler=DDIMScheduler(**{**SCHEDULE, **scheduler}),
            add_watermarker=False,
        )
    return quiet(pipeline)


def make_sd3_pipeline(t5: bool = False, **scheduler: Any) -> StableDiffusion3Pipeline:
    """Make a Stable Diffusion 3.5 of random weights, 32x32 images; `scheduler` overrides its config.

    T5 or what stands for it has `T5_LENGTH` tokens. Shift and scale of the latents are those of the real one.
    """
    tokenizer = make_tokenizer()
    tokenizer_3 = copy.deepcopy(tokenizer)
    tokenizer_3.model_max_length = T5_LENGTH
    widths, joint = (16, 24), 48  # CLIP's are filled up with zeros to T5's
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clips = [make_clip(tokenizer, width, width, layers=2, heads=2, inside=width) for width in widths]
        third = make_t5(tokenizer, joint)
        transformer = SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            joint_attention_dim=joint,
            caption_projection_dim=16,
            pooled_projection_dim=sum(widths),
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        vae = recipes.make_vae()
    vae.register_to_config(scaling_factor=1.5305, shift_factor=0.0609)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
        vae=vae,
        text_encoder=clips[0],
        tokenizer=tokenizer,
        text_encoder_2=clips[1],
        tokenizer_2=tokenizer,
        text_encoder_3=third if t5 else None,
        tokenizer_3=tokenizer_3,
    )
    return quiet(pipeline)


def make_flux_pipeline(guidance: bool = True, kind: type[Any] = FluxPipeline, **scheduler: Any) -> Any:
    """Make a FLUX.1 of random weights, 32x32 images, "dev" or without guidance "schnell".

    `kind` is its class, and `scheduler` overrides its config. The shift grows from 4 to 64 tokens.
    """
    tokenizer = make_tokenizer()
    tokenizer_2 = copy.deepcopy(tokenizer)
    tokenizer_2.model_max_length = FLUX_LENGTH
    shifted = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64}
    joint = 48
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip = recipes.make_text_encoder(tokenizer)
        t5 = make_t5(tokenizer, joint)
        transformer = FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            num_attention_heads=2,
            attention_head_dim=12,
            joint_attention_dim=joint,
            pooled_projection_dim=recipes.WIDTH,
            guidance_embeds=guidance,
            axes_dims_rope=(4, 4, 4),
        )
        vae = recipes.make_vae()
    vae.register_to_config(scaling_factor=0.3611, shift_factor=0.1159)
    pipeline = kind(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**({**shifted, **scheduler} if guidance else scheduler)),
        vae=vae,
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=tokenizer_2,
    )
    pipeline.default_sample_size = 8
    return quiet(pipeline)


def make_kontext_pipeline() -> FluxKontextPipeline:
    return make_flux_pipeline(kind=FluxKontextPipeline)


def noise_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def images_of(count: int, height: int, width: int) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(3))


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def check_drawn_as_by_diffusers(
    drawn: tuple[torch.Tensor, Trajectory], plain: Any, prompts: list[str], settings: SamplingSettings,
    latents: torch.Tensor, to_plain: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    atol: float = 1e-5, **arguments: Any,
) -> None:  # fmt: skip
    """Check a rollout's images and final latents against a plain pipeline's from the same first latents.

    `to_plain` brings latents into the pipeline's shape. The rollout's generators have the seeds 1, 2, ...
    """
    images, trajectory = drawn
    for output_type, ours in (("latent", to_plain(trajectory.final_latents)), ("pt", images)):
        theirs = plain(
            prompt=prompts, latents=to_plain(latents), num_inference_steps=settings.num_inference_steps,
            generator=generators(*range(1, len(prompts) + 1)), output_type=output_type, **arguments,
        ).images  # fmt: skip
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def write_preprocessor(folder: Path, edge: int) -> None:
    """Write how CLIP wants its images: shorter edge to `edge`, then the middle."""
    settings = {
        "size": {"shortest_edge": edge},
        "crop_size": {"height": CLIP_SIZE, "width": CLIP_SIZE},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def write_clip(folder: Path) -> Path:
    """Write a random CLIP as the hub would hold it; its tokenizer knows single letters only."""
    letters = [*string.ascii_lowercase, *(letter + "</w>" for letter in string.ascii_lowercase)]
    vocab = {token: i for i, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=24).save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    ids = {"bos_token_id": len(vocab) - 2, "eos_token_id": len(vocab) - 1}
    config = CLIPConfig(
        text_config={
            **shape, **ids, "num_attention_heads": 4, "vocab_size": len(vocab),
            "max_position_embeddings": 24,
        },
        vision_config={**shape, "num_attention_heads": 4, "image_size": CLIP_SIZE, "patch_size": 8},
        projection_dim=768,  # of ViT-L/14, which the aesthetic head needs
    )  # fmt: skip
    torch.manual_seed(0)
    enlarged(CLIPModel(config)).save_pretrained(folder)
    write_preprocessor(folder, CLIP_SIZE)
    return folder


def write_resnet(folder: Path) -> Path:
    """Write a random convolutional network as the hub would hold it."""
    torch.manual_seed(1)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetModel(config).save_pretrained(folder)
    settings = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


# For algorithms that do not clip, and refuse the range that `make_config` asks for.
NOT_CLIPPED: dict[str, Any] = {"train_clip_range": DDPOConfig.train_clip_range}


def make_config(folder: Path | str, **changes: Any) -> DDPOConfig:
    """Make settings of one epoch: two samples, three timesteps, one optimizer step."""
    settings = {
        "output_dir": str(folder),
        "num_epochs": 1,
        "image_grid_freq": 0,
        "sample_num_steps": 3,
        "sample_guidance_scale": 2.0,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 1,
        "train_batch_size": 2,
        "train_learning_rate": 1e-3,
        "train_clip_range": 1e-2,
    }
    return DDPOConfig(**{**settings, **changes})


def brightness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Reward of the mean pixel."""
    return images.mean(dim=(1, 2, 3))


def make_trainer(
    folder: Path, reward: Any = brightness, prompts: Any = None, pipeline: Any = None, hook: Any = None,
    noise_strength: float | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """Make a run of DDPO; the defaults are one prompt, or noisy images, and a random Stable Diffusion."""
    config, pipeline = make_config(folder, **changes), pipeline or make_pipeline()
    if noise_strength is None:
        return DDPOTrainer(config, reward, prompts or red_three, pipeline, hook)
    return ImageDDPOTrainer(config, reward, prompts or noisy_image, pipeline, hook, noise_strength)


def run(folder: Path, *parts: Any, **changes: Any) -> Any:
    """Train what `make_trainer` makes; return it."""
    trainer = make_trainer(folder, *parts, **changes)
    trainer.train()
    return trainer


def flow_trainer(
    folder: Path, algorithm: Any, start: Any = None, pipeline: Any = None, reward: Any = brightness,
    **changes: Any,
) -> Trainer:  # fmt: skip
    """Make a run of FLUX.1 or another flow model: five steps, two optimizer steps an epoch."""
    unused = {name: getattr(DDPOConfig, name) for name in algorithm.unused}
    eta = {"sample_eta": 0.7} if isinstance(algorithm, FlowGRPO) else {}  # the others take the ODE
    settings = {"train_batch_size": 1, "sample_num_steps": 5, **eta, **unused, **changes}
    parts = (make_config(folder, **settings), reward)
    prompts = noisy_image if isinstance(start, WithImages) else each_prompt()
    pipeline, start = pipeline or make_flux_pipeline(), start or FromNoise()
    return Trainer(*parts, prompts, pipeline, algorithm=algorithm, start=start)


def weights_of(trainer: Trainer) -> torch.Tensor:
    """Return a copy of all trained weights in a row."""
    return torch.cat([p.detach().flatten().clone() for p in trainer.learner.trainable.values()])


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Return a run's records without their times."""
    return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in read_metrics(folder)]


def check_resume(make: Callable[..., Trainer], folder: Path, epochs: int = 2) -> Path:
    """Check that a run in two parts is to the bit the one that never stopped; return the folder of that one.

    Compared are weights, their average, those of an older policy, and records.
    """
    whole, parts = folder / "whole", folder / "parts"
    straight = make(whole, num_epochs=epochs)
    straight.train()
    make(parts, num_epochs=epochs - 1).train()
    resumed = make(parts, num_epochs=epochs, resume_from="latest")
    resumed.train()
    for kind in ("trainable", "old", "average"):
        ours, theirs = (getattr(trainer.learner, kind) for trainer in (resumed, straight))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert records_of(parts) == records_of(whole)
    assert len(records_of(whole)) >= 2 * epochs
    return whole


def red_three() -> tuple[str, dict[str, Any]]:
    """Prompt function of one prompt."""
    return "a red three", {}


def each_prompt() -> Any:
    """Make a prompt function that goes round `PROMPTS`, the second of which is empty."""
    drawn: list[None] = []

    def draw() -> tuple[str, dict[str, Any]]:
        drawn.append(None)
        return PROMPTS[(len(drawn) - 1) % len(PROMPTS)], {}

    return draw


class Counting:
    """A prompt function that goes on from call to call."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self) -> tuple[str, dict[str, Any]]:
        self.drawn += 1
        return PROMPTS[self.drawn % 3], {}


class Remembering(Counting):
    """The same with a state, which a checkpoint can hold."""

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def let_loss_overflow(trainer: Trainer) -> None:
    """Make every loss of a trainer infinite."""
    loss = trainer.algorithm.loss

    def overflow(*arguments: Any) -> Any:
        value, stats = loss(*arguments)
        return value * math.inf, stats

    trainer.algorithm.loss = overflow


def noisy_image() -> tuple[str, torch.Tensor, dict[str, Any]]:
    """Prompt function of an image from torch's global generator, which the trainer seeds."""
    return "", torch.rand(3, 32, 32), {}


def stir_adapter(unet: torch.nn.Module, seed: int = 1) -> None:
    """Give a fresh LoRA adapter, which starts as zero, weights that change the policy."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in unet.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.1 * noise)


@contextlib.contextmanager
def counted_passes(unet: torch.nn.Module) -> Iterator[list[int]]:
    """Collect the batch size of every forward pass of a UNet."""
    sizes: list[int] = []
    handle = unet.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(args[0])), with_kwargs=True
    )
    try:
        yield sizes
    finally:
        handle.remove()


def launch(script: str, folder: Path, processes: int, *flags: str) -> subprocess.Popen[str]:
    """Run a test file's own program in processes that accelerate starts, on the CPU."""
    here = Path(script)
    paths = [str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    # accelerate starts several processes for GPUs only, but lets them compute on the CPU.
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "ACCELERATE_USE_CPU": "true"}
    several = [*(flags or ["--multi_gpu"]), "--main_process_port", "0"]  # 0: a port that is free
    return subprocess.Popen(
        [
            sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes),
            *(several if processes > 1 else ["--num_cpu_threads_per_process=1"]), "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no", script, str(folder),
        ],
        env={**os.environ, **settings, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------- the command line
# Of `train`: one epoch of two samples, three timesteps and one optimizer step.
TINY = shlex.split("""
--num-epochs 1 --image-grid-freq 0 --sample-num-steps 3 --sample-batch-size 2
--sample-num-batches-per-epoch 1 --train-batch-size 2 --train-learning-rate 1e-3 --reward colorfulness
--output-dir run
""")


def run_command(*words: str | Path, status: int = 0) -> None:
    """Run a command in this process, which must end with that status."""
    assert main([str(word) for word in words]) == status


def printed_error(capsys: Any) -> str:
    """Return the last error that commands printed since the last call, in one line."""
    _, start, text = capsys.readouterr().err.rpartition("error: ")
    return " ".join((start + text).split())


def pictures(folder: Path, *names: str, color: str = "red", size: tuple[int, int] = (32, 32)) -> Path:
    """Write images of one color into a folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, color).save(folder / name)
    return folder


# --------------------------------------------------------------------- the exercises of the notebooks
def cells_of(stem: str) -> list[tuple[str, str]]:
    """Return kind and source of a notebook's cells; nbformat takes a second to import."""
    text = (Path(__file__).parents[1] / "notebooks" / f"{stem}.ipynb").read_text("utf-8")
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]


def check_of(stem: str, number: int) -> Callable[[Any], None]:
    """Return the check of an exercise, made by the notebook's statements, as few as it and the solution need.

    A statement needs the last definition before it of each name that it uses, and a function that of all.
    """
    statements: list[ast.stmt] = []
    here = ""
    for kind, source in cells_of(stem):
        title = re.search(r"^### (Exercise \d+)", source, re.MULTILINE)
        if here == f"Exercise {number}" and (title or source.startswith("## ")):
            break
        here = title[1] if title else here
        if kind == "code":
            statements += ast.parse(TransformerManager().transform_cell(source)).body
    uses, defines = zip(*map(_names, statements), strict=True)
    last = max(n for n, names in enumerate(defines) if any(name.startswith("check_") for name in names))
    definitions = [isinstance(statement, ast.FunctionDef | ast.ClassDef) for statement in statements]
    needed, queue = set[int](), [n for n in range(last, len(statements)) if definitions[n]]
    while queue:
        n = queue.pop()
        if isinstance(statements[n], ast.Expr) or n in needed:  # `check_mine(...)` prints only
            continue
        needed.add(n)
        before = range(len(statements) if definitions[n] else n)
        found = [[m for m in before if name in defines[m]] for name in uses[n]]
        queue += [places[-1] for places in found if places]
    namespace: dict[str, Any] = {}
    for n in sorted(needed):
        exec(compile(ast.Module([statements[n]], []), stem, "exec"), namespace)
    return namespace[next(iter(defines[last]))]


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement uses, and those that it defines."""
    nodes = list(ast.walk(statement))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    filled = [node.value for node in nodes if isinstance(node, ast.Subscript | ast.Attribute)
              and isinstance(node.ctx, ast.Store)]  # fmt: skip
    loaded = {node.id for node in names} - {node.arg for node in nodes if isinstance(node, ast.arg)}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return loaded - stored, {statement.name}
    inner = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    local = {node.id for target in inner for node in ast.walk(target) if isinstance(node, ast.Name)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
    changed = {node.id for node in filled if isinstance(node, ast.Name)}
    own = stored if isinstance(statement, ast.For) else local
    return loaded - own, (stored - local) | changed | imported


def hint_for(check: Callable[[Any], None], answer: str) -> str:
    """Give a check an answer as code, whose last function it is; return the hint, "" if it is accepted."""
    namespace = dict(check.__globals__)
    exec(answer, namespace)
    function = [node for node in ast.parse(answer).body if isinstance(node, ast.FunctionDef)][-1]
    return why_not(check, namespace[function.name])


def edited(code: str, *changes: str) -> str:
    """Replace the first, third, ... of the changes in the code by those that follow them."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code
        code = code.replace(old, new)
    return code


def exercise_tests(
    stem: str, imports: str, arguments: dict[int, str], right: list[Any], wrong: list[Any]
) -> tuple[Any, Any]:
    """Make the two tests of a lesson's exercises: right answers pass, wrong ones are refused with a hint.

    An answer is code that defines a function, or the expression that `f(arguments)` returns. `right` has
    (number of the exercise, answer) for every form of a right answer, and `wrong` (number, answer, what the
    hint says) for every hint of the checks. A missing `return` is tried in every exercise.
    """
    check = functools.cache(functools.partial(check_of, stem))
    without = [(number, "None", "is there a `return`?") for number in arguments]

    def hint_of(number: int, answer: str) -> str:
        body = answer if "def " in answer else f"def f({arguments[number]}):\n    return {answer}\n"
        return hint_for(check(number), imports + body)

    @pytest.mark.parametrize(("number", "answer"), right)
    def test_right_answers_of_any_form_pass(number: int, answer: str) -> None:
        assert hint_of(number, answer) == ""

    @pytest.mark.parametrize(("number", "answer", "hint"), wrong + without)
    def test_wrong_answers_are_refused_with_a_hint(number: int, answer: str, hint: str) -> None:
        found = hint_of(number, answer)
        assert found, "it is accepted"
        assert hint in found

    return test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint
