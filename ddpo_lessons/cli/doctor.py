"""Run `ddpo-lessons doctor`, which prints a line for everything that a run needs."""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ddpo_lessons.cli.messages import wrapped
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.table import Lines

GIB = 2**30
MEMORY_NEEDED_GIB = 2.0  # the demo peaks at 0.9; the rest is room for the system
DISK_NEEDED_GIB = 1.0  # the demo writes megabytes
DISK_FULL_SIZE_GIB = 10  # Stable Diffusion, CLIP, checkpoints and grids (paper_run.json)
NEXT_AFTER_FAILURE = ": fix what the lines with [FAIL] name, and run `ddpo-lessons doctor` again"


@dataclass
class Doctor:
    """Flags of `doctor`: none."""


class Check(NamedTuple):
    """The result of a check: whether it passed, and a sentence with the remedy if it did not."""

    ok: bool
    text: str
    is_note: bool = False  #: whether only some runs need what is missing, so that it is no failure

    def __str__(self) -> str:
        return f"{'[NOTE]' if self.is_note else '[OK]  ' if self.ok else '[FAIL]'} {self.text}"


def check_python() -> Iterator[Check]:
    """Compare the interpreter with the oldest supported version."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check(sys.version_info >= (3, 11), f"Python {version} (needs 3.11 or newer)")


def check_packages() -> Iterator[Check]:
    """Compare every installed core package with the bounds in this package's own metadata."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("ddpo-lessons") or []
    except metadata.PackageNotFoundError:
        yield Check(False, "ddpo-lessons is not installed: run `pip install -e .` in its folder")
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            bounds = sorted(map(str, requirement.specifier), reverse=True)  # ">=2" before "<3"
            yield check_package(requirement.name, ",".join(bounds))


def check_package(name: str, bounds: str) -> Check:
    """Compare one installed package with its bounds, such as ">=2.13,<3"."""
    from packaging.specifiers import SpecifierSet

    remedy = f': run `pip install "{name}{bounds}"`'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(False, f"{name} is missing{remedy}")
    ok = SpecifierSet(bounds).contains(version, prereleases=True)
    return Check(ok, f"{name} {version} (needs {bounds}){'' if ok else remedy}")


def check_gpu() -> Iterator[Check]:
    """Report the GPU, for CUDA with its memory; a machine without a GPU passes."""
    import torch

    if torch.backends.mps.is_available():  # accelerate asks in this order
        yield Check(True, "GPU: Apple's, by MPS; training uses it, lessons do not")
        return
    if not torch.cuda.is_available():
        yield Check(True, "GPU: none; lesson 13 runs in small")
        return
    free, total = torch.cuda.mem_get_info()  # bytes
    name = torch.cuda.get_device_name()
    yield Check(True, f"GPU: {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")


def check_memory() -> Iterator[Check]:
    """Compare the free main memory with the need of the demo."""
    import psutil

    memory = psutil.virtual_memory()
    sizes = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    ok = memory.available >= MEMORY_NEEDED_GIB * GIB
    remedy = "" if ok else ": close other programs"
    yield Check(ok, f"Memory: {sizes} (the demo needs {MEMORY_NEEDED_GIB:g}){remedy}")


def check_disk() -> Iterator[Check]:
    """Compare the free disk space of the current folder with the need of a run."""
    free = shutil.disk_usage(Path.cwd()).free
    ok = free >= DISK_NEEDED_GIB * GIB
    remedy = "" if ok else ": make room, or work in a folder on another disk"
    needs = f"the demo needs {DISK_NEEDED_GIB:g}, Stable Diffusion {DISK_FULL_SIZE_GIB}"
    yield Check(ok, f"Disk: {free / GIB:.1f} GiB free ({needs}){remedy}")


def check_checkpoint() -> Iterator[Check]:
    """Open every weight file of the embedded tiny-sd, to find truncated ones."""
    from safetensors import SafetensorError, safe_open

    files = sorted(CHECKPOINTS["tiny-sd"].rglob("*.safetensors"))
    if not files:
        yield Check(False, f"tiny-sd is missing from {CHECKPOINTS['tiny-sd']}: reinstall ddpo-lessons")
        return
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            yield Check(False, f"tiny-sd: {file} is damaged ({error}): reinstall ddpo-lessons")
            return
    size = sum(file.stat().st_size for file in files)  # bytes
    yield Check(True, f"tiny-sd: {len(files)} weight files, {size / 1e6:.1f} MB")


def check_hub() -> Iterator[Check]:
    """Report whether the model hub answers; it is optional, because tiny-sd is in the package."""
    from huggingface_hub import constants

    from ddpo_lessons.hub import hub_reachable

    if hub_reachable():
        yield Check(True, f"Model hub: {constants.ENDPOINT} answers")
        return
    is_off = constants.HF_HUB_OFFLINE
    state = "switched off by HF_HUB_OFFLINE" if is_off else f"{constants.ENDPOINT} is not reached"
    needs = "presets of Stable Diffusion, rewards such as CLIP, and lesson 13 on a GPU download from it"
    yield Check(True, f"Model hub: {state}; {needs}", is_note=True)


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_python,
    check_packages,
    check_gpu,
    check_memory,
    check_disk,
    check_checkpoint,
    check_hub,
)


def findings() -> Lines[Check]:
    """Run every check, and show one line per finding in a notebook."""
    return Lines(_findings())


def _findings() -> Iterator[Check]:
    """Run every check; a check that fails to start is also a finding."""
    for check in CHECKS:
        try:
            yield from check()
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            yield Check(False, f"{check.__name__}: {error}: reinstall ddpo-lessons")


def run(_: object = None) -> int:
    """Print an [OK], [NOTE] or [FAIL] line for each finding, then a verdict; return 1 if one failed."""
    count = failed = notes = 0
    for finding in _findings():
        print(wrapped(str(finding), 7), flush=True)
        count, failed, notes = count + 1, failed + (not finding.ok), notes + finding.is_note
    verdict = f"{count - failed - notes} of {count} checks passed{f', {notes} with a note' if notes else ''}"
    print(wrapped(f"\n{verdict}{NEXT_AFTER_FAILURE if failed else ''}", 0), flush=True)
    return int(failed > 0)
