"""Run every attack, or those that pytest's arguments choose: `python -m tests.torture -k "kill and nft"`."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    files = [str(Path(__file__).parent / f"{name}.py") for name in ("runs", "inputs")]
    raise SystemExit(pytest.main([*files, "-p", "no:nbval", "--durations", "5", *sys.argv[1:]]))
