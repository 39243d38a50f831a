"""JupyterLab, started as Makefile and docs say, opens lesson 01 and serves every lesson's figures."""

import os
import posixpath
import re
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[1]
FIGURES = {
    figure
    for path in (ROOT / "notebooks").glob("*.ipynb")
    for figure in re.findall(r"\.\./images/[\w.-]+", path.read_text("utf-8"))
}


def commands() -> list[str]:
    """The flags of `jupyter lab`, wherever it has any; the README's has none."""
    pages = [ROOT / "Makefile", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text("utf-8") for page in pages]
    return [found.strip() for text in texts for found in re.findall(r"jupyter lab (-[^`\n]*)", text)]


class Server:
    """JupyterLab on a free port, without a browser, started in the repository's root.

    Attributes:
        opens: the path of the page that a browser would open.
    """

    def __init__(self, arguments: list[str], settings: Path) -> None:
        jupyter = str(Path(sysconfig.get_path("scripts")) / "jupyter")
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--ServerApp.port=0"]
        self.process = subprocess.Popen(
            [jupyter, "lab", *arguments, *options],
            cwd=ROOT,
            env={**os.environ, "JUPYTER_CONFIG_DIR": str(settings)},  # not the developer's own
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def connect(self) -> None:
        """Read the server's address, and wait until it listens there, which begins after it is printed."""
        assert self.process.stderr is not None
        lines: list[str] = []
        while not (found := re.search(r"http://127\.0\.0\.1:\S+", "".join(lines[-1:]))):
            lines.append(self.process.stderr.readline())
            assert lines[-1], "".join(lines)  # it ended
        address = urlsplit(found[0])
        self.opens = address.path
        self.connection = HTTPConnection("127.0.0.1", address.port, timeout=60)
        self.headers = {"Authorization": "token " + address.query.removeprefix("token=")}
        while self.connection.sock is None:
            time.sleep(0.1)
            with suppress(ConnectionRefusedError):
                self.connection.connect()

    def ask(self, path: str, method: str = "GET") -> int:
        """Send a request, and return the status of the answer."""
        self.connection.request(method, path, headers=self.headers)
        answer = self.connection.getresponse()
        answer.read()
        return answer.status


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(commands()[0].split(), tmp_path_factory.mktemp("settings"))
    try:
        server.connect()
        yield server
        assert server.ask("/api/shutdown", "POST") == 200
        server.process.communicate(timeout=60)
    finally:
        server.process.kill()


def test_there_is_one_command():
    assert len(commands()) >= 2  # Makefile, docs/install.md
    assert len({*commands()}) == 1


def test_binder_opens_the_same_page():
    text = (ROOT / "docs" / "install.md").read_text("utf-8")
    [page] = re.findall(r"choose \*URL\* instead of \*File\*, and enter `([^`]+)`", text)
    assert commands()[0].endswith(f"={page}")


@pytest.mark.slow
def test_it_opens_the_first_lesson(server):
    assert server.opens == "/lab/tree/notebooks/01_batching.ipynb"
    assert server.ask(server.opens) == 200
    assert server.ask("/api/contents/notebooks/01_batching.ipynb?content=0") == 200


@pytest.mark.slow
def test_it_serves_every_figure_of_the_lessons(server):
    """JupyterLab resolves a figure's address from the notebook's folder, and requests it under /files."""
    folder = posixpath.dirname(server.opens.removeprefix("/lab/tree"))
    places = [posixpath.normpath(posixpath.join("/", folder, figure)) for figure in sorted(FIGURES)]
    assert len(places) > 50
    assert [place for place in places if server.ask(f"/files{place}") != 200] == []
