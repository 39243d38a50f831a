"""`--algorithm FILE.py:CLASS`: the page's example by flag and in Python, and what is refused."""

import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    brightness,
    howto_blocks,
    launch,
    make_config,
    make_pipeline,
    printed_error,
    records_of,
    red_three,
)
from safetensors.torch import load_file

from ddpo_lessons.algorithms import make_algorithm, parse_algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.nft import NFT
from ddpo_lessons.cli import main as cli
from ddpo_lessons.config import LORA_FILE
from ddpo_lessons.models import load_pipeline
from ddpo_lessons.rewards import get_reward
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.record import read_run
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = itertools.count()
RLOO, IN_PYTHON, IMITATION = howto_blocks("own-algorithm", "python")
*COMMANDS, _compare = howto_blocks("own-algorithm", "sh")
SMALL = shlex.split(
    "--sample-num-steps 3 --sample-batch-size 4 --sample-num-batches-per-epoch 1 --train-batch-size 4 "
    "--sample-group-size 2 --image-grid-freq 0 --reward colorfulness"
)
OTHERS = """
from typing import Optional

from ddpo_lessons.algorithms.algorithm import Algorithm
from ddpo_lessons.algorithms.ddpo import DDPO as TheirDDPO
from ddpo_lessons.algorithms.nft import NFT


class Kinds(TheirDDPO):
    def __init__(self, many=2, share: Optional[float] = None, on: bool = False, word: str = "a", **others):
        self.settings = dict(many=many, share=share, on=on, word=word)

    def identity(self):
        return self.settings


class Inherits(NFT):
    pass


class Forgets(TheirDDPO):
    def __init__(self, scale: float = 1.0):
        self.factor = scale


class Hides(TheirDDPO):
    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def identity(self):
        return {}


class Needs(TheirDDPO):
    def __init__(self, scale):
        self.scale = scale


class Half(Algorithm):
    name = "half"


class Nameless(Algorithm):
    def advantages(self, rewards, keys): ...
    def steps(self, samples, learner): ...


class DDPO(TheirDDPO):
    pass


class Divides(TheirDDPO):
    def advantages(self, rewards, keys):
        return (rewards - rewards.mean()) / rewards.view(-1, 1).std(dim=1)


class Other:
    pass


def red(images, prompts, metadata): ...
"""


@pytest.fixture
def mine(here, monkeypatch):
    """The page's files as one, and another one, under names that no other test has imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"my_algorithms_{next(NUMBERS)}"
    (here / f"{name}.py").write_text(RLOO + IMITATION)
    (here / f"others_{name}.py").write_text(OTHERS)
    return name


def train(algorithm: str, *words: str, status: int = 0) -> None:
    flags = ["train", "--algorithm", algorithm, *SMALL, "--num-epochs", "2", "--output-dir", "run", *words]
    assert cli.main(flags) == status


# ------------------------------------------------------------------------------------------- the page
def test_rloo_compares_each_reward_with_the_mean_of_the_others(mine):
    algorithm: Any = make_algorithm(f"{mine}.py:RLOO:scale=2")
    algorithm.config = make_config("unused", sample_group_size=3)
    rewards = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    # 2 (1 - (2 + 6) / 2) = -6, 2 (2 - 7 / 2) = -3, 2 (6 - 3 / 2) = 9; 2 (0 - 3 / 2) = -3, 2 (3 - 0) = 6
    assert algorithm.advantages(rewards, [None] * 6).tolist() == [-6, -3, 9, -3, -3, 6]


@pytest.mark.slow
def test_the_page_s_commands_run(here, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    for name, text in (("rloo", RLOO), ("imitation", IMITATION)):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (here / f"{name}.py").write_text(text)
    for command in COMMANDS:
        assert cli.main([*shlex.split(command)[1:], *SMALL]) == 0
    exec(compile(IN_PYTHON, "own-algorithm.md", "exec"), {})
    rloo, imitation = {"name": "RLOO", "scale": 2.0}, {"name": "SelfImitation", "fraction": 0.1}
    runs = {"rloo-run": (rloo, 2), "rloo-python": (rloo, 1), "imitation-run": (imitation, 2)}
    for folder, (algorithm, epochs) in runs.items():
        assert read_run(Path(folder))[1]["algorithm"] == algorithm
        assert len(read_metrics(folder, "epoch")) == epochs
    for name in ("rloo", "imitation"):
        monkeypatch.delitem(sys.modules, name)


def test_self_imitation_takes_one_more_step_on_all_actions_of_the_best_samples(mine, tmp_path):
    algorithm: Any = make_algorithm(f"{mine}.py:SelfImitation:fraction=0.5")
    seen: list[set[tuple[int, int]]] = []
    imitate = algorithm.imitate

    def watch(samples: Any, denoiser: Any, pairs: Any) -> Any:
        seen.append(set(zip(pairs["rows"].tolist(), pairs["columns"].tolist(), strict=True)))
        return imitate(samples, denoiser, pairs)

    algorithm.imitate = watch
    sizes = {"sample_batch_size": 4, "sample_num_batches_per_epoch": 1, "train_batch_size": 4}
    config = make_config(tmp_path / "run", **sizes)
    trainer = Trainer(config, brightness, red_three, make_pipeline(), algorithm=algorithm)
    rewards = torch.tensor(trainer.step(0)["rewards"])
    steps = read_metrics(tmp_path / "run", "step")
    assert ["best_log_prob" in step for step in steps] == [False, True]
    assert all(finding.passed for finding in trainer.preflight)
    actions = {column for _, column in set.union(*seen)}
    assert len(actions) > 1
    assert set.union(*seen) == {(row, c) for row in rewards.topk(2).indices.tolist() for c in actions}


def test_imitated_actions_become_more_likely(mine, tmp_path):
    """With rewards that are all equal, DDPO's own step has no gradient."""
    algorithm: Any = make_algorithm(f"{mine}.py:SelfImitation:fraction=1")
    kept: list[Any] = []
    steps = algorithm.steps

    def twice(samples: Any, learner: Any) -> Any:
        *_, (loss, groups) = steps(samples, learner)
        kept.extend([loss, groups])
        yield loss, groups
        yield loss, groups

    algorithm.steps = twice
    config = make_config(tmp_path / "run", train_learning_rate=1e-3)
    Trainer(config, brightness, red_three, make_pipeline(), algorithm=algorithm).step(0)
    before, after = (step["best_log_prob"] for step in read_metrics(tmp_path / "run", "step"))
    assert after > before


