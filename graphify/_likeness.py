"""What torch asks of a function beside its call."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

__all__ = ["FunctionLike"]


class FunctionLike:
    """What `torch.export` reads of a `forward` to name the arguments, read of the one that is wrapped."""

    __slots__ = ()

    __wrapped__: Any
    __code__ = property(attrgetter("__wrapped__.__code__"))
