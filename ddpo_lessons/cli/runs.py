"""Find the policy of `ddpo-lessons sample`: that of a run, a LoRA folder or a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.embedded import no_model
from ddpo_lessons.training.record import CONFIG, METRICS, read_run

GIVE_A_RUN = "give the folder of a run, which is the --output-dir of its training, or else logs/ddpo"


@dataclass(frozen=True)
class Policy:
    """A model with the weights that its run trained."""

    model: str  #: "tiny-sd", a folder, or a name on the hub
    lora: Path | None  #: folder of LoRA weights, if any
    settings: DDPOConfig  #: of its run; the defaults where there is none
    record: dict[str, Any]  #: what the run's config.json holds beside them; empty where there is none


def find_policy(run_dir: Path | None, model: str | None, lora: Path | None) -> Policy:
    """Find the policy to sample from, given `--run`, `--model` and `--lora`.

    A LoRA folder that lies in a run's folder has that run's settings. If something is missing, a ValueError
    names the flag that helps.
    """
    if lora is not None and (fault := lack(lora, LORA_FILE)):
        raise ValueError(f"--lora {fault}: give the lora folder of a run")
    if run_dir is not None:
        if fault := lack(run_dir, CONFIG):
            raise ValueError(f"--run {fault}: {GIVE_A_RUN}")
        if lora is not None:
            raise ValueError("--run has LoRA weights of its own: leave out --lora, or --run")
        settings, record = read_run(run_dir)
        model, lora = _weights(run_dir, model, record)
    else:
        settings, record = _run_around(lora or Path(model or ""))
    trained = Path(record.get("model", ""))
    if model is None and trained.is_absolute() and not trained.is_dir():
        raise ValueError(f"the run was trained on {trained}, which is not there: give --model")
    policy = Policy(model or record.get("model", "tiny-sd"), lora, settings, record)
    check_model(policy.model)
    return policy


def _weights(run_dir: Path, model: str | None, record: dict[str, Any]) -> tuple[str | None, Path | None]:
    """Return the model of a run, if it differs from the record's, and its LoRA folder."""
    lora, pipeline = run_dir / "lora", run_dir / "pipeline"
    if (lora / LORA_FILE).is_file():
        if model is None and "model" not in record:
            raise ValueError(f"--run {run_dir} does not name its model: give --model")
        return model, lora
    if pipeline.is_dir():
        return str(pipeline), None
    raise ValueError(
        f"--run {run_dir} holds neither lora nor pipeline, which training writes when it ends: "
        "continue it with --resume-from latest, or call save_pretrained"
    )


def _run_around(result: Path) -> tuple[DDPOConfig, dict[str, Any]]:
    """Return the settings of the run whose folder contains `result`, or the defaults."""
    run_dir = result.parent
    if result.is_dir() and (run_dir / METRICS).is_file():
        return read_run(run_dir)
    return DDPOConfig(), {}


def check_model(model: str) -> None:
    """Raise a ValueError for a `--model` that is neither a folder of a pipeline nor a name on the hub."""
    fault = no_model(model)
    if fault:
        raise ValueError(f"--model {fault}")


def lack(folder: Path, file: str) -> str:
    """Return what is wrong with a folder that should hold a file, or nothing."""
    if folder.is_dir():
        return "" if (folder / file).is_file() else f"{folder} holds no {file}"
    return f"{folder} is a file" if folder.exists() else f"{folder} does not exist"