def test_a_flag_trains_what_python_trains(mine, here, model):
    train(f"{mine}.py:RLOO:scale=2", "--model", model, "--prompt", "a red three")
    record = json.loads(Path("run/config.json").read_text())["run"]
    assert record["algorithm"] == {"name": "RLOO", "scale": 2.0}
    assert record["own_algorithm"] == f"{mine}.py:RLOO:scale=2"
    config, _ = read_run(Path("run"))
    config.output_dir = "python"
    own = make_algorithm(f"{mine}:RLOO", scale=2.0)
    parts = get_reward("colorfulness"), lambda: ("a red three", {}), load_pipeline(model)
    trainer = Trainer(config, *parts, algorithm=own)
    trainer.train()
    assert records_of(Path("python")) == records_of(Path("run"))
    assert len(read_metrics("run", "step")) == 2


def test_a_run_resumes_with_its_settings_only(mine, here, model, capsys):
    flags = ("--model", model, "--prompt", "a red three")
    train(f"{mine}.py:RLOO:scale=2", *flags)
    again = (*flags, "--num-epochs", "3", "--resume-from", "latest")
    train(f"{mine}.py:RLOO:scale=3", *again, status=2)
    assert "scale: 2.0 there, 3.0 here" in printed_error(capsys)
    train("ddpo", *again, status=2)
    assert "algorithm: 'RLOO' there, 'DDPO' here" in printed_error(capsys)
    train(f"{mine}:RLOO:scale=2", *again)
    assert len(read_metrics("run", "epoch")) == 3


def test_a_run_s_own_file_makes_the_same_run_again(mine, here, model, capsys):
    train(f"{mine}.py:RLOO:scale=2", "--model", model, "--prompt", "a red three", "--num-epochs", "1")
    again = cli.parse(["train", "--config", "run/config.json"])
    assert again.algorithm == f"{mine}.py:RLOO:scale=2"
    other = cli.parse(["train", "--config", "run/config.json", "--algorithm", "nft"])
    assert other.algorithm == "nft"
    parts = make_config(here / "script", sample_group_size=2), brightness, red_three, make_pipeline()
    Trainer(*parts, algorithm=make_algorithm(f"{mine}:RLOO"))._open_log()
    script = ["train", "--config", "script/config.json", "--reward", "colorfulness"]
    with pytest.raises(ValueError, match="a script gave that run its algorithm: give --algorithm"):
        cli.parse(script)
    assert cli.parse([*script, "--algorithm", "ddpo"]).algorithm == "ddpo"


