"""Run every attack, or those that pytest's arguments choose: `python -m tests.torture -k "kill and nft"`."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    here = Path(__file__).parent
    files = [str(here / "runs.py"), str(here.parent / "test_wrong_inputs.py")]
    raise SystemExit(pytest.main([*files, "-p", "no:nbval", "--durations", "5", *sys.argv[1:]]))
