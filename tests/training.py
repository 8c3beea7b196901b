"""What the training tests share: a scenario is played once plainly and once graphed, and what it shows is equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from checks import equal
from torch import nn
from torch.utils._pytree import tree_map

from graphify import GraphifyError, graphify, handle

Wrap = Callable[..., Any]
Scenario = Callable[[Wrap], Iterator[Any]]
ERRORS = ("inplace operation", "second time")


def same(scenario: Scenario, backend: str, **options: Any) -> list[Any]:
    """Play a scenario with plain and with graphed callables, from one seed; the graphed ones come back.

    What it yields must be equal when it is yielded and, kept, again at the end.
    """
    graphed: list[Any] = []

    def wrap(target: Any, **more: Any) -> Any:
        graphed.append(graphify(target, backend=backend, **options, **more))
        return graphed[-1]

    equal(_play(scenario, lambda target, **more: target), _play(scenario, wrap))
    return graphed


def same_or_loud(scenario: Scenario, backend: str, **options: Any) -> None:
    """As `same`, but a `GraphifyError` is an answer too."""
    try:
        same(scenario, backend, **options)
    except GraphifyError as error:
        print("refused:", error)


def _play(scenario: Scenario, wrap: Wrap) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    then: list[Any] = []
    kept: list[Any] = []
    for value in scenario(wrap):
        then.append(tree_map(_copied, value))
        kept.append(value)
    return then, kept


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def grads(*owners: Any) -> list[torch.Tensor | None]:
    """The gradients of the parameters of modules, and of tensors."""
    found = [list(o.parameters()) if isinstance(o, nn.Module) else [o] for o in owners]
    return [p.grad for ps in found for p in ps]


def clear(*owners: Any) -> None:
    """Set the gradients of modules and of tensors to None."""
    for owner in owners:
        for p in owner.parameters() if isinstance(owner, nn.Module) else [owner]:
            p.grad = None


def error_of(work: Callable[[], Any]) -> str | None:
    """What torch's autograd had against it, in few words; None if nothing."""
    try:
        work()
    except GraphifyError:
        raise
    except RuntimeError as error:
        return next(text for text in ERRORS if text in str(error))
    return None


def let_go(device: torch.device) -> None:
    """Wait until a device's thread has let go of the last backward, which it does a moment later where that failed."""
    torch.zeros((), device=device, requires_grad=True).backward()


def right_or_eagers_error(work: Callable[[], Any], want: Callable[[], Any]) -> None:
    """The right values, or the error that eager raises where a saved tensor was edited."""
    try:
        got = work()
    except RuntimeError as error:
        assert "inplace operation" in str(error), error  # noqa: PT017
    else:
        equal(want(), got)


def reset(graphed: Any) -> None:
    """Reset what is graphed; nothing for the plain twin."""
    try:
        controls = handle(graphed)
    except TypeError:
        return
    controls.reset()


def mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)


def leaf(device: torch.device, *shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device=device, requires_grad=True, **options)
