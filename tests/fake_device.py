"""A CUDA device for machines without one: real values, CUDA's errors, and a log of what crosses or waits.

The tensors are ordinary ones in the host's memory; the storages of those that are "on the device" carry a
mark. A function mode, which sees every call of torch from Python, marks results, answers `tensor.device` by
the marks and refuses what CUDA would refuse. Views share a storage, and so its mark. Outside of `fake_device`
nobody looks at marks, so that nothing has to be taken back; in a later block old marks count again.

What it does not know: calls in other threads and processes, what torch does inside of one call (such as the
backward pass), generators of the device, and torch.compile; `torch.cuda.is_available()` says what it says
without. Nothing is learned here of kernels, rounding or time.
"""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from torch.overrides import TorchFunctionMode

import ddpo_lessons

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
MARK = "is_on_fake_device"

PACKAGE = Path(ddpo_lessons.__file__).parent
NOT_CALLERS = (os.path.join(os.path.dirname(torch.__file__), ""), __file__)

# Calls that give the host a value, or make a tensor whose size only the device knows.
WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select", "bincount", "unique"),
    "unique_consecutive",
}
INDEXING = {"__getitem__", "__setitem__"}
COPIES = {"to", "cpu", "cuda", "tensor", "as_tensor"}  # to the device that they name
# Calls that take tensors of both sides.
MIXES = {
    *(*COPIES, *INDEXING, "new_tensor", "copy_"),
    *("data.__set__", "_has_compatible_shallow_copy_type"),  # with these a module moves its parameters
}
# Elsewhere the device takes single numbers from the host; these make one tensor of all.
JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
TO_NUMPY = {"numpy", "__array__"}
ANSWERS = {"device.__get__": DEVICE, "is_cuda.__get__": True, "is_cpu.__get__": False, "get_device": 0}


