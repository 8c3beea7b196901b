"""Every place that a run can read, found by walks from its roots; and how two surveys differ."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import types
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from copy import copy
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ._code import Executed, is_library, names_of
from ._places import (
    MISSING,
    Bulk,
    Change,
    Place,
    TensorFacts,
    entries,
    hyperparameters,
    is_plain,
    item_name,
    nothing,
    same,
    truncate,
)

__all__ = ["Survey"]

_BULK = 64
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, threading.local, types.FunctionType)
_EMPTY: tuple[Any, ...] = ([], (), {}, set(), "", range(0))
_ITERATORS = tuple(type(iter(empty)) for empty in _EMPTY)
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# The last two are what a learning-rate schedule adds; it warns with the help of the first of them.
_OPTIMIZER_INTERNALS = frozenset(
    {"defaults", "param_groups", "state", "_zero_grad_profile_name", "_opt_called", "step"}
)
_INTERNALS = ((nn.Module, _MODULE_INTERNALS), (Optimizer, _OPTIMIZER_INTERNALS))
_SKIPPED_PACKAGES = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}


class Survey:
    """Every place that executed code can reach from `roots` by the names it uses, and what each holds.

    Parameters, buffers and submodules of every reachable module count whether or not they are named.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], executed: Executed) -> None:
        self.executed = executed
        self.names = None if executed.by_any_name() else executed.names() | {"training"}
        self.places: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self.sizes: list[tuple[Any, list[Any], str]] = []
        self.bulk: list[Bulk] = []
        self.tensor_facts: list[tuple[Tensor, str, TensorFacts]] = []
        self.generators: list[torch.Generator] = []
        self.hooks: list[tuple[Any, int, str]] = []
        self.registries: list[dict[str, Any]] = []
        self.optimizers: list[tuple[str, Optimizer]] = []
        self.held: list[tuple[Place, Tensor]] = []
        self._seen: dict[int, Any] = {}
        self._keys: dict[int, list[Any]] = {}
        self._outermost: Any = None
        self._queue: deque[tuple[Any, str]] = deque()
        self.base: Survey | None = None
        self._base_holds: Callable[[], bool] = bool
        for name, value in roots:
            self._reach(value, name)
        for code, scope in executed.scopes():
            self._add_all(Place(scope, name, "field", name) for name in names_of(code).scope if name in scope)
            for module in names_of(code).imports:
                self._reach(sys.modules.get(module), module)
        self._walk_all()

    def _walk_all(self) -> None:
        while self._queue:
            value, name = self._queue.popleft()
            self._walk(value, name)

    def fork(self, holds: Callable[[], bool]) -> Survey:
        """The same survey to add to; `holds` tells whether all is as this one found it."""
        made = copy(self)
        made.places, made._seen, made._keys = dict(self.places), dict(self._seen), dict(self._keys)
        made.sizes, made.bulk, made.tensor_facts = [*self.sizes], [*self.bulk], [*self.tensor_facts]
        made.generators, made.hooks, made.held = [*self.generators], [*self.hooks], [*self.held]
        made.optimizers, made.registries, made._queue = [*self.optimizers], [*self.registries], deque()
        made.base, made._base_holds = self, holds
        return made

    def beyond(self, roots: Iterable[tuple[str, Any]]) -> Survey:
        """This survey, which takes in what can be reached from more roots."""
        for name, value in roots:
            self._reach(value, name)
        self._walk_all()
        return self

    def added(self) -> list[tuple[Place, Any]]:
        """The places that the survey below this one does not have, or not so."""
        below = {} if self.base is None else self.base.places
        return [held for key, held in self.places.items() if below.get(key) is not held]

    def holds(self, value: Any) -> bool:
        """Whether the survey met this very object."""
        return id(value) in self._seen

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """The places that hold tensors, those of an optimizer that are compared as a whole included."""
        found = ((place, value) for place, value in self.places.values() if issubclass(type(value), Tensor))
        return itertools.chain(found, self.held)

    def changes(self, after: Survey) -> list[Change]:
        """What happened between this survey and a later one of the same roots."""
        found = []
        base = self.base if self.base is after.base else None  # which held just now
        known, bulks, facts_known = _extent(base)
        for key, (place, now) in islice(after.places.items(), known, None):
            if key in self.places and not same(now, self.places[key][1]):
                found.append(Change(place, self.places[key][1], now))
            elif key not in self.places and self._was_absent(place):
                found.append(Change(place, MISSING, now))
        for key, (place, before) in islice(self.places.items(), known, None):
            if key not in after.places and place.read() is MISSING:
                found.append(Change(place, before, MISSING))
        bulk = [b for b in self.bulk[bulks:] if b.read() != b.content]
        found += [Change(Place(b, None, "bulk", b.name), b.content, b.read()) for b in bulk]
        moved = [
            (t, name, facts) for t, name, facts in self.tensor_facts[facts_known:] if not facts.same_as(t)
        ]
        return found + [Change(Place(t, None, "tensor", name), facts, t) for t, name, facts in moved]

    def _was_absent(self, place: Place) -> bool:
        """Whether a container that this survey knows did not have this key then."""
        keys = self._keys.get(id(place.container))
        if keys is None:
            return False
        return place.key >= len(keys) if isinstance(place.container, (list, deque)) else place.key not in keys

    def adopt(self, after: Survey, changed: set[tuple[int, Any]]) -> None:
        """Take over places that only a later survey met, unless they changed."""
        known, _, _ = _extent(self.base if self.base is after.base else None)
        for key, held in islice(after.places.items(), known, None):
            if key not in changed and id(held[0].container) in self._seen:
                self.places.setdefault(key, held)

    def restore(self) -> None:
        """Put back what the surveyed places held, and the length of the surveyed lists and dicts."""
        base = self.base if self._base_holds() else None
        known, bulks, facts_known = _extent(base)
        for container, keys, _ in self.sizes[0 if base is None else len(base.sizes) :]:
            truncate(container, keys)
        for bulk in self.bulk[bulks:]:
            if bulk.read() != bulk.content:
                bulk.restore()
        for tensor, _, facts in self.tensor_facts[facts_known:]:
            facts.restore(tensor)
        for place, value in islice(self.places.values(), known, None):
            if place.read() is not value:
                place.write(value)

    def _add(self, place: Place) -> None:
        value = place.read()
        if value is MISSING or place.id in self.places:
            return
        self.places[place.id] = (place, value)
        self._seen[id(place.container)] = place.container
        if isinstance(value, Tensor) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self.tensor_facts.append((value, place.name, TensorFacts(value)))
        self._reach(value, place.name)

    def _add_all(self, places: Iterable[Place]) -> None:
        for place in places:
            self._add(place)

    def _reach(self, value: Any, name: str) -> None:
        if id(value) in self._seen or isinstance(value, Tensor) or is_plain(value):
            return
        self._seen[id(value)] = value
        self._queue.append((value, name))

    def _walk(self, value: Any, name: str) -> None:
        for kind, walk in _WALKS:
            if isinstance(value, kind):
                walk(self, value, name)
                return
        if self.names is None and isinstance(value, LRScheduler):
            self._walk_object(value, name)  # before it is known what runs, all that a run might count
        package, _, module = type(value).__module__.partition(".")
        if package == "graphify" and not module.startswith("testing"):
            self._walk_graphed(value, name)
        elif package not in _SKIPPED_PACKAGES or isinstance(value, _HOLDERS):
            self._walk_object(value, name)
        elif package == "numpy":
            self._walk_array(value, name)

    def _walk_graphed(self, value: Any, name: str) -> None:
        """A wrapper of ours stands for what it wraps."""
        if hasattr(value, "__self__"):
            self._walk_method(value, name)
        self._reach(getattr(value, "__wrapped__", None), name)

    def _used(self, names: Iterable[str]) -> Iterator[str]:
        return (n for n in names if self.names is None or n in self.names)

    def _walk_module(self, module: nn.Module, name: str) -> None:
        state = module.__dict__
        for registry in ("_parameters", "_buffers", "_modules"):
            held = state[registry]
            self._add_all(Place(held, key, "field", f"{name}.{key}") for key in list(held))
            self._seen[id(held)] = held
            self.registries.append(held)
        self._size(state["_modules"], name)
        # Hooks of the graphed module itself run around the graph, at every call.
        inside = module is not self._outermost
        for hooks, label in ((state[h], f"{name}.{h}") for h in _HOOKS if inside and h in state):
            self.hooks.append((hooks, len(hooks), label))
            for hook in hooks.values():
                self._reach(hook, label)
        self._walk_object(module, name)

    def _walk_object(self, value: Any, name: str) -> None:
        self._reach(getattr(value, "_torchdynamo_orig_callable", None), name)
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            hidden = next((names for kind, names in _INTERNALS if isinstance(value, kind)), frozenset())
            self._seen[id(state)] = state
            self._size(state, name)
            keys = [k for k in self._used(state) if k not in hidden]
            self._add_all(Place(state, key, "field", f"{name}.{key}") for key in keys)
        for cls in _user_bases(type(value)):
            slots = [k for k, v in vars(cls).items() if _is_slot(type(value), k, v)]
            self._add_all(Place(value, slot, "attr", f"{name}.{slot}") for slot in self._used(slots))
        self._walk_class(type(value), name)

    def _walk_class(self, cls: type, name: str) -> None:
        for base in _user_bases(cls):
            used = [k for k, v in vars(base).items() if not k.startswith("__") and not _is_descriptor(v)]
            self._add_all(Place(base, key, "class", f"{name}.{key}") for key in self._used(used))

    def _walk_function(self, function: types.FunctionType, name: str) -> None:
        self._reach(function.__dict__.get("_torchdynamo_orig_callable"), name)
        if not self.executed.ran(function.__code__) or is_library(function.__code__.co_filename):
            if is_library(function.__code__.co_filename):  # as torch's own decorators are
                self._reach(function.__dict__.get("__wrapped__"), name)
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(Place(cell, key, "cell", key))
        self._walk_object(function, name)
        for default in (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values()):
            self._reach(default, f"a default of {name}")
        scope = function.__globals__
        self._add_all(
            Place(scope, key, "field", key) for key in names_of(function.__code__).scope if key in scope
        )
        self._reach(getattr(function, "__wrapped__", None), name)

    def _walk_method(self, method: Any, name: str) -> None:
        if self._outermost is None and not self.places:
            self._outermost = method.__self__
        self._reach(method.__self__, "self")
        self._reach(method.__func__, name)

    def _walk_partial(self, value: partial[Any], name: str) -> None:
        self._reach(value.func, name)
        self._walk_sequence(value.args, f"{name}.args")
        self._walk_dict(value.keywords, f"{name}.keywords")

    def _walk_dict(self, value: dict[Any, Any], name: str) -> None:
        if len(value) > _BULK and all(map(is_plain, value.values())):
            self.bulk.append(Bulk.of(value, name))
            return
        self._size(value, name)
        self._add_all(Place(value, key, "item", item_name(name, key)) for key in list(value))

    def _walk_sequence(self, value: Sequence[Any], name: str) -> None:
        if len(value) > _BULK and all(map(is_plain, value)) and not isinstance(value, tuple):
            self.bulk.append(Bulk.of(value, name))
            return
        self._size(value, name)
        self._add_all(Place(value, i, "item", f"{name}[{i}]") for i in range(len(value)))

    def _walk_namespace(self, value: types.ModuleType, name: str) -> None:
        if value.__name__ == "os" and (self.names is None or {"environ", "getenv"} & self.names):
            self.bulk.append(Bulk(lambda: dict(os.environ), dict(os.environ), nothing, "os.environ"))
        if value.__name__.partition(".")[0] in _SKIPPED_PACKAGES | {"graphify"}:
            return
        scope, names = vars(value), self.executed.names() if self.names is None else self.names
        used = [k for k in names & scope.keys() if not k.startswith("__")]
        self._add_all(Place(scope, key, "field", f"{name}.{key}") for key in used)

    def _walk_set(self, value: set[Any], name: str) -> None:
        self.bulk.append(Bulk.of(value, name))

    def _walk_array(self, value: Any, name: str) -> None:
        """A numpy array is read on the host: its bytes are a value."""
        if hasattr(value, "tobytes") and value.dtype.kind != "O":
            content = value.copy()
            self.bulk.append(
                Bulk(value.tobytes, value.tobytes(), lambda: value.__setitem__(..., content), name)
            )

    def _walk_iterator(self, value: Any, name: str) -> None:
        """How far an iterator has come is a value; nothing can put it back."""
        read = (
            (lambda: repr(value)) if isinstance(value, itertools.count) else (lambda: length_hint(value, -1))
        )
        self.bulk.append(Bulk(read, read(), nothing, name))

    def _walk_generator(self, value: torch.Generator, name: str) -> None:
        self.generators.append(value)

    def _walk_optimizer(self, value: Optimizer, name: str) -> None:
        fields = value.__dict__
        groups, state = fields.get("param_groups"), fields.get("state")
        if not isinstance(groups, list) or not isinstance(state, dict):
            self._walk_object(value, name)  # a wrapper, which shows what another one has
            return
        self.optimizers.append((name, value))
        for held in (groups, state, *groups, *(group["params"] for group in groups)):
            self._seen[id(held)] = held  # walked here
        self._add_all(Place(fields, key, "field", f"{name}.{key}") for key in ("param_groups", "state"))
        self._size(groups, f"{name}.param_groups")
        for i, group in enumerate(groups):
            self._add(Place(groups, i, "item", f"{name}.param_groups[{i}]"))
            self._size(group, f"{name}.param_groups[{i}]")
            self._hold_params(group["params"], f"{name}.param_groups[{i}]['params']")
        self._add_all(hyperparameters(value, name))
        self._hold_state(value, f"{name}.state")
        for hooks in (fields[h] for h in _STEP_HOOKS if h in fields):
            self.hooks.append((hooks, len(hooks), f"the hooks of {name}"))
            for hook in hooks.values():
                self._reach(hook, f"a hook of {name}")
        if any(_user_bases(type(value))):
            self._walk_object(value, name)

    def _hold_params(self, params: list[Tensor], name: str) -> None:
        self.bulk.append(Bulk.of_objects(params, lambda: params, name))
        for i, param in enumerate(params):
            self.held.append((Place(params, i, "item", f"{name}[{i}]"), param))
            if id(param) not in self._seen:
                self._seen[id(param)] = param
                self.tensor_facts.append((param, f"{name}[{i}]", TensorFacts(param)))

    def _hold_state(self, optimizer: Optimizer, name: str) -> None:
        state = optimizer.state
        self.bulk.append(Bulk.of_objects(state, lambda: entries(state), name))
        numbers = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        for param, held in state.items():
            if not isinstance(held, dict):
                continue
            label = f"{name}[{numbers.get(id(param), '...')}]"
            places = [(Place(held, key, "item", f"{label}[{key!r}]"), value) for key, value in held.items()]
            self.held += [(place, value) for place, value in places if isinstance(value, Tensor)]

    def _walk_scaler(self, value: GradScaler, name: str) -> None:
        state = value.__dict__
        # What it notes of each optimizer between `unscale_` and `update` is made anew by each step.
        keys = [key for key in state if key != "_per_optimizer_states"]
        self._add_all(Place(state, key, "field", f"{name}.{key}") for key in keys)

    def _walk_reference(self, value: weakref.ref[Any], name: str) -> None:
        self._reach(value(), name)

    def _walk_variable(self, value: ContextVar[Any], name: str) -> None:
        self._add(Place(value, value.name, "variable", name))

    def _walk_maps(self, value: ChainMap[Any, Any], name: str) -> None:
        for i, part in enumerate(value.maps):
            self._reach(part, f"{name}.maps[{i}]")

    def _walk_proxy(self, value: types.MappingProxyType[Any, Any], name: str) -> None:
        self._add_all(Place(value, key, "item", item_name(name, key)) for key in list(value))

    def _size(self, container: Any, name: str) -> None:
        self._seen[id(container)] = container
        if not isinstance(container, tuple):
            keys = list(container) if isinstance(container, dict) else [None] * len(container)
            self.sizes.append((container, keys, name))
            self._keys[id(container)] = keys


