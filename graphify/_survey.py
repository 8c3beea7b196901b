"""Every place that a run can read, found by walks from its roots."""

from __future__ import annotations

import argparse
import functools
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, UserString, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ._classes import (
    SKIPPED_PACKAGES,
    class_of,
    defined_names,
    functions_behind,
    parts_of,
    slots_of,
    special_names,
    user_bases,
)
from ._code import Executed, is_library, names_of
from ._found import Found
from ._places import Bulk, Place, entries, hyperparameters, is_plain, item_name
from ._raw import fields_of, is_a, items_of
from ._streams import BLIND, FILES, numpy_stream, random_stream, used_up
from ._unnamed import Unnamed
from ._wholes import WHOLES, array_of, whole_of

__all__ = ["Survey"]

_BULK = 64
_HOLDERS: tuple[Any, ...] = (types.SimpleNamespace, argparse.Namespace, threading.local, types.FunctionType)
_HOLDERS += (threading.Event, threading.Semaphore, UserDict, UserList, UserString)
_HOLDING = ("configparser", "queue")
"""Parts of the standard library whose objects hold values for their users."""
_CLOSED = (functools._lru_cache_wrapper, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PUT_BACK = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS)
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# The last two are what a learning-rate schedule adds; it warns with the help of the first of them.
_OPTIMIZER_INTERNALS = frozenset(
    {"defaults", "param_groups", "state", "_zero_grad_profile_name", "_opt_called", "step"}
)
_INTERNALS = ((nn.Module, _MODULE_INTERNALS), (Optimizer, _OPTIMIZER_INTERNALS))


