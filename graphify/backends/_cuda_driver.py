"""The few driver calls that torch does not offer, through ctypes: a private stream, nodes, copies inside a graph."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

__all__ = ["CopyNode", "add_copies", "count_nodes", "driver_found", "private_stream"]

_NON_BLOCKING = 1
_DEVICE_MEMORY = 2


class _Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D of the driver's header; a plain copy is one row of one slice."""

    _fields_ = (
        *((f"source_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "lod")),
        ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("reserved_0", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("source_height", ctypes.c_size_t),
        *((f"target_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "lod")),
        ("target_kind", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("reserved_1", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("target_height", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


@cache
def _driver() -> Any:
    """The driver library, or None."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def driver_found() -> bool:
    """Whether the driver library can be called."""
    return _driver() is not None


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code != 0:
        raise RuntimeError(f"{name} failed with CUDA driver error {code}")


def private_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else can be given.

    torch hands out its 32 streams per device in turn, so a user may hold the very stream of a capture.
    Without the driver library one of those has to do.
    """
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context current on this thread
        if not driver_found():
            return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        _call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        return torch.cuda.ExternalStream(handle.value or 0, device=device)  # type: ignore[no-untyped-call]


def _nodes(graph: torch.cuda.CUDAGraph, which: str) -> list[int]:
    raw, number = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _call(which, raw, None, ctypes.byref(number))
    if number.value == 0:
        return []
    nodes = (ctypes.c_void_p * number.value)()
    _call(which, raw, nodes, ctypes.byref(number))
    return [node for node in nodes if node is not None]


def count_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """The number of nodes of a graph captured with `keep_graph=True`; None without the driver library."""
    return len(_nodes(graph, "cuGraphGetNodes")) if driver_found() else None


class CopyNode:
    """A device-to-device copy inside a graph, whose ends can be moved before each launch."""

    def __init__(self, source: int, target: int, size: int) -> None:
        self.ends = _Memcpy3D(
            source_kind=_DEVICE_MEMORY, source=source, target_kind=_DEVICE_MEMORY, target=target,
            width=size, height=1, depth=1,
        )  # fmt: skip
        self.node = ctypes.c_void_p()
        self._update: Any = _driver().cuGraphExecMemcpyNodeSetParams
        self._args: tuple[Any, ...] = ()

    def arm(self, graph: torch.cuda.CUDAGraph, context: ctypes.c_void_p) -> None:
        """Aim at the instantiated graph; call again after it was instantiated anew."""
        executable = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        self._args = (executable, self.node, ctypes.byref(self.ends), context)

    def take_from(self, address: int) -> None:
        """Copy from this address at the next launches."""
        self.ends.source = address
        if code := self._update(*self._args):
            raise _not_moved(code)

    def put_to(self, address: int) -> None:
        """Copy to this address at the next launches."""
        self.ends.target = address
        if code := self._update(*self._args):
            raise _not_moved(code)


def _not_moved(code: int) -> RuntimeError:
    return RuntimeError(f"cuGraphExecMemcpyNodeSetParams failed with CUDA driver error {code}")


def add_copies(graph: torch.cuda.CUDAGraph, before: Sequence[CopyNode], after: Sequence[CopyNode]) -> None:
    """Put copies in front of and behind all nodes of a captured graph, and instantiate it."""
    raw, context = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    roots, everything = _nodes(graph, "cuGraphGetRootNodes"), _nodes(graph, "cuGraphGetNodes")
    for copy in before:
        _add(raw, copy, (), context)
        for root in roots:
            _call("cuGraphAddDependencies", raw, ctypes.byref(copy.node), ctypes.byref(ctypes.c_void_p(root)),
                  ctypes.c_size_t(1))  # fmt: skip
    inputs = [copy.node.value or 0 for copy in before]
    for copy in after:
        _add(raw, copy, (*everything, *inputs), context)
    graph.instantiate()
    for copy in (*before, *after):
        copy.arm(graph, context)


def _add(raw: ctypes.c_void_p, copy: CopyNode, needs: Sequence[int], context: ctypes.c_void_p) -> None:
    nodes = (ctypes.c_void_p * len(needs))(*needs) if needs else None
    _call("cuGraphAddMemcpyNode", ctypes.byref(copy.node), raw, nodes, ctypes.c_size_t(len(needs)),
          ctypes.byref(copy.ends), context)  # fmt: skip
