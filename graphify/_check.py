"""Everything that stands between a function and its graph, found at once, without a capture and without trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._binding import binder_of
from ._code import Executed, line_naming, user_line
from ._hooks import hook_roots
from ._layout import family_key
from ._lazy import LazyError
from ._method import plain
from ._module import GraphedModule, runner_of
from ._optimizers import refusal_of, refused_code, steps
from ._options import disabled
from ._record import has_gradients
from ._signature import refusal
from ._stand_ins import set_aside
from ._survey import Survey
from ._tree import tree_of
from ._trial import HostRandomness, trial
from ._verdicts import (
    blind_iterator,
    given_history,
    host_reads,
    hung_on,
    keeps_random_state,
    other_flag,
    other_form,
    other_place,
    random_draw,
    replaced_argument,
    second_backward,
    seeded,
    shared_memory,
    side_effect,
    unknown_result,
)
from ._watch import Watch, watching
from .backends import backend_for
from .backends.base import Backend
from .errors import CaptureError, InputError

__all__ = ["Finding", "Findings", "check"]

_STAGED = "a graph reads its tensors from fixed memory, and knows its other arguments by their values"
_WAITS = "a graph replays device work only; the host cannot wait for it in the middle"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing in the way of a graph: what, at which line of the user's, why, and what to write instead."""

    what: str
    where: str | None
    why: str
    fix: str

    def __str__(self) -> str:
        return str(CaptureError(self.what, where=self.where, why=self.why, fix=self.fix))


