"""What executed Python code can read and write by name, learned from its bytecode."""

from __future__ import annotations

import dis
import gc
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from ._computed import Computed, computed_by, names_in
from ._following import hearing_calls

__all__ = [
    "CodeNames",
    "Executed",
    "is_library",
    "is_ours",
    "line_naming",
    "line_of",
    "names_of",
    "user_frame",
    "user_line",
]

_TORCH = tuple(f"{path}/" for path in torch.__path__)
_STANDARD = tuple(
    f"{path}/" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")} if path
)
_OURS = __file__.rpartition("/")[0] + "/"


class CodeNames:
    """The names that one code object loads and stores."""

    def __init__(self, code: CodeType) -> None:
        loads: set[str] = set()
        stores: set[str] = set()
        scope: set[str] = set()
        imports: set[str] = set()
        evaluated = code.co_name == "<module>"
        for step in dis.get_instructions(code):
            if not isinstance(step.argval, str):
                continue
            if step.opname.startswith(
                ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "LOAD_DEREF", "LOAD_CLASSDEREF")
            ):
                loads.add(step.argval)
            elif step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT")):
                loads.add(step.argval)
                scope.add(step.argval)
            elif step.opname.startswith(("STORE_ATTR", "STORE_DEREF", "DELETE_ATTR")):
                stores.add(step.argval)
            elif step.opname.startswith("STORE_GLOBAL") or (step.opname == "STORE_NAME" and evaluated):
                stores.add(step.argval)
                scope.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                imports.add(step.argval)
            elif step.opname == "IMPORT_FROM":
                loads.add(step.argval)
        self.loads = frozenset(loads)
        self.stores = frozenset(stores)
        self.scope = frozenset(scope)
        self.imports = frozenset(imports)
        self.strings = frozenset(n for c in code.co_consts if isinstance(c, str) for n in names_in(c))
        self.all = self.loads | self.stores | self.strings


_NAMED_TUPLE = ("_tuple_new",)
"""What the constructor of a named tuple loads, and nothing else does: it is generated, and reads no state."""

names_of = lru_cache(maxsize=None)(CodeNames)


