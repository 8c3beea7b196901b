"""Numbers of an optimizer that change from call to call: floats on the host, tensors in the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ._layout import family_key, is_dense
from ._places import Place, hyperparameters
from ._undo import below
from .errors import CaptureError

__all__ = ["Lifted", "OnDevice", "can_lift", "numbers_of", "unliftable"]


def numbers_of(optimizers: Iterable[tuple[str, Optimizer]]) -> list[Place]:
    """The options that are floats, or tuples of floats, by the names that a survey gives them."""
    places = (place for name, optimizer in optimizers for place in hyperparameters(optimizer, name))
    return [place for place in places if _is_number(place.read())]


def _is_number(value: Any) -> bool:
    if type(value) is tuple:
        return bool(value) and all(type(item) is float for item in value)
    return type(value) is float


def can_lift(place: Place, device: torch.device) -> bool:
    """Whether a tensor in this place would be used with the precision of the number.

    A capture tells the rest: it fails where torch reads the tensor on the host.
    """
    group = place.container
    dtypes = {p.dtype for p in group["params"]}
    if group.get("fused"):
        # A fused kernel takes a tensor for the learning rate only, on a device in single precision.
        return place.key == "lr" and (device.type == "cpu" or torch.float64 not in dtypes)
    return not dtypes & {torch.float16, torch.bfloat16}


def unliftable(place: Place) -> CaptureError:
    """What to say of a number that changes again and again and cannot be a tensor."""
    group, fix = place.container, ""
    if place.key == "lr" and "fused" in group and not group["fused"]:
        fix = "`fused=True`, which takes the learning rate from a tensor, or "
    elif (
        group["params"][0].device.type != "cpu"
        and "capturable" in group
        and not (group.get("foreach") and group["capturable"])
    ):
        fix = "`foreach=True, capturable=True`, which takes tensors, or "
    return CaptureError(
        f"`{place.name}` takes a new value again and again",
        why="each value is baked into a graph of its own, and this optimizer reads the number on the host",
        fix=f"{fix}keep the number, or step outside the graphed function",
    )


class _Number(NamedTuple):
    """One float, on its own or in a tuple, and the 0-dim tensor that stands for it."""

    slot: int
    item: int | None
    tensor: Tensor

    def of(self, values: Sequence[Any]) -> float:
        value = values[self.slot]
        number: float = value if self.item is None else value[self.item]
        return number


class _Condition(NamedTuple):
    """A comparison that Python made while the step was recorded."""

    number: int
    test: Callable[[float, float], bool]
    other: float
    answer: bool


class Lifted:
    """Floats of optimizers as 0-dim device tensors: lent to a run that is recorded, filled before each replay.

    Make it before the capture, on the stream of the capture. A guard leaves out `places` and asks `holds`;
    the memory of the tensors is in `families`.
    """

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        self.places = list(places)
        self._slots = [(place.container, place.key) for place in self.places]
        self._numbers: list[_Number] = []
        self._conditions: list[_Condition] = []
        self._seen: list[Any] = [None] * len(self.places)
        self._stand_ins = [self._stand_in(slot, device) for slot in range(len(self.places))]
        self._values = [float("nan")] * len(self._numbers)
        self.families = {family_key(number.tensor) for number in self._numbers}
        self.refill()

    def _stand_in(self, slot: int, device: torch.device) -> Any:
        group, key = self._slots[slot]
        value, dtype = group[key], _dtype(group, device)
        with torch.inference_mode(False), below():
            made = [torch.empty((), dtype=dtype, device=device) for _ in range(_count(value))]
        single = not isinstance(value, tuple)
        self._numbers += [_Number(slot, None if single else i, tensor) for i, tensor in enumerate(made)]
        return made[0] if single else tuple(made)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The tensors in the places of the floats; then the floats again, except where the body put another."""
        before = [group[key] for group, key in self._slots]
        for (group, key), tensor in zip(self._slots, self._stand_ins, strict=True):
            group[key] = tensor
        try:
            yield
        finally:
            for (group, key), tensor, value in zip(self._slots, self._stand_ins, before, strict=True):
                if group.get(key) is tensor:
                    group[key] = value

    def refill(self) -> None:
        """Bring the tensors up to the floats; costs next to nothing while these are the same objects."""
        now = [group[key] for group, key in self._slots]
        if all(map(operator.is_, now, self._seen)):
            return
        self._seen = now
        with torch.inference_mode(False), below():
            for i, number in enumerate(self._numbers):
                value = number.of(now)
                if value != self._values[i]:
                    self._values[i] = value
                    number.tensor.fill_(value)

    def holds(self) -> bool:
        """Whether the places hold floats still, which compare as they did while the step was recorded."""
        now = [group.get(key) for group, key in self._slots]
        if all(map(operator.is_, now, self._seen)):
            return True
        if not all(map(_is_number, now)) or [*map(_count, now)] != [*map(_count, self._stand_ins)]:
            return False
        return all(c.test(self._numbers[c.number].of(now), c.other) == c.answer for c in self._conditions)

    def compare(self, tensor: Any, test: Callable[[Any, Any], bool], other: float) -> bool | None:
        """How the float behind a tensor compares, noted for `holds`; None for a tensor that is none of ours."""
        for i, number in enumerate(self._numbers):
            if number.tensor is tensor:
                answer = bool(test(self._values[i], other))
                self._conditions.append(_Condition(i, test, other, answer))
                return answer
        return None

    def refused_results(self, tensors: Iterable[Tensor]) -> CaptureError | None:
        """Why these results of the recorded run cannot be: one is a stand-in, where eager returns a float."""
        returned = {family_key(t) for t in tensors}
        for number in self._numbers:
            if family_key(number.tensor) in returned:
                return CaptureError(
                    f"`{self.places[number.slot].name}` is among the results",
                    why="it changes from call to call, so the graph has a tensor in its place",
                    fix="read it outside the graphed function",
                )
        return None


