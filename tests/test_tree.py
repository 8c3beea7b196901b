"""Values to leaves and back: structure, constants, and what is refused."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import gc
import struct
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from graphify._constants import kind_of, token_of
from graphify._tree import Tree, tree_of
from graphify.errors import InputError

# ---------------------------------------------------------------- what people pass


class Pair(NamedTuple):
    left: Any
    right: Any = None


class TaggedPair(Pair):
    """A NamedTuple's subclass, whose instances have a __dict__."""


class Triple(tuple):  # noqa: SLOT001 (it shall have a __dict__)
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("graphify runs no code of a container")


class Bag(list):
    def __len__(self) -> int:
        raise AssertionError("graphify runs no code of a container")


class Config(dict):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, ("changed", value))


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None

    def __post_init__(self) -> None:
        self.born = self.__dict__.get("born", 0) + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: Any = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclasses.dataclass(kw_only=True)
class KeywordOnly:
    x: Any
    later: Any = dataclasses.field(init=False)


@dataclasses.dataclass(init=False)
class OwnInit:
    x: Any

    def __init__(self, doubled: Any) -> None:
        self.x = doubled


class ModelOutput(OrderedDict):
    """Items and attributes in step, as in the model outputs of the transformers library."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@dataclasses.dataclass
class Logits(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


class Mode(enum.Enum):
    TRAIN = "train"
    LEARN = "train"  # noqa: PIE796 (an alias is the same member)
    EVAL = "eval"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Opt(enum.Flag):
    A = 1
    B = 2


class Thing:
    """Something that is only itself."""


class Text(str):
    __slots__ = ()


THING, OTHER = Thing(), Thing()
MISSING = object()

tensors = st.builds(torch.zeros, st.integers(0, 3))
constants = st.sampled_from(
    [
        *(None, ..., NotImplemented, True, False, 0, 1, 1.0, 0.0, -0.0, float("nan"), float("inf"), 2.5),
        *(
            0j,
            complex(0.0, -0.0),
            complex(-0.0, 0.0),
            complex(1, float("nan")),
            "",
            "a",
            "'\n\ud800",
            b"",
            b"a",
        ),
        *(Mode.TRAIN, Mode.LEARN, Mode.EVAL, Level.LOW, Level.HIGH, Opt.A, Opt.A | Opt.B, Opt(0)),
        *(torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda")),
        *(torch.strided, torch.channels_last, torch.Size([1, 2]), torch.Size([]), int, float, Pair),
        *(range(3), range(0, 3, 2), range(0, 4, 2), slice(1), slice(None, 1.0), slice(True)),
        *(
            frozenset(),
            frozenset({1}),
            frozenset({1.0}),
            frozenset({0.0}),
            frozenset({-0.0}),
            frozenset({(1, "a")}),
        ),
        *(THING, OTHER, MISSING, len, torch.add, functools.partial(int), Text("a"), Text("b")),
    ]
)
keys = st.sampled_from(
    [
        "a",
        "b",
        "__class__",
        "x y",
        "'\"",
        0,
        1,
        1.0,
        -0.0,
        True,
        None,
        (1, "a"),
        (1.0, "a"),
        Mode.EVAL,
        b"k",
        torch.int8,
    ]
)


def _init_false(x: Any, later: Any, fill: bool) -> KeywordOnly:
    made = KeywordOnly(x=x)
    if fill:
        made.later = later
    return made


def _tagged(left: Any, right: Any) -> TaggedPair:
    made = TaggedPair(left)
    made.tag = right  # type: ignore[attr-defined]
    return made


def _config(items: dict[Any, Any], note: Any) -> Config:
    made = Config(items)
    made.note = note
    return made


def _default(items: dict[Any, Any]) -> defaultdict[Any, Any]:
    return defaultdict(list, items)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every kind of container, around anything."""
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)
    pair = st.tuples(inner, inner)
    return st.one_of(
        lists,
        lists.map(tuple),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(_default),
        st.builds(_config, dicts, inner),
        lists.map(Bag),
        lists.map(lambda items: tuple.__new__(Triple, items)),
        pair.map(lambda p: Pair(*p)),
        pair.map(lambda p: _tagged(*p)),
        pair.map(lambda p: Batch(*p)),
        pair.map(lambda p: Frozen(*p)),
        pair.map(lambda p: Slotted(*p)),
        pair.map(lambda p: Logits(loss=p[0], logits=p[1])),
        inner.map(OwnInit),
        st.builds(_init_false, inner, inner, st.booleans()),
        tensors.map(lambda t: torch.return_types.max((t, t))),
    )