def _extent(base: Survey | None) -> tuple[int, int, int]:
    """How many places, contents and tensors a fork has of its base, before its own."""
    return (0, 0, 0) if base is None else (len(base.places), len(base.bulk), len(base.tensor_facts))


def _user_bases(cls: type) -> Iterator[type]:
    skipped = _SKIPPED_PACKAGES | {"graphify"}
    return (base for base in cls.__mro__ if base.__module__.partition(".")[0] not in skipped)


def _is_slot(cls: type, name: str, found: Any) -> bool:
    """Whether an attribute of a class's instances lives in this very slot."""
    return isinstance(found, types.MemberDescriptorType) and getattr(cls, name, None) is found


def _is_descriptor(value: Any) -> bool:
    return isinstance(value, (property, types.MemberDescriptorType, types.GetSetDescriptorType))


Walk = Callable[[Survey, Any, str], None]
_WALKS: list[tuple[Any, Walk]] = [
    (nn.Module, Survey._walk_module),
    (Optimizer, Survey._walk_optimizer),
    (GradScaler, Survey._walk_scaler),
    (types.FunctionType, Survey._walk_function),
    (types.MethodType, Survey._walk_method),
    (partial, Survey._walk_partial),
    (dict, Survey._walk_dict),
    ((list, tuple, deque), Survey._walk_sequence),
    (types.ModuleType, Survey._walk_namespace),
    (torch.Generator, Survey._walk_generator),
    (weakref.ref, Survey._walk_reference),
    (ContextVar, Survey._walk_variable),
    (ChainMap, Survey._walk_maps),
    (types.MappingProxyType, Survey._walk_proxy),
    (set, Survey._walk_set),
    ((itertools.count, *_ITERATORS), Survey._walk_iterator),
    (type, Survey._walk_class),
]
