import http.server
import socket
import sys
import threading
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import ddpo_lessons.hub as hub_module
from ddpo_lessons import DDPOConfig, what_fits
from ddpo_lessons.cli import doctor
from ddpo_lessons.cli.doctor import Check


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Every test starts offline, without a CUDA device."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def hub(monkeypatch):
    """A model hub on loopback; call the fixture with the HTTP status that it should answer."""
    status = 200

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    def answer(new_status: int) -> None:
        nonlocal status
        status = new_status

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield answer
    server.shutdown()
    server.server_close()


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretend 8G")


def pretend_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    requires = ["torch<3,>=2.13", "peft<1,>=0.18", 'pytest>=9; extra == "test"']
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(metadata, "version", version)


# ---- the hub
@pytest.mark.parametrize("status", [200, 404, 503])
def test_hub_that_answers_if_with_an_error(hub, status):
    hub(status)
    assert hub_module.hub_reachable()


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", True), ("ENDPOINT", "models.example")])
def test_hub_that_is_switched_off_or_has_no_address(hub, monkeypatch, name, value):
    monkeypatch.setattr(constants, name, value)
    assert not hub_module.hub_reachable()


def test_hub_that_accepts_and_never_answers(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert not hub_module.hub_reachable(timeout=0.1)


# ---- doctor
def test_packages_within_and_outside_their_bounds_and_missing(monkeypatch):
    pretend_installed(monkeypatch, {"torch": "2.13.0+cpu", "peft": "0.17.1"})
    assert list(doctor.check_packages()) == [
        Check(True, "torch 2.13.0+cpu (needs >=2.13,<3)"),
        Check(False, 'peft 0.17.1 (needs >=0.18,<1): run `pip install "peft>=0.18,<1"`'),
    ]  # pytest belongs to an extra and is not looked at
    pretend_installed(monkeypatch, {"torch": "3.0"})
    assert list(doctor.check_packages()) == [
        Check(False, 'torch 3.0 (needs >=2.13,<3): run `pip install "torch>=2.13,<3"`'),
        Check(False, 'peft is missing: run `pip install "peft>=0.18,<1"`'),
    ]


def test_package_itself_not_installed(monkeypatch):
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    [check] = doctor.check_packages()
    assert not check.ok
    assert "pip install -e ." in check.text


def test_gpu_line(monkeypatch):
    assert [*doctor.check_gpu()] == [Check(True, "GPU: none; lesson 13 runs in small")]
    pretend_cuda(monkeypatch)
    assert list(doctor.check_gpu()) == [Check(True, "GPU: Pretend 8G, 6.0 of 8.0 GiB free")]
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert list(doctor.check_gpu()) == [Check(True, "GPU: Apple's, by MPS; training uses it, lessons do not")]


def test_memory_and_disk_limits(monkeypatch):
    memory = SimpleNamespace(available=2 * 2**30, total=4 * 2**30)
    disk = SimpleNamespace(free=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: disk)
    checks = [*doctor.check_memory(), *doctor.check_disk()]
    assert checks == [
        Check(True, "Memory: 2.0 of 4.0 GiB free (the demo needs 2)"),
        Check(True, "Disk: 1.0 GiB free (the demo needs 1, Stable Diffusion 10)"),
    ]
    memory.available -= 1
    disk.free -= 1
    assert [check.ok for check in [*doctor.check_memory(), *doctor.check_disk()]] == [False, False]


def test_checkpoint_present_truncated_and_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(doctor.CHECKPOINTS, "tiny-sd", tmp_path)
    [check] = doctor.check_checkpoint()
    assert not check.ok
    assert "missing" in check.text

    file = tmp_path / "unet" / "weights.safetensors"
    file.parent.mkdir()
    save_file({"weight": torch.zeros(250_000)}, file)  # 1 MB of float32 and a short header
    assert list(doctor.check_checkpoint()) == [Check(True, "tiny-sd: 1 weight files, 1.0 MB")]

    file.write_bytes(file.read_bytes()[:-1])
    [check] = doctor.check_checkpoint()
    assert not check.ok
    assert f"{file} is damaged" in check.text


def test_hub_lines(hub, monkeypatch):
    assert list(doctor.check_hub()) == [Check(True, f"Model hub: {constants.ENDPOINT} answers")]
    monkeypatch.setattr(constants, "ENDPOINT", "models.example")
    [check] = doctor.check_hub()
    needs = "presets of Stable Diffusion, rewards such as CLIP, and lesson 13 on a GPU download from it"
    assert str(check) == f"[NOTE] Model hub: {constants.ENDPOINT} is not reached; {needs}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    [check] = doctor.check_hub()
    assert str(check) == f"[NOTE] Model hub: switched off by HF_HUB_OFFLINE; {needs}"


def test_main_prints_one_line_per_finding_and_fails_if_one_does(monkeypatch, capsys):
    fine, bad = doctor.Check(True, "fine"), doctor.Check(False, "bad: do this")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([fine]),))
    assert doctor.run() == 0
    assert capsys.readouterr().out == "[OK]   fine\n\n1 of 1 checks passed\n"
    note = doctor.Check(True, "some need this", is_note=True)
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([fine, note]),))
    assert doctor.run() == 0
    text = "[OK]   fine\n[NOTE] some need this\n\n1 of 2 checks passed, 1 with a note\n"
    assert capsys.readouterr().out == text
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([bad]), lambda: iter([fine])))
    assert doctor.run() == 1
    lines, _, verdict = capsys.readouterr().out.partition("\n\n")
    assert lines.splitlines() == ["[FAIL] bad: do this", "[OK]   fine"]
    assert verdict.startswith("1 of 2 checks passed: fix what the lines with [FAIL] name")


def test_main_survives_a_torch_that_cannot_be_imported(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` raises ImportError
    assert doctor.run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("[FAIL] check_gpu: ") and "torch" in line for line in lines)
    assert lines[0].startswith("[OK]   Python")
    assert any(line.startswith("[OK]   Disk") or line.startswith("[FAIL] Disk") for line in lines)


def test_a_notebook_shows_one_line_per_finding(monkeypatch):
    fine, bad = doctor.Check(True, "fine"), doctor.Check(False, "bad: do this")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([fine, bad]),))
    assert repr(doctor.findings()) == "[OK]   fine\n[FAIL] bad: do this"


# ---- what fits
@pytest.mark.parametrize(
    ("free", "capability", "precision", "size"),
    [
        (16.1, (7, 5), "fp16", 2),  # T4: 0.85 of it less 6.3 GB hold three pairs of 2.3 GB
        (11.0, (7, 5), "fp16", 1),  # the same, with 5 GB held by another notebook
        (24.2, (8, 9), "bf16", 4),  # L4: six
        (85.0, (8, 0), "bf16", 16),  # A100: 28
        (8.0, (8, 6), "bf16", 1),
    ],
)
def test_what_fits(free, capability, precision, size, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * 1e9), 10**12))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    sizes = {"sample_micro_batch_size": size, "train_micro_batch_size": size}
    assert what_fits() == {"mixed_precision": precision, **sizes}


def test_without_a_gpu_the_trainer_picks():
    config = DDPOConfig(**what_fits())
    assert (config.mixed_precision, config.train_micro_batch_size) == ("no", 0)
