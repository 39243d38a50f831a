"""What loading a model prints: nothing but what a user can act on; the libraries' settings stay."""

import logging
import subprocess
import sys
import warnings

import pytest
import transformers
from diffusers.utils import logging as of_diffusers
from helpers import make_pipeline
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as of_transformers

from ddpo_lessons import loading
from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.models import load_pipeline
from ddpo_lessons.models.policy import with_parts
from ddpo_lessons.worlds import load_tiny_sd


@pytest.fixture(autouse=True)
def bars(monkeypatch):
    """A terminal, and the libraries' settings as they are in a new process."""
    monkeypatch.setattr(loading, "draws_bars", lambda: True)
    libraries = of_diffusers, of_transformers
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.enable_progress_bar()
        library.set_verbosity_warning()
    yield
    for library, level in zip(libraries, levels, strict=True):
        library.set_verbosity(level)
    enable_progress_bars()


@pytest.mark.parametrize("load", [load_tiny_sd, lambda: load_pipeline("tiny-sd")])
def test_a_model_of_the_package_loads_without_a_word(load, capfd):
    load()
    assert capfd.readouterr() == ("", "")
    assert of_diffusers.is_progress_bar_enabled()
    assert of_transformers.is_progress_bar_enabled()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_another_model_has_bars_on_a_terminal(is_terminal, model, capfd, monkeypatch):
    monkeypatch.setattr(loading, "draws_bars", lambda: is_terminal)
    load_pipeline(model)
    assert ("Loading pipeline components" in capfd.readouterr().err) == is_terminal


def test_bars_that_are_off_stay_off():
    disable_progress_bars()  # those of downloads alone
    with quiet_loading():
        assert not of_transformers.is_progress_bar_enabled()
    assert of_transformers.is_progress_bar_enabled()
    assert are_progress_bars_disabled()
    of_diffusers.disable_progress_bar()
    with quiet_loading():
        pass
    assert not of_diffusers.is_progress_bar_enabled()
    of_diffusers.enable_progress_bar()


def test_what_is_raised_is_not_printed_too(tmp_path, capfd):
    make_pipeline().save_pretrained(tmp_path)
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="could not be loaded"):
        load_pipeline(tmp_path)
    assert "An error occurred while trying to fetch" not in capfd.readouterr().err


def test_the_checker_is_not_warned_of_again(caplog):
    pipeline = make_pipeline()
    pipeline.register_to_config(requires_safety_checker=True)
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    with_parts(pipeline, {})
    assert caplog.messages == []
    type(pipeline)(**pipeline.components, requires_safety_checker=True)
    assert "You have disabled the safety checker" in caplog.text  # for a call of the user
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("is_missing", [True, False])
def test_weights_that_are_missing_are_told_and_superfluous_ones_are_not(is_missing, tmp_path, caplog):
    sizes = {"n_embd": 4, "n_head": 1, "vocab_size": 5, "n_positions": 3}
    small, large = (transformers.GPT2Config(n_layer=layers, **sizes) for layers in (1, 2))
    transformers.GPT2LMHeadModel(small if is_missing else large).save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    with quiet_loading():
        config = large if is_missing else small
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path, config=config)
    assert ("MISSING" in caplog.text) == is_missing
    assert ("UNEXPECTED" in caplog.text) is False
    logger.removeHandler(caplog.handler)


def test_warnings_of_users_code_stay():
    with warnings.catch_warnings(record=True) as found, quiet_loading():
        warnings.warn("`local_dir_use_symlinks` is deprecated", stacklevel=1)
        warnings.warn("mine", stacklevel=1)
    assert [str(each.message) for each in found] == ["mine"]


@pytest.mark.slow
def test_imports_print_nothing():
    """In a new process, because transformers says once per process that torchvision is missing."""
    code = "from ddpo_lessons import checks, compat, worlds; from ddpo_lessons.lessons import demo; "
    code += "worlds.load_tiny_sd(); worlds.load_tiny_sd3(); worlds.load_tiny_zoo()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
