"""Classes and code that are replaced while objects and functions stay: as reloading a module in place does, or swapping layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts
from torch import Tensor, nn

from graphify import CaptureError, graphify, handle

Change = tuple[Callable[[Tensor], Tensor], Callable[[], Any], str]
"""A function, what replaces something that it runs, and the name of that."""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Inference."""
    with torch.no_grad():
        yield


class One:
    k = 1.0

    def factor(self) -> float:
        return 1.0


class Five:
    k = 5.0

    def factor(self) -> float:
        return 5.0


class Doubles(nn.Linear):
    """A layer in place of another one, as quantization makes it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def fresh(source: str) -> Any:
    """A function or class of its own."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(source, space)
    return space["f"]


def class_of_an_object() -> Change:
    held = One()
    return lambda x: x * held.k, lambda: setattr(held, "__class__", Five), "type(held)"


def class_of_an_object_with_methods() -> Change:
    held = One()
    return lambda x: x * held.factor(), lambda: setattr(held, "__class__", Five), "type(held)"


def class_of_an_item() -> Change:
    held = [One(), One()]
    return lambda x: x * held[1].k, lambda: setattr(held[1], "__class__", Five), "type(held[1])"


def class_of_a_dict() -> Change:
    kinds = type("Small", (dict,), {"k": 1.0}), type("Large", (dict,), {"k": 5.0})
    held = kinds[0](a=2.0)
    return lambda x: x * held["a"] * held.k, lambda: setattr(held, "__class__", kinds[1]), "type(held)"


def class_of_a_layer() -> Change:
    net = Net()
    return net, lambda: setattr(net.a, "__class__", Doubles), "type(self.a)"


def code() -> Change:
    f = fresh("def f(x): return x * 1.0")
    return lambda x: f(x), lambda: setattr(f, "__code__", (lambda x: x * 5.0).__code__), "f.__code__"


def code_of_the_function_itself() -> Change:
    f = fresh("def f(x): return x * 1.0")
    return f, lambda: setattr(f, "__code__", (lambda x: x * 5.0).__code__), "f.__code__"


def defaults() -> Change:
    f = fresh("def f(x, k=1.0): return x * k")
    return lambda x: f(x), lambda: setattr(f, "__defaults__", (5.0,)), "f.__defaults__"


def defaults_that_come() -> Change:
    f = fresh("def f(x, *k): return x * (k[0] if k else 1.0)")
    new = fresh("def f(x, k=5.0): return x * k")

    def change() -> None:
        f.__code__, f.__defaults__ = new.__code__, new.__defaults__

    return lambda x: f(x), change, "f.__code__"


def keyword_defaults() -> Change:
    f = fresh("def f(x, *, k=1.0): return x * k")
    return lambda x: f(x), lambda: setattr(f, "__kwdefaults__", {"k": 5.0}), "f.__kwdefaults__"


def one_keyword_default() -> Change:
    f = fresh("def f(x, *, k=1.0): return x * k")
    return lambda x: f(x), lambda: f.__kwdefaults__.update(k=5.0), "f.__kwdefaults__['k']"


def default_tensor(device: torch.device) -> Change:
    f = fresh("def f(x, k=1.0): return x * k")
    f.__defaults__ = (torch.ones(3, device=device),)
    new = (torch.full((3,), 5.0, device=device),)
    return lambda x: f(x), lambda: setattr(f, "__defaults__", new), "f.__defaults__"


def method_code() -> Change:
    own = fresh("class f:\n def factor(self): return 1.0")
    held = own()
    return (
        lambda x: x * held.factor(),
        lambda: setattr(own.factor, "__code__", Five.factor.__code__),
        "__code__",
    )


def static_method_code() -> Change:
    own = fresh("class f:\n @staticmethod\n def k(self=None): return 1.0")
    return lambda x: x * own.k(), lambda: setattr(own.k, "__code__", Five.factor.__code__), "__code__"


def class_method_code() -> Change:
    own = fresh("class f:\n @classmethod\n def k(self): return 1.0")
    change = lambda: setattr(own.__dict__["k"].__func__, "__code__", Five.factor.__code__)
    return lambda x: x * own.k(), change, "__code__"


