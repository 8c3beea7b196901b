"""The twin of a module: one state, two objects; the eager original is the oracle."""

from __future__ import annotations

import abc
import copy
import functools
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import together
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from graphify import GraphedModule, GraphifyWarning, graphify, handle

TAPE: dict[str, Any] = {"backend": "tape"}

# Results equal eager whether or not calls that need gradients are captured.
UNCAPTURED = pytest.mark.filterwarnings("ignore::graphify.GraphifyWarning")


class Net(nn.Module):
    """Two linears, a buffer, a plain value and a keyword."""

    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.register_buffer("shift", torch.randn(2))
        self.scale = 2.0

    def forward(self, x: Tensor, *, k: int = 1) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale * k + self.shift


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Layers(nn.Module):
    """A module without plain values, which torch.compile would make inputs of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Slotted(nn.Module):
    __slots__ = ("value",)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Named(nn.Module):
    """A module that has every name of the controls for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = "own"
        self.graphs = nn.Parameter(torch.ones(2))
        self.report = nn.Linear(2, 2)
        self.register_buffer("capture", torch.ones(2))

    def reset(self) -> str:
        return "own"

    def forward(self, x: Tensor) -> Tensor:
        return x * self.graphs


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """The promises here are about state; those about gradients turn them on."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def agree(graphed: Any, eager: Any, calls: int = 4, **kwargs: Any) -> None:
    """Both give the same for fresh data, often enough for a warm-up, a capture and replays."""
    for _ in range(calls):
        x = torch.randn(3, 4)
        torch.testing.assert_close(graphed(x, **kwargs), eager(x, **kwargs), rtol=0, atol=0)


# One state, two objects.


def test_a_twin_computes_what_the_module_computes_and_replays_it() -> None:
    """Calls equal the eager original's, and all but the first two are replays."""
    eager = Net()
    model = graphify(eager, **TAPE)

    agree(model, eager, calls=5)
    agree(model, eager, calls=5, k=3)

    stats = handle(model).stats()
    assert (stats.calls, stats.warmups, stats.captures, stats.replays) == (10, 2, 2, 6)


def test_a_twin_has_the_very_state_of_the_module() -> None:
    """Keys, parameters, buffers, attributes and hooks are the same objects, not copies."""
    eager = Net()
    model = graphify(eager, **TAPE)
    agree(model, eager)

    assert isinstance(model, Net)
    assert isinstance(model, GraphedModule)
    assert not isinstance(eager, GraphedModule)
    assert vars(model) is vars(eager)
    assert list(model.state_dict()) == list(eager.state_dict())
    for (name, mine), (same_name, its) in zip(
        model.named_parameters(), eager.named_parameters(), strict=True
    ):
        assert name == same_name
        assert mine is its
    assert list(map(id, model.children())) == list(map(id, eager.children()))


def _in_place(to: Net, other: Net) -> None:
    to.load_state_dict(other.state_dict())


def _assigned(to: Net, other: Net) -> None:
    to.load_state_dict(other.state_dict(), assign=True)


def _parameter(to: Net, other: Net) -> None:
    to.first.weight = nn.Parameter(torch.randn(4, 4))


def _data(to: Net, other: Net) -> None:
    to.second.bias.data = torch.randn(2)


def _submodule(to: Net, other: Net) -> None:
    to.first = nn.Linear(4, 4)


def _buffer(to: Net, other: Net) -> None:
    to.shift = torch.randn(2)


def _value(to: Net, other: Net) -> None:
    to.scale = 0.5


def _in_a_list(to: Net, other: Net) -> None:
    del to.second
    to.register_module("second", nn.Sequential(nn.Linear(4, 2), Doubling()))


@pytest.mark.parametrize("side", ["twin", "original"])
@pytest.mark.parametrize(
    "change", [_in_place, _assigned, _parameter, _data, _submodule, _buffer, _value, _in_a_list]
)
def test_surgery_is_seen_from_both_sides(change: Callable[[Net, Net], None], side: str) -> None:
    """Whatever changes on one of the two, both compute with it at the next call."""
    eager = Net()
    model = graphify(eager, **TAPE)
    agree(model, eager)

    change(model if side == "twin" else eager, Net())

    agree(model, eager)
    assert vars(model) is vars(eager)


