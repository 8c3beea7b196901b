"""Host reads of tensors that never reach the dispatcher, heard by patching methods while somebody listens."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

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

# Process-wide, because methods are: who listens, and what to put back when the last one leaves.
_lock = threading.Lock()
_listeners = 0
_restorers: list[Callable[[], None]] = []


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
    _install()
    listener = (report, device_type, frozenset(names))
    _ears.listeners.append(listener)
    try:
        yield
    finally:
        _ears.listeners.remove(listener)
        _uninstall()


def _install() -> None:
    global _listeners  # noqa: PLW0603
    with _lock:
        _listeners += 1
        if _listeners == 1:
            for name in _ALWAYS:
                _patch(name, _is_read)
            _patch("to", _names_cpu)


def _uninstall() -> None:
    global _listeners  # noqa: PLW0603
    with _lock:
        _listeners -= 1
        while not _listeners and _restorers:
            _restorers.pop()()


def _is_read(*args: Any, **kwargs: Any) -> bool:
    return True


def _names_cpu(*args: Any, **kwargs: Any) -> bool:
    device = kwargs.get("device", args[0] if args else None)
    return isinstance(device, str) and device.partition(":")[0] == "cpu"


def _patch(name: str, reads: Callable[..., bool]) -> None:
    """Shadow a method with one that reports first. Other threads pass straight through."""
    original, inherited = getattr(Tensor, name), name not in vars(Tensor)
    title = f"Tensor.{name}"

    @functools.wraps(original)
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

    def restore() -> None:
        # If somebody has patched over us since, theirs stays: ours below it is deaf without listeners.
        if vars(Tensor).get(name) is method:
            delattr(Tensor, name) if inherited else setattr(Tensor, name, original)

    setattr(Tensor, name, method)
    _restorers.append(restore)
