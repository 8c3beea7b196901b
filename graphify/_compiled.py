"""The forward of a module that `module.compile()` compiled."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn

from .errors import GraphifyWarning

__all__ = ["Compiled"]

_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")

_any_global_hook = getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: False)


class Compiled:
    """The forward of a module on which `module.compile()` was called: its compiled code, hooks left out.

    What compile() made runs the module's hooks too, and the twin runs these around its graph already: a module
    that has hooks runs its plain forward.
    """

    __slots__ = ("__self__", "__weakref__")

    def __init__(self, module: nn.Module) -> None:
        self.__self__ = module

    @property
    def __func__(self) -> Any:
        return type(self.__self__).forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        compiled = module._compiled_call_impl
        if compiled is None:
            return module.forward(*args, **kwargs)
        if not any(getattr(module, hooks) for hooks in _HOOKS) and not _any_global_hook():
            return compiled(*args, **kwargs)
        name = type(module).__qualname__
        warnings.warn(
            f"`{name}` has hooks, and {name}.compile() compiled them together with the forward: its graphs hold "
            f"the plain forward. To graph compiled code, write graphify(torch.compile(module)).",
            GraphifyWarning,
            stacklevel=2,
        )
        return module.forward(*args, **kwargs)