@dataclass
class Executed:
    """The code objects that ran, with the globals they ran in; `everything` when that is not known."""

    codes: dict[int, tuple[CodeType, dict[str, Any]]] = field(default_factory=dict)
    everything: bool = False
    _computed: dict[int, Computed] = field(default_factory=dict, repr=False)

    def merge(self, other: Executed) -> None:
        """Take over what another run executed."""
        self.codes.update(other.codes)
        self.everything = self.everything or other.everything

    def merge_library(self, other: Executed) -> None:
        """Take over no code of the user's, which may be one signature's alone."""
        self.codes.update({k: held for k, held in other.codes.items() if is_library(held[0].co_filename)})

    def note(self, functions: Iterable[Any]) -> None:
        """Take these functions as executed."""
        for function in functions:
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                self.codes[id(code)] = (code, function.__globals__)

    def ran(self, code: CodeType) -> bool:
        """Whether this code object ran."""
        return self.everything or id(code) in self.codes

    def heard(self, code: CodeType) -> bool:
        """Whether this code object is known to have run."""
        return id(code) in self.codes

    def loads(self) -> frozenset[str]:
        """Every name that the code loads as an attribute, global or closure cell."""
        return frozenset().union(*(names_of(code).loads for code, _ in self.codes.values()))

    def stores(self) -> frozenset[str]:
        """Every name that the code stores as an attribute, global or closure cell."""
        return frozenset().union(*(names_of(code).stores for code, _ in self.codes.values()))

    def by_any_name(self) -> bool:
        """Whether names say nothing: they are not known, or the user's code computes them."""
        return self.everything or any(found.anywhere for _, _, found in self.computed())

    def computed(self) -> Iterator[tuple[CodeType, dict[str, Any], Computed]]:
        """The user's code that looks up names which no bytecode shows."""
        for code, scope in self.scopes():
            found = self._computed.get(id(code))
            if found is None:
                found = self._computed[id(code)] = computed_by(code, scope)
            if any(found):
                yield code, scope, found

    def reads(self) -> frozenset[str]:
        """Every name that the code loads, or may load by a string."""
        return self.loads() | frozenset().union(*(names_of(code).strings for code, _ in self.codes.values()))

    def names(self) -> frozenset[str]:
        """Every name that the code may read or write, `getattr(self, "name")` included."""
        return frozenset().union(*(names_of(code).all for code, _ in self.codes.values()))

    def user_names(self) -> frozenset[str]:
        """Every name that the user's own code may read or write."""
        return frozenset().union(*(names_of(code).all for code, _ in self.scopes()))

    def scopes(self) -> Iterator[tuple[CodeType, dict[str, Any]]]:
        """The user's code objects with their globals; torch's and the standard library's left out."""
        return ((c, g) for c, g in self.codes.values() if not is_library(c.co_filename))

    @contextmanager
    def following(self, at_unknown: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Note every code object that this thread runs inside; suspect every name where that cannot be."""
        collecting = {id(getattr(callback, "__code__", None)) for callback in gc.callbacks}

        def note(frame: FrameType) -> bool:
            code = frame.f_code
            if id(code) in self.codes or is_ours(code) or code.co_names == _NAMED_TUPLE:
                return True
            if _is_aside(frame, collecting):
                return False
            self.codes[id(code)] = (code, frame.f_globals)
            # Compiled code reads its values by guards that no bytecode shows.
            compiled = any(name.startswith("__compiled_fn") for name in code.co_names)
            if compiled and not self.everything:
                self.everything = True
                at_unknown()
            return True

        with hearing_calls(note) as heard:
            if not heard:
                self.everything = True
                at_unknown()
            yield


def _is_aside(frame: FrameType | None, collecting: set[int]) -> bool:
    """Whether a frame belongs to a first import or to what the garbage collector calls, and not to the run.

    What the user's own code evaluates or executes is the run's.
    """
    while frame is not None and not is_ours(frame.f_code):
        caller = frame.f_back
        if frame.f_code.co_name == "<module>" and (caller is None or is_library(caller.f_code.co_filename)):
            return True
        if id(frame.f_code) in collecting:
            return True
        frame = caller
    return False


def is_ours(code: CodeType) -> bool:
    """Whether code belongs to graphify."""
    return code.co_filename.startswith(_OURS)


def is_library(filename: str) -> bool:
    """Whether a file belongs to torch, to the standard library or to graphify."""
    if filename.startswith((_OURS, *_TORCH)):
        return True
    if "site-packages" in filename or "dist-packages" in filename:
        return False
    return filename.startswith((*_STANDARD, "<frozen", "<eval_with_key>", "<graphify"))


def user_frame() -> FrameType | None:
    """The innermost frame that belongs to neither torch nor the standard library nor graphify."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> str | None:
    """The user's own "file:line: source text" on the stack right now."""
    frame = user_frame()
    return None if frame is None else _quote(frame.f_code.co_filename, frame.f_lineno)


def line_of(error: BaseException) -> str | None:
    """The user's own innermost line in an error's traceback."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    mine = [(file, line) for file, line in lines if not is_library(file)]
    return _quote(*mine[-1]) if mine else None


def line_naming(executed: Executed, name: str) -> str | None:
    """The user's own line that stores a name, or else uses it: "file:line: source text" of the first."""
    found: list[tuple[bool, str, int]] = []
    for code, _ in executed.scopes():
        starts = dict.fromkeys(dis.findlinestarts(code))
        lines, line = {offset: number for offset, number in starts if number}, code.co_firstlineno
        for step in dis.get_instructions(code):
            line = lines.get(step.offset, line)
            if step.argval == name and isinstance(step.argval, str):
                found.append((not step.opname.startswith("STORE"), code.co_filename, line))
    return _quote(*min(found)[1:]) if found else None


def _quote(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}: {text}" if text else f"{file}:{line}"
