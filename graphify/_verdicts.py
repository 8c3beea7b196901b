"""What a run did that no replay could repeat: each kind with the words that help, or None where nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ._code import Executed, line_naming, line_of
from ._ends import Wanted
from ._layout import family_key
from ._optimizers import refused_change
from ._places import MISSING, Change, Place
from ._raw import fields_of
from ._results import TangledError
from ._survey import Survey
from ._watch import Watch
from .errors import CaptureError, InputError

__all__ = [
    "blind_iterator",
    "changed_container",
    "device_refused",
    "given_history",
    "has_memory",
    "host_reads",
    "hung_on",
    "is_only_written",
    "keeps_random_state",
    "long_history",
    "other_flag",
    "other_form",
    "other_place",
    "random_draw",
    "replaced_argument",
    "second_backward",
    "seeded",
    "shared_memory",
    "side_effect",
    "unknown_result",
    "without_memory",
]

_REENTRANT = CheckpointFunction.forward.__code__
_STATE_READERS = frozenset({"get_rng_state", "get_device_states"})
# Code that asks whether it is being captured may read on the host only where it is not: the capture decides.
_ASKS = "is_current_stream_capturing"
_SEEDERS = (torch.manual_seed.__code__, torch.seed.__code__)
_ONCE = "Python runs when a graph is recorded; a replay repeats device work only"


def host_reads(watch: Watch, executed: Executed) -> list[CaptureError]:
    """The operators that a graph cannot hold; none where the code itself asks whether it is captured."""
    return [] if _ASKS in executed.loads() else watch.offences


def device_refused(error: Exception) -> CaptureError:
    """What the device said in the middle of a capture, at the user's own line."""
    text = str(error).splitlines()[0]
    why, fix = "a stream capture allows no waiting for the device, and no work on uncaptured streams", ""
    if "legacy stream" in text:
        why += "; a parameter's gradient is added up on the stream of the run whose history is still held"
        fix = "`loss.detach()` of what is kept of earlier runs, or "
    return CaptureError(
        f"the device refused to capture: {text}",
        where=line_of(error),
        why=why,
        fix=f"{fix}do this part outside the graphed function",
    )


def random_draw(name: str, generator: str) -> CaptureError:
    """The function drew from a generator of the host."""
    return CaptureError(
        f"`{name}` draws from {generator}",
        why=_ONCE,
        fix="draw outside and pass the number as a tensor, or use torch's generator of the device",
    )


def seeded(executed: Executed) -> CaptureError | None:
    """The function seeded torch's generators, which shows in no state where the seed is the one that was there."""
    if not any(executed.ran(code) for code in _SEEDERS) or executed.everything:
        return None
    return CaptureError(
        "`torch.manual_seed` is called inside",
        why=_ONCE,
        fix="seed before the call, or draw outside and pass the numbers as a tensor",
    )


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a strided view of one memory, as a sparse one is not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def without_memory(what: str, tensor: Tensor, fix: str) -> CaptureError:
    """A tensor that is no view of one memory."""
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").removeprefix("_")
    why = "a replay reads and writes at fixed addresses, and the parts of such a tensor have others at each call"
    return CaptureError(f"{what} is a {kind} tensor", why=why, fix=fix)


def is_only_written(change: Change, executed: Executed, survey: Survey) -> bool:
    """Whether a change can be repeated at each call: a field that the code stores and never loads."""
    only = _is_written(change) and change.place.key in executed.stores() - executed.reads()
    return only and not survey.reads_unnamed(change.place.container)


def side_effect(name: str, change: Change, executed: Executed, survey: Survey) -> CaptureError | None:
    """What Python did to something that it holds, as `survey` met it; None where each call can do it again."""
    if change.place.kind == "draw":
        return random_draw(name, f"`{change.place.name}`")
    refused = refused_change(change, survey.optimizers)
    if refused is not None or is_only_written(change, executed, survey):
        return refused
    what = "reads and re-binds" if _is_written(change) else "changes"
    fix = "keep it in a tensor and change that in place (`copy_`, `add_`), or return it"
    if _is_written(change) and change.before is MISSING:
        what, fix = "makes", "make it before, as in `__init__` or by a first call of the plain function"
    return CaptureError(f"`{name}` {what} `{change.place.name}`", why=_ONCE, fix=fix)


def hung_on(executed: Executed, named: Iterable[tuple[str, Tensor]]) -> CaptureError | None:
    """An argument with an attribute of its own that the code names: a graph's copy of the tensor has none."""
    for path, tensor in named:
        found = sorted((fields_of(tensor) or {}).keys() & executed.user_names())
        if found:
            return CaptureError(
                f"argument `{path}` carries an attribute `{found[0]}` of its own",
                where=line_naming(executed, found[0]),
                why="a graph reads its own copy of an argument, which has the numbers of the tensor and nothing else",
                fix=f"pass `{path}.{found[0]}` as an argument of its own",
            )
    return None


def blind_iterator(name: str, executed: Executed, survey: Survey) -> CaptureError | None:
    """The first of those that the code names and that nobody could put back where a run advances them."""
    named = executed.names()
    for place, value in survey.blind:
        if Place(None, None, "", place).variable in named:
            kind = type(value).__name__.lstrip("_")
            return CaptureError(
                f"`{name}` takes items from `{place}` ({kind}), which nobody can put back",
                where=line_naming(executed, Place(None, None, "", place).variable),
                why=f"{_ONCE}, and the next item would be that of the capture for good",
                fix="take the item outside (`next(...)`, `read()`), and pass it as an argument",
            )
    return None


