"""Hooks of the whole process: what is captured belongs to those in force, and their code is part of the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts, equal, python, together
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import Wrap, grads, mlp, same, same_or_loud

from graphify import CaptureError, check, graphify
from graphify._hooks import hook_tables, process_hooks

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.fixture(autouse=True)
def none_afterwards() -> Iterator[None]:
    """No test leaves a hook of the process."""
    yield
    assert not any(hook_tables)


def forward(change: Callable[[Any], Any]) -> Any:
    return modules.register_module_forward_hook(
        lambda m, args, out: change(out) if isinstance(m, nn.Tanh) else None
    )


def forward_pre(change: Callable[[Any], Any]) -> Any:
    return modules.register_module_forward_pre_hook(
        lambda m, args: (change(args[0]),) if isinstance(m, nn.Tanh) else None
    )


def backward(change: Callable[[Any], Any]) -> Any:
    return modules.register_module_full_backward_hook(
        lambda m, inner, outer: (change(inner[0]),) if isinstance(m, nn.Tanh) else None
    )


def backward_pre(change: Callable[[Any], Any]) -> Any:
    return modules.register_module_full_backward_pre_hook(
        lambda m, outer: (change(outer[0]),) if isinstance(m, nn.Tanh) else None
    )


def before_steps(change: Callable[[Any], Any]) -> Any:
    def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.grad.copy_(change(p.grad))

    return register_optimizer_step_pre_hook(scale)


def after_steps(change: Callable[[Any], Any]) -> Any:
    def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.copy_(change(p))

    return register_optimizer_step_post_hook(scale)


OF_MODULES = [forward, forward_pre, backward, backward_pre]
OF_STEPS = [*OF_MODULES, before_steps, after_steps]
Register = Callable[[Callable[[Any], Any]], Any]


@pytest.mark.parametrize("register", OF_MODULES)
def test_the_hooks_in_force_take_part(backend, device, register: Register):
    """A hook that comes after a capture, or goes, takes part from the next call on, in forward and backward."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(16):
            hook = register(lambda t: t * 2) if i // 4 % 2 else None
            y = net(torch.randn(4, 3, device=device))
            y.square().sum().backward()
            if hook is not None:
                hook.remove()
            yield y, grads(net)

    same(train, backend)


@pytest.mark.parametrize("register", OF_STEPS)
@pytest.mark.parametrize("first", [False, True], ids=["later", "from the start"])
def test_the_hooks_in_force_take_part_in_whole_steps(backend, device, register: Register, first: bool):
    """In a whole step, too, a hook counts for the calls that it is in force for, whichever were recorded first."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        for i in range(16):
            hook = register(lambda t: t * 0.5) if (i // 4 + first) % 2 else None
            loss = step(torch.randn(4, 3, device=device))
            if hook is not None:
                hook.remove()
            yield loss, [p.detach().clone() for p in net.parameters()]

    same(train, backend)


@pytest.mark.parametrize("register", [forward, forward_pre])
def test_what_a_hook_reads_is_guarded(backend, device, register: Register):
    """Closure cells, attributes and tensors that a hook of all modules reads are read as they are now."""

    class Scale:
        by = 1.0

    net, scale, shift = mlp(device), Scale(), [torch.zeros(4, device=device)]
    graphed = graphify(net, backend=backend)
    hook = register(lambda t: t * scale.by + shift[0])
    with torch.no_grad():
        for i in range(12):
            scale.by = 1.0 + i // 4
            if i % 4 == 3:
                shift[0] = torch.full((4,), float(i), device=device)
            x = torch.randn(4, 3, device=device)
            equal(net(x), graphed(x))
    hook.remove()
    assert counts(graphed)[2] > 0


@pytest.mark.parametrize("register", OF_STEPS)
def test_a_hook_with_a_python_effect_is_refused(backend, device, register: Register):
    """A hook of all modules or optimizers that appends to a list is refused, as one module's own is."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen = mlp(device), list[int]()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        hook = register(lambda t: (seen.append(1), t)[1])

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        try:
            for _ in range(4):
                yield step(torch.randn(4, 3, device=device)), len(seen)
        finally:
            hook.remove()

    if backend == "eager":
        same_or_loud(train, backend)
        return
    with pytest.raises(CaptureError, match="seen"):
        same(train, backend)


