"""The controls of whatever is graphed: each is its runner's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from ._likeness import FunctionLike
from ._wrapper import Runner

if TYPE_CHECKING:
    from torch import Tensor

    from .stats import CapturedBuckets, GraphRecord, Stats

__all__ = ["CONTROLS", "BoundMethod", "Controls"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Controls(FunctionLike):
    """What every graphed function and method offers beside its call."""

    __slots__ = ()

    runner: Runner

    def _controlled(self) -> Runner:
        """The runner that the controls are about."""
        return self.runner

    def stats(self) -> Stats:
        """How the calls so far got their results; see `Stats`."""
        return self._controlled().stats()

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        """One record per graph: signature, replays, nodes, bytes, capture seconds, unguarded tensors."""
        return self._controlled().graphs

    def report(self) -> str:
        """Stats and graphs as a table."""
        return self._controlled().report()

    def capture(self, *args: Any, **kwargs: Any) -> GraphRecord:
        """Capture the signature of these arguments ahead of time, without a trace."""
        return self._controlled().capture(*args, **kwargs)

    def capture_buckets(self, *args: Any, progress: bool = True, **kwargs: Any) -> CapturedBuckets:
        """Capture all buckets ahead of time from one example, the largest first, without a trace."""
        return self._controlled().capture_buckets(*args, progress=progress, **kwargs)

    def estimate(self, *args: Any, **kwargs: Any) -> int:
        """Bytes that the graphs of all buckets would take."""
        return self._controlled().estimate(*args, **kwargs)

    def seal(self) -> None:
        """Capture nothing from now on."""
        self._controlled().seal()

    def buffer(self, name: str) -> Tensor:
        """The static input of an argument, for producers that write in place."""
        return self._controlled().buffer(name)

    def reset(self) -> None:
        """Drop all graphs and their memory; the next call starts anew."""
        self._controlled().reset()


CONTROLS = tuple(name for name in vars(Controls) if not name.startswith("_"))
"""The names of all controls."""


class BoundMethod(Protocol[P, R_co]):
    """The type of a graphed method bound to its instance: a `types.MethodType` that has the controls too."""

    @property
    def __self__(self) -> Any: ...
    @property
    def __func__(self) -> Any: ...
    @property
    def __wrapped__(self) -> Callable[..., R_co]: ...
    @property
    def __name__(self) -> str: ...
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def stats(self) -> Stats: ...
    @property
    def graphs(self) -> tuple[GraphRecord, ...]: ...
    def report(self) -> str: ...
    def capture(self, *args: P.args, **kwargs: P.kwargs) -> GraphRecord: ...
    def capture_buckets(self, *args: Any, progress: bool = True, **kwargs: Any) -> CapturedBuckets: ...
    def estimate(self, *args: P.args, **kwargs: P.kwargs) -> int: ...
    def seal(self) -> None: ...
    def buffer(self, name: str) -> Tensor: ...
    def reset(self) -> None: ...
