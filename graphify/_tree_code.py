"""Generated code between values and leaves: one function per direction, without a loop and without a choice."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ._constants import TOKEN_CODE, token_of

__all__ = ["EXACT", "Box", "Node", "Rebuild", "Unpack", "is_structseq", "rebuilder", "unpacker"]

EXACT = (dict, list, tuple)

Unpack = Callable[[tuple[Any, ...]], "tuple[tuple[Tensor, ...], tuple[Hashable, ...]] | None"]
Rebuild = Callable[[Sequence[Tensor], Sequence[object]], "tuple[Any, ...]"]


class Node(NamedTuple):
    """One place in the structure. Equal specs mean equal structures; the rest says how to get in and out."""

    spec: Hashable
    kind: str  # "tensor", "mirror", "box", or a kind of constant
    cls: type
    value: Any = None  # of a single: the value itself; of a mirror: the index of the item that it repeats
    box: Box | None = None


class Box(NamedTuple):
    """A container: items in order, then instance attributes in order, then slots."""

    base: Any  # the builtin class that holds the items
    keys: tuple[Any, ...] | None  # of mappings
    items: tuple[Node, ...]
    names: tuple[str, ...] | None  # of attributes; None when instances have no __dict__
    attrs: tuple[Node, ...]
    members: tuple[types.MemberDescriptorType, ...]  # of slots
    slots: tuple[Node, ...]
    unset: tuple[types.MemberDescriptorType, ...]


def is_structseq(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields")


def _same_keys(keys: tuple[Any, ...], tokens: tuple[Hashable, ...]) -> bool:
    return tuple(map(token_of, keys)) == tokens


class _Emitter:
    """Lines of one function, and the objects they name; nothing of the user's is ever spelled in the source."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self.lines: list[str] = []
        self._known: dict[int, str] = {}
        self._count = 0

    def const(self, value: Any) -> str:
        """The name under which generated code sees this object."""
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"K{len(self.space)}"
            self.space[name] = value
        return name

    def local(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def function(self, head: str) -> Any:
        name = head.partition("(")[0]
        source = "\n".join([f"def {head}:", *self.lines])
        exec(compile(source, f"<graphify {name}>", "exec"), self.space)
        return self.space[name]


def _tuple_code(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)},)" if parts else "()"


