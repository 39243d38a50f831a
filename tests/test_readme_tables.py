"""Tables of the READMEs, from a result made up by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import readme_tables
from benchmarks.readme_tables import filled, peers_phase_table, peers_table


def phases(sampling: float, training: float) -> dict[str, list[float]]:
    """Medians, each with a tenth below and a fifth above."""
    seconds = {"sampling": sampling, "reward": 0.0, "training": training, "whole": sampling + training}
    return {name: [value, 0.9 * value, 1.2 * value] for name, value in seconds.items()}


@pytest.fixture
def result() -> dict[str, Any]:
    ours = {"size": "TRL", "ours": phases(1.0, 3.0), "floor": phases(1.0, 2.2)}
    ours |= {"compiled": phases(1.0, 1.5), "ordered floor": phases(1.25, 2.5)}
    peer = {"peer": phases(2.0, 8.0)}
    right = {"first_clip_fraction": 0.0, "gradient_difference": {"ours": 5.2e-6, "compiled": 6e-6}}
    wrong = {"first_clip_fraction": 0.97, "gradient_difference": None}
    return {
        "machine": "2 cores, a processor, torch 2.13.0",
        "threads": 2,
        "rounds": 5,
        "peers": {"trl": "0.21.0"},
        "ours": {"diffusers": "0.42.1"},
        "rows": [
            {"case": "guided", "against": "TRL", **ours, **peer, **right},
            {"case": "unguided", "against": "TRL", **ours, "error": "RuntimeError: a | b" + " and so on" * 9},
            {"case": "img2img", "against": "imageddpo", **ours, **peer, **wrong},
        ],
    }


def test_peers_are_compared_by_whole_epochs(result: dict[str, Any]) -> None:
    lines = peers_table(result).splitlines()
    assert [line.removeprefix("| ") for line in lines[2:5]] == [
        "guided | TRL | TRL | 10.00 | 4.00 | 2.50 | 2.50 | 4.00 | 1.25 | 1.07 | 0.78 "
        "| gradients 5e-06 and 6e-06 apart |",
        "unguided | TRL | TRL | fails | 4.00 | 2.50 | – | – | 1.25 | 1.07 | 0.78 "
        "| RuntimeError: a / b and so on and so on and so on and so on and so on … |",
        "img2img | TRL | imageddpo | 10.00 | 4.00 | 2.50 | 2.50 | 4.00 | 1.25 | 1.07 | 0.78 "
        "| wrong policy: clip fraction 0.97 before any update |",
    ]
    assert all(line.count("|") == lines[0].count("|") for line in lines[1:5])
    assert lines[6] == (
        "Seconds per epoch, 5 rounds, 2 thread(s), 2 cores, a processor, torch 2.13.0. "
        "Peers: trl 0.21.0. Ours: diffusers 0.42.1."
    )


def test_phases_show_median_and_spread(result: dict[str, Any]) -> None:
    lines = peers_phase_table(result).splitlines()
    own = ["ours", "compiled", "floor", "ordered floor"]
    who = [line.split(" | ")[2] for line in lines[2:-2]]
    ratios = ["peer / ours", "peer / compiled"]
    ratios += ["ours / floor", "ours / ordered floor", "compiled / floor"]
    assert who == ["TRL", *own, *ratios, *own, *ratios[2:], "imageddpo", *own, *ratios]
    assert lines[7] == "| guided | TRL | peer / ours | 2.00 | – | 2.67 | 2.50 |"
    assert lines[2] == (
        "| guided | TRL | TRL | 2.00 (1.80–2.40) | 0.00 (0.00–0.00) | 8.00 (7.20–9.60) | 10.00 (9.00–12.00) |"
    )


def test_only_tables_with_marks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"one": lambda: "| new |", "not measured": lambda: readme_tables.read("no such file")}
    monkeypatch.setattr(readme_tables, "TABLES", tables)
    text = "before\n<!-- one -->\n| old |\n<!-- /one -->\nafter <!-- /one -->\n"
    assert filled(text) == text.replace("old", "new")
    with pytest.raises(FileNotFoundError, match="no such file"):
        filled("<!-- not measured --><!-- /not measured -->")


@pytest.mark.parametrize("path", ["README.md", "benchmarks/README.md"])
def test_a_readme_shows_the_committed_tables(path: str) -> None:
    text = (readme_tables.ROOT / path).read_text(encoding="utf-8")
    assert filled(text) == text
