"""The tables of docs/gallery.md: committed images of seed 0, each beside its numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import ROOT, read_rows


@dataclass(frozen=True)
class Section:
    """Images of one experiment: where they and the numbers are, and the text of each row."""

    csv: str
    images: str  # the path of a row's image, by its name; without a name there is no image
    columns: dict[str, tuple[str, Callable[[float], str]]]  # title: column, and how it is written
    rows: tuple[tuple[str, str, dict[str, str]], ...]  # image, words, what selects the row of the CSV
    common: dict[str, str] | None = None  # selects too


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def two(number: float) -> str:
    return f"{number:.2f}"


def kilobytes(reward: float) -> str:
    return f"{abs(reward):.2f}"


def _paper(reward: str, title: str, written: Callable[[float], str], turned: str) -> Section:
    trained = [
        (f"{reward}_{name}", name, {"method": name, "epoch": "16"}) for name in ("DDPO", "branching", "RWR")
    ]
    before = (f"{reward}_before", "before", {"method": "DDPO", "epoch": "0"})
    without = [
        ("", "best-of-8, no training", {"method": "best-of-8"}),
        ("", turned, {"method": "turned"}),
    ]
    columns = {title: ("score", written), "animal present": ("animal", percent)}
    rows = (before, *trained, *without)
    return Section(
        "benchmarks/zoo/paper.csv", "benchmarks/zoo/paper/{}.png", columns, rows, {"reward": reward}
    )


SECTIONS = {
    "foxes": Section(
        "benchmarks/zoo/painter.csv",
        "benchmarks/zoo/painter/{}.png",
        {"kB": ("reward", kilobytes), "a fox": ("fox", percent)},
        (
            ("DDPO_00", "before", {"method": "DDPO", "epoch": "0"}),
            ("DDPO_04", "DDPO, 256 reward evaluations", {"method": "DDPO", "epoch": "4"}),
            ("DDPO_06", "384", {"method": "DDPO", "epoch": "6"}),
            ("DDPO_10", "640", {"method": "DDPO", "epoch": "10"}),
            ("KL_0.1_10", "640, with a KL penalty of 0.1", {"method": "KL 0.1", "epoch": "10"}),
            ("", "best-of-8, no training", {"method": "best-of-8"}),
            ("", "“a fox by Noto on an orange background”, no training", {"method": "more words"}),
        ),
    ),
    "small": _paper("compressibility", "kB", kilobytes, "“by Noto” and “green”, no training"),
    "large": _paper("incompressibility", "kB", kilobytes, "“by Twemoji”, “yellow”, guidance 3, no training"),
    "preference": _paper(
        "preference", "learned reward", two, "“by Fluent”, “orange”, guidance 3, no training"
    ),
    "red": Section(
        "benchmarks/results/clipping.csv",
        "benchmarks/results/clipping_{}.png",
        {"redness": ("redness", two), "readable": ("readable", percent)},
        (
            ("", "before", {"variant": "clipped", "epoch": "0"}),
            ("clipped", "DDPO, ten epochs", {"variant": "clipped", "epoch": "10"}),
            ("not_clipped", "the same without the clip", {"variant": "not clipped", "epoch": "10"}),
        ),
        {"learning_rate": "0.0002", "inner_epochs": "4"},
    ),
}  # fmt: skip


def shown(section: Section) -> list[list[str]]:
    rows = [row for row in read_rows(ROOT / section.csv) if str(row.get("seed")) == "0"]

    def find(chosen: dict[str, str]) -> dict[str, Any]:
        wanted = {**chosen, **(section.common or {})}
        (found,) = [row for row in rows if all(str(row[name]) == value for name, value in wanted.items())]
        return found

    table = [["", *section.columns]]
    for name, words, chosen in section.rows:
        row = find(chosen)
        image = f"<br>![](../{section.images.format(name)})" if name else ""  # narrow, for phones
        numbers = [written(float(row[column])) for column, written in section.columns.values()]
        table.append([words + image, *numbers])
    return table
