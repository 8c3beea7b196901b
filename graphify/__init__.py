"""One line turns a PyTorch callable into a CUDA-graph replay and keeps its meaning.

    import torch
    from graphify import graphify

    @graphify
    def step(x, mask=None): ...         # a function, a method, a lambda, a partial, a callable object

    model = graphify(model)             # an nn.Module becomes a GraphedModule, its twin

A short tour. The first call of a signature (shapes, dtypes, constants, modes, and the plain values the code
reads) runs eagerly, the second is captured, every later one is a replay. Whatever the caller can see equals
eager, or a `GraphifyError` says where, why and what to write instead.

    step.stats()                        # how each call got its result, and why some ran eagerly
    step.graphs                         # one record per graph: signature, replays, nodes, bytes
    print(step.report())                # both as a table
    step.capture(x)                     # ahead of time, without a trace
    step.reset()                        # drop all graphs
    handle(model).stats()               # the same controls, also where a module's own names hide them

    print(check(step, x))               # all that keeps a call from becoming a graph, without a trace

    with disabled(): ...                # plain calls on this thread; GRAPHIFY_DISABLE=1 for a whole process

`graphify.testing` compares your own code with eager, on a CPU too. `python -m graphify doctor` tells what
this installation can do, `python -m graphify demo` shows what it is good for.
"""

import typing as _typing

from ._check import check as check
from ._decorate import graphify as graphify, handle as handle
from ._module import GraphedModule as GraphedModule
from ._options import disabled as disabled
from ._pool import GraphPool as GraphPool
from .buckets import Bucket as Bucket
from .errors import (
    CaptureError as CaptureError,
    GraphifyError as GraphifyError,
    GraphifyWarning as GraphifyWarning,
    InputError as InputError,
    PaddingError as PaddingError,
    StaleOutputError as StaleOutputError,
    VerificationError as VerificationError,
)

__all__ = [
    "Bucket",
    "CaptureError",
    "GraphPool",
    "GraphedModule",
    "GraphifyError",
    "GraphifyWarning",
    "InputError",
    "PaddingError",
    "StaleOutputError",
    "VerificationError",
    "check",
    "disabled",
    "graphify",
    "handle",
]


__version__: str

if not _typing.TYPE_CHECKING:  # a type checker would take this for "any name exists"

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("graphify")