pytrees = st.recursive(tensors | constants, containers, max_leaves=6)

# ---------------------------------------------------------------- the oracle


def _own(value: Any) -> list[tuple[str, Any]]:
    """Attributes in order, then slots that are set."""
    found = list(getattr(value, "__dict__", {}).items())
    names = [n for cls in type(value).__mro__ for n in vars(cls).get("__slots__", ()) if n != "__weakref__"]
    return found + [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _items(value: Any) -> tuple[list[Any], list[Any]] | None:
    for base in (OrderedDict, dict):
        if isinstance(value, base):
            return list(base.__iter__(value)), list(base.values(value))
    for base in (list, tuple):
        if isinstance(value, base) and not isinstance(value, torch.Size):
            return [], list(base.__iter__(value))
    return ([], []) if dataclasses.is_dataclass(value) and not isinstance(value, type) else None


def same(a: Any, b: Any, tensor: Any = lambda a, b: a is b) -> bool:
    """Whether no code can tell two values apart, written without any of graphify's own code."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return bool(tensor(a, b))
    inside, other = _items(a), _items(b)
    if inside is None or other is None:
        return _same_constant(a, b)
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    own, others = _own(a), _own(b)
    parts = [*zip(inside[0], other[0], strict=False), *zip(inside[1], other[1], strict=False)]
    parts += [(x[1], y[1]) for x, y in zip(own, others, strict=False)]
    sizes = [len(inside[0]), len(inside[1])] == [len(other[0]), len(other[1])]
    return (
        sizes
        and [name for name, _ in own] == [name for name, _ in others]
        and _mirrors(a) == _mirrors(b)
        and all(same(x, y, tensor) for x, y in parts)
    )


def _mirrors(value: Any) -> list[bool]:
    own = getattr(value, "__dict__", {})
    return (
        [OrderedDict.__getitem__(value, n) is v for n, v in own.items() if n in value]
        if isinstance(value, ModelOutput)
        else []
    )


def _same_constant(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return (a != a and b != b) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return _same_constant(a.real, b.real) and _same_constant(a.imag, b.imag)
    if isinstance(a, (slice, range)):
        return all(same(getattr(a, n), getattr(b, n)) for n in ("start", "stop", "step"))
    if isinstance(a, frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return a is b if kind_of(a) == "opaque" else bool(a == b)


def any_tensor(a: Tensor, b: Tensor) -> bool:
    return True


def key_of(value: Any) -> tuple[Tree, Any]:
    tree = tree_of((value,), ["x"])
    leaves = tree.unpack((value,))
    assert leaves is not None
    return tree, leaves[1]


# ---------------------------------------------------------------- properties


@settings(deadline=None, max_examples=300)
@given(pytrees)
def test_rebuild_undoes_unpack(value: Any) -> None:
    """Taking a value apart and building it again gives an equal value of the same types, in the same order."""
    tree = tree_of((value,), ["x"])
    leaves = tree.unpack((value,))
    assert leaves is not None
    assert len(leaves[0]) == len(tree.tensor_paths)
    assert len(leaves[1]) == len(tree.const_paths) == len(tree.consts((value,)))

    (made,) = tree.rebuild(leaves[0], tree.consts((value,)))

    assert same(made, value)
    assert (made is not value) or _items(value) is None or value == ()


@settings(deadline=None, max_examples=300)
@given(pytrees, pytrees)
def test_keys_are_equal_exactly_where_values_are(a: Any, b: Any) -> None:
    """Tree and tokens agree for two values where nothing but their tensors can tell them apart, and only there."""
    (tree, tokens), (other, others) = key_of(a), key_of(b)

    assert (tree == other and tokens == others) == same(a, b, any_tensor)
    assert (tree.unpack((b,)) is None) == (tree != other)
    assert hash((tree, tokens)) == hash((tree, tokens))


@settings(deadline=None, max_examples=200)
@given(pytrees)
def test_copies_have_the_same_key(value: Any) -> None:
    """A value built anew from other tensors has the tree and the tokens of the first."""
    tree, tokens = key_of(value)
    leaves = tree.unpack((value,))
    assert leaves is not None
    (copy,) = tree.rebuild([t.clone() for t in leaves[0]], tree.consts((value,)))

    assert key_of(copy) == (tree, tokens)
    found = tree.unpack((copy,))
    assert found is not None
    assert found[1] == tokens


@settings(deadline=None, max_examples=100)
@given(st.lists(constants, min_size=2, max_size=40))
def test_constants_are_told_apart(values: list[Any]) -> None:
    """1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals itself, an object is only itself."""
    for a in values:
        for b in values:
            assert (key_of(a) == key_of(b)) == same(a, b), (a, b)


# ---------------------------------------------------------------- examples


def x() -> Tensor:
    return torch.randn(2)


@pytest.mark.parametrize(
    ("value", "tensor_paths", "const_paths"),
    [
        ({"a": [x()], "n": 2}, ("b['a'][0]",), ("b['n']",)),
        ({("k", 1): x(), Mode.EVAL: x()}, ("b[('k', 1)]", f"b[{Mode.EVAL!r}]"), ()),
        (Pair(x(), 3), ("b.left",), ("b.right",)),
        (Frozen((x(), None)), ("b.x[0]",), ("b.x[1]", "b.scale")),
        (Slotted(x()), ("b.x",), ("b.y",)),
        (torch.return_types.max((x(), x())), ("b.values", "b.indices"), ()),
        (defaultdict(list, k=x()), ("b['k']",), ("b.default_factory",)),
        (Logits(logits=x()), ("b['logits']",), ("b.loss", "b.hidden")),
    ],
)
def test_paths_are_what_the_user_would_write(value: Any, tensor_paths: Any, const_paths: Any) -> None:
    """Every leaf is named by the expression that reaches it."""
    tree = tree_of((value,), ["b"])

    assert (tree.tensor_paths, tree.const_paths) == (tensor_paths, const_paths)
    for path, tensor in zip(tensor_paths, tree.unpack((value,))[0], strict=True):  # type: ignore[index]
        assert eval(path.replace(repr(Mode.EVAL), "Mode.EVAL"), {"b": value, "Mode": Mode}) is tensor


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ([x()], (x(),)),
        ([x()], [x(), x()]),
        ({"a": x(), "b": 1}, {"b": 1, "a": x()}),
        ({"a": x()}, {"b": x()}),
        ({"a": x()}, {Text("a"): x()}),
        ({1: x()}, {True: x()}),
        ({"a": x()}, OrderedDict(a=x())),
        (x(), None),
        (None, x()),
        (1.0, x()),
        (x(), 1.0),
        (1, True),
        ("a", Text("a")),
        (Pair(x(), 1), (x(), 1)),
        (Frozen(x()), Batch(x())),
        (defaultdict(list, a=x()), defaultdict(None, a=x())),
        (_init_false(x(), 1, fill=True), _init_false(x(), 1, fill=False)),
        (_init_false(x(), 1, fill=False), _init_false(x(), 1, fill=True)),
        (_tagged(x(), 1), TaggedPair(x())),
        (THING, x()),
        (frozenset({1}), frozenset({THING})),
    ],
)
def test_unpack_answers_none_for_another_structure(value: Any, other: Any) -> None:
    """Container, length, keys, their order, types of constants, tensor or not: each is compared."""
    tree = tree_of((value,), ["x"])

    assert tree.unpack((other,)) is None
    assert tree.unpack((value, value)) is None
    assert tree.unpack((value,)) is not None


def test_an_unset_slot_is_part_of_the_structure() -> None:
    """A slot without a value is found both ways, and stays unset."""
    full, bare = Slotted(x(), 1), object.__new__(Slotted)
    tree = tree_of((bare,), ["s"])

    assert tree.unpack((full,)) is None
    assert tree_of((full,), ["s"]).unpack((bare,)) is None
    assert not hasattr(tree.rebuild((), ())[0], "x")


def test_a_model_output_stays_in_step() -> None:
    """An attribute that repeats an item is one leaf, and the same object again after a rebuild."""
    value = Logits(logits=x(), hidden=(x(), x()))
    tree = tree_of((value,), ["out"])
    made = tree.rebuild((a := x(), x(), x()), (None,))[0]

    assert tree.tensor_paths == ("out['logits']", "out['hidden'][0]", "out['hidden'][1]")
    assert type(made) is Logits
    assert made.logits is made["logits"] is a
    assert made.hidden is made["hidden"]
    assert list(made) == ["logits", "hidden"]
    made.logits = b = x()
    assert made["logits"] is b


def test_a_model_output_out_of_step_is_another_structure() -> None:
    """An attribute that no longer repeats its item is a leaf of its own."""
    value, torn = Logits(logits=x()), Logits(logits=x())
    vars(torn)["logits"] = other = x()
    tree = tree_of((torn,), ["out"])

    assert tree_of((value,), ["out"]).unpack((torn,)) is None
    assert tree.tensor_paths == ("out['logits']", "out.logits")
    assert tree.unpack((torn,))[0][1] is other  # type: ignore[index]


def test_rebuild_runs_no_code_of_the_user() -> None:
    """No __init__, __post_init__ or __setitem__ runs: what it would do has been done already."""
    batch = Batch(x(), 1)
    config = dict.__new__(Config)
    dict.__setitem__(config, "a", 1)
    tree = tree_of((batch, config), ["b", "c"])
    made, other = tree.rebuild((x(),), tree.consts((batch, config)))

    assert made.born == batch.born == 1
    assert type(other) is Config
    assert dict(other) == {"a": 1}


def test_order_of_an_ordered_dict_is_its_own() -> None:
    """`move_to_end` changes an OrderedDict's order but not that of the dict below it."""
    value = OrderedDict(a=x(), b=x())
    value.move_to_end("a")
    tree = tree_of((value,), ["x"])

    assert tree.tensor_paths == ("x['b']", "x['a']")
    assert list(tree.rebuild((x(), x()), ())[0]) == ["b", "a"]


def test_a_bound_method_is_compared_by_its_parts() -> None:
    """`self.hook` is a new object at each access, and still the same argument."""

    class Owner:
        def hook(self) -> None: ...

    owner = Owner()

    assert key_of(owner.hook) == key_of(owner.hook)
    assert key_of(owner.hook) != key_of(Owner().hook)
    assert tree_of((owner.hook,), ["h"]).rebuild((), (Owner.hook, owner))[0] == owner.hook


def test_opaque_objects_are_listed() -> None:
    """`opaque` holds the places of the constants that are compared by identity."""
    values = (1, THING, [len, None], Thing)
    tree = tree_of(values, ["a", "b", "c", "d"])

    assert tree.const_paths == ("a", "b", "c[0]", "c[1]", "d")
    assert tree.opaque == (1, 2)
    assert tree.unpack(values)[1][1] == id(THING)  # type: ignore[index]


def test_a_tree_keeps_no_argument_alive() -> None:
    """Opaque objects and tensors die with their last user: a tree holds types, not values."""
    thing, tensor = Thing(), x()
    refs = weakref.ref(thing), weakref.ref(tensor)
    tree = tree_of((thing, [tensor]), ["a", "b"])
    assert tree.unpack((thing, [tensor])) is not None
    del thing, tensor
    gc.collect()

    assert [ref() for ref in refs] == [None, None]


def test_shared_containers_are_walked_twice() -> None:
    """A container met twice gives its leaves twice; only one inside itself is refused."""
    inner = [x()]

    assert tree_of(((inner, inner),), ["a"]).tensor_paths == ("a[0][0]", "a[1][0]")


def test_thousands_of_tensors() -> None:
    """2,000 tensors in one argument are no special case."""
    many = tuple(torch.zeros(1) for _ in range(2000))
    tree = tree_of((many, {str(i): t for i, t in enumerate(many)}), ["args", "kwargs"])
    leaves = tree.unpack((many, {str(i): t for i, t in enumerate(many)}))

    assert leaves is not None
    assert leaves[0] == many + many
    assert tree.rebuild(leaves[0], ())[0] == many


def test_names_play_no_part_in_equality() -> None:
    """A tree is a structure: the names of its roots are for messages."""
    assert tree_of((x(), 1), ["a", "b"]) == tree_of((x(), 2), ["c", "d"])
    assert tree_of((x(),), ["a"]) != tree_of((1,), ["a"])
    assert tree_of((x(),), ["a"]) != "a"


def test_repr_names_the_leaves() -> None:
    """A tree shows what it knows."""
    assert repr(tree_of((x(), [1]), ["a", "b"])) == "Tree(tensors=['a'], constants=['b[0]'])"


# ---------------------------------------------------------------- refusals


class Bare:
    __slots__ = ("x",)


def _generator() -> Iterator[int]:
    yield 1


def _nested(depth: int) -> Any:
    value: Any = x()
    for _ in range(depth):
        value = [value]
    return value


def _cycle() -> Any:
    value: dict[str, Any] = {"a": [1]}
    value["a"].append(value)
    return value


NO_IDENTITY = "it has no value that graphify knows and cannot be weakly referenced, so its graphs could not die with it."


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {1, 2},
            "`b['v']` is a set: a signature cannot hold something without an order. Pass a tuple, list or frozenset.",
        ),
        ({}.keys(), "`b['v']` is a dict_keys: a signature cannot hold something without an order."),
        ({}.values(), "`b['v']` is a dict_values: it is only a view of a dict. Pass a list."),
        (
            _generator(),
            "`b['v']` is a generator: the first call would use it up. Pass a list of what it yields.",
        ),
        (iter([]), "`b['v']` is a list_iterator: the first call would use it up."),
        (bytearray(), "`b['v']` is a bytearray: what it holds can change without its identity."),
        (array.array("f"), "`b['v']` is a array.array: what it holds can change without its identity."),
        (
            collections.deque(),
            "`b['v']` is a collections.deque: what it holds can change without its identity.",
        ),
        (types.SimpleNamespace(), f"`b['v']` is a types.SimpleNamespace: {NO_IDENTITY}"),
        (Bare(), f"`b['v']` is a {__name__}.Bare: {NO_IDENTITY}"),
        (frozenset({THING}), "`b['v']` is a frozenset that holds more than plain constants."),
        (slice(THING), "`b['v']` is a slice that holds more than plain constants."),
        ({THING: 1}, "`b['v']` has a key of type Thing: keys are compared by value."),
        ({x(): 1}, "`b['v']` has a key of type Tensor: keys are compared by value."),
        (_cycle(), "`b['v']['a'][1]` is `b['v']` again: a container that contains itself has no signature."),
        (_nested(200), "is nested deeper than 100 containers. Pass it flatter."),
    ],
)
def test_refused_by_path(value: Any, message: str) -> None:
    """What no signature can hold is named by its path, with the reason and what to pass."""
    with pytest.raises(InputError) as caught:
        tree_of(({"v": value},), ["b"])

    assert message in str(caught.value)