def test_methods_that_return_self_return_the_twin() -> None:
    """`.train()`, `.eval()`, `.to()` and their kin work on the shared state and give the twin itself."""
    eager = Net()
    model = graphify(eager, **TAPE)

    assert model.eval() is model
    assert not eager.training
    assert not eager.first.training
    assert model.train() is model
    assert eager.training
    assert model.to(torch.float64) is model
    assert eager.first.weight.dtype is torch.float64
    assert model.float() is model
    assert model.requires_grad_(requires_grad=False) is model
    assert not eager.second.bias.requires_grad
    agree(model, eager)


def test_a_twin_inside_another_module_is_transparent() -> None:
    """A parent has the same keys, and conversions reach through."""
    eager = nn.Sequential(Net(), Doubling())
    keys = list(eager.state_dict())
    model = nn.Sequential(graphify(eager[0], **TAPE), eager[1])

    agree(model, eager)
    model.double()

    assert list(model.state_dict()) == keys
    assert next(eager.parameters()).dtype is torch.float64
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), eager(x), rtol=0, atol=0)


@UNCAPTURED
def test_training_moves_both() -> None:
    """An optimizer over the twin's parameters trains the original too, as an eager twin is trained."""
    eager = Net()
    model = graphify(copy.deepcopy(eager), **TAPE)
    sides = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (model, eager)]

    with torch.enable_grad():
        for _ in range(5):
            x = torch.randn(3, 4)
            for net, optimizer in sides:
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()

    assert all(map(torch.equal, model.parameters(), eager.parameters()))


# Hooks.


def test_hooks_on_the_module_run_at_every_call() -> None:
    """Pre, forward and keyword hooks run on replayed calls too, and what they change counts."""
    eager = Net()
    model = graphify(eager, **TAPE)
    seen: list[str] = []
    eager.register_forward_pre_hook(lambda m, args: seen.append("pre") or (args[0] + 1,))
    model.register_forward_hook(lambda m, args, out: seen.append("post") or out * 2)
    late = model.register_forward_hook(
        lambda m, args, kwargs, out: seen.append(f"k={kwargs['k']}"), with_kwargs=True
    )

    for _ in range(5):
        model(torch.randn(3, 4), k=2)
    assert seen == ["pre", "post", "k=2"] * 5

    late.remove()
    agree(model, eager, k=2)


@UNCAPTURED
def test_backward_hooks_on_the_module_run_at_every_backward() -> None:
    """A full backward hook sees each backward through the twin."""
    model = graphify(Net(), **TAPE)
    seen: list[int] = []
    model.register_full_backward_hook(lambda m, grads, out: seen.append(out[0].numel()))

    with torch.enable_grad():
        for _ in range(4):
            model(torch.randn(3, 4, requires_grad=True)).sum().backward()

    assert seen == [6] * 4


# Copies.


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _python_pickled(model: Any) -> Any:
    buffer = io.BytesIO()
    pickle._Pickler(buffer, protocol=2).dump(model)  # type: ignore[attr-defined]
    return pickle.loads(buffer.getvalue())


def _saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, _pickled, _python_pickled, _saved])
def test_copies_are_independent_twins_without_graphs(how: Callable[[Any], Any]) -> None:
    """A copy is a GraphedModule with the same options and weights of its own, and starts uncaptured."""
    eager = Net()
    model = graphify(eager, max_graphs=7, **TAPE)
    agree(model, eager)

    other = how(model)
    other.shift.fill_(5)

    assert isinstance(other, GraphedModule)
    assert type(other) is type(model)
    assert vars(other) is vars(other.__wrapped__)
    assert handle(other).options == handle(model).options
    assert handle(other).stats().calls == 0
    agree(other, other.__wrapped__)
    agree(model, eager)
    assert not torch.equal(other.shift, eager.shift)


def test_a_shallow_copy_shares_what_a_shallow_copy_of_the_module_shares() -> None:
    """`copy.copy` gives a twin of a shallow copy: the same parameters, attributes of its own."""
    model = graphify(Net(), **TAPE)

    other = copy.copy(model)
    other.scale = 3.0

    assert isinstance(other, GraphedModule)
    assert other.first is model.first
    assert model.scale == 2.0
    agree(other, other.__wrapped__)


