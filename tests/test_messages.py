"""Errors of the command line: flags in the place of settings, in lines as wide as the terminal."""

import re
import shutil
import warnings
from os import terminal_size

import pytest

from ddpo_lessons.cli import doctor, main, messages
from ddpo_lessons.cli.options import Demo, Sample, Train

TRAIN = Train(settings={})
COMMAND = "`ddpo-lessons train --reward colorfulness --num-epochs 20`"


@pytest.mark.parametrize(
    ("message", "in_flags"),
    [
        ("num_epochs=-1 must be at least 1", "--num-epochs -1 must be at least 1"),
        ("resume_from='auto' or overwrite=True: set one", "--resume-from auto or --overwrite: set one"),
        ("train_cfg=False: set train_cfg=True", "--no-train-cfg: set --train-cfg"),
        ("choose another output_dir.", "choose another --output-dir."),
        ("a new run (train_lora_from)", "a new run (--train-lora-from)"),
        ("output_dir='a b' is a file", "--output-dir 'a b' is a file"),
        ("reward=my.py:seed=0.2,f=1 is 0", "--reward my.py:seed=0.2,f=1 is 0"),
        ("algorithm='nft' cannot: beta=0 must", "--algorithm nft cannot: beta=0 must"),
        # What no user has typed as a flag.
        ("prompt='seed=3, num_epochs' fits", "--prompt 'seed=3, num_epochs' fits"),
        ('prompt="a dog\'s seed=3" fits', '--prompt "a dog\'s seed=3" fits'),
        ("""prompt='it\\'s a "big" seed=3' fits""", """--prompt 'it\\'s a "big" seed=3' fits"""),
        ("the run's seed and prompt, the model's own", "the run's seed and prompt, the model's own"),
        ("write `num_epochs: 5`", "write `num_epochs: 5`"),
        ("Trainer(start=FromImages(noise_strength))", "Trainer(start=FromImages(noise_strength))"),
        ("config.num_epochs of runs/num_epochs/a", "config.num_epochs of runs/num_epochs/a"),
        ("give --images FOLDER: steps=3", "give --images FOLDER: steps=3"),
    ],
)
def test_settings_become_flags_and_quotations_stay(message, in_flags):
    assert messages.in_flags(message, TRAIN) == in_flags


def test_each_command_has_its_own_flags():
    assert messages.in_flags("sample_num_steps=0, batch_size=0", Sample()) == "--steps 0, --batch-size 0"
    assert messages.in_flags("num_epochs=0, eval_images=0", Demo()) == "num_epochs=0, --eval-images 0"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_lines_are_as_wide_as_the_terminal_and_break_no_command_flag_path_or_word(columns, monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: terminal_size((columns, 24)))
    path = "/a/" + "long-path-with-hyphens/" * 5
    words = [f"--some-flag-{number}" for number in range(20)]
    text = f"error: {' '.join(words)} in {path} do\n{COMMAND} and 'a prompt' {' '.join(words)}"
    lines = messages.wrapped(text).splitlines()
    long = [line.strip() for line in lines if len(line) > min(88, columns)]
    assert set(long) <= {path, COMMAND}
    assert len(lines) > 6
    assert re.sub(r"\n  ", " ", "\n".join(lines)) == text
    assert all(any(whole in line for line in lines) for whole in (path, COMMAND, *words, "'a prompt'"))


def test_warnings_of_the_package_name_flags_and_those_of_others_stay(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which `main` replaces
    monkeypatch.setattr(main, "run", lambda *_: 0)
    assert main.main(["train"]) == 0
    ours, others = (
        warnings.formatwarning("num_epochs=3 is odd", UserWarning, file, 1)
        for file in (main.__file__, __file__)
    )
    assert ours == "warning: --num-epochs 3 is odd\n"
    assert others == "warning: num_epochs=3 is odd\n"


def test_a_note_of_the_doctor_is_wrapped_below_its_text(monkeypatch, capsys):
    note = doctor.Check(True, "Model hub: " + "it is not reached " * 9, is_note=True)
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([note]),))
    assert doctor.run() == 0
    first, *others, _, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("[NOTE] Model hub: it")
    assert others
    assert {line[:7] for line in others} == {" " * 7}
    assert max(map(len, (first, *others))) <= 80