def test_a_numpy_array_is_refused_by_path() -> None:
    """An array's values are invisible to a signature."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(InputError, match=r"`b\[0\]` is a numpy.ndarray: .* Pass torch.from_numpy"):
        tree_of(([numpy.zeros(2)],), ["b"])


def test_numpy_scalars_are_constants() -> None:
    """Numbers and dates of numpy have exact tokens, by type and value."""
    numpy = pytest.importorskip("numpy")
    values = [
        *(numpy.float32(1), numpy.float64(1), numpy.float64("nan"), numpy.float32(0.0), numpy.float32(-0.0)),
        *(numpy.int64(1), numpy.int32(1), numpy.bool_(True), numpy.complex64(1), numpy.str_("a")),
        *(numpy.datetime64("2020-01-01"), numpy.datetime64("2020-01-01T00"), numpy.timedelta64(1, "s")),
        *(numpy.timedelta64(1000, "ms"), numpy.complex128(complex(0.0, -0.0)), numpy.complex128(0)),
    ]
    for i, a in enumerate(values):
        for j, b in enumerate(values):
            assert (key_of(a) == key_of(b)) == (i == j), (a, b)
        assert key_of(a)[0].opaque == ()


def test_a_subclass_with_attributes_is_no_constant() -> None:
    """A string that carries more than its text is only itself."""

    class Token(str):  # noqa: SLOT000 (it shall have a __dict__)
        pass

    plain, rich = Token("a"), Token("a")
    rich.span = (0, 1)  # type: ignore[attr-defined]
    tree, _ = key_of(plain)

    assert tree.opaque == ()
    assert key_of(rich)[0].opaque == (0,)
    assert tree.unpack((rich,)) is None
    assert token_of(rich) is None


def test_modules_and_self_dicts_are_opaque() -> None:
    """A module and a dict that is its own __dict__ could not be built again: they are only themselves."""

    class AttrDict(dict):
        def __init__(self, **items: Any) -> None:
            super().__init__(items)
            self.__dict__ = self

    module, attrs = torch.nn.Linear(1, 1), AttrDict(a=1)

    assert tree_of((module, attrs), ["m", "d"]).opaque == (0, 1)
    assert key_of(attrs) == key_of(attrs)
    assert key_of(attrs) != key_of(AttrDict(a=1))


def test_an_object_with_a_finaliser_is_opaque() -> None:
    """A copy of an object that owns a resource would free it twice."""

    @dataclasses.dataclass
    class Handle:
        x: Any

        def __del__(self) -> None: ...

    assert tree_of((Handle(1),), ["h"]).opaque == (0,)


def test_a_dataclass_below_a_c_class_is_opaque() -> None:
    """Only containers whose instances Python alone can make are taken apart."""

    @dataclasses.dataclass
    class Failure(Exception):
        x: Any

    assert tree_of((Failure(1),), ["f"]).opaque == (0,)