def _count(value: Any) -> int:
    return len(value) if isinstance(value, tuple) else 1


def _dtype(group: dict[str, Any], device: torch.device) -> torch.dtype:
    """As precise as what torch computes with the float itself; a fused kernel on a device takes one kind only."""
    if group.get("fused"):
        return torch.float64 if device.type == "cpu" else torch.float32
    double = any(p.dtype in (torch.float64, torch.complex128) for p in group["params"])
    return torch.float64 if double else torch.float32


# -- a step with tensors among its options


class OnDevice(TorchFunctionMode):
    """Keeps on the device what torch's optimizers would read on the host when an option is a tensor.

    A tensor as `alpha=` of an addition, as the weight of a mean or the base of powers, and comparisons of lifted
    floats.
    """

    def __init__(self, lifted: Lifted | None) -> None:
        super().__init__()
        self._lifted = lifted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COMPARISONS and self._lifted is not None and type(args[1]) in (int, float):
            answer = self._lifted.compare(args[0], _COMPARISONS[func], args[1])
            if answer is not None:
                return answer
        alpha = kwargs.get("alpha")
        if func in _ADDITIONS and isinstance(alpha, Tensor) and not alpha.requires_grad:
            xs, ys = args[:2] if isinstance(args[0], (list, tuple)) else ([args[0]], [args[1]])
            if all(isinstance(t, Tensor) and t.layout is torch.strided for t in (*xs, *ys)):
                return _ADDITIONS[func](args[0], xs, ys, alpha)
        if func is torch._foreach_pow and isinstance(args[0], Tensor):
            return [*args[0].pow(torch.stack([*args[1]])).unbind()]
        if func is torch._foreach_lerp_ and isinstance(args[2], Tensor):
            return _add_scaled_(args[0], args[0], torch._foreach_sub(args[1], args[0]), args[2])
        return func(*args, **kwargs)


def _add_scaled_(whole: Any, xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: Tensor) -> Any:
    """`x += alpha * y` with one rounding, as with a float."""
    if _fits_one_kernel(xs, ys):
        plain: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
        torch._fused_sgd_(
            [*xs], [*ys], [], lr=alpha.neg().float(), maximize=False, is_first_step=False, **plain
        )
    else:
        for x, y in zip(xs, ys, strict=True):
            x.addcmul_(y, alpha)
    return whole


def _add_scaled(whole: Any, xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: Tensor) -> Any:
    made = [x.clone() for x in xs]
    return _add_scaled_(made if isinstance(whole, (list, tuple)) else made[0], made, ys, alpha)


def _fits_one_kernel(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Whether the fused kernel of a device takes these; the CPU's computes otherwise than an addition does."""
    first = xs[0]
    if first.device.type == "cpu" or first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    alike = all(t.dtype is first.dtype and t.device == first.device for t in (*xs, *ys))
    return alike and all(x.stride() == y.stride() and is_dense(x) for x, y in zip(xs, ys, strict=True))


_ADDITIONS: dict[Any, Callable[..., Any]] = {
    Tensor.add: _add_scaled,
    Tensor.add_: _add_scaled_,
    torch._foreach_add: _add_scaled,
    torch._foreach_add_: _add_scaled_,
}
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(Tensor, form): getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for form in (name, f"__{name}__")
}