@pytest.mark.parametrize("register", [backward, backward_pre])
def test_a_python_effect_in_a_backward_is_refused(backend, device, register: Register):
    """So is one in the recorded backward of a call."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen = mlp(device), list[int]()
        hook = register(lambda t: (seen.append(1), t)[1])
        net = wrap(net)
        try:
            for _ in range(4):
                net(torch.randn(4, 3, device=device)).sum().backward()
                yield grads(net), len(seen)
        finally:
            hook.remove()

    with pytest.raises(CaptureError, match="seen"):
        same(train, backend)


def test_check_sees_the_effects_of_process_wide_hooks():
    """`check` tells of a hook of all modules that appends to a list."""
    seen: list[int] = []
    with forward(lambda t: (seen.append(1), t)[1]):
        found = check(mlp(torch.device("cpu")), torch.randn(4, 3))
    assert "seen" in str(found)
    assert seen == []


def test_one_hook_that_comes_and_goes_has_one_graph(backend, device):
    """The same function or method, registered anew at each call, is the same hook: there is one graph for it."""

    class Doubling:
        def hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out * 2

    net, doubling = mlp(device), Doubling()
    graphed = graphify(net, backend=backend)
    with torch.no_grad():
        for _ in range(6):
            with modules.register_module_forward_hook(doubling.hook):
                x = torch.randn(4, 3, device=device)
                equal(net(x), graphed(x))
    assert counts(graphed) == (1, 1, 4, 0, 0)


def test_hooks_of_registrations_count(backend, device):
    """A hook of all new buffers takes part where a function makes one."""

    def through_a_buffer(x: Tensor) -> Tensor:
        made = nn.Module()
        made.register_buffer("kept", x * 2)
        return made.kept + 1

    graphed = graphify(through_a_buffer, backend=backend)
    for _ in range(12):
        x = torch.randn(3, device=device)
        hook = modules.register_module_buffer_registration_hook(lambda m, name, t: t * 3)
        equal(through_a_buffer(x), graphed(x))
        hook.remove()
        equal(through_a_buffer(x), graphed(x))


def test_ways_of_calling_a_hook_count():
    """One function with other arguments, or as another kind, is another hook; its name is in its words."""

    def hook(*args: Any, **kwargs: Any) -> None: ...

    found = []
    for register, options in (
        (modules.register_module_forward_hook, {}),
        (modules.register_module_forward_hook, {"with_kwargs": True}),
        (modules.register_module_forward_hook, {"always_call": True}),
        (modules.register_module_forward_pre_hook, {}),
    ):
        for _ in range(2):
            with register(hook, **options):
                found.append(process_hooks())
    assert len(set(found)) == 4
    assert [a == b for a, b in itertools.pairwise(found)] == [True, False] * 3 + [True]
    assert "a forward pre-hook of all modules" in repr(found[-1])
    assert "hook" in repr(found[-1])


def test_own_hooks_of_another_threads_recording_do_not_count():
    """The hooks that the library itself sets while one thread runs a whole step are nobody's signature."""
    from graphify._optimizers import steps

    with steps():
        assert any(hook_tables)
        assert together(1, process_hooks) == [()]


def test_a_torch_without_these_tables_has_no_hooks():
    """Where torch keeps its hooks elsewhere the library works as without any."""
    code = (
        "import torch, torch.nn.modules.module as m; names = [n for n in vars(m) if n.startswith('_global_forward')]\n"
        "from torch.optim import optimizer as o; own = [n for n in vars(o) if n.startswith('_global_optimizer')]\n"
        "kept = {n: vars(m).pop(n) for n in names} | {n: vars(o).pop(n) for n in own}\n"
        "import graphify; from graphify._hooks import hook_tables, process_hooks\n"
        "vars(m).update({n: kept[n] for n in names}); vars(o).update({n: kept[n] for n in own})\n"
        "assert not any(hook_tables) and process_hooks() == ()\n"
        "net = torch.nn.Linear(2, 2); g = graphify.graphify(net, backend='tape')\n"
        "with torch.no_grad():\n"
        "    print([torch.equal(g(x), net(x)) for x in torch.randn(4, 1, 2)])\n"
    )
    done = python("-c", code)
    assert done.stdout.strip() == str([True] * 4), done.stderr
