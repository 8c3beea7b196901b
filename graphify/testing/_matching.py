"""An eager twin and a graphed twin over one sequence of calls, compared after each."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import graphify, handle
from ..errors import GraphifyError
from ..stats import Stats
from ._checks import check_callable, check_kind, check_place
from ._compare import Comparison
from ._leaves import align, forget
from ._twins import Act, Call, Done, Outcome, Then, Twin
from ._witness import Witness
from ._worlds import Rng, World, refuse_shared_state

__all__ = ["assert_matches_eager"]

_HERE = "assert_matches_eager"
_SHOWN = 8
_LATEST = 3  # what acts change is here; the next call looks at all that was ever handed out
_MODIFIED = "modified by an inplace operation"
_FORBIDDEN = "is a view and its base or another view of its base has been modified inplace"


def assert_matches_eager(
    target: Callable[..., Any] | None = None,
    calls: Iterable[Call | tuple[Any, ...]] = (),
    *,
    make: Callable[[], Callable[..., Any]] | None = None,
    graphed: Callable[[Any], Callable[..., Any]] | None = None,
    backend: str = "tape",
    device: torch.device | str | None = None,
    check_state: bool | Callable[[Any], Any] = True,
    loud_ok: bool | Callable[[GraphifyError], bool] = False,
    **options: Any,
) -> Stats:
    """Run the calls on an eager and on a graphed twin of `target`; AssertionError where a user sees a difference.

    Example::

        stats = assert_matches_eager(model, [(torch.randn(4, 8),) for _ in range(5)])
        assert stats.replays == 3  # else little was proved

    Compared after every call: the result (container types, values bit for bit with NaN equal to NaN, shapes, strides,
    dtype, device, requires_grad, inference, conj and neg bits), the arguments, every earlier result still held, the
    state (parameters, buffers, attributes, closure cells, globals the code names, gradients), which of all these
    tensors are one object or share memory, the random streams, grad mode and autocast, and exceptions.

    Args:
        target: an nn.Module, a callable object or a function without state; both twins are copies of it.
        calls: `Call`s, or plain tuples of positional arguments. Two that hold one tensor pass one tensor.
        make: instead of `target`, builds a fresh twin each time: for functions with state around them.
        graphed: makes the graphed twin, instead of `graphify(twin, backend=backend, **options)`.
        backend: passed on to `graphify`, as is every other option.
        device: where the copies live (modules too); None: where the originals are.
        check_state: False leaves state out; a callable gives, for a twin, more of it to compare.
        loud_ok: whether a GraphifyError is right where eager does something else ("equal or loud"); a callable is asked
            for each. The plain function then makes the call on the graphed twin, where nothing may have moved yet.

    Raises:
        AssertionError: names the call, the leaf and what differs.
        TypeError: a function whose twins would share state (pass `make`); an argument of another kind.
        ValueError: an option that has no such value, a device that is not there.

    With `outputs="static"`, results are compared right after their call and then let go.
    """
    __tracebackhide__ = True
    place = None if device is None else check_place(f"{_HERE}: device", device)
    sequence = _sequence(calls)
    for name, judge in (("check_state", check_state), ("loud_ok", loud_ok)):
        check_callable(f"{_HERE}: {name}", judge, "True, False or a function", (True, False), classes=False)
    check_callable(f"{_HERE}: graphed", graphed, "a function that wraps the twin, or None")
    found = Rng(place)
    try:
        worlds = _worlds(target, make, place)
        decorate: Any = graphify
        entry = (graphed or decorate(backend=backend, **options))(worlds[1].twin)
        if not callable(entry):
            raise TypeError(f"{_HERE}: graphed gave {entry!r}, which cannot be called")
        acts = [act for call in sequence if isinstance(call.after, Then) for act in call.after.acts]
        witness = Witness() if any(act.goes_back for act in acts) else None
        eager = Twin(worlds[0], worlds[0].twin, witness)
        pair = _Pair(eager, Twin(worlds[1], entry), check_state, loud_ok)
        for number, call in enumerate(sequence, 1):
            if options.get("outputs") == "static":
                pair.forget()
            pair.run(call, f"call {number} of {len(sequence)}")
        pair.finish()
    finally:
        found.restore()
    controls = _controls(entry)
    return Stats(calls=len(sequence), eager=len(sequence)) if controls is None else controls.stats()


def _sequence(calls: Iterable[Call | tuple[Any, ...]]) -> list[Call]:
    wanted = "an iterable of Calls or of tuples of positional arguments, as in [(x,), (y,)]"
    if isinstance(calls, (str, Mapping, Tensor)) or not isinstance(calls, Iterable):
        check_kind(f"{_HERE}: calls", calls, (), wanted)
    sequence = list(calls)
    for call in sequence:
        check_kind(f"{_HERE}: each of calls", call, (Call, tuple, list), "a Call or a tuple, as in (x,)")
    return [call if isinstance(call, Call) else Call(tuple(call)) for call in sequence]


def _worlds(
    target: Callable[..., Any] | None,
    make: Callable[[], Callable[..., Any]] | None,
    device: torch.device | None,
) -> tuple[World, World]:
    """Two worlds with a twin each, made from one random state."""
    if (target is None) == (make is None):
        raise TypeError(f"{_HERE}: give either a target or make=")
    if target is not None:
        _check_plain("the target", target)
    check_callable(f"{_HERE}: make", make, "a function that builds a fresh twin")
    refuse_shared_state(target)
    worlds, start = (World(device), World(device)), Rng(device)
    for world in worlds:
        start.restore()
        world.twin = world.copy(target) if make is None else make()
        if device is not None and isinstance(world.twin, nn.Module):
            world.twin.to(device)
    start.restore()
    if make is not None:
        _check_made(*(world.twin for world in worlds))
    return worlds


def _check_plain(name: str, target: Any) -> None:
    if isinstance(target, type) or not callable(target):
        raise TypeError(f"{_HERE}: {name} must be a module, a function or a callable object, not {target!r}")
    if _controls(target) is not None:
        raise TypeError(f"{_HERE}: {name} is graphed already; give the plain one, its `__wrapped__`")


def _check_made(eager: Any, graphed: Any) -> None:
    _check_plain("what make() gave", eager)
    if eager is not graphed:
        return
    if not isinstance(eager, (types.FunctionType, types.BuiltinFunctionType)):
        raise TypeError(
            f"{_HERE}: make() gave one {type(eager).__name__} twice; it must build a fresh twin each time"
        )
    refuse_shared_state(eager)


def _controls(entry: Any) -> Any:
    try:
        return handle(entry)
    except TypeError:  # how `handle` says that nobody graphed this
        return None


class _Pair:
    """Both twins, and how they are told apart."""

    def __init__(
        self,
        eager: Twin,
        graphed: Twin,
        check_state: bool | Callable[[Any], Any],
        loud_ok: bool | Callable[[GraphifyError], bool],
    ) -> None:
        self.eager, self.graphed = eager, graphed
        self.check_state, self.loud_ok = check_state, loud_ok
        self.pending = ""

    def run(self, call: Call, title: str) -> None:
        """Make one call on both and compare; once more when the call's owner did something with the result."""
        __tracebackhide__ = True
        eager, graphed = self.eager.run(call), self.graphed.run(call)
        if isinstance(graphed.error, GraphifyError) and not _same_error(eager.error, graphed.error):
            self._judge(graphed.error, title)
            graphed = self.graphed.run_plain(call, graphed)
            title += " (repeated plainly after a loud refusal)"
        self.eager.accept(eager)
        self.graphed.accept(graphed)
        self._compare(title, graphed.error)
        if call.after is None or eager.error is not None:
            return
        if isinstance(call.after, Then):
            for act in call.after.acts:
                self._act(act, f"{title}, {act!r}")
            return
        self.eager.after(call, eager)
        self.graphed.after(call, graphed)
        self._compare(f"{title}, after()", None)

    def _act(self, act: Act, title: str) -> None:
        """Do one act on both; where eager raises, gradients are half made and count for nothing."""
        __tracebackhide__ = True
        held = len(self.eager.held)
        eager = self.eager.perform(act)
        if eager.error is not None and act.optional:
            return
        graphed = self.graphed.perform(act)
        if eager.error is None and graphed.error is None:
            align(act, self.eager, self.graphed)
            self.pending = title if act.quiet else ""
        else:
            self._judge_act(eager, graphed, title)
            for twin in (self.eager, self.graphed):
                del twin.held[held:]
                forget(twin)
            self.pending = ""
        if not self.pending:
            self._compare(title, graphed.error, latest=_LATEST)

    def finish(self) -> None:
        """Compare what the last acts left."""
        __tracebackhide__ = True
        if self.pending:
            self._compare(self.pending, None)

    def _judge_act(self, eager: Done, graphed: Done, title: str) -> None:
        __tracebackhide__ = True
        if _same_error(eager.error, graphed.error):
            return
        if eager.modified and _MODIFIED in str(graphed.error):
            return
        if graphed.error is None and _FORBIDDEN in str(eager.error):
            return
        if isinstance(graphed.error, GraphifyError):
            self._judge(graphed.error, title)
            return
        line = f"exception: eager {_named(eager.error)}, graphed {_named(graphed.error)}"
        raise AssertionError(f"{title} differs from eager:\n  {line}") from graphed.error

    def forget(self) -> None:
        """Let both twins' results go."""
        self.eager.forget()
        self.graphed.forget()

    def _judge(self, error: GraphifyError, title: str) -> None:
        __tracebackhide__ = True
        if not (self.loud_ok(error) if callable(self.loud_ok) else self.loud_ok):
            raise AssertionError(f"{title}: eager succeeds, graphed raised {_named(error)}") from error

    def _compare(self, title: str, cause: Exception | None, latest: int = 0) -> None:
        __tracebackhide__ = True
        eager, graphed = self.eager.outcomes[-1], self.graphed.outcomes[-1]
        lines = _error_differences(eager.error, graphed.error)
        lines = lines or self._object_differences(latest) + _ambient_differences(eager, graphed)
        lines += [
            f"rng: the state of {name} differs" for name in self.eager.rng.differences(self.graphed.rng)
        ]
        if lines:
            hidden = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            text = "\n  ".join([f"{title} differs from eager:", *lines[:_SHOWN], *hidden])
            raise AssertionError(text) from cause

    def _object_differences(self, latest: int) -> list[str]:
        """State first, results last for "shares memory with"; the latest result first in the message.

        Of the calls only the latest so many, 0 for all.
        """
        both = Comparison()
        sections = [self._state(both)]
        made = enumerate(zip(self.eager.outcomes, self.graphed.outcomes, strict=True), 1)
        last, outcomes = len(self.eager.outcomes), list(made)[-latest:]
        for number, (eager, graphed) in outcomes:
            both.suffix = "" if number == last else f" of call {number}"
            for index, (left, right) in enumerate(zip(eager.args, graphed.args, strict=True)):
                both.walk(f"args[{index}]", left, right)
            for name, left in eager.kwargs.items():
                both.walk(f"kwargs[{name!r}]", left, graphed.kwargs[name])
            sections.append(both.take())
        for number, (eager, graphed) in outcomes:
            both.suffix = "" if number == last else f" of call {number}"
            both.walk("output", eager.value, graphed.value)
            sections.append(both.take())
        both.suffix = ""
        if self.eager.witness is not None:
            self._bases(both)
            both.gradients("held", self.eager.held, self.graphed.held)
        sections.append(both.take())
        both.compare_aliasing()
        return [line for section in reversed(sections) for line in section] + both.take()

    def _bases(self, both: Comparison) -> None:
        """What arguments with a history were made from, where gradients come to."""
        for key, left in self.eager.world.made.items():
            if left.requires_grad:
                both.walk(f"{key!r}", left, self.graphed.world.made[key])

    def _state(self, both: Comparison) -> list[str]:
        left, right = self.eager.plain, self.graphed.plain
        if self.check_state:
            root = left.__name__ if isinstance(left, types.FunctionType) else "self"
            both.walk(root, left, right)
        if callable(self.check_state):
            both.walk("state", self.check_state(left), self.check_state(right))
        return both.take()


def _same_error(eager: Exception | None, graphed: Exception | None) -> bool:
    return type(eager) is type(graphed) and str(eager) == str(graphed)


def _error_differences(eager: Exception | None, graphed: Exception | None) -> list[str]:
    if _same_error(eager, graphed):
        return []
    return [f"exception: eager {_named(eager)}, graphed {_named(graphed)}"]


def _ambient_differences(eager: Outcome, graphed: Outcome) -> list[str]:
    return [
        f"{name} after the call: eager {value}, graphed {graphed.ambient[name]}"
        for name, value in eager.ambient.items()
        if value != graphed.ambient[name]
    ]


def _named(error: Exception | None) -> str:
    return "none" if error is None else f"{type(error).__name__}: {error}"
