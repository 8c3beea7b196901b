"""The few driver calls that torch does not offer, through ctypes: a private stream and a node count."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

__all__ = ["count_nodes", "private_stream"]

_NON_BLOCKING = 1


@cache
def _driver() -> ctypes.CDLL | None:
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def private_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else can be given.

    torch hands out its 32 streams per device in turn, so a user may hold the very stream of a capture.
    Without the driver library one of those has to do.
    """
    driver, handle = _driver(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context current on this thread
        if driver is not None and driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING) == 0:
            return torch.cuda.ExternalStream(handle.value or 0, device=device)  # type: ignore[no-untyped-call]
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def count_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """The number of nodes of a graph captured with `keep_graph=True`; None without the driver library."""
    driver, number = _driver(), ctypes.c_size_t()
    if driver is None:
        return None
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    return number.value if driver.cuGraphGetNodes(raw, None, ctypes.byref(number)) == 0 else None