@dataclass(frozen=True, slots=True)
class Findings:
    """What `check` found; true when nothing is in the way, and printing it gives the list."""

    name: str
    found: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is in the way."""
        return not self.found

    def __bool__(self) -> bool:
        return self.ok

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: nothing in the way of a graph"
        lines = [f"{self.name}: {len(self.found)} in the way of a graph"]
        return "\n".join([*lines, *(f"{i}. {each}" for i, each in enumerate(self.found, 1))])


def check(target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Findings:
    """List everything that keeps a call from becoming a graph, without capturing it and without trace.

    Example:
        >>> print(graphify.check(step, torch.randn(8, 16, device="cuda")))
        step: 1 in the way of a graph
        1. a tensor's value is read on the host (`.item()`, `bool()`, `int()`, `float()`, or an `if` on a tensor)
          where: train.py:12: if loss.item() > 3:
          ...

    Args:
        target: A function, method or module, graphed or not.
        args, kwargs: Those of the call, such as a tensor of shape (8, 16).

    The call runs twice, as a warm-up and as what would be captured; memory, random streams and Python state are put
    back. On CPU tensors it is checked as `backend="tape"` would capture it, where a tensor made on the CPU is no fault.
    On CUDA, with one thread alive, waits that no operator shows are found, too.

    Raises:
        Whatever the target itself raises.

    Warning:
        What neither Python holds nor torch's dispatcher sees (files, iterators, an extension's own memory) is not put
        back.
    """
    target = runner_of(target).target if isinstance(target, GraphedModule) else plain(target)
    return _Check(target, args, kwargs).findings()


class _Check:
    """One call under examination."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        binder = binder_of(target)
        self.target, self.spread = target, binder.call
        self.name = getattr(target, "__qualname__", type(target).__qualname__)
        self.values = binder.bind(*args, **kwargs)
        self.called = [*zip(binder.names, self.values, strict=True)]
        self.roots = [(self.name, target), *self.called, *hook_roots()]
        self.found: dict[tuple[str, str | None], Finding] = {}
        self.executed = Executed()
        self.lines: dict[int, str | None] = {}
        self.named = [*self._tensors()]
        self.backend, self.device = self._place()

    def findings(self) -> Findings:
        """Everything that was found."""
        try:
            self._look()
        except LazyError as error:
            self._note([error])
        return Findings(self.name, tuple(self.found.values()))

    def _look(self) -> None:
        """Run, run again, and judge."""
        everything = Survey(self.roots, Executed(everything=True))
        with (
            disabled(),
            self.backend.scope(self.device, aside=not torch.is_grad_enabled()),
            trial(self.backend, self.device, everything, large=True) as log,
            set_aside(t for _, t in everything.tensors()),
        ):
            forms = [*map(_form, self.named)]
            first, stepped, _ = self._run(Watch(self.device, given=self._given(), undo=log))
            self._judge_run(first, stepped)
            before, host = Survey(self.roots, self.executed), HostRandomness(self.device)
            watch, stepped, result = self._run(Watch(self.device, given=self._given(), undo=log))
            self._judge_run(watch, stepped)
            self._judge_python(before, host, watch)
            self._judge_arguments(forms, before, watch)
            self._judge_results(result, before, watch, graded=bool(stepped))

    def _given(self) -> list[Tensor]:
        return [tensor for _, tensor in self.named]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors among the arguments; what cannot be an argument is noted."""
        for name, value in self.called:
            try:
                tree = tree_of((value,), (name,))
            except InputError as error:
                self._note_input(error)
                continue
            found = tree.unpack((value,))
            assert found is not None, "a value has the structure that was read off it"
            yield from zip(tree.tensor_paths, found[0], strict=True)

    def _place(self) -> tuple[Backend, torch.device]:
        for path, tensor in self.named:
            why = refusal(tensor)
            if why is not None:
                self._note_input(InputError(f"argument `{path}`: {why}"))
        cuda = backend_for("cuda")
        try:
            device = cuda.device_of(self._given())
        except InputError as error:
            self._note_input(error)
            device = next(t.device for t in self._given() if t.device.type == cuda.device_type)
        if device is None:
            return backend_for("tape"), torch.device("cpu")
        for path, tensor in self.named:
            if tensor.device.type != device.type and tensor.dim():
                self._note_input(other_place(path, tensor, device))
        return cuda, device

    def _run(self, watch: Watch) -> tuple[Watch, list[Optimizer], Any]:
        with (
            watching(watch, self.backend.listen),
            self._hearing_waits(watch),
            self._noting_steps(),
            steps() as stepped,
        ):
            result = self.spread(self.target, self.values)
        self.executed.merge(watch.executed)
        return watch, stepped, result

    @contextmanager
    def _noting_steps(self) -> Iterator[None]:
        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.lines.setdefault(id(optimizer), user_line())

        handle = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def _hearing_waits(self, watch: Watch) -> Any:
        # Process-wide: other threads would hear of their own waits.
        if threading.active_count() > 1:
            return nullcontext()

        def heard(text: str) -> None:
            where = user_line()
            if all(known.where != where for known in watch.offences):
                fix = "do this part outside the graphed function"
                watch.offences.append(
                    CaptureError("the host waits for the device", where=where, why=_WAITS, fix=fix)
                )

        return self.backend.waits(heard)

    # -- judging

    def _note(self, errors: Iterable[CaptureError | None], where: str | None = None) -> None:
        for error in errors:
            if error is not None:
                line = error.where or where
                self.found.setdefault((error.what, line), Finding(error.what, line, error.why, error.fix))

    def _note_input(self, error: InputError) -> None:
        self._note([CaptureError(str(error), why=_STAGED)], user_line())

    def _judge_run(self, watch: Watch, stepped: Sequence[Optimizer]) -> None:
        refused = {self.lines[id(each)]: refusal_of(each, self.device) for each in stepped}
        for line, error in refused.items():
            self._note([error], line)
        said = {line for line, error in refused.items() if error is not None}
        self._note(error for error in host_reads(watch, self.executed) if error.where not in said)
        self._note([refused_code(watch.executed)], line_naming(self.executed, "step"))

    def _judge_python(self, before: Survey, host: HostRandomness, watch: Watch) -> None:
        drawn = [random_draw(self.name, generator) for generator in host.drawn()]
        self._note([seeded(watch.executed)], line_naming(self.executed, "manual_seed"))
        self._note(drawn, line_naming(self.executed, "random"))
        after = Survey(self.roots, self.executed)
        for change in before.changes(after):
            refused = side_effect(self.name, change, self.executed, after)
            self._note([refused], line_naming(self.executed, change.place.variable))
        self._note([blind_iterator(self.name, self.executed, before), hung_on(self.executed, self.named)])
        self._note([given_history(watch.renewed(()), before, self.named)])

    def _judge_arguments(self, forms: list[tuple[Any, bool]], before: Survey, watch: Watch) -> None:
        held = {family_key(t) for _, t in before.tensors()}
        for (path, tensor), (form, needed) in zip(self.named, forms, strict=True):
            line = line_naming(self.executed, path)
            now, needs = _form((path, tensor))
            if now != form:
                self._note([other_form(path)], line)
            if needs != needed:
                self._note([other_flag(path)], line)
            if family_key(tensor) in held & watch.written:
                self._note([shared_memory(self.name, path)], line)

    def _judge_results(self, result: Any, before: Survey, watch: Watch, *, graded: bool) -> None:
        try:
            tree = tree_of((result,), ("output",))
        except InputError as error:
            self._note([CaptureError(str(error), why="a replay makes the result anew at each call")])
            return
        consts, theirs = tree.consts((result,)), {id(value) for value in self.values}
        for i in tree.opaque:
            if id(consts[i]) not in theirs and not before.holds(consts[i]):
                self._note([unknown_result(tree.const_paths[i], consts[i])])
        if not has_gradients(result, self._given()):
            return
        if watch.backward or graded:
            self._note([second_backward(self.name)])
        else:
            self._note([*replaced_argument(watch, self.named), keeps_random_state(self.name, watch)])


def _form(named: tuple[str, Tensor]) -> tuple[Any, bool]:
    _, t = named
    if refusal(t) is not None:
        return t.shape, t.requires_grad
    return (t.shape, t.stride(), t.storage_offset(), t.dtype, family_key(t)), t.requires_grad
