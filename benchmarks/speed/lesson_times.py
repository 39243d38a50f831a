"""Time every notebook in a fresh kernel and an empty folder: `python -m benchmarks.speed.lesson_times`.

With names of notebooks it times these alone. Writes lesson_times.json, from which the README's table of
lessons is made. Run it on a quiet machine. With `--memory` it reads instead, every 50 ms, what nbconvert and
its kernel use of a small machine's memory while they execute lessons 01 to 05; that is lesson_memory.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

from benchmarks.common import machine, seconds_of, write_json
from benchmarks.speed.lessons import LESSONS

RESULT = Path(__file__).with_suffix(".json")
MEMORY = RESULT.with_name("lesson_memory.json")


def time_of(path: Path) -> float:
    """Execute one notebook and return how long it took, the start of its kernel included."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        client = NotebookClient(nbformat.read(path, as_version=4), kernel_name="python3", resources=place)
        return round(seconds_of(client.execute), 1)


def memory_of(path: Path) -> float:
    """Execute one notebook and return the peak GB of nbconvert and its kernel together."""
    peak, command = 0, [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", str(path)]
    with tempfile.TemporaryDirectory() as folder:
        process = psutil.Popen([*command, "--output-dir", folder], stderr=subprocess.DEVNULL)
        while process.poll() is None:
            held = [rss(part) for part in (process, *process.children(recursive=True))]
            peak = max(peak, sum(held))
            time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"{path.name} failed: execute it by itself to see why")
    return round(peak / 1e9, 2)


def rss(process: psutil.Process) -> int:
    """Return the bytes that a process uses; 0 for one that has just ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("lessons", nargs="*", help="names of notebooks; without any, all of them")
    arguments = parser.parse_args()
    if arguments.memory:
        gigabytes = {path.stem: memory_of(path) for path in LESSONS[:5]}
        write_json(MEMORY, {"machine": machine(), "gigabytes": gigabytes})
        print(f"wrote {MEMORY.name}: {gigabytes}")
        return
    seconds = json.loads(RESULT.read_text())["seconds"]
    chosen = [path for path in LESSONS if not arguments.lessons or path.stem in arguments.lessons]
    seconds |= {path.stem: time_of(path) for path in chosen}
    write_json(RESULT, {"machine": machine(), "seconds": seconds})
    print(f"wrote {RESULT.name}: {seconds}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