@pytest.mark.parametrize("how", [copy.deepcopy, _pickled, _saved])
def test_copies_keep_how_module_and_twin_belong_together(how: Callable[[Any], Any]) -> None:
    """A module that is copied with its twin, or that refers to its own twin, stays the twin's module."""
    eager = Net()
    model = graphify(eager, **TAPE)
    eager.friends = [model]

    other_eager, other = how((eager, model))

    assert other.__wrapped__ is other_eager
    assert other_eager.friends == [other]
    assert other_eager is not eager

    alone = how(model)
    assert alone.friends == [alone]


def test_a_custom_deepcopy_is_honoured() -> None:
    """The module's own way of copying itself is used for the twin's copy."""

    class Sharing(Net):
        def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
            return copy.copy(self)

    model = graphify(Sharing(), **TAPE)

    other = copy.deepcopy(model)

    assert isinstance(other, GraphedModule)
    assert other.first is model.first


def test_new_modules_of_the_twins_class_are_twins() -> None:
    """`type(model)(...)` and data-parallel replicas are twins with a state of their own."""
    model = graphify(layers(), **TAPE)

    fresh = type(model)(nn.Linear(4, 4))
    replica = model._replicate_for_data_parallel()
    replica._modules = model._modules

    for other in (fresh, replica):
        assert isinstance(other, GraphedModule)
        assert vars(other) is vars(other.__wrapped__)
        assert vars(other) is not vars(model)
    agree(fresh, fresh.__wrapped__)
    agree(replica, model)


def test_what_a_container_does_with_its_class() -> None:
    """A slice of a Sequential is an eager Sequential over the same modules."""
    model = graphify(layers(), **TAPE)

    part = model[:2]

    assert len(model) == 3
    assert type(part) is nn.Sequential
    assert part[0] is model[0]


# What torch does with modules.


def test_functional_call_uses_the_given_parameters() -> None:
    """Parameters that are swapped in for one call are the ones computed with."""
    eager = Net()
    model = graphify(eager, **TAPE)
    agree(model, eager)

    for _ in range(3):
        given = {name: torch.randn_like(p) for name, p in eager.named_parameters()}
        x = torch.randn(3, 4)
        result = torch.func.functional_call(model, given, (x,), {"k": 2})
        torch.testing.assert_close(
            result, torch.func.functional_call(eager, given, (x,), {"k": 2}), rtol=0, atol=0
        )
    agree(model, eager)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo")
