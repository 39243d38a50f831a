"""`--config`: what a file says becomes flags, which are checked as flags are, and flags override it."""

import json

import pytest
import yaml
from helpers import brightness, make_config, make_pipeline, red_three

from ddpo_lessons.algorithms.nft import NFT
from ddpo_lessons.cli import main as cli
from ddpo_lessons.cli import options, train
from ddpo_lessons.trainer import DDPOTrainer

SMALL = "--sample-num-steps 3 --sample-batch-size 2 --train-batch-size 2 --sample-num-batches-per-epoch 2"


def parse(*words: str) -> options.Train:
    command: options.Train = cli.parse(["train", *words])
    command.check()
    return command


def test_yaml_has_the_flags_names_and_flags_override_it(tmp_path):
    file = tmp_path / "mine.yaml"
    settings = {"num_epochs": 7, "reward": "colorfulness", "train_lora_target_modules": ["to_q", "to_k"]}
    settings |= {"allow_tf32": False, "tracker_kwargs": {"a": 1}, "validation_freq": 3, "seed": 2}
    file.write_text(yaml.safe_dump(settings))
    read = parse("--config", str(file), "--seed", "5", "--lr", "0.1")
    assert (read.reward, read.validation_freq) == ("colorfulness", 3)
    config = read.make_config()
    assert (config.num_epochs, config.seed, config.train_learning_rate) == (7, 5, 0.1)
    assert (config.train_lora_target_modules, config.allow_tf32) == (("to_q", "to_k"), False)
    assert config.tracker_kwargs == {"a": 1}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "words",
    [
        "--algorithm nft:beta=0.5 --prompt x --reward colorfulness=2,jpeg_compressibility=0.1",
        "--prompts digit_world_left_out --judge colorfulness",
    ],
)
def test_a_runs_own_file_makes_the_same_run_elsewhere(words, tmp_path):
    """Its config.json equals that of the first run, but for the folder."""
    for place, given in ((tmp_path / "a", [*words.split(), *SMALL.split()]),
                         (tmp_path / "b", ["--config", str(tmp_path / "a" / "config.json")])):  # fmt: skip
        trainer = train.make_trainer(parse(*given, "--output-dir", str(place)), None)
        trainer._open_log()
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert {**first, "output_dir": ""} == {**second, "output_dir": ""}
    if "nft" in words:
        assert isinstance(trainer.algorithm, NFT)
        assert trainer.algorithm.beta == 0.5


def test_a_prompt_replaces_the_files_prompts(tmp_path):
    (tmp_path / "c.yaml").write_text("prompts: digit_world\n")
    assert parse("--config", str(tmp_path / "c.yaml"), "--prompt", "x").prompts is None


def test_the_learning_rate_may_be_written_as_its_flag(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text("lr: 0.125\n")
    assert cli.parse(["train", "--config", str(file)]).settings["train_learning_rate"] == 0.125
    again = cli.parse(["train", "--config", str(file), "--lr", "0.5"])
    assert again.settings["train_learning_rate"] == 0.5


@pytest.mark.usefixtures("one_thread")
def test_a_script_s_run_does_not_name_its_reward(tmp_path):
    DDPOTrainer(make_config(tmp_path), brightness, red_three, make_pipeline())._open_log()
    with pytest.raises(ValueError, match="a script gave that run its reward: give --reward"):
        cli.parse(["train", "--config", str(tmp_path / "config.json")])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_epoch: 7", "'num_epoch', which is no setting: perhaps you meant `num_epochs`"),
        ("xyzzy: 7", "'xyzzy', which is no setting: use the names of train's flags"),
        ("num_epochs: [", "is neither JSON nor YAML"),
        ("- 1", "holds no settings: write lines such as `num_epochs: 5`"),
        ("seed: 1\n\tlr: 2", "is neither JSON nor YAML: line 2: found character '\\\\t' that cannot start"),
        ("mixed_precision: no", 'mixed_precision reads as false: write it in quotes, as "no"'),
        ("dry_run: maybe", "dry_run is 'maybe': write true or false"),
        ("prompt: [a, b]", "prompt is a list, where one value belongs"),
        ("config: other.yaml", "'config', which is no setting"),
        ('{"run": 5}', "is damaged: 'run' is not what a run writes"),
        ('{"run": {"reward": 3}}', "is damaged: 'run' is not what a run writes"),
        (None, "is not a file: give the config.json of a run, or YAML"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text, says, tmp_path):
    file = tmp_path / "bad.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=says):
        cli.parse(["train", f"--config={file}"])
    with pytest.raises(ValueError, match="--config needs a file"):
        cli.parse(["train", "--config"])