def test_dry_run_and_preflight_know_it(mine, here, model, capsys):
    flags = ("--model", model, "--prompt", "a red three")
    train(f"{mine}.py:RLOO", *flags, "--sample-guidance-scale", "1", "--dry-run")
    text = capsys.readouterr().out
    assert f"algorithm: {mine}.py:RLOO" in text
    assert re.search(r"forward passes in sampling, at most +12 ", text)  # 4 samples of 3 steps
    assert cli.main(["preflight", "--algorithm", f"{mine}.py:RLOO", *SMALL, *flags]) == 0


@pytest.mark.slow
def test_two_processes_train_the_weights_of_one(mine, here, model):
    words = ["train", "--algorithm", f"{mine}.py:RLOO:scale=2", *SMALL, "--num-epochs", "2", "--model", model]
    words += ["--prompt", "a red three", "--train-adam-epsilon", "1e-2", "--output-dir"]
    assert cli.main([*words, "one"]) == 0
    halves = ["--sample-batch-size", "2", "--train-batch-size", "2"]
    (here / "words.json").write_text(json.dumps([*words, "two", *halves]))
    together = launch(__file__, here, processes=2)
    _, errors = together.communicate(timeout=300)
    assert together.returncode == 0, errors[-3000:]
    one, two = (load_file(here / folder / "lora" / LORA_FILE) for folder in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------ the form
def test_settings_are_read_as_the_constructor_says(mine):
    kinds: Any = make_algorithm(f"others_{mine}.py:Kinds:many=3,share=0.5,on=true,word=C:x=y")
    assert kinds.settings == {"many": 3, "share": 0.5, "on": True, "word": "C:x=y"}
    kinds = make_algorithm(f"others_{mine}:Kinds:share=none", many=7)
    assert kinds.settings == {"many": 7, "share": None, "on": False, "word": "a"}
    assert isinstance(make_algorithm(f"others_{mine}.py:Inherits:beta=0.5"), NFT)


def test_a_path_may_hold_colons():
    assert parse_algorithm(r"C:\x\my.py:RLOO:scale=2") == (r"C:\x\my.py:RLOO", {"scale": "2"})
    assert parse_algorithm("a.b:RLOO") == ("a.b:RLOO", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py:RLOO", "--algorithm nowhere.py:RLOO: there is no file nowhere.py"),
        ("nowhere:RLOO", "--algorithm nowhere:RLOO cannot be imported: there is no module nowhere in"),
        ("NAME.py", "--algorithm NAME.py names no class of the file: write NAME.py:CLASS"),
        ("NAME.py:scale=2", "names no class of the file: write NAME.py:CLASS"),
        ("NAME.py:RLO", "NAME.py has no 'RLO'; it has RLOO"),
        ("NAME.py:RLOO:scal=2", "has no setting 'scal' (perhaps scale): it has scale"),
        ("NAME.py:RLOO:scale=much", "scale=much must be a number"),
        ("NAME.py:RLOO:scale", "write settings as NAME.py:RLOO:KEY=VALUE"),
        (
            "NAME.py:RLOO:scale=-1",
            "NAME.py:RLOO cannot be made of {'scale': -1.0}: scale=-1.0 must be above 0",
        ),
        ("NAME.py:RLOO --sample-group-size 1", "of a group: sample_group_size must be at least 2"),
        ("others_NAME.py:Other", "is no subclass of ddpo_lessons.algorithms.algorithm.Algorithm"),
        ("others_NAME.py:red", "is no subclass of ddpo_lessons.algorithms.algorithm.Algorithm"),
        (
            "others_NAME.py:Needs",
            "NAME.py:Needs cannot be made: Needs.__init__() missing 1 required positional",
        ),
        ("others_NAME.py:Half", "abstract"),
        ("others_NAME.py:Nameless", "has no name: begin the class with name = 'nameless'"),
        ("others_NAME.py:DDPO", "is called as one of the package is: rename the class"),
        ("others_NAME.py:Forgets:scale=2", "does not keep its argument 'scale'"),
        ("others_NAME.py:Hides:scale=2", "leaves 'scale' out of what its identity() returns"),
        ("broken.py:RLOO", "cannot be imported: SyntaxError"),
        ("flow_gpro:window=3", "--algorithm flow_gpro does not exist (perhaps flow_grpo)"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_model_loads(mine, text, message, capsys, monkeypatch):
    monkeypatch.setattr(
        "ddpo_lessons.cli.train.load_pipeline", lambda *_, **__: pytest.fail("a model is loaded")
    )
    Path("broken.py").write_text("class RLOO(:\n")
    algorithm, *words = text.replace("NAME", mine).split()
    train(algorithm, *words, status=2)
    line = printed_error(capsys)
    assert line.startswith("error: ")
    assert message.replace("NAME", mine) in line
    assert not Path("run").exists()


def test_advantages_that_divide_by_the_deviation_of_one_name_the_cause(mine, here, model, capsys):
    train(f"others_{mine}.py:Divides", "--model", model, "--prompt", "a red three", status=2)
    error = printed_error(capsys)
    assert "advantages holds NaN or inf: does it divide by the deviation of a group of one sample" in error


if __name__ == "__main__":  # what each of two processes runs
    os.chdir(sys.argv[1])
    sys.exit(cli.main(json.loads(Path("words.json").read_text())))


# ----------------------------------------------------------------------------------- other policies
class Asks(DDPO):
    """Looks at another policy, "reference" or "old_policy", without saying that it needs it."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def loss(self, samples: Any, learner: Any, denoiser: Any, pairs: Any) -> Any:
        with getattr(learner, self.policy)():
            pass
        return super().loss(samples, learner, denoiser, pairs)


def test_a_policy_that_is_not_kept_is_an_error_and_not_the_newest_one(tmp_path):
    def step(algorithm: DDPO, **changes: Any) -> None:
        config = make_config(tmp_path / f"{len(list(tmp_path.iterdir()))}", **changes)
        parts = (config, brightness, red_three, make_pipeline())
        Trainer(*parts, algorithm=algorithm).step(0)

    step(Asks("reference"))  # a new adapter is switched off
    with pytest.raises(RuntimeError, match=r"needs_reference\(config\)"):
        step(Asks("reference"), train_use_lora=False)
    with pytest.raises(RuntimeError, match="set keeps_old = True"):
        step(Asks("old_policy"))


class SaysANumber(DDPO):
    """Returns a statistic that is no tensor."""

    def loss(self, samples: Any, learner: Any, denoiser: Any, pairs: Any) -> Any:
        loss, record = super().loss(samples, learner, denoiser, pairs)
        return loss, {**record, "mine": 0.5}


def test_a_statistic_may_be_a_number(tmp_path):
    Trainer(make_config(tmp_path), brightness, red_three, make_pipeline(), algorithm=SaysANumber()).step(0)
    assert read_metrics(tmp_path, "step")[0]["mine"] == 0.5


# ------------------------------------------------------------------------ what is given to the trainer
class Returns(DDPO):
    """Return something else from one of the methods that an algorithm may override."""

    def __init__(self, method: str, change: Callable[[Any], Any]) -> None:
        self.method, self.change = method, change

    def _changed(self, method: str, found: Any) -> Any:
        return self.change(found) if self.method == method else found

    def advantages(self, *given: Any) -> Any:
        return self._changed("advantages", super().advantages(*given))

    def steps(self, *given: Any) -> Any:
        return self._changed("steps", super().steps(*given))

    def loss(self, *given: Any) -> Any:
        return self._changed("loss", super().loss(*given))

    def sampling_schedule(self, *given: Any, **named: Any) -> Any:
        return self._changed("sampling_schedule", super().sampling_schedule(*given, **named))

    def state_dict(self) -> Any:
        return self._changed("state_dict", super().state_dict())


def each(change: Callable[[Any, list[Any]], Any]) -> Callable[[Any], Any]:
    """Return a change of `steps` that changes each step."""
    return lambda steps: (change(loss, groups) for loss, groups in steps)


def with_pairs(**changes: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """Return a change of `steps` that changes entries of each group."""
    return each(
        lambda loss, groups: (
            loss,
            [{**group, **{n: change(group[n]) for n, change in changes.items()}} for group in groups],
        )
    )


OF_STEPS = r"steps\(\) of the algorithm "
NO_PAIRS = OF_STEPS + r"must yield \(loss, groups\) pairs"


@pytest.mark.parametrize(
    ("method", "change", "error"),
    [
        ("advantages", lambda a: a.tolist(), r"advantages\(\) of the algorithm must return a tensor"),
        ("advantages", lambda a: a.view(-1, 2)[:1], r"returned shape \(1, 2\) for .* samples of .* actions"),
        ("steps", lambda _: None, NO_PAIRS + ", not return None"),
        ("steps", lambda _: (), OF_STEPS + "yielded nothing"),
        ("steps", each(lambda *_: 3), NO_PAIRS + ", not 3"),
        ("steps", each(lambda loss, _: loss), NO_PAIRS + ", not functools.partial"),
        ("steps", each(lambda _, groups: ("loss", groups)), OF_STEPS + "yielded the loss 'loss'"),
        ("steps", each(lambda loss, _: (loss, [])), OF_STEPS + r"yielded the groups \[\]: yield a list"),
        ("steps", each(lambda loss, groups: (loss, groups[0])), OF_STEPS + "yielded the groups {'rows'"),
        ("steps", each(lambda loss, _: (loss, [{}])), OF_STEPS + r"yielded the groups \[{}\]"),
        ("steps", with_pairs(rows=torch.Tensor.tolist), OF_STEPS + "yielded the groups"),
        ("steps", with_pairs(columns=lambda c: c[1:]), OF_STEPS + "yielded the groups"),
        ("steps", with_pairs(rows=lambda r: r[:0]), OF_STEPS + "yielded the groups"),
        ("steps", with_pairs(columns=lambda c: c + 100), OF_STEPS + r"yielded 'columns' from 100 to \d+"),
        ("steps", with_pairs(rows=lambda r: r - 1), OF_STEPS + "yielded 'rows' from -1 to"),
        (
            "steps",
            each(lambda loss, groups: (loss, [{"rows": groups[0]["rows"]}])),
            OF_STEPS + "yielded pairs without 'columns'",
        ),
        ("loss", lambda pair: pair[0], r"loss\(\) of the algorithm must return a pair of the loss"),
        ("loss", lambda pair: (pair[0].expand(3), pair[1]), r"returned the loss with shape \(3,\)"),
        ("loss", lambda pair: (pair[0].detach(), pair[1]), "returned a loss without a gradient"),
        ("loss", lambda pair: (pair[0], {"mine": torch.ones(2)}), "the statistic 'mine' with shape"),
        ("loss", lambda pair: (pair[0], {"mine": "good"}), "the statistic 'mine' as 'good'"),
        ("sampling_schedule", lambda _: None, r"sampling_schedule\(\) of the .* a schedule.*, not None"),
        (
            "state_dict",
            lambda _: torch.zeros(2),
            r"state_dict\(\) of the algorithm must return .*, not tensor",
        ),
        (
            "state_dict",
            lambda _: {"seen": (1, 2)},
            r"state_dict\(\) of the algorithm must return .*, not {'seen'",
        ),
    ],
)
def test_an_algorithm_that_returns_something_else_is_refused_by_name(tmp_path, method, change, error):
    parts = make_config(tmp_path), brightness, red_three, make_pipeline()
    with pytest.raises((TypeError, ValueError), match=error):
        Trainer(*parts, algorithm=Returns(method, change)).step(0)


def test_an_epoch_without_a_signal_may_have_no_step(tmp_path):
    """As of an algorithm that leaves out samples with an advantage of 0."""
    parts = make_config(tmp_path), lambda images, *_: torch.ones(len(images)), red_three, make_pipeline()
    with pytest.warns(UserWarning, match="all .* rewards are 1"):
        Trainer(*parts, algorithm=Returns("steps", lambda _: ())).step(0)


class Counts(DDPO):
    """Sets its state after `begin` of its base class."""

    def begin(self, *given: Any) -> None:
        super().begin(*given)
        self.count = 0

    def state_dict(self) -> Any:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def test_a_state_may_begin_after_the_base_class_s(tmp_path):
    Trainer(make_config(tmp_path), brightness, red_three, make_pipeline(), algorithm=Counts()).step(0)


def test_replay_shares_predictions_where_steps_does_not(tmp_path):
    """The record of a run is the same whether its steps share predictions or leave that to replay."""

    def step(change: Callable[[Any], Any]) -> Any:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        config = make_config(folder, sample_group_size=2)
        parts = config, brightness, red_three, make_pipeline()
        Trainer(*parts, algorithm=Returns("steps", change)).step(0)
        return read_metrics(folder, "step")

    alone = each(lambda loss, groups: (loss, [{n: g[n] for n in ("rows", "columns")} for g in groups]))
    assert step(alone) == step(lambda steps: steps)