@UNCAPTURED
def test_distributed_data_parallel_over_a_twin() -> None:
    """DDP around a twin trains as DDP around the module does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        eager = Net()
        twin = graphify(copy.deepcopy(eager), **TAPE)
        sides = [DistributedDataParallel(net) for net in (twin, eager)]
        with torch.enable_grad():
            for _ in range(4):
                x = torch.randn(3, 4)
                for net in sides:
                    net(x).square().sum().backward()

        assert [name for name, _ in sides[0].named_parameters()] == [
            n for n, _ in sides[1].named_parameters()
        ]
        for mine, its in zip(twin.parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


def test_a_script_module_has_a_twin() -> None:
    """ScriptModules keep their compiled forward, their attributes and their methods."""
    eager = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = graphify(eager, **TAPE)

    agree(model, eager)
    model.eval()

    assert isinstance(model, torch.jit.ScriptModule)
    assert not eager.training
    assert list(model.state_dict()) == list(eager.state_dict())
    assert model.graph is not None
    copied = copy.deepcopy(model)
    agree(copied, eager)


def test_a_lazy_module_becomes_what_it_becomes() -> None:
    """A lazy layer learns its shape in the first call, on both sides, and changes its class on both."""
    eager = nn.LazyLinear(2)
    model = graphify(eager, **TAPE)
    assert isinstance(model, nn.LazyLinear)

    model(torch.randn(3, 4))

    assert type(eager) is nn.Linear
    assert isinstance(model, nn.Linear)
    assert isinstance(model, GraphedModule)
    assert not isinstance(model, nn.LazyLinear)
    agree(model, eager)


@pytest.mark.parametrize("side", ["twin", "original"])
def test_parametrizations_reach_both(side: str) -> None:
    """A parametrization registered on either side, and taken away again, changes what both compute."""
    eager = nn.Linear(4, 4)
    model = graphify(eager, **TAPE)
    untouched = graphify(nn.Linear(4, 4), **TAPE)
    target = model if side == "twin" else eager
    agree(model, eager)

    for name in ("weight", "bias"):
        parametrize.register_parametrization(target, name, Doubling())
        agree(model, eager)
        assert torch.equal(getattr(model, name), getattr(eager, name))
        assert parametrize.is_parametrized(eager, name)
    parametrize.remove_parametrizations(target, "weight")

    agree(model, eager)
    agree(untouched, untouched.__wrapped__)
    assert list(model.state_dict()) == list(eager.state_dict())
    assert isinstance(model, GraphedModule)


def test_torch_compile_sees_the_plain_forward() -> None:
    """Dynamo traces through a twin in one piece, to the eager result."""
    eager = Net()
    model = graphify(eager, **TAPE)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    agree(compiled, eager)
    assert handle(model).stats().replays == 0


def test_a_compiled_module_is_graphed_as_compiled() -> None:
    """The twin of `torch.compile(module)` keeps the compiled forward, and its way of passing attributes on."""
    eager = Layers()
    compiled = torch.compile(eager, backend="eager")
    model = graphify(compiled, **TAPE)

    agree(model, eager)
    model.eval()
    model.first.weight.fill_(3)
    model.note = "new"

    assert not eager.training
    assert eager.note == "new"
    agree(model, eager)


@pytest.mark.parametrize("compile_first", [True, False])
def test_module_compile_goes_into_the_graph(compile_first: bool) -> None:
    """`module.compile()` does not bypass the graphs: its code is what is graphed."""
    runs = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    eager = Layers()
    if compile_first:
        eager.compile(backend=backend)
    model = graphify(eager, **TAPE)
    if not compile_first:
        agree(model, eager)
        model.compile(backend=backend)
    plain = copy.deepcopy(eager)

    before = len(runs)
    agree(model, plain, calls=5)

    stats = handle(model).stats()
    assert len(runs) > before
    assert (stats.calls, stats.warmups, stats.captures) == (5, 1, 1)


def test_hooks_are_not_compiled_into_the_graph() -> None:
    """Hooks of a module with `compile()` run once per call; the plain forward is graphed, with a warning."""
    eager = Net()
    seen: list[int] = []
    eager.register_forward_hook(lambda m, args, out: seen.append(1))
    eager.compile(backend="eager")
    model = graphify(eager, **TAPE)

    with pytest.warns(GraphifyWarning, match=r"graphify\(torch.compile\(module\)\)"):
        agree(model, lambda x: type(eager).forward(eager, x), calls=4)

    assert len(seen) == 4


def test_fx_modules_recompile_on_both_sides() -> None:
    """A traced module edited through its twin or by itself is graphed anew with the new code."""
    eager = fx.symbolic_trace(Net())
    model = graphify(eager, **TAPE)
    agree(model, eager)

    for side in (model, eager):
        (node,) = [n for n in side.graph.nodes if n.op == "call_method"]
        node.target = "tanh" if node.target == "relu" else "sigmoid"
        side.recompile()
        agree(model, eager)
    assert isinstance(model, GraphedModule)


def test_fx_traces_the_plain_forward() -> None:
    """`symbolic_trace` looks at the forward of the class, which is the module's own."""
    eager = Net()
    agree(fx.symbolic_trace(graphify(eager, **TAPE)), eager)


# Forward, patched.


@pytest.mark.parametrize("side", ["twin", "original"])
def test_a_patched_forward_is_honoured(side: str) -> None:
    """A forward set on the instance, before or after `graphify` and from either side, is what is graphed."""
    eager = Net()
    plain = eager.forward
    eager.forward = lambda x: plain(x) + 1
    model = graphify(eager, **TAPE)
    agree(model, lambda x: plain(x) + 1)
    target = model if side == "twin" else eager

    target.forward = lambda x: plain(x) * 3

    agree(model, lambda x: plain(x) * 3)
    assert handle(model).stats().captures == 1

    del target.forward

    agree(model, plain)
    assert "forward" not in vars(eager)


def test_wrapping_and_restoring_forward_through_the_twin() -> None:
    """The usual `old = m.forward; m.forward = wrapper; m.forward = old` leaves nothing behind."""
    eager = Net()
    model = graphify(eager, **TAPE)
    plain = functools.partial(Net.forward, eager)
    old = model.forward

    model.forward = lambda x: old(x) + 1
    agree(model, lambda x: plain(x) + 1)
    model.forward = old
    agree(model, plain)

    assert "forward" not in vars(eager)
    assert isinstance(model, GraphedModule)


