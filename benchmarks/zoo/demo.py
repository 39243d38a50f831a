"""The demo for three seeds: `python -m benchmarks.zoo.demo`.

Writes demo.json, and the first seed's pictures as images/demo-before-after.png, which README, site and
lesson 07 show. What demo.json already holds is not run again.
"""

import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, Row, machine, write_json
from ddpo_lessons.cli import options
from ddpo_lessons.lessons import demo

RESULT = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)


def train(seed: int) -> Row:
    """Run the demo with a seed; return its results, and keep the first seed's pictures."""
    with tempfile.TemporaryDirectory() as folder:
        demo.run(options.Demo(seed=seed, output_dir=Path(folder)))
        if seed == SEEDS[0]:
            shutil.copy(Path(folder, "before-after.png"), ROOT / "images" / "demo-before-after.png")
        results = json.loads(Path(folder, "results.json").read_text())
        return {"seed": seed, "seconds": results["run"]["seconds"], **results}


if __name__ == "__main__":
    rows: list[Row] = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    for seed in SEEDS:
        if seed not in {row["seed"] for row in rows}:
            rows.append(train(seed))
            write_json(RESULT, {"machine": machine(), "runs": rows})
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")
