"""What happens to a program's state between two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._checks import check_count, check_kind, check_one_of
from ._data import make_tensor
from ._programs import Place, State

__all__ = ["Change", "Changes", "changes_of"]

Change = tuple[Any, ...]
"""A verb, a name, and values."""


@dataclass(frozen=True)
class Changes:
    """What happens to a twin before a call; each change is a verb, a name and values."""

    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        check_kind("Changes: changes", self.changes, (tuple, list), "a tuple of tuples")
        for change in self.changes:
            check_kind("Changes: each change", change, tuple, "a tuple of a verb, a name and values")
            check_count("Changes: the length of each change", len(change), 2)
            check_one_of("Changes: the verb", change[0], _VERBS)

    def __call__(self, twin: Any) -> None:
        for verb, name, *values in self.changes:
            _VERBS[verb](twin, name, *values)


def _like(tensor: Tensor, seed: int) -> Tensor:
    return make_tensor(tuple(tensor.shape), tensor.dtype, seed=seed).to(tensor.device)


def _set(twin: Any, name: str, value: object) -> None:
    Place(twin, name).set(value)


def _put(twin: Any, name: str, key: Any, value: object) -> None:
    Place(twin, name).get()[key] = value


def _field(twin: Any, name: str, key: str, value: object) -> None:
    setattr(Place(twin, name).get(), key, value)


def _put_tensor(twin: Any, name: str, key: Any, seed: int) -> None:
    held = Place(twin, name).get()
    held[key] = _like(held[key], seed)


def _copy(twin: Any, name: str, seed: int) -> None:
    held = Place(twin, name).get()
    with torch.inference_mode():
        held.copy_(_like(held, seed))


def _rebind(twin: Any, name: str, seed: int) -> None:
    place = Place(twin, name)
    place.set(_like(place.get(), seed))


def _weights(twin: Any, name: str, seed: int) -> None:
    with torch.no_grad():
        for parameter in Place(twin, name).get().parameters():
            parameter.copy_(_like(parameter, seed))


def _assign(twin: Any, name: str, seed: int) -> None:
    module = Place(twin, name).get()
    fresh = {key: _like(held, seed).abs() for key, held in module.state_dict().items()}
    module.load_state_dict(fresh, assign=True)


def _data(twin: Any, name: str, seed: int) -> None:
    for parameter in Place(twin, name).get().parameters():
        parameter.data = _like(parameter, seed)


def _parameter(twin: Any, name: str, seed: int) -> None:
    for module in Place(twin, name).get().modules():
        for key, held in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(_like(held, seed)))


def _train(twin: Any, name: str, mode: bool) -> None:
    (Place(twin, name).get() if name else twin).train(mode)


def _freeze(twin: Any, name: str, freeze: bool) -> None:
    Place(twin, name).get().requires_grad_(not freeze)


def _require(twin: Any, name: str, index: int, flag: bool) -> None:
    held = Place(twin, name).get()
    leaves = list(held.parameters()) if isinstance(held, nn.Module) else [held]
    for leaf in leaves[index % max(1, len(leaves)) :][:1]:
        leaf.requires_grad_(flag)


def _renew(twin: Any, name: str, seed: int) -> None:
    place = Place(twin, name)
    place.set(nn.Parameter(_like(place.get(), seed)))


def _rate(twin: Any, name: str, rate: float) -> None:
    for group in Place(twin, name).get().param_groups:
        group["lr"] = rate


def _seed(twin: Any, name: str, seed: int) -> None:
    torch.manual_seed(seed)


_VERBS: dict[str, Callable[..., None]] = {
    "set": _set,
    "put": _put,
    "field": _field,
    "put_tensor": _put_tensor,
    "copy": _copy,
    "rebind": _rebind,
    "weights": _weights,
    "assign": _assign,
    "data": _data,
    "parameter": _parameter,
    "train": _train,
    "freeze": _freeze,
    "require": _require,
    "renew": _renew,
    "rate": _rate,
    "seed": _seed,
}

_PLAIN: dict[str, tuple[object, ...]] = {
    "float": (2.0, -1.0, 0.5),
    "flag": (False, True),
    "word": ("b", "a"),
    "pair": ((1.0, 3.0), (0.5, 2.0)),
    "counter": (10, 0),
}


def changes_of(item: State, seed: int) -> list[Change]:
    """What can happen to this part of the state."""
    if item.kind in _PLAIN:
        return [("set", item.name, value) for value in _PLAIN[item.kind]]
    if item.kind == "tensor":
        return [("copy", item.name, seed), ("rebind", item.name, seed)]
    if item.kind == "module":
        verbs = ("weights", "assign", "data", "parameter")
        flips: list[Change] = [
            ("train", item.name, False),
            ("train", item.name, True),
            ("freeze", item.name, True),
        ]
        return [(verb, item.name, seed) for verb in verbs] + flips
    others: dict[str, list[Change]] = {
        "options": [("put", item.name, "scale", 2.0), ("put", item.name, "scale", 3.0)],
        "config": [("field", item.name, "value", 2.0), ("field", item.name, "value", 3.0)],
        "named": [("put_tensor", item.name, "w", seed)],
        "piled": [("put_tensor", item.name, 0, seed)],
        "optimizer": [("rate", item.name, 0.05), ("rate", item.name, 0.2), ("rate", item.name, 0.01)],
    }
    return others.get(item.kind, [])
