"""Recording for the tape: a dispatch mode that keeps the operator calls of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from .._code import user_line
from .._composite import uncovered
from .._illegal import tensors_in
from .._mode import InfraMode
from .._operators import operator_of
from .._undo import UndoLog
from ..errors import CaptureError
from ._memory import Slot
from ._rng import Streams
from ._tape_steps import Call, Output, Step, allocates, constant, pinned, refilling, settled

__all__ = ["Recorder"]

_LIFT = torch.ops.aten.lift_fresh.default


class Recorder(InfraMode):
    """Keeps every operator call of a run, saves what the run writes, and watches the generators."""

    supports_higher_order_operators = True

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.undo = UndoLog()
        self.streams = Streams(generators)
        self.owned: dict[int, Tensor] = {}  # one alias of each storage that the run made
        self.pins: Counter[int] = Counter()  # how many aliases the tape holds of each storage
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._last: Any = "its beginning"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the operators on the tensors inside come next
        kwargs = kwargs or {}
        _check_kind(func, types)
        self.check_streams(func)
        operator = operator_of(func, "cpu")
        for value in (*args, *kwargs.values()) if operator.generator else ():
            if isinstance(value, torch.Generator):
                self.streams.add(value)
        call = Call(func, args, kwargs)
        self._save_written(call)
        if operator.calls_others:
            with uncovered(func, "cpu") as call.found:
                result = settled(func, operator.call(*args, **kwargs))
        else:
            result = settled(func, operator.call(*args, **kwargs))
        self._keep(call, result, drew=self.streams.moved())
        if not _is_bookkeeping(func):
            self._last = func
        return result

    def check_streams(self, here: Any) -> None:
        """Raise if Python code has moved a generator since the last operator; `here` is the next one, or a word."""
        if self.streams.moved():
            before, after = (p if isinstance(p, str) else f"`{p}`" for p in (self._last, here))
            when = f"after {before}" if _is_bookkeeping(here) else f"between {before} and {after}"
            raise CaptureError(
                f"Python code moved a random generator {when}",
                where=user_line(),
                why="a replay repeats operators only, so its random numbers would differ from eager's",
                fix="seed, fork or restore generators outside the graphed function;"
                " for a checkpoint, `preserve_rng_state=False`",
            )

    def settle_memory(self) -> None:
        """Give storages that the host shrank during the run the size that the kept operators rely on."""
        for storage, size in self._sizes.values():
            if storage.nbytes() < size:
                storage.resize_(size)
        self._sizes.clear()

    def _save_written(self, call: Call) -> None:
        for tensor in call.written:
            if tensor.layout is not torch.strided:
                raise _no_memory(call.func, tensor)
            if _key(tensor) not in self.owned:
                self.undo.before_write(tensor)

    def _keep(self, call: Call, result: Any, *, drew: bool) -> None:
        leaves, run = list(tensors_in(result)), call.bound()
        outputs = self._outputs(call, leaves)
        if outputs and call.func is _LIFT:
            # Made from Python numbers: eager makes it anew at each call, so the tape refills it.
            run = constant(leaves[0])
        if allocates(call.func) or not (outputs or drew or call.has_effect()):
            return
        for alias in call.pins.values():
            self._hold(alias)
        if outputs:
            run = refilling(run, call.func, len(leaves), outputs)
        self.steps.append(Step(run, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    def _outputs(self, call: Call, leaves: list[Tensor]) -> list[Output]:
        """The results that are new memory. Views are told by their storage: not every alias is declared."""
        constants = call.func is _LIFT and leaves[0].untyped_storage().resizable()  # NumPy's memory is not
        given = set() if constants else set(map(_key, call.pins.values()))
        made = []
        for position, leaf in enumerate(leaves):
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise _no_memory(call.func, leaf)
            # Wrapper subclasses and autograd's zero tensors have storages without memory.
            hollow = _is_foreign(type(leaf)) or leaf._is_zerotensor()
            if not hollow and (key := _key(leaf)) not in given and key not in self.pins:
                made.append(Output(position, Slot(self._own(leaf))))
        return made

    def _own(self, leaf: Tensor) -> Tensor:
        alias = pinned(leaf)
        self._hold(alias)
        self.owned.setdefault(leaf.untyped_storage()._cdata, alias)
        return alias

    def _hold(self, alias: Tensor) -> None:
        if alias.layout is torch.strided:
            storage = alias.untyped_storage()
            _, size = self._sizes.get(storage._cdata, (storage, 0))
            self._sizes[storage._cdata] = storage, max(size, storage.nbytes())
            self.pins[storage._cdata] += 1


def _key(tensor: Tensor) -> int | None:
    """The identity of a tensor's memory; None for layouts that have no memory of their own."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _is_foreign(kind: Any) -> bool:
    """Whether a subclass handles operators by itself."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_bookkeeping(here: Any) -> bool:
    """Whether an operator is one that the profiler has torch call, as around every step of an optimizer."""
    return getattr(here, "namespace", "") == "profiler"


def _check_kind(func: Any, types: Any) -> None:
    if not hasattr(func, "_schema"):
        raise CaptureError(
            f"`{func}` is a higher-order operator",
            where=user_line(),
            why="the tape holds plain operators only",
            fix="call it outside the graphed function, or write it with `torch.where`",
        )
    for kind in types:
        if _is_foreign(kind):
            raise CaptureError(
                f"`{func}` gets a {kind.__name__}, whose operators the tape cannot see",
                where=user_line(),
                why="it has a `__torch_dispatch__` of its own and no `__tensor_flatten__`",
                fix="pass the plain tensor inside it, or call this outside the graphed function",
            )


def _no_memory(func: Any, tensor: Tensor) -> CaptureError:
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return CaptureError(
        f"`{func}` makes or writes a {kind} tensor",
        where=user_line(),
        why="a replay writes into memory of a fixed size and layout",
        fix="use strided tensors, or do this part outside the graphed function",
    )