@dataclass
class Traffic:
    """How often each line of code copied between host and device, or waited for the device.

    Lines are "file:line": the innermost one of the package, or else that of the nearest caller outside of
    torch. A copy to the host waits too, and counts as a copy only.
    """

    to_device: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget what was counted so far."""
        for counter in vars(self).values():
            counter.clear()

    def __str__(self) -> str:
        rows = [(kind, *row) for kind, counter in vars(self).items() for row in sorted(counter.items())]
        return "\n".join(f"{count:6} {kind:9} {line}" for kind, line, count in rows)


@contextlib.contextmanager
def fake_device(has_float64: bool = True, is_refused: bool = False) -> Iterator[Traffic]:
    """Let accelerate choose a device that is not the host, for the time of a `with` block.

    Args:
        has_float64: false where the device refuses tensors of float64, as Apple's MPS does.
        is_refused: whether it is an error that accelerate chooses the device. Calls of torch are not seen
            then, which is faster, because torch itself refuses a device that the machine does not have.

    Yields:
        The log, which counts until the block ends.
    """
    traffic = Traffic()

    def synchronize(device: Any = None) -> None:
        _add(traffic.waits)

    def choose(state: PartialState) -> torch.device:
        if is_refused:
            raise RuntimeError("accelerate chooses the GPU of a machine that is made up: stay on the CPU")
        return torch.device(DEVICE.type)

    with contextlib.ExitStack() as stack:
        for state in (PartialState, AcceleratorState):  # accelerate chooses a device once for the process
            stack.enter_context(mock.patch.dict(state._shared_state, clear=True))
        for name, replacement in {
            "accelerate.PartialState.default_device": property(choose),
            "torch.cuda.synchronize": synchronize,
            "torch._C._group_tensors_by_device_and_dtype": _group_tensors,
            "torch.autocast.__init__": _init_autocast,
            # Asked before autocast of the device and the loss's scaling are turned on; bool() is False.
            "torch.cuda.amp.common.amp_definitely_not_available": bool,
        }.items():
            stack.enter_context(mock.patch(name, replacement))
        if not is_refused:
            stack.enter_context(_Device(traffic, has_float64))
        yield traffic


class _Device(TorchFunctionMode):
    """Runs every call of torch on the host, as though marked tensors were on the device."""

    def __init__(self, traffic: Traffic, has_float64: bool) -> None:
        super().__init__()
        self.traffic, self.has_float64 = traffic, has_float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = _Call(func, args, kwargs or {})
        if call.marked and call.name in ANSWERS:
            return ANSWERS[call.name]
        _refuse(call)
        _count(call, self.traffic)
        result = call.run()
        if not self.has_float64 and any(map(_is_float64_there, _find_tensors(result))):
            raise TypeError("the MPS framework doesn't support float64. Please use float32 instead.")
        return result


# -------------------------------------------------------------------------------------------- marks
def _is_marked(tensor: torch.Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), MARK)


def _is_float64_there(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64 and _is_marked(tensor)


def _place(tensor: torch.Tensor) -> torch.device:
    return DEVICE if _is_marked(tensor) else HOST


def _names_device(value: Any) -> bool:
    """Tell whether an argument names the device: "cuda", a torch.device or the number of a GPU."""
    if isinstance(value, (str, torch.device)):
        return torch.device(value).type == DEVICE.type
    return isinstance(value, int) and not isinstance(value, bool)


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Find the tensors in the arguments or the result of a call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _find_tensors(part)


# -------------------------------------------------------------------------------------------- calls
class _Call:
    """One call of torch: what it is given, and where its result belongs."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = func.__name__
        if self.name in ("__get__", "__set__"):  # of an attribute
            self.name = f"{func.__self__.__name__}.{self.name}"  # type: ignore[attr-defined]
        self.subject = next(iter([*args, *kwargs.values()]), None)  # "self" of a method, data of torch.tensor
        # The memo of a deepcopy holds what was copied before, of both sides.
        given = self.subject if self.name == "__deepcopy__" else (args, kwargs)
        self.tensors = list(_find_tensors(given))
        self.marked = [tensor for tensor in self.tensors if _is_marked(tensor)]
        self.named = self._named_place()
        self.place = self.named or (DEVICE if self.marked else HOST)

    def _named_place(self) -> torch.device | None:
        """Return where the result is asked for, if the call says so."""
        if self.name in ("cpu", "cuda"):
            return HOST if self.name == "cpu" else DEVICE
        candidates = [self.kwargs.get("device")]
        if self.name == "to":
            candidates += [*self.args[1:], self.kwargs.get("other")]
        for value in candidates:
            if isinstance(value, torch.Tensor):
                return _place(value)
            if _names_device(value):
                return DEVICE
            if isinstance(value, (str, torch.device)):
                return HOST
        # torch.tensor makes a tensor of the host out of numbers, also if these are on the device.
        return HOST if self.name in COPIES and not isinstance(self.subject, torch.Tensor) else None

    @property
    def indices(self) -> list[Any]:
        """The tensors, lists and arrays that the call indexes with."""
        if self.name not in INDEXING:
            return []
        index = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
        return [part for part in index if hasattr(part, "__len__") or isinstance(part, torch.Tensor)]

    def run(self) -> Any:
        """Call torch on the host, and put the result where it belongs."""
        func, args, kwargs = self.func, self.args, self.kwargs
        if self.name == "cuda":
            func, args, kwargs = torch.Tensor.to, (self.subject, HOST), {}
        if self.name == "to":
            args = (args[0], *(HOST if _names_device(value) else value for value in args[1:]))
        if _names_device(kwargs.get("device")):
            kwargs = {**kwargs, "device": HOST}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and self.named not in (None, _place(result)):
            result = result.clone() if self._is_old(result) else result
        if self.place == DEVICE:
            for tensor in _find_tensors(result):
                if not self._is_old(tensor):
                    setattr(tensor.untyped_storage(), MARK, True)
        return result

    def _is_old(self, result: torch.Tensor) -> bool:
        """Tell whether a result is a view of an argument, whose place it shares."""
        storage = result.untyped_storage()
        return any(tensor.untyped_storage() is storage for tensor in self.tensors)


def _refuse(call: _Call) -> None:
    """Raise what CUDA would raise."""
    if call.marked and call.name in TO_NUMPY:
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )
    generator = call.kwargs.get("generator")
    if generator is not None and generator.device.type != call.place.type:
        raise RuntimeError(
            f"Expected a '{call.place.type}' device type for generator but found '{generator.device.type}'"
        )
    if _is_mixed(call):
        places = ", ".join(f"{_place(tensor)} {tuple(tensor.shape)}" for tensor in call.tensors)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
            f"{HOST}! ({call.name} of {places})"
        )


