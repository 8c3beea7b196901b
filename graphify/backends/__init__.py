"""Backends by name; each is made at its first use."""

from __future__ import annotations

from functools import cache

from .base import Backend

__all__ = ["backend_for", "named"]


@cache
def named(name: str) -> Backend:
    """The backend of this name."""
    if name == "cuda":
        from .cuda import CudaBackend

        return CudaBackend()
    if name == "tape":
        from .tape import TapeBackend

        return TapeBackend()
    from .eager import EagerBackend

    return EagerBackend()


def backend_for(name: str) -> Backend:
    """The backend that a wrapper with `backend=name` records on; "auto" is CUDA, which passes on CPU tensors."""
    return named("cuda" if name == "auto" else name)
