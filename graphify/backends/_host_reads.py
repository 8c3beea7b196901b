"""Host reads of tensors that never reach the dispatcher, heard by patching methods while somebody listens."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

from .._shadows import Shadows, shadow
from .base import Report

__all__ = ["listen"]

_ALWAYS = (
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__format__",
    "__reduce_ex__",  # pickle and `torch.save`
    "__repr__",  # and `str` and `print`
    "apply_",
    "cpu",
    "map_",
    "numpy",
    "tolist",
)


class _Ears(threading.local):
    """The listeners of this thread, innermost last; `busy` while a read that was reported is under way."""

    def __init__(self) -> None:
        self.listeners: list[tuple[Report, str, frozenset[str]]] = []
        self.busy = False

    def reports(self, tensor: Tensor, name: str) -> list[Report]:
        """Who wants to hear of this read."""
        if self.busy or not self.listeners:
            return []
        kind = tensor.device.type
        return [
            report for report, device, names in reversed(self.listeners) if device == kind and name in names
        ]


_ears = _Ears()


@contextlib.contextmanager
def listen(
    report: Report, device_type: str = "cpu", names: Collection[str] = (*_ALWAYS, "to")
) -> Iterator[None]:
    """Call `report` with names such as "Tensor.tolist" for reads on this thread, then do the read.

    Reads of tensors on other devices pass in silence. `report` may raise; the read is not done then. A read that another read needs is not reported again.
    On a CPU tensor `.to` counts as a read only when it names the CPU in a string: `x.to(y.device)` is the
    usual way to stay on the device. A `TorchFunctionMode` would hear more, but it switches off fast paths.
    """
    listener = (report, device_type, frozenset(names))
    _ears.listeners.append(listener)
    try:
        with _shadows.cast():
            yield
    finally:
        _ears.listeners.remove(listener)


def _is_read(*args: Any, **kwargs: Any) -> bool:
    return True


def _names_cpu(*args: Any, **kwargs: Any) -> bool:
    device = kwargs.get("device", args[0] if args else None)
    return isinstance(device, str) and device.partition(":")[0] == "cpu"


def _reporting(name: str, reads: Callable[..., bool], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reports first. Other threads pass straight through."""
    title = f"Tensor.{name}"

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        reports = _ears.reports(self, name)
        if not reports or not reads(*args, **kwargs):
            return original(self, *args, **kwargs)
        for report in reports:
            report(title)
        _ears.busy = True
        try:
            return original(self, *args, **kwargs)
        finally:
            _ears.busy = False

    return method


_READS = dict.fromkeys(_ALWAYS, _is_read) | {"to": _names_cpu}
_shadows = Shadows(
    lambda: [
        shadow(Tensor, name, functools.partial(_reporting, name, reads)) for name, reads in _READS.items()
    ]
)
