"""Write and read the folder of a run: metrics.jsonl, config.json and image grids."""

import contextlib
import errno
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from filelock import FileLock, Timeout
from PIL import Image
from tqdm.auto import tqdm

from ddpo_lessons.config import RUN, DDPOConfig
from ddpo_lessons.data.contexts import Context
from ddpo_lessons.image import grid_columns, image_grid, save_grid
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.record import CONFIG
from ddpo_lessons.training.record import METRICS as METRICS

GRIDS = "images"  # the folder of image grids
OTHERS = (CONFIG, GRIDS, "lora", "pipeline")  # what a run writes, under names that are also in use elsewhere
INPUT = "input"  # the caption of an input image in a grid
PREFLIGHT = "preflight.json"
CHANGES = "changes"  # the kind of record that says what a resume changed
_WITHOUT_EFFECT = ("num_epochs", "price_per_hour", "save_freq", "num_checkpoint_limit", "image_grid_freq")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of an epoch's rewards


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Lock a folder against other processes and trainers, until this process ends at the latest.

    Raises RuntimeError if another one trains there; OSError if the folder cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot make the folder {run_dir} ({error.strerror}): choose another output_dir"
        ) from error
    lock = FileLock(run_dir / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RuntimeError(
            f"another trainer is at work in {run_dir}: wait for its end, or choose another output_dir"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _is_of_a_run(path: Path) -> bool:
    """Return whether a config.json was written by a run, whose records may be gone."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RUN in json.loads(path.read_text(encoding="utf-8"))
    return False


def claim(config: DDPOConfig) -> Path | None:
    """Check that a run may use its folder; return the checkpoint to resume from, if any.

    Nothing is changed yet: what an older run left is dropped once training starts. With "auto" these may be
    the records of a run that ended before its first checkpoint. Raises ValueError if the folder is a file or
    lies below one, if it holds another run or files of no run that a run would change, or if there is nothing
    to resume.
    """
    run_dir = config.run_dir
    if file := next((place for place in (run_dir, *run_dir.parents) if place.is_file()), None):
        raise ValueError(f"output_dir={str(file)!r} is a file: choose another output_dir")
    checkpoints = checkpoint.list_checkpoints(run_dir)
    is_run = bool(checkpoints) or (run_dir / METRICS).is_file() or _is_of_a_run(run_dir / CONFIG)
    if others := [
        name for name in OTHERS if not is_run and not config.overwrite and (run_dir / name).exists()
    ]:
        raise ValueError(
            f"{run_dir} holds no run, but {others[0]}, which a run would change: choose another output_dir, "
            "or set overwrite=True"
        )
    if config.resume_from == "auto":
        if not checkpoints:
            read_metrics(run_dir)  # refuses a file of this name that is no run's
        return checkpoints[-1] if checkpoints else None
    if config.resume_from == "latest":
        if not checkpoints:
            raise ValueError(
                f"resume_from='latest', but {run_dir} holds no checkpoint: resume_from='auto' starts the run"
            )
        return checkpoints[-1]
    source = Path(config.resume_from) if config.resume_from else None
    if config.overwrite or _is_inside(source, run_dir):
        return source
    if not checkpoints and read_metrics(run_dir):
        raise ValueError(
            f"{run_dir} holds the records of a run that ended before its first checkpoint: set "
            "resume_from='auto' to start it again, or choose another output_dir"
        )
    if checkpoints:
        raise ValueError(
            f"{run_dir} already holds a run: set resume_from='auto' to continue it, overwrite=True to "
            "replace it, or choose another output_dir"
        )
    return source


def _is_inside(source: Path | None, run_dir: Path) -> bool:
    return source is not None and source.resolve().parent == run_dir.resolve()


class RunLog:
    """Write the records of a run."""

    def __init__(
        self,
        config: DDPOConfig,
        source: Path | None,
        epochs_done: int,
        record: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write config.json; remove leftovers of older runs and records after the checkpoint.

        The checkpoint `source`, if any, is that of `epochs_done`; `record` says what else the run was made
        with. Raises ValueError if a record that is continued is damaged, or the last one is missing;
        RuntimeError if another trainer has used the folder since `claim` looked at it.
        """
        self.run_dir, self.path = config.run_dir, config.run_dir / METRICS
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if claim(config) != source:
            raise RuntimeError(
                f"another trainer has used {self.run_dir} since this one was made: make a new trainer with "
                "resume_from='auto'"
            )
        if source is None and config.resume_from == "auto" and (dropped := read_metrics(self.run_dir)):
            tqdm.write(
                f"starting {self.run_dir}: {len(dropped)} records of a run that ended before its first "
                "checkpoint are replaced"
            )
        if not _is_inside(source, self.run_dir):
            epochs_done = -1  # not even a checkpoint before the first epoch stays
        kept = self._records_until(epochs_done)
        self._drop_after(epochs_done)
        write_file(self.path, kept)
        made_with = {**config.to_dict(), RUN: dict(record)}
        write_file(self.run_dir / CONFIG, (json.dumps(made_with, indent=1) + "\n").encode())
        self.size = len(kept)  # bytes of the records, to which `rewind` may go back
        self._warned = False  # of a grid that could not be written

    def _records_until(self, epochs_done: int) -> bytes:
        """Return the lines of completed epochs, or nothing if the file is gone."""
        kept, last = list[bytes](), 0
        for line, record in _lines(self.path) if epochs_done > 0 else ():
            epoch = record.get("epoch", 0)
            if epoch > epochs_done or (record["kind"] == CHANGES and epoch == epochs_done):
                break
            kept.append(line + b"\n")
            last = max(last, epoch)
        if kept and last < epochs_done:
            raise ValueError(
                f"{self.path} is damaged: it ends with epoch {last}, and the checkpoint has {epochs_done}; "
                "restore the file, or move it away to continue without the older records"
            )
        return b"".join(kept)

    def _drop_after(self, epochs_done: int) -> None:
        """Remove only the checkpoints and images that a run wrote after this epoch."""
        checkpoint.remove_leftovers(self.run_dir)
        for path in checkpoint.list_checkpoints(self.run_dir):
            if checkpoint.epochs_of(path) > epochs_done:
                checkpoint.remove(path)
        for path in self.run_dir.glob(f"{GRIDS}/*"):
            grid = re.fullmatch(r"(?:epoch|validation|highest)-(\d+)\.(?:png|jpg|json)", path.name)
            if grid and int(grid[1]) > epochs_done:
                path.unlink()

    def changes(self, epochs_done: int, changes: Sequence[str]) -> None:
        """Record what a resume changed, `{"kind": "changes", "epoch": ..., "changes": ["name old → new"]}`.

        The epoch is the last one with the old settings. Settings that later epochs do not depend on, such as
        `save_freq`, are left out.
        """
        if kept := [change for change in changes if change.split(" ")[0] not in _WITHOUT_EFFECT]:
            self.record(CHANGES, {"epoch": epochs_done, "changes": kept})

    def record(self, kind: str, values: Mapping[str, float | list[float] | list[str]]) -> None:
        """Append one record, `{"kind": ..., **values}`; numbers that are not finite become null.

        Numbers in lists are finite, as rewards are.

        Raises OSError if the disk is full or the file cannot be written; the records before it stay whole;
        RuntimeError if another trainer has written to the file.
        """
        clean = {k: v if isinstance(v, list) or math.isfinite(v) else None for k, v in values.items()}
        line = (json.dumps({"kind": kind, **clean}) + "\n").encode()
        with self._append() as file:
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(self.size)
                raise
        self.size += len(line)

    def flush(self) -> None:
        """Flush the records to disk; raise a RuntimeError if another trainer wrote to the file."""
        with self._append() as file:
            os.fsync(file.fileno())

    def rewind(self, position: int) -> None:
        """Remove the records after a position, unless another trainer has written since."""
        if self.path.exists() and self.path.stat().st_size == self.size:
            os.truncate(self.path, position)
            self.size = position

    @contextlib.contextmanager
    def _append(self) -> Iterator[Any]:
        """Open the records at their end, unless another trainer has continued the run."""
        with _writing(self.path, self.run_dir), open(self.path, "ab", buffering=0) as file:
            if file.tell() != self.size:
                raise RuntimeError(
                    f"{self.path} holds {file.tell()} bytes, and this trainer wrote {self.size}: another "
                    "trainer uses the folder; stop one of them and continue with resume_from='latest'"
                )
            yield file

    def preflight(self, findings: Sequence[Mapping[str, Any]]) -> None:
        """Write the findings of the first epoch to preflight.json, one per line."""
        write_file(self.run_dir / PREFLIGHT, (json.dumps(findings, indent=1) + "\n").encode())

    def images(
        self, epoch: int, images: torch.Tensor, name: str = "epoch", captions: Sequence[str] = ()
    ) -> Image.Image:
        """Save a grid of images (N, 3, H, W) as images/NAME-NNNNNN.png, or .jpg if they are large; return it.

        Captions of the N images, if given, lie beside it in NAME-NNNNNN.json. The first grid that cannot
        be written is warned of; none costs an epoch.
        """
        path = self.run_dir / GRIDS / f"{name}-{epoch:06d}"
        grid = image_grid(images, grid_columns(len(images)))
        try:
            path.parent.mkdir(exist_ok=True)
            if captions:
                path.with_suffix(".json").write_text(json.dumps(list(captions)) + "\n", encoding="utf-8")
            save_grid(grid, path, max(images.shape[2:]))
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"cannot write {path} ({error.strerror}): make room, or make the folder writable; the "
                    "run goes on without such grids",
                    stacklevel=3,
                )
            self._warned = True
        return grid


def spread(name: str, rewards: torch.Tensor) -> dict[str, float]:
    """Describe the distribution of rewards (N,): standard deviation `NAME_std`, quantiles `NAME_q05`, ..."""
    quantiles = rewards.quantile(torch.tensor(QUANTILES, dtype=rewards.dtype)).tolist()
    return {
        f"{name}_std": rewards.std(correction=0).item(),
        **{f"{name}_q{100 * q:02.0f}": value for q, value in zip(QUANTILES, quantiles, strict=True)},
    }


def as_numbers(rewards: torch.Tensor) -> list[float]:
    """Return rewards (N,) as the shortest exact numbers: 0.1 for float32 instead of 0.10000000149."""
    return [float(str(reward)) for reward in rewards.numpy()]


def varied(keys: Sequence[Hashable], count: int) -> list[int]:
    """Return the numbers of at most `count` samples in order, with as many different keys as possible."""
    seen, ranks = Counter[Hashable](), list[int]()
    for key in keys:
        ranks.append(seen[key])
        seen[key] += 1
    return sorted(sorted(range(len(keys)), key=lambda number: (ranks[number], number))[:count])


def with_captions(
    contexts: Sequence[Context], images: torch.Tensor, rewards: Sequence[float]
) -> tuple[torch.Tensor, list[str]]:
    """Return images (B, 3, H, W) for a grid, each after its input image, and their captions."""
    tiles, captions = list[torch.Tensor](), list[str]()
    for context, image, reward in zip(contexts, images, rewards, strict=True):
        if context.image is not None and context.image.shape == image.shape:
            tiles.append(context.image.to(image.device))
            captions.append(INPUT)
        tiles.append(image)
        captions.append(f"{reward:.4g} · {context.prompt}")
    return torch.stack(tiles), captions


def write_file(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that a kill leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.new")
    with _writing(path, path.parent):
        aside.write_bytes(data)
        aside.replace(path)


@contextlib.contextmanager
def _writing(path: Path, run_dir: Path) -> Iterator[None]:
    """Add the file and the remedy to errors of the disk."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path} ({error.strerror}): make room, or make the folder writable, then "
            f"{checkpoint.how_to_go_on(run_dir)}",
        ) from error


def read_metrics(run_dir: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read a run's records (of a kind), without an incomplete last line; raise a ValueError for bad lines."""
    records = (record for _, record in _lines(Path(run_dir, METRICS)))
    return [record for record in records if kind is None or record["kind"] == kind]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line with its record; none if there is no file."""
    if not path.exists():
        return
    *lines, rest = path.read_bytes().split(b"\n")  # a record ends with a line break
    for number, line in enumerate(lines, start=1):
        yield line, _parse(line, path, number)
    try:
        yield rest, _parse(rest, path, len(lines) + 1)
    except ValueError:
        if not _is_cut_off(rest):
            raise


def _is_cut_off(line: bytes) -> bool:
    """Return whether a line may be the beginning of a record."""
    begin = b'{"kind": '
    return begin.startswith(line[: len(begin)]) and line.isascii() and line.decode().isprintable()


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            return record
    except ValueError:
        pass
    raise ValueError(f"{path}, line {number} is damaged: restore the file, or delete the line")