def _is_written(change: Change) -> bool:
    return change.place.kind in ("field", "cell", "attr") and change.after is not MISSING


def keeps_random_state(name: str, watch: Watch) -> CaptureError | None:
    """A checkpoint would recompute with the random state of the capture for good."""
    ran = [code for code, _ in watch.executed.codes.values()]
    if any(code is _REENTRANT for code in ran):
        return CaptureError(
            f"`{name}` uses a reentrant checkpoint",
            why="its backward is a backward of its own inside another, which only `.backward()` can run",
            fix="`checkpoint(..., use_reentrant=False)`",
        )
    if watch.drew and any(code.co_name in _STATE_READERS for code in ran):
        return CaptureError(
            f"`{name}` keeps the state of a random generator for its backward",
            why=_ONCE,
            fix="`preserve_rng_state=False` for a checkpoint, or no dropout inside it",
        )
    return None


def other_place(path: str, tensor: Tensor, device: torch.device) -> InputError:
    """An argument with dimensions that is not where the graph is."""
    fix = f"pass `{path}.to({str(device)!r})`"
    return InputError(f"argument `{path}` is on {tensor.device} beside tensors on {device}: {fix}")


def other_form(path: str) -> CaptureError:
    """An argument whose shape or layout the run changed."""
    return CaptureError(
        f"`{path}` gets another shape or layout in place",
        why="the caller's tensor would not, since a replay changes memory only",
        fix="use the form without underscore, which makes a view",
    )


def other_flag(path: str) -> CaptureError:
    """An argument whose `requires_grad` the run changed."""
    return CaptureError(
        f"`{path}` gets another `requires_grad` in place",
        why="the caller's tensor would not, since a replay changes memory only",
        fix=f"`{path}.detach().requires_grad_()` inside, or `{path}.requires_grad_()` before the call",
    )


def changed_container(name: str) -> CaptureError:
    """The function changed a list, a dict or another container that it was called with."""
    return CaptureError(
        f"`{name}` changes a container among its arguments",
        why=_ONCE,
        fix="return the new value instead, or write into a tensor with `copy_`",
    )


def shared_memory(name: str, path: str) -> CaptureError:
    """An argument on memory that the function uses from outside, which either writes."""
    return CaptureError(
        f"`{path}` shares memory with a tensor that `{name}` uses from outside, and one is written",
        why="the graph reads its own copy of the argument, which would not see the write",
        fix="pass a clone, or use only one of the two",
    )


def second_backward(name: str) -> CaptureError:
    """The run went backward, and its results could go backward once more."""
    return CaptureError(
        f"`{name}` runs a backward and returns a tensor that needs gradients",
        why="its backward is in the graph already, and a second one would need what the first let go",
        fix="`return loss.detach()`",
    )


def given_history(
    renewed: Sequence[Tensor], survey: Survey, named: Sequence[tuple[str, Tensor]]
) -> CaptureError | None:
    """A tensor from outside that got a history; `named` are the arguments with their paths."""
    if not renewed:
        return None
    names = {family_key(t): place.name for place, t in survey.tensors()}
    names |= {family_key(t): path for path, t in named}
    name = names.get(family_key(renewed[0]), "a tensor from outside")
    return CaptureError(
        f"`{name}` is written in place with something that needs gradients",
        why="a graph repeats device work only, and the tensor would not get the history that it has in eager",
        fix="write under `torch.no_grad()` or write `.detach()`, or return the new value",
    )


def long_history(wants: Wanted, survey: Survey) -> TangledError:
    """A backward that ends at a tensor itself may go on behind it, and on a device it has to run live."""
    tensor = next((t for t in wants.real if not t.is_leaf or not wants.uncut), wants.real[0])
    name = next((f"`{place.name}`" for place, t in survey.tensors() if t is tensor), "a tensor from outside")
    why = "has a history of its own" if wants.uncut else "is needed beside random numbers"
    return TangledError(
        "history",
        f"its results need a gradient of {name}, which {why} and cannot be set aside while a graph is recorded (it is "
        "no plain tensor or parameter, or torch keeps its `.grad` as after `retain_grad()`): pass it as an argument",
    )


def replaced_argument(watch: Watch, named: Iterable[tuple[str, Tensor]]) -> list[CaptureError]:
    """Arguments that need gradients and are written, where the results need gradients, too."""
    return [
        CaptureError(
            f"`{path}` needs gradients and is written in place",
            why="a graph has its own copy of the argument, and the caller's would lose its history",
            fix=f"write into `{path}.clone()`, or use the form without underscore",
        )
        for path, tensor in named
        if tensor.requires_grad and family_key(tensor) in watch.written
    ]


def unknown_result(path: str, value: Any) -> CaptureError:
    """A result that is an object of a kind that nobody can make again."""
    return CaptureError(
        f"`{path}` is a new {type(value).__name__} at each call",
        why="a replay cannot make Python objects of a kind that graphify does not know",
        fix="return tensors, tuples, dicts, NamedTuples or dataclasses",
    )
