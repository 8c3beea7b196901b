"""Watching one run: the memory it touches, the host reads it makes, the Python code it executes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._ambient import current_backward
from ._code import Executed, is_library, user_line
from ._composite import decomposed, uncovered
from ._detaching import hearing_detach
from ._following import unheard
from ._illegal import DETACHED, HOST, PLAIN, READ, RENEWED, Offence, foreign, offence, tensors_in
from ._layout import family_key
from ._lazy import hearing_birth
from ._mode import InfraMode
from ._operators import Operator, operator_of
from ._optimizers import UnbuiltError
from ._touched import Touched, hearing_grads
from ._undo import UndoLog, version_of, writes_of
from .errors import CaptureError, again

__all__ = ["Watch", "next_node", "unwatched", "watching"]

aten = torch.ops.aten
Around = Callable[[Any, Any, dict[str, Any], Callable[[], Any]], Any]
"""Makes the result of an operator with these arguments, by the call of it that is given last."""

_BATCH_NORM = nn.modules.batchnorm._BatchNorm.forward.__code__
next_node = torch._C._autograd._get_sequence_nr
"""The number of the next node that autograd makes on this thread."""


class Watch(InfraMode):
    """Sees every operator of a run on this thread.

    Compiled regions stay unseen, which the guards make up for by taking every parameter and buffer as read.

    `history` holds tensors on memory from outside that have a grad_fn: older ones, and views that the run made.
    `aliases` holds what the run made on memory that is not its own and that had no history then.
    `given` holds the memory of the run's own arguments. A strict watch raises before an operator that a
    graph cannot hold, so that a capture is never broken by it; otherwise offences are only noted. `around` makes
    the call of each operator that writes.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        given: Sequence[Tensor] = (),
        strict: bool = False,
        undo: UndoLog | None = None,
        touched: Touched | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.given = {family_key(t) for t in given}
        self.strict = strict
        self.undo = undo
        self.around: Around | None = None
        self.executed = Executed()
        self.offences: list[CaptureError] = []
        self.outside: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self.restrided: set[int] = set()
        self.born: set[int] = set()
        self.generators: dict[int, torch.Generator] = {}
        self.versions: dict[int, int | None] = {}
        self.history: dict[int, Tensor] = {}
        self.aliases: dict[int, Tensor] = {}
        self.backward = False
        self.detached = False
        self.built = False
        """Whether a lazy module had its first run."""
        self.device_work = False
        self.drew = False
        self._seeds: set[int] = set()
        self._operators: dict[int, Operator] = {}
        self._kind = device.type
        self._here: tuple[int, ...] = ()
        if device.index is not None:
            self._here = (-1, device.index)
        self._tasks = (-1, current_backward())
        self._start = next_node()
        self.touched = touched or (undo.touched if undo is not None else Touched())
        self.touched.see(self.outside, self.written, self.executed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(map(is_traceable_wrapper_subclass, tensors_in((args, kwargs)))):
            return NotImplemented
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators.setdefault(id(func), operator_of(func, self._kind))
        if operator.composite:
            return decomposed(func, args, kwargs, self, self.device.type)
        self._before(operator, args, kwargs)
        if operator.writes and self.around is not None:
            result = self.around(func, args, kwargs, lambda: self._made(operator, args, kwargs))
        elif operator.calls_others:
            result = self._made(operator, args, kwargs)
        else:
            result = operator.call(*args, **kwargs)
        self._after(operator, args, kwargs, result)
        return result

    def _made(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        if not operator.calls_others:
            return operator.call(*args, **kwargs)
        with uncovered(operator.func, self._kind):
            return operator.call(*args, **kwargs)

    @unheard
    def _before(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        if operator.odd:
            self._look_at(operator, args, kwargs)
        if current_backward() not in self._tasks:
            self.backward = True
            self.touched.hear_backward()
        born, given, here = self.born, self.given, self._here
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) in PLAIN:
                continue
            for tensor in (value,) if type(value) is Tensor else tensors_in(value):
                key = family_key(tensor)
                if key not in born and key not in given:
                    self._note_outside(tensor, key)
                if here and tensor.get_device() not in here:
                    self._check_place(operator, tensor)
        if operator.writes:
            self._note_writes(operator, args, kwargs)

    def _look_at(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        """What few operators are asked."""
        inputs = tensors_in((*args, *kwargs.values()))
        if operator.suspect:
            self._check(operator, args, kwargs)
        if operator.generator:
            self._note_generators(args, kwargs)
        if operator.born:
            self._note_lifted(inputs)
        if operator.restrides:
            self.restrided.add(family_key(inputs[0]))

    @unheard
    def _after(self, operator: Operator, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if operator.draws:
            self.drew = self.drew or operator.drew(args, kwargs)
        for tensor in (result,) if type(result) is Tensor else tensors_in(result):
            key = family_key(tensor)
            if key in self.outside or key in self.given:
                if not tensor.requires_grad:
                    self.aliases[id(tensor)] = tensor
            else:
                self.born.add(key)
            if not self.device_work:
                self.device_work = tensor.device.type == self._kind
            if operator.seeds and not tensor.dim():
                self._seeds.add(key)

    def _check(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        found = offence(operator.func, args, kwargs, self.device)
        if found is not None and not self._is_seed(operator.func, args):
            self.blame(found)

    def _check_place(self, operator: Operator, tensor: Tensor) -> None:
        found = None if operator.suspect else foreign((tensor,), self.device)
        if found is not None:
            self.blame(found)

    def _is_seed(self, func: Any, args: Any) -> bool:
        """CuDNN draws the seed of its dropout state on the device and reads it, once per process: not in a capture."""
        reads = func is aten._local_scalar_dense.default and not self.strict
        return reads and family_key(args[0]) in self._seeds

    def _check_lifted(self, tensor: Tensor) -> None:
        """`torch.tensor(..., device=...)` copies from the host below every dispatcher; only this shows."""
        if tensor.device.type == self.device.type != "cpu":
            self.blame(
                Offence(
                    "`torch.tensor` makes a device tensor from Python numbers inside",
                    HOST,
                    "`torch.full`, or make it once outside the graphed function",
                )
            )

    def blame(self, found: Offence) -> None:
        """Note an offence with the user's own line; raise it when strict."""
        found = _averaging() or found
        error = CaptureError(found.what, where=user_line(), why=found.why, fix=found.fix)
        if self.strict:
            raise again(error)
        self.offences.append(error)

    def host_read(self, name: str) -> None:
        """Note a host read that no dispatcher sees, such as `Tensor.tolist`."""
        self.blame(
            Offence(
                f"`{name}` reads a tensor on the host",
                READ,
                "keep it on the device, or do this part outside the graphed function",
            )
        )

    def builds(self) -> None:
        """Note that a lazy module makes its parameters: the next run can be captured."""
        self.built = True
        if self.strict:
            raise UnbuiltError(
                "a lazy module has its first run",
                where=user_line(),
                why="its parameters would be memory of the graph",
                fix="take one run before the capture",
            )

    def detaches(self, tensor: Tensor) -> None:
        """Note a `detach_`, which no dispatcher sees, where the history that is lost is older than the run."""
        if self._had_history(tensor):
            self.detached = True
            self.blame(DETACHED)

    def _had_history(self, tensor: Tensor) -> bool:
        """Whether a tensor from outside, or what this is a view of, has a history, which nobody could give back."""
        met = id(tensor) in self.history and id(tensor) not in self.aliases and tensor.grad_fn is not None
        base = tensor._base
        return met or self.is_older(tensor) or (base is not None and self._had_history(base))

    def expect(self, outside: dict[int, Tensor], written: set[int], executed: Executed) -> None:
        """Take what another run touched for what the next one will, unwatched."""
        self.outside.update(outside)
        self.written |= written
        self.executed.merge(executed)

    def bumped(self) -> list[Tensor]:
        """The tensors from outside whose versions moved since the run first met them."""
        return [t for key, t in self.outside.items() if self.versions[key] != version_of(t)]

    def is_older(self, tensor: Tensor) -> bool:
        """Whether a tensor has a history that was made before the run."""
        node: Any = tensor.grad_fn
        # A device's backward makes nodes on a thread of its own, which counts them by itself.
        return node is not None and id(tensor) not in self.aliases and node._sequence_nr() < self._start

    def renewed(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Tensors from before the run that it gave a history, by writing into them with autograd."""
        found = {id(t): t for t in (*arguments, *self.outside.values()) if family_key(t) in self.written}
        return [t for t in found.values() if t.grad_fn is not None and not self.is_older(t)]

    def _note_generators(self, args: Any, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self.generators[id(value)] = value

    def _note_lifted(self, inputs: Sequence[Tensor]) -> None:
        for tensor in inputs:
            self.born.add(family_key(tensor))
            self._check_lifted(tensor)

    def _note_outside(self, tensor: Tensor, key: int) -> None:
        if key not in self.outside:
            self.outside[key], self.versions[key] = tensor, version_of(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            self.history.setdefault(id(tensor), tensor)

    def _note_writes(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        for tensor in writes_of(operator.func, args, kwargs):
            key = family_key(tensor)
            self.written.add(key)
            # A warm-up is real and does as eager; what a recording did to a history could not be put back.
            if self.strict and tensor.requires_grad and torch.is_grad_enabled() and self._had_history(tensor):
                self.blame(RENEWED)
            if self.undo is not None and key not in self.born:
                self.undo.before_write(tensor)


def _averaging() -> Offence | None:
    """The words for a BatchNorm without momentum, whose factor is made of a count that lies on the device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code is _BATCH_NORM and frame.f_locals["self"].momentum is None:
            return Offence(
                "the count of batches of a BatchNorm with `momentum=None` is read on the host",
                READ,
                "give it a momentum, such as `momentum=0.1`",
            )
        frame = frame.f_back
    return None


@contextmanager
def watching(watch: Watch, listen: Callable[[Callable[[str], None]], Any]) -> Iterator[Watch]:
    """Run the body under a watch, and apart."""
    with (
        apart(watch.device),
        hearing_detach(watch.detaches),
        hearing_birth(watch.builds),
        hearing_grads(watch.touched.hear),
        listen(watch.host_read),
        watch,
        # Last: names that the others load are not the body's.
        watch.executed.following(watch.touched.hear_all),
    ):
        yield watch


@contextmanager
def unwatched(watch: Watch) -> Iterator[None]:
    """Run the body apart, while the watch hears of gradients only."""
    with apart(watch.device), hearing_grads(watch.touched.hear):
        yield


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Run the body on this thread alone, with no cast from outside in autocast's cache, and none left there.

    Backwards inside run here, too: this thread may hold a lock for which the device's thread for backwards waits, and
    that thread lets go of a backward's nodes only after it is over. Handles and plans of libraries, too, are a
    thread's own, and so is what follows the code that runs.
    """
    with torch.autograd.set_multithreading_enabled(False), _fresh_casts(device):
        yield


@contextmanager
def _fresh_casts(device: torch.device) -> Iterator[None]:
    """Autocast with a cache of this run's own: a cast from before may be stale, one from inside belongs to a graph.

    Inside, the cache stays on, since it decides in which precision the gradients of a cast add up.
    """
    cached = any(map(torch.is_autocast_enabled, {"cpu", device.type})) and torch.is_autocast_cache_enabled()
    if cached:
        torch.clear_autocast_cache()
    try:
        yield
    finally:
        if cached:
            torch.clear_autocast_cache()