class Survey(Found):
    """Every place that executed code can reach from `roots` by the names it uses, and what each holds.

    Parameters, buffers and submodules of every reachable module count whether or not they are named.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], executed: Executed) -> None:
        super().__init__()
        self.executed = executed
        self.names = None if executed.by_any_name() else executed.names() | {"training"}
        self.unnamed = Unnamed(executed)
        self._start(roots)
        if self.names is not None and self.unnamed.found():
            super().__init__()
            self.names = None if self.unnamed.anywhere else self.names | self.unnamed.names
            self._start(roots)

    def _start(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._outermost: Any = None
        self.seen |= self.unnamed.functions
        for name, value in roots:
            self.reach(value, name)
        for code, scope in self.executed.scopes():
            self.add_all(Place(scope, name, "field", name) for name in names_of(code).scope if name in scope)
            for module in names_of(code).imports:
                self.reach(sys.modules.get(module), module)
        for scope, name in self.unnamed.globals():
            self.add(Place(scope, name, "field", name))
        for space in self.unnamed.modules():
            self.reach(space, space.__name__)
        self._walk_all()

    def _walk_all(self) -> None:
        while self.queue:
            value, name = self.queue.popleft()
            self._walk(value, name)

    def beyond(self, roots: Iterable[tuple[str, Any]]) -> Survey:
        """This survey, which takes in what can be reached from more roots."""
        for name, value in roots:
            self.reach(value, name)
        self._walk_all()
        return self

    def _walk(self, value: Any, name: str) -> None:
        self.add_all(class_of(value, name, held=id(value) in self.placed))
        for kind, walk in _WALKS:
            if is_a(value, kind):
                walk(self, value, name)
                return
        if self.names is None and is_a(value, LRScheduler):
            self._walk_object(value, name)  # before it is known what runs, all that a run might count
        package, _, module = type(value).__module__.partition(".")
        if package == "graphify" and not module.startswith("testing"):
            self._walk_graphed(value, name)
        elif package not in SKIPPED_PACKAGES or package in _HOLDING or is_a(value, _HOLDERS):
            self._walk_object(value, name)
        elif package == "numpy":
            self._walk_array(value, name)
        elif package in sys.stdlib_module_names:
            self._walk_standard(value, name)

    def _walk_graphed(self, value: Any, name: str) -> None:
        """A wrapper of ours stands for what it wraps."""
        if hasattr(value, "__self__"):
            self._walk_method(value, name)
        self.reach(getattr(value, "__wrapped__", None), name)

    def reads_unnamed(self, container: Any) -> bool:
        """Whether code reads this dict by names that are not known."""
        return id(container) in self.unnamed.whole or (self.names is None and not self.executed.everything)

    def _used(self, names: Iterable[str], holder: Any) -> Iterator[str]:
        every = self.names is None or self.unnamed.reads_all(holder)
        return (n for n in names if every or n in self.names)  # type: ignore[operator]

    def _walk_module(self, module: nn.Module, name: str) -> None:
        state = module.__dict__
        for registry in ("_parameters", "_buffers", "_modules"):
            held = state[registry]
            self.add_all(Place(held, key, "field", f"{name}.{key}") for key in list(held))
            self.seen[id(held)] = held
            self.registries.append(held)
        internals = {key: state[key] for key in _PUT_BACK if key in state}
        self.internals.append((state, internals))
        for internal in internals.values():
            self.hold(internal)
        self.size(state["_modules"], name)
        # Hooks of the graphed module itself run around the graph, at every call.
        inside = module is not self._outermost
        for hooks, label in ((state[h], f"{name}.{h}") for h in _HOOKS if inside and h in state):
            self._walk_hooks(hooks, label, label)
        self._walk_object(module, name)

    def _walk_hooks(self, hooks: dict[int, Any], name: str, each: str) -> None:
        self.hooks.append((hooks, len(hooks), name))
        for hook in hooks.values():
            self.reach(hook, each)

    def _walk_object(self, value: Any, name: str) -> None:
        state = fields_of(value)
        if state is not None:
            self.reach(state.get("_torchdynamo_orig_callable"), name)
            hidden = next((names for kind, names in _INTERNALS if is_a(value, kind)), frozenset())
            self.size(state, name, listed=False)
            keys = [k for k in self._used(state, value) if k not in hidden]
            if self.unnamed.reads_all(value):
                self.unnamed.whole.add(id(state))
            self.add_all(Place(state, key, "field", f"{name}.{key}") for key in keys)
        for cls in user_bases(type(value)):
            slots = slots_of(type(value), cls)
            self.add_all(Place(value, slot, "attr", f"{name}.{slot}") for slot in self._used(slots, value))
        self._walk_class(type(value), name)

    def _walk_getter(self, value: Any, name: str) -> None:
        """A function that looks up names: those that it was made with, or any that it is given."""
        self.unnamed.meet(value, self.names)

    def _walk_class(self, cls: type, name: str) -> None:
        for base in user_bases(cls):
            used = [*self._used(defined_names(base), cls), *special_names(base, self.executed)]
            self.add_all(Place(base, key, "class", f"{name}.{key}") for key in used)

    def _walk_descriptor(self, value: Any, name: str) -> None:
        for function in functions_behind(value):
            if self.executed.heard(function.__code__):
                self.reach(function, name)

    def _walk_function(self, function: types.FunctionType, name: str) -> None:
        self.reach(function.__dict__.get("_torchdynamo_orig_callable"), name)
        if not self.executed.ran(function.__code__) or is_library(function.__code__.co_filename):
            if is_library(function.__code__.co_filename):  # as torch's own decorators are
                self.reach(function.__dict__.get("__wrapped__"), name)
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.add(Place(cell, key, "cell", key))
        self._walk_object(function, name)
        for default in (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values()):
            self.reach(default, f"a default of {name}")
        self.seen[id(function.__code__)] = function.__code__  # nothing is inside
        self.add_all(parts_of(function, name))
        scope = function.__globals__
        self.add_all(
            Place(scope, key, "field", key) for key in names_of(function.__code__).scope if key in scope
        )
        self.reach(getattr(function, "__wrapped__", None), name)

    def _walk_method(self, method: Any, name: str) -> None:
        if self._outermost is None and not self.places:
            self._outermost = method.__self__
        self.reach(method.__self__, "self")
        self.reach(method.__func__, name)

    def _walk_partial(self, value: partial[Any], name: str) -> None:
        self.reach(value.func, name)
        self._walk_sequence(value.args, f"{name}.args")
        self._walk_dict(value.keywords, f"{name}.keywords")

    def _walk_dict(self, value: dict[Any, Any], name: str) -> None:
        values = [held for _, held in items_of(value)]
        if len(values) > _BULK and all(map(is_plain, values)):
            self._walk_whole(value, name)
            return
        self.size(value, name)
        self.add_all(Place(value, key, "item", item_name(name, key)) for key, _ in [*items_of(value)])

    def _walk_sequence(self, value: Sequence[Any], name: str) -> None:
        if len(value) > _BULK and all(map(is_plain, value)) and not is_a(value, tuple):
            self._walk_whole(value, name)
            return
        self.size(value, name)
        self.add_all(Place(value, i, "item", f"{name}[{i}]") for i in range(len(value)))

    def _walk_namespace(self, value: types.ModuleType, name: str) -> None:
        if value.__name__ == "os" and (self.names is None or {"environ", "getenv"} & self.names):
            self.reach(os.environ, "os.environ")
        if value.__name__.partition(".")[0] in SKIPPED_PACKAGES | {"graphify"}:
            return
        scope, names = vars(value), self.executed.names() if self.names is None else self.names
        names = (names & scope.keys()) | self.unnamed.of_module(value, everywhere=self.names is None)
        used = [k for k in names if not k.startswith("__")]
        self.add_all(Place(scope, key, "field", f"{name}.{key}") for key in used)

    def _walk_whole(self, value: Any, name: str) -> None:
        self.bulk.append(Bulk.of(value, name))
        self.hold(value)

    def _walk_made(self, value: Any, name: str) -> None:
        self.bulk.append(whole_of(value, name))

    def _walk_array(self, value: Any, name: str) -> None:
        stream, whole = numpy_stream(value, name), array_of(value, name)
        self.streams += [stream] if stream is not None else []
        self.bulk += [whole] if whole is not None else []

    def _walk_standard(self, value: Any, name: str) -> None:
        """An object of the standard library is its own affair, but for fields that the user's code names."""
        state = fields_of(value) or {}
        self.add_all(
            Place(state, k, "field", f"{name}.{k}") for k in self.executed.user_names() & state.keys()
        )

    def meet(self, tensor: Tensor, name: str) -> None:
        """A tensor is what it is over, and what hangs on it by names that the code uses."""
        if id(tensor) in self.seen:
            return
        super().meet(tensor, name)
        state = fields_of(tensor)
        if state:
            self.size(state, name, listed=False)
            self.add_all(
                Place(state, key, "field", f"{name}.{key}") for key in list(self._used(state, tensor))
            )

    def _walk_blind(self, value: Any, name: str) -> None:
        if not is_a(value, FILES) or used_up(value):
            self.blind.append((name, value))

    def _walk_stream(self, value: random.Random, name: str) -> None:
        self.streams.append(random_stream(value, name))
        if type(value).__module__ != "random":
            self._walk_object(value, name)

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
            self.seen[id(held)] = held  # walked here
        self.add_all(Place(fields, key, "field", f"{name}.{key}") for key in ("param_groups", "state"))
        self.size(groups, f"{name}.param_groups")
        for i, group in enumerate(groups):
            self.add(Place(groups, i, "item", f"{name}.param_groups[{i}]"))
            self.size(group, f"{name}.param_groups[{i}]")
            self._hold_params(group["params"], f"{name}.param_groups[{i}]['params']")
        self.add_all(hyperparameters(value, name))
        self._hold_state(value, f"{name}.state")
        for hooks in (fields[h] for h in _STEP_HOOKS if h in fields):
            self._walk_hooks(hooks, f"the hooks of {name}", f"a hook of {name}")
        if any(user_bases(type(value))):
            self._walk_object(value, name)

    def _hold_params(self, params: list[Tensor], name: str) -> None:
        self.bulk.append(Bulk.of_objects(params, lambda: params, name))
        for i, param in enumerate(params):
            self.held.append((Place(params, i, "item", f"{name}[{i}]"), param))
            self.meet(param, f"{name}[{i}]")

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
        self.add_all(Place(state, key, "field", f"{name}.{key}") for key in keys)

    def _walk_closed(self, value: Any, name: str) -> None:
        self.closed.append(name)

    def _walk_reference(self, value: weakref.ref[Any], name: str) -> None:
        self.reach(value(), name)

    def _walk_variable(self, value: ContextVar[Any], name: str) -> None:
        self.add(Place(value, value.name, "variable", name))

    def _walk_maps(self, value: ChainMap[Any, Any], name: str) -> None:
        for i, part in enumerate(value.maps):
            self.reach(part, f"{name}.maps[{i}]")

    def _walk_proxy(self, value: types.MappingProxyType[Any, Any], name: str) -> None:
        self.add_all(Place(value, key, "item", item_name(name, key)) for key in list(value))


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
    (WHOLES, Survey._walk_made),
    (set, Survey._walk_whole),
    ((*BLIND, *FILES), Survey._walk_blind),
    (random.Random, Survey._walk_stream),
    ((operator.attrgetter, operator.methodcaller, types.BuiltinFunctionType), Survey._walk_getter),
    (_CLOSED, Survey._walk_closed),
    ((property, staticmethod, classmethod, functools.cached_property), Survey._walk_descriptor),
    (type, Survey._walk_class),
]