def test_a_forward_patched_in_the_class_is_honoured() -> None:
    """Replacing the method of the class changes what every twin of its modules computes."""

    class Local(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    eager = Local()
    model = graphify(eager, **TAPE)
    agree(model, lambda x: x + 1)

    Local.forward = lambda self, x: x - 1

    agree(model, lambda x: x - 1)
    assert type(model).forward is Local.forward


def test_a_partialmethod_as_forward_is_graphed_once() -> None:
    """A forward that is a new object at each access is not taken for a patch."""

    class Half(nn.Module):
        def scaled(self, scale: float, x: Tensor) -> Tensor:
            return x * scale

        forward = functools.partialmethod(scaled, 0.5)

    model = graphify(Half(), **TAPE)

    agree(model, lambda x: x * 0.5, calls=5)

    assert handle(model).stats().replays == 3


def test_a_forward_that_is_graphed_already_is_graphed_plain() -> None:
    """A twin of a module whose forward was graphed by hand runs the plain forward in its graphs."""
    eager = Net()
    plain = eager.forward
    eager.forward = graphify(eager.forward, **TAPE)
    model = graphify(eager, **TAPE)

    agree(model, plain)

    assert handle(model).stats().replays == 2
    assert handle(eager).stats().calls == 0


# The twin as an object.


def test_a_twin_is_freed_without_the_collector(no_gc: None) -> None:
    """`del` frees the twin and its graphs at once, and leaves the module as it was."""
    eager = Net()
    model = graphify(eager, **TAPE)
    agree(model, eager)
    gone, runner = weakref.ref(model), weakref.ref(handle(model))

    del model

    assert gone() is None
    assert runner() is None
    eager(torch.randn(3, 4))


def test_the_module_is_freed_with_its_twin(no_gc: None) -> None:
    """A twin whose original nobody else holds takes the original along."""
    model = graphify(Net(), **TAPE)
    agree(model, model.__wrapped__)
    gone = weakref.ref(model.__wrapped__)

    del model

    assert gone() is None


def test_the_modules_own_names_win() -> None:
    """Attributes, parameters, buffers, submodules and methods hide controls; `handle` gives them all the same."""
    eager = Named()
    model = graphify(eager, **TAPE)
    model(torch.ones(2))

    assert model.stats == "own"
    assert model.graphs is eager.graphs
    assert model.report is eager.report
    assert model.capture is eager.capture
    assert model.reset() == "own"
    assert handle(model).stats().calls == 1


def test_the_controls_are_found_after_the_modules_own_names() -> None:
    """Where the module has no such names, the twin offers the controls, and the original does not."""
    eager = Net()
    model = graphify(eager, **TAPE)
    agree(model, eager)

    assert model.stats() == handle(model).stats()
    assert model.stats().calls == 4
    assert isinstance(model.report(), str)
    assert {"stats", "graphs", "report", "capture", "reset", "scale", "first"} <= set(dir(model))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'stats'"):
        eager.stats  # type: ignore[operator]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        model.nothing  # type: ignore[operator]


def test_reset_starts_anew() -> None:
    """After `reset()` the next calls warm up and capture again, to the same results."""
    eager = Net()
    model = graphify(eager, **TAPE)
    for _ in range(2):
        agree(model, eager)
        handle(model).reset()
    agree(model, eager)


def test_what_a_twin_is_called() -> None:
    """The class has the name of the module's, as checkpoints and logs store it; the repr tells the twin."""
    eager = Net()
    model = graphify(eager, **TAPE)

    assert model.__class__ is Net
    assert type(model) is not Net
    assert type(model).__name__ == "Net"
    assert type(model).__module__ == Net.__module__
    assert type(model).__qualname__ == "GraphedModule[Net]"
    assert repr(model) == f"GraphedModule({eager!r})"
    assert model.__wrapped__ is eager
    assert inspect.unwrap(model) is eager
    assert inspect.signature(model.forward) == inspect.signature(eager.forward)
    assert type(model).forward is Net.forward


def test_graphify_of_a_twin_is_another_twin_of_the_module() -> None:
    """Both share the module, and each has options and graphs of its own."""
    eager = Net()
    first = graphify(eager, max_graphs=3, **TAPE)
    second = graphify(first, max_graphs=5, **TAPE)

    agree(second, eager)

    assert second is not first
    assert second.__wrapped__ is eager
    assert (handle(first).options.max_graphs, handle(second).options.max_graphs) == (3, 5)
    assert handle(first).stats().calls == 0


def test_two_twins_of_one_class_have_one_class() -> None:
    """The class of the twins is made once per class of modules."""
    first, second, other = graphify(Net()), graphify(Net()), graphify(Doubling())

    assert type(first) is type(second)
    assert type(first) is not type(other)


def test_classes_are_not_kept_alive() -> None:
    """A local module class and the class of its twins go when nothing uses them."""

    class Local(Net):
        pass

    model = graphify(Local(), **TAPE)
    agree(model, model.__wrapped__)
    original, dynamic = weakref.ref(Local), weakref.ref(type(model))

    del Local, model
    gc.collect()

    assert original() is None
    assert dynamic() is None


def test_threads_that_meet_a_patched_forward_make_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads notice a new forward at once, it gets one set of graphs."""
    eager = Doubling()
    model = graphify(eager, **TAPE)
    eager.forward = lambda x: x + 1

    found = together(8, lambda: model.forward)

    assert len(found) == 8
    assert len(set(map(id, found))) == 1


# Classes with ideas of their own.


def test_values_in_slots_are_refused() -> None:
    """State outside `__dict__` cannot be shared: the error says so, and the line it gives works."""
    module = Slotted()
    module.value = 3.0

    with pytest.raises(TypeError, match="cannot make a twin of a `Slotted`") as error:
        graphify(module, **TAPE)

    assert "write: module.forward = graphify(module.forward)" in str(error.value)
    module.forward = graphify(module.forward, **TAPE)
    agree(module, lambda x: x * 3)
    assert handle(module).stats().replays == 2


def test_a_metaclass_that_refuses_subclasses_is_named() -> None:
    """Whatever keeps a twin's class from being made comes with the class's name and a way out."""

    class Final(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
            if any(isinstance(base, Final) for base in bases):
                raise RuntimeError("no subclasses, please")
            return super().__new__(mcs, name, bases, namespace)

    class Sealed(nn.Module, metaclass=Final):
        pass

    with pytest.raises(TypeError, match=r"Sealed`: no subclasses, please"):
        graphify(Sealed())


def test_abstract_bases_and_registries_are_no_obstacle() -> None:
    """ABCs work, and the making of a twin's class registers nothing."""
    registry: list[type] = []

    class Registered(nn.Module, abc.ABC):
        def __init_subclass__(cls, *, label: str) -> None:
            registry.append(cls)

        @abc.abstractmethod
        def forward(self, x: Tensor) -> Tensor: ...

    class Concrete(Registered, label="concrete"):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    model = graphify(Concrete(), **TAPE)

    agree(model, lambda x: x + 1)
    assert registry == [Concrete]


def test_a_finaliser_runs_once_and_for_the_module(no_gc: None) -> None:
    """`__del__` belongs to the module: a twin that goes away does not call it."""
    gone: list[int] = []

    class Closing(Doubling):
        def __del__(self) -> None:
            gone.append(1)

    eager = Closing()
    model = graphify(eager, **TAPE)
    del model
    assert gone == []

    del eager
    assert gone == [1]


def test_own_attribute_access_is_kept() -> None:
    """Modules that override `__getattr__` and `__setattr__` keep doing so through the twin."""

    class Upper(Doubling):
        def __getattr__(self, name: str) -> Any:
            return name.upper() if name.startswith("loud_") else super().__getattr__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value + 1 if name == "count" else value)

    eager = Upper()
    model = graphify(eager, **TAPE)
    model.count = 1

    assert model.loud_one == "LOUD_ONE"
    assert eager.count == 2
    agree(model, eager)


def test_the_class_of_twins_is_not_for_subclassing_or_calling() -> None:
    """A GraphedModule comes from `graphify(module)` only, and the errors say what to write."""
    with pytest.raises(TypeError, match=r"write graphify\(module\)"):
        GraphedModule(Net())
    with pytest.raises(TypeError, match="put @graphify above it"):
        type("Sub", (GraphedModule,), {})
    with pytest.raises(TypeError, match="put @graphify above it"):
        type("Sub", (type(graphify(Net())),), {})


def test_a_module_without_forward_fails_as_it_does_eagerly() -> None:
    """Containers can have twins; calling one raises what the container raises."""
    model = graphify(nn.ModuleList([Net()]), **TAPE)

    assert len(model) == 1
    with pytest.raises(NotImplementedError, match='missing the required "forward"'):
        model(torch.ones(1))
