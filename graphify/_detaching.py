"""`detach_`, which never reaches the dispatcher, heard by patching it while somebody listens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ._shadows import Shadows, shadow

__all__ = ["hearing_detach"]


def hearing_detach(hear: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """Call `hear` with each tensor that this thread is about to `detach_`; it may raise, and then that is not done."""
    return _shadows.hearing(hear)


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    def detach_(*args: Any, **kwargs: Any) -> Any:
        for tensor in (given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)):
            _shadows.tell(tensor)
        return original(*args, **kwargs)

    return detach_


_shadows = Shadows(lambda: [shadow(owner, "detach_", _heard) for owner in (Tensor, torch)])