class _Unpacker(_Emitter):
    """Writes the function from values to leaves: every test in line, the first that fails answers None."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self._tokens = tokens
        self.tensors: list[str] = []
        self.consts: list[str] = []
        self._tests: list[str] = []

    def compiled(self, nodes: tuple[Node, ...]) -> Any:
        self._tests.append(f"len(roots) != {len(nodes)}")
        names = self._spread("roots", len(nodes))
        for node, name in zip(nodes, names, strict=True):
            self._check(node, name, ())
        self._flush()
        all_tensors = names == self.tensors
        self.line(
            f"return {'roots' if all_tensors else _tuple_code(self.tensors)}, {_tuple_code(self.consts)}"
        )
        self.space.update(Tensor=Tensor)
        return self.function("unpack(roots)")

    def _flush(self) -> None:
        if self._tests:
            self.line(f"if {' or '.join(self._tests)}: return None")
            self._tests.clear()

    def _spread(self, source: str, count: int) -> list[str]:
        """Locals for the elements of something that is known to have this many once the tests so far passed."""
        names = [self.local() for _ in range(count)]
        self._flush()
        if names:
            self.line(f"{', '.join(names)}, = {source}")
        return names

    def _check(self, node: Node, name: str, items: Sequence[str]) -> None:
        if node.kind == "tensor":
            self._tests.append(f"not isinstance({name}, Tensor)")
            self.tensors.append(name)
        elif node.kind == "mirror":
            self._tests.append(f"{name} is not {items[node.value]}")
        elif node.box is not None:
            self._enter(node, node.box, name)
        else:
            self._constant(node, name)

    def _constant(self, node: Node, name: str) -> None:
        single = "None" if node.value is None else self.const(node.value)
        exact = (
            f"{name} is not {single}"
            if node.kind == "single"
            else f"type({name}) is not {self.const(node.cls)}"
        )
        self._tests.append(exact)
        if node.kind == "checked":
            token = self.local()
            self._flush()
            self.line(f"{token} = {self.const(token_of)}({name})")
            self._tests.append(f"{token} is None")
            self.consts.append(token if self._tokens else name)
        else:
            self.consts.append(TOKEN_CODE[node.kind].format(name) if self._tokens else name)

    def _enter(self, node: Node, box: Box, name: str) -> None:
        self._tests.append(f"type({name}) is not {self.const(node.cls)}")
        items = self._items(node.cls, box, name)
        for item, local in zip(box.items, items, strict=True):
            self._check(item, local, ())
        if box.names is not None:
            self._attrs(box, name, items)
        self._slots(box, name)

    def _items(self, cls: type, box: Box, name: str) -> list[str]:
        base, count = box.base, len(box.items)
        if base is object:
            return []
        if base is types.MethodType:
            return self._spread(f"{name}.__func__, {name}.__self__", 2)
        exact = cls in EXACT
        size = f"len({name})" if exact else f"{self.const(base.__len__)}({name})"
        self._tests.append(f"{size} != {count}")
        each = name if exact else f"{self.const(base.__iter__)}({name})"
        if box.keys is None:
            return self._spread(each, count)
        self._keys(box.keys, each)
        return self._spread(f"{name}.values()" if exact else f"{self.const(base.values)}({name})", count)

    def _keys(self, keys: tuple[Any, ...], source: str) -> None:
        """Keys are nearly always the same interned strings; only others are compared by token."""
        if not keys:
            return
        locals_ = self._spread(source, len(keys))
        differ = " or ".join(
            f"{local} is not {self.const(key)}" for local, key in zip(locals_, keys, strict=True)
        )
        tokens = self.const(tuple(map(token_of, keys)))
        same = f"{self.const(_same_keys)}({_tuple_code(locals_)}, {tokens})"
        self._tests.append(f"({differ}) and not {same}")

    def _attrs(self, box: Box, name: str, items: list[str]) -> None:
        assert box.names is not None
        own = self.local()
        self._flush()
        self.line(f"{own} = {name}.__dict__")
        self._tests.append(f"len({own}) != {len(box.names)}")
        self._keys(box.names, own)
        for node, local in zip(box.attrs, self._spread(f"{own}.values()", len(box.names)), strict=True):
            self._check(node, local, items)

    def _slots(self, box: Box, name: str) -> None:
        absent = self.const(_ABSENT)
        for member in box.unset:
            self._tests.append(f"{self.const(_slot)}({self.const(member)}, {name}) is not {absent}")
        for member, node in zip(box.members, box.slots, strict=True):
            local = self.local()
            self._flush()
            self.line(f"try: {local} = {self.const(member.__get__)}({name})")
            self.line("except AttributeError: return None")
            self._check(node, local, ())


_ABSENT = object()


def _slot(member: types.MemberDescriptorType, value: object) -> object:
    try:
        return member.__get__(value)
    except AttributeError:
        return _ABSENT


class _Rebuilder(_Emitter):
    """Writes the function from leaves to values, below whatever the classes override."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[str] = []
        self._consts: list[str] = []

    def compiled(self, nodes: tuple[Node, ...]) -> Any:
        roots = [self._value(node, ()) for node in nodes]
        self.line(f"return {_tuple_code(roots)}")
        for names, source in ((self._consts, "consts"), (self._tensors, "tensors")):
            if names:
                self.lines.insert(0, f"    {', '.join(names)}, = {source}")
        return self.function("rebuild(tensors, consts)")

    def _value(self, node: Node, items: Sequence[str]) -> str:
        if node.kind == "mirror":
            place: int = node.value
            return items[place]
        if node.box is not None:
            return self._make(node.cls, node.box)
        local = self.local()
        (self._tensors if node.kind == "tensor" else self._consts).append(local)
        return local

    def _make(self, cls: type, box: Box) -> str:
        items = [self._value(item, ()) for item in box.items]
        made = self.local()
        self.line(f"{made} = {self._display(cls, box, items)}")
        if box.keys is not None and cls is not dict:
            put = self.const(box.base.__setitem__)
            for key, item in zip(box.keys, items, strict=True):
                self.line(f"{put}({made}, {self.const(key)}, {item})")
        if box.names:
            attrs = [self._value(attr, items) for attr in box.attrs]
            self.line(f"{made}.__dict__.update({self._dict(box.names, attrs)})")
        for member, slot in zip(box.members, box.slots, strict=True):
            self.line(f"{self.const(member.__set__)}({made}, {self._value(slot, ())})")
        return made

    def _dict(self, keys: Sequence[Any], values: Sequence[str]) -> str:
        entries = [f"{self.const(key)}: {value}" for key, value in zip(keys, values, strict=True)]
        return f"{{{', '.join(entries)}}}"

    def _display(self, cls: type, box: Box, items: list[str]) -> str:
        """The expression that makes the container, with its items unless it is an unusual mapping."""
        if cls is tuple:
            return _tuple_code(items)
        if cls is list:
            return f"[{', '.join(items)}]"
        if cls is dict:
            assert box.keys is not None
            return self._dict(box.keys, items)
        if box.base is types.MethodType:
            return f"{self.const(cls)}({', '.join(items)})"
        if box.base is cls and is_structseq(cls):
            return f"{self.const(cls)}({_tuple_code(items)})"
        if box.base is list:
            return f"{self.const(_list_of)}({self.const(cls)}, {_tuple_code(items)})"
        given = f", {_tuple_code(items)}" if box.base is tuple else ""
        return f"{self.const(box.base.__new__)}({self.const(cls)}{given})"


def _list_of(cls: type[list[Any]], items: tuple[Any, ...]) -> list[Any]:
    made: list[Any] = list.__new__(cls)
    list.extend(made, items)
    return made


def unpacker(nodes: tuple[Node, ...], *, tokens: bool = True) -> Unpack:
    """Values to tensors and one token per constant (or the constant itself); None for another structure."""
    made: Unpack = _Unpacker(tokens).compiled(nodes)
    return made


def rebuilder(nodes: tuple[Node, ...]) -> Rebuild:
    """Tensors and constants to values, in fresh containers of the same types."""
    made: Rebuild = _Rebuilder().compiled(nodes)
    return made
