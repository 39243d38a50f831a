"""Faults of lesson 08 that raise no error; each changes one line of the running package.

Each fault comes from a public issue or a published trainer. `put_in` compiles a module with one line changed,
and gives the code of the changed function to the function in use, so that no module is imported again.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import ddpo_lessons

PACKAGE = Path(ddpo_lessons.__file__).parent


@dataclass(frozen=True)
class Fault:
    """A line of the package and its faulty replacement."""

    file: str  #: path in the package, such as "algorithms/ddpo.py"
    right: str  #: text that occurs once in the file, inside a function
    wrong: str  #: its replacement
    does: str  #: the effect
    found: str  #: the public source

    def __str__(self) -> str:
        return f"{self.does}\n  {self.file}\n  - {self.right}\n  + {self.wrong}\n  found: {self.found}"


FAULTS = {
    "stale sampler": Fault(
        "trainer.py",
        "config, self.family, start,",
        "config, family_of(__import__('copy').deepcopy(self.pipeline)), start,",
        "the sampler keeps a copy of the model, which never gets the trained adapter",
        "verl-omni #552",
    ),
    "other prompts": Fault(
        "rollout.py",
        "distinct = {name: value[::shared] for name, value in conditioning.items()}",
        "distinct = {name: 0 * value[::shared] for name, value in conditioning.items()}",
        "sampling uses no prompt, training uses the prompt",
        "imageddpo 0.1.2 without guidance (docs/peers.md)",
    ),
    "other weights": Fault(
        "trainer.py",
        "make_optimizer(config, list(trainable.values()))",
        "make_optimizer(config, [p.detach().clone() for p in trainable.values()])",
        "the optimizer holds copies of the weights",
        "TRL 0.21, a resumed adapter (docs/peers.md); trl #6700, an empty optimizer",
    ),
    "first layer only": Fault(
        "training/learner.py",
        "self.accelerator.backward(value * share)",
        "self.accelerator.backward(value * share); "
        "[p.grad.zero_() for p in list(self.trainable.values())[2:]]",
        "gradients reach only the first layer",
        "torchforge #592",
    ),
    "B stays 0": Fault(
        "training/learner.py",
        "self.accelerator.backward(value * share)",
        "self.accelerator.backward(value * share); "
        "[p.grad.zero_() for p in list(self.trainable.values())[1::2]]",
        "LoRA's B is never trained, so the adapter adds 0",
        "ai-toolkit #925",
    ),
    "empty file": Fault(
        "models/policy.py",
        "weights = {key: whole(tensor) for key, tensor in found.items()}",
        "weights = {key: 0 * whole(tensor) for key, tensor in found.items()}",
        "the saved adapter is empty",
        "Flow-Factory #156",
    ),
    "first four": Fault(
        "advantages.py",
        "return _standardise(values, values, eps).to(device)",
        "return _standardise(values, values[:4], eps).to(device)",
        "mean and standard deviation come from only the first four samples",
        "PipelineRL #54",
    ),
    "whole numbers": Fault(
        "advantages.py",
        "return _standardise(values, values, eps).to(device)",
        "return _standardise(values, values, eps).long().float().to(device)",
        "advantages are truncated to integers, as if they had the rewards' type",
        "TRL 0.21 with integer rewards (docs/peers.md)",
    ),
    "shifted images": Fault(
        "training/sampler.py",
        "zip(group.tolist(), images.split(group.shape[1]), strict=True)",
        "zip(group.tolist(), images.roll(1, 0).split(group.shape[1]), strict=True)",
        "each sample gets the reward of the image before it",
        "trl #3098",
    ),
    "bf16 latents": Fault(
        "rollout.py",
        "states.append(latents)\n            log_probs",
        "states.append(latents.bfloat16().float())\n            log_probs",
        "latents are kept in bf16, but log-probs are computed with those in float32",
        "TRL 0.21 in bf16 (docs/peers.md); DanceGRPO #57",
    ),
    "own ratio": Fault(
        "algorithms/ddpo.py",
        "trajectory.log_probs[rows, columns],",
        "new.log_prob,",
        "the ratio compares the new policy with itself",
        "questions in flow_grpo #131 and Flow-Factory #157",
    ),
    "0 to 255": Fault(
        "lessons/run_sets.py",
        "pixels = (255 * images).to(torch.uint8).float() / 255",
        "pixels = images.to(torch.uint8).float()",
        "the reward treats images in [0, 1] as if they were in 0 to 255",
        "cosmos-rl #580",
    ),
    "four noises": Fault(
        "training/sampler.py",
        "[self._generator(epoch, INITIAL_NOISE, group) for group in groups],",
        "[self._generator(epoch, INITIAL_NOISE, group % 4) for group in groups],",
        "all samples of an epoch start from one of four noises",
        "verl-omni #561",
    ),
}


@contextmanager
def put_in(fault: Fault) -> Iterator[None]:
    """Put a fault into the running package during a `with` block.

    Functions that are made inside the block keep the fault.

    Raises:
        ValueError: if the text does not occur exactly once in the file, or is not inside a function.
    """
    source = (PACKAGE / fault.file).read_text("utf-8")
    if source.count(fault.right) != 1:
        raise ValueError(f"{fault.file} has {fault.right!r} {source.count(fault.right)} times, not once")
    name = "ddpo_lessons." + fault.file.removesuffix(".py").replace("/", ".")
    line = source[: source.index(fault.right)].count("\n") + 1
    function = _function_at(importlib.import_module(name), ast.parse(source), line)
    broken = compile(source.replace(fault.right, fault.wrong), name, "exec", dont_inherit=True)
    healthy = function.__code__
    function.__code__ = next(c for c in _codes(broken) if c.co_qualname == healthy.co_qualname)
    try:
        yield
    finally:
        function.__code__ = healthy


def _function_at(module: Any, tree: ast.Module, line: int) -> FunctionType:
    """Return the function or method of a module that contains a line."""
    found: Any = module
    nodes: list[ast.stmt] = tree.body
    while not isinstance(found, FunctionType):
        named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        inside = [node for node in named if node.lineno <= line <= (node.end_lineno or 0)]
        if not inside:
            raise ValueError(f"line {line} of {module.__name__} is in no function")
        nodes, found = inside[0].body, inspect.getattr_static(found, inside[0].name)
        found = getattr(found, "fget", None) or inspect.unwrap(getattr(found, "__func__", found))
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield all code objects that are nested in a code object."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