def special_method() -> Change:
    own = fresh("class f:\n def __len__(self): return 1")
    held = own()
    return lambda x: x * len(held), lambda: setattr(own, "__len__", lambda self: 5), "__len__"


def special_method_code() -> Change:
    own = fresh("class f:\n def __len__(self): return 1")
    held, new = own(), lambda self: 5
    return lambda x: x * len(held), lambda: setattr(own.__len__, "__code__", new.__code__), "__code__"


def replaced_property() -> Change:
    own = fresh("class f:\n k = property(lambda self: 1.0)")
    held = own()
    return lambda x: x * held.k, lambda: setattr(own, "k", property(lambda self: 5.0)), "k"


def property_code() -> Change:
    own = fresh("class f:\n k = property(lambda self: 1.0)")
    held = own()
    return lambda x: x * held.k, lambda: setattr(own.k.fget, "__code__", Five.factor.__code__), "__code__"


def replaced_method() -> Change:
    own = fresh("class f:\n def k(self): return 1.0")
    held = own()
    return lambda x: x * held.k(), lambda: setattr(own, "k", lambda self: 5.0), "k"


def replaced_static_method() -> Change:
    own = fresh("class f:\n k = staticmethod(lambda: 1.0)")
    held = own()
    return lambda x: x * held.k(), lambda: setattr(own, "k", staticmethod(lambda: 5.0)), "k"


class Answer:
    """A descriptor of the user's own."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, held: Any, cls: type) -> float:
        return self.value


def replaced_descriptor() -> Change:
    own = type("Own", (), {"k": Answer(1.0)})
    held = own()
    return lambda x: x * held.k, lambda: setattr(own, "k", Answer(5.0)), "k"


CHANGES = [
    class_of_an_object, class_of_an_object_with_methods, class_of_an_item, class_of_a_dict, class_of_a_layer,
    code, code_of_the_function_itself, defaults, defaults_that_come, keyword_defaults,
    one_keyword_default, default_tensor, method_code, static_method_code, class_method_code, special_method,
    special_method_code, replaced_property, property_code, replaced_method, replaced_static_method, replaced_descriptor,
]  # fmt: skip


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_what_is_replaced_is_run(backend, device, make):
    """The call after a replacement runs what is there now, and so do the next ones."""
    function, change, name = make(device) if make is default_tensor else make()
    if isinstance(function, nn.Module):
        function.to(device)
    graphed = graphify(function, backend=backend)
    for turn in range(2):
        for _ in range(4):
            x = torch.randn(3, device=device)
            plain = type(function).forward.__get__(function) if isinstance(function, nn.Module) else function
            assert torch.equal(graphed(x), plain(x)), turn
        if turn == 0:
            assert counts(graphed)[2] == 2
            entry = handle(graphed)._life.entries.ready[0]
            change()
            assert not entry.guard.holds()
            assert name in str(entry.guard.miss())
    assert counts(graphed)[2] == 4


def test_a_module_of_another_class_has_graphs_of_its_own(backend, device):
    """The class of the graphed module itself may change, too."""
    net = Net().to(device)
    graphed = graphify(net, backend=backend)
    for cls in (Net, Twice, Net):
        net.__class__ = cls
        for _ in range(4):
            x = torch.randn(3, device=device)
            assert torch.equal(graphed(x), cls.forward(net, x))


def test_a_function_that_changes_a_class_is_refused(backend, device):
    """A replay could not do it again: it is said, by name."""
    held, replaced = One(), fresh("def f(x, k=1.0): return x * k")

    def f(x: Tensor) -> Tensor:
        held.__class__ = Five if type(held) is One else One
        return x * held.k

    def g(x: Tensor) -> Tensor:
        replaced.__defaults__ = (len(replaced.__defaults__) + replaced.__defaults__[0],)
        return replaced(x)

    for target, name in ((f, r"type\(held\)"), (g, r"replaced\.__defaults__")):
        graphed = graphify(target, backend=backend, fallback="raise")
        assert torch.equal(
            graphed(torch.ones(3, device=device)).cpu(), torch.full((3,), 5.0 if target is f else 2.0)
        )
        with pytest.raises(CaptureError, match=name):
            graphed(torch.ones(3, device=device))
    assert type(held) is Five
    assert replaced.__defaults__ == (2.0,)