def _is_mixed(call: _Call) -> bool:
    """Tell whether a call is given tensors of both sides that do not go together."""
    if call.name in INDEXING and not _is_marked(call.args[0]):  # such a tensor takes no index of the device
        return any(tensor.ndim > 0 and _is_marked(tensor) for tensor in _find_tensors(call.indices))
    if not call.marked or call.name in MIXES:
        return False
    strangers = [tensor for tensor in call.tensors if not _is_marked(tensor)]
    is_in_place = call.name.endswith("_") and not call.name.endswith("__")
    return any(
        tensor.ndim > 0 or call.name in JOINS or (is_in_place and tensor is call.subject)
        for tensor in strangers
    )


# ---------------------------------------------------------------------------------------------- log
def _count(call: _Call, traffic: Traffic) -> None:
    """Log what a call copies between the two sides, and whether the host waits for it."""
    for source, target in _copies(call):
        if source != target:
            _add(traffic.to_device if target == DEVICE else traffic.to_host)
    if _waits(call):
        _add(traffic.waits)


def _copies(call: _Call) -> list[tuple[torch.device, torch.device]]:
    """Return from where to where a call copies each of its arguments, if to anywhere."""
    if call.name in INDEXING:
        values = _find_tensors(call.args[2:])  # numbers only fill
        return [(_place_of_data(data), _place(call.args[0])) for data in [*call.indices, *values]]
    if call.name == "copy_":
        return [(_place(call.args[1]), _place(call.args[0]))]
    if call.name == "new_tensor":
        return [(_place_of_data(call.args[1]), call.place)]
    return [(_place_of_data(call.subject), call.place)] if call.name in COPIES else []


def _waits(call: _Call) -> bool:
    """Tell whether the host needs to know a value on the device before it can go on."""
    if call.name in INDEXING:  # a mask is turned into numbers, and a number into one of Python's
        is_fill = call.name == "__setitem__" and not isinstance(call.args[2], torch.Tensor)
        indices = [index for index in _find_tensors(call.indices) if _is_marked(index)]
        return any(index.ndim == 0 or (index.dtype == torch.bool and not is_fill) for index in indices)
    in_one_form = {
        "where": len(call.args) == 1,  # which is nonzero
        "repeat_interleave": len(call.tensors) > 1,  # each row as often as the device says
        "tensor": not isinstance(call.subject, torch.Tensor),  # out of numbers on the device
        "as_tensor": not isinstance(call.subject, torch.Tensor),
    }
    return bool(call.marked) and (call.name in WAITS or in_one_form.get(call.name, False))


def _place_of_data(data: Any) -> torch.device:
    return _place(data) if isinstance(data, torch.Tensor) else HOST


def _add(counter: Counter[str]) -> None:
    counter[_line()] += 1


def _line() -> str:
    """Name the line that made the call, as `Traffic` says."""
    frames = [frame for frame in _frames() if not frame.f_code.co_filename.startswith(NOT_CALLERS)]
    frame = next((frame for frame in frames if _is_package(frame)), frames[0])
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(PACKAGE).as_posix() if _is_package(frame) else "/".join(path.parts[-2:])
    return f"{name}:{frame.f_lineno}"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_package(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(PACKAGE)


# ------------------------------------------------------------------- what function modes do not see
_group_tensors_on_host = torch._C._group_tensors_by_device_and_dtype
_init_autocast_on_host = torch.autocast.__init__


def _group_tensors(tensor_lists: Any, with_indices: bool = False) -> Any:
    """Group tensors for optimizers and gradient clipping, which ask the groups for their device."""
    groups: dict[Any, Any] = _group_tensors_on_host(tensor_lists, with_indices)
    return {(lists[0][0].device, dtype): (lists, rows) for (_, dtype), (lists, rows) in groups.items()}


def _init_autocast(
    self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **settings: Any
) -> None:
    """Let autocast of the device work on the host's tensors, which the marked ones are."""
    if device_type == DEVICE.type:
        device_type, dtype = HOST.type, dtype or torch.get_autocast_dtype(device_type)
    _init_autocast_on_host(self, device_type, dtype, *rest, **settings)
