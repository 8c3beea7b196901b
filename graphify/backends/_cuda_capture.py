"""Capturing: a stream per device and thread, a capture that ends well whatever happens in it, and what mends a broken one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from ..errors import again
from ._cuda_driver import private_stream

__all__ = ["Pool", "capture", "own_workspaces", "stream_of"]

T = TypeVar("T")

_HEALINGS = 16

# Before torch 2.14 a capture that cannot be ended stays registered with the allocator, which then never frees
# a block again that another stream has used (https://github.com/pytorch/pytorch/pull/180395). It stays registered
# with the allocator of host memory, too, which nobody can end: no capture can begin in that pool any more.
_LEAVES_POOL_OPEN = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)

_streams = threading.local()


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """This thread's capture stream; at its first use the thread gets ready to capture."""
    known: dict[int | None, torch.cuda.Stream] = _streams.__dict__.setdefault("known", {})
    if device.index not in known:
        known[device.index] = private_stream(device)
        with torch.cuda.stream(known[device.index]):
            _make_handles(device)
    return known[device.index]


def _make_handles(device: torch.device) -> None:
    """Make this thread's cuBLAS and cuDNN handles, which cannot be made in the middle of a capture."""
    torch.zeros(1, device=device)
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            image = torch.zeros(1, 1, 4, 4, device=device)
            torch.nn.functional.conv2d(image, image)


class Pool(Protocol):
    """Where a graph's memory comes from."""

    device: torch.device
    handle: Any

    def renew(self) -> None:
        """Take another handle: no capture can begin with this one any more."""


def capture(graph: torch.cuda.CUDAGraph, run: Callable[[], T], pool: Pool) -> T:
    """Run under capture; a failure ends the capture, mends what it broke and surfaces as it was."""
    graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
    try:
        result = run()
    except BaseException:
        if _end(graph, pool.device, pool.handle) is not None:
            _mend(pool)
        raise
    broken = _end(graph, pool.device, pool.handle)
    if broken is not None:
        _mend(pool)
        raise again(broken)
    return result


def _mend(pool: Pool) -> None:
    pool.renew()
    _heal(pool.device)


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, handle: Any) -> RuntimeError | None:
    """End a capture; when the driver finds it broken, free the allocator from it and answer the error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        try:
            graph.capture_end()
        except RuntimeError as error:
            if _LEAVES_POOL_OPEN:
                torch._C._cuda_endAllocateToPool(device.index, handle)
                torch._C._cuda_releasePool(device.index, handle)
            return error
    return None


def _heal(device: torch.device) -> None:
    """Take the default generator out of the state in which a broken capture leaves it.

    It believes that a capture is under way, and so do all graphs that registered it; a capture that draws and
    ends well sets that right. A device-wide synchronisation in another thread breaks any capture, this one
    too, so it is tried again.
    """
    for _ in range(_HEALINGS):
        graph, handle = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        torch.rand(1, device=device)
        if _end(graph, device, handle) is None:
            return


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Make cuBLAS take its workspace from the capture's own pool.

    Since torch 2.12 resetting one graph frees the cached workspaces of its capture stream, which other graphs
    captured on that stream would still use (https://github.com/pytorch/pytorch/issues/193402).
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", _nothing)
    clear()
    try:
        yield
    finally:
        clear()


def _nothing() -> None:
    """Without a way to clear them there is nothing to clear."""
