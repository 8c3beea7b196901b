"""Training: several forwards before their backwards, what happens in between, modes, copies and threads."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts, equal, together
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Wrap, clear, error_of, grads, leaf, mlp, reset, same, same_or_loud

from graphify import GraphPool, graphify

REBOUND = pytest.mark.filterwarnings("ignore:.*re-bound:graphify.GraphifyWarning")

# -- several forwards before their backwards


def test_a_pipeline(backend, device):
    """Two stages under a 1F1B schedule give the gradients of eager, micro-batch by micro-batch."""

    def train(wrap: Wrap) -> Iterator[Any]:
        first, second = wrap(mlp(device)), wrap(nn.Linear(2, 1).to(device))
        waiting: list[tuple[Tensor, Tensor]] = []

        def forward() -> None:
            a = first(torch.randn(4, 3, device=device))
            b = a.detach().requires_grad_()
            waiting.append((a, b))

        def backward() -> None:
            a, b = waiting.pop(0)
            second(b).square().sum().backward()
            a.backward(b.grad)

        for _ in range(4):
            forward()
            for _ in range(3):
                forward()
                backward()
            backward()
            yield grads(first, second)
            clear(first, second)

    first, second = same(train, backend)
    assert counts(first) == (1, 2, 13, 0, 0)
    assert counts(second) == (1, 1, 14, 0, 0)


@pytest.mark.filterwarnings("ignore:.*instances:graphify.GraphifyWarning")
@pytest.mark.parametrize("order", [1, -1])
def test_more_forwards_than_instances(backend, device, order):
    """Beyond eight forwards that wait for their backward, calls run eagerly, say so, and are right."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(3):
            ys = [net(torch.randn(4, 3, device=device)) for _ in range(12)]
            for y in ys[::order]:
                y.square().sum().backward()
                yield grads(net)
            clear(net)

    (graphed,) = same(train, backend)
    assert counts(graphed) == (1, 8, 16, 11, 0)
    assert graphed.stats().reasons == {"instances": 11}


def test_a_forward_that_waits_long(backend, device):
    """A forward whose backward comes after many other steps still gets the gradient of its own numbers."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        net(torch.randn(4, 3, device=device))
        waiting = net(torch.randn(4, 3, device=device)).square().sum()
        for _ in range(12):
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)
        yield torch.autograd.grad(waiting, tuple(net.parameters()))

    assert counts(*same(train, backend)) == (1, 2, 11, 0, 0)


BETWEEN: dict[str, Callable[..., Any]] = {
    "another shape": lambda net, other, x: net(x[:2]),
    "without gradients": lambda net, other, x: torch.no_grad()(net)(x),
    "inference mode": lambda net, other, x: torch.inference_mode()(net)(x),
    "eval": lambda net, other, x: (net.eval()(x), net.train())[0],
    "autocast": lambda net, other, x: torch.autocast(x.device.type, torch.bfloat16)(net)(x),
    "another wrapper": lambda net, other, x: other(x),
    "another wrapper, backward": lambda net, other, x: torch.autograd.grad(other(x).sum(), other[0].weight),
    "another shape, backward": lambda net, other, x: torch.autograd.grad(net(x[:2]).sum(), net[0].weight),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("what", BETWEEN)
def test_what_happens_between_forward_and_backward(backend, device, what, first):
    """Another signature, or another wrapper of the same pool, called in between changes no gradient."""
    pool = GraphPool()

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Sequential(*mlp(device), nn.Dropout(0.5)), pool=pool)
        other = wrap(mlp(device), pool=pool)
        for _ in range(4 if first else 0):  # graphs that are older than those of the net
            BETWEEN[what](net, other, torch.randn(4, 3, device=device))
        for _ in range(6):
            y = net(torch.randn(4, 3, device=device))
            yield BETWEEN[what](net, other, torch.randn(4, 3, device=device))
            y.square().sum().backward()
            yield y, grads(net, other)

    for graphed in same(train, backend):
        assert counts(graphed)[3:] == (0, 0)


def test_recurrent_steps(backend, device):
    """A cell fed with its own state, truncated or through all steps, gets the gradient through time."""

    def train(wrap: Wrap) -> Iterator[Any]:
        cell = wrap(nn.GRUCell(3, 4).to(device))
        for i in range(4):
            h, loss = torch.zeros(2, 4, device=device), 0.0
            for _ in range(4):
                h = cell(torch.randn(2, 3, device=device), h)
                loss = loss + h.square().sum()
                h = h.detach() if i % 2 else h
            loss.backward()
            yield h, grads(cell)

    assert counts(*same(train, backend))[3:] == (0, 0)


def test_losses_kept_in_a_list(backend, device):
    """Losses that are kept undetached after their backward keep no instance."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, losses = wrap(mlp(device)), []
        for _ in range(14):
            losses.append(net(torch.randn(4, 3, device=device)).square().sum())
            losses[-1].backward()
            yield grads(net)
        yield torch.stack(losses).detach()

    assert counts(*same(train, backend)) == (1, 1, 12, 0, 0)


@pytest.mark.parametrize("hold", [False, True])
def test_a_loop_that_never_goes_backward(backend, device, hold):
    """Forwards under grad mode whose results are dropped replay for ever; holding the last takes one more instance."""

    def evaluate(wrap: Wrap) -> Iterator[Any]:
        net, y = wrap(mlp(device)), None
        for _ in range(20):
            if not hold:
                y = None
            y = net(torch.randn(4, 3, device=device))
            yield y.detach()

    (graphed,) = same(evaluate, backend)
    assert counts(graphed) == ((1, 2, 17, 0, 0) if hold else (1, 1, 18, 0, 0))


def test_recordings_come_to_an_end(backend, device):
    """A training loop makes its recordings in its first steps, and none after."""
    net = graphify(mlp(device), backend=backend)
    seen = []
    for _ in range(10):
        net(torch.randn(4, 3, device=device)).square().sum().backward()
        seen.append(net.stats().recordings)
    assert seen[0] == 0
    assert seen[4:] == [seen[4]] * 6
    assert len(net.graphs) == 1
    assert net.graphs[0].replays == 8


# -- edits, resets and lives between forward and backward


@torch.no_grad()
def scaled(net: nn.Module, index: int, name: str) -> None:
    getattr(net[index], name).mul_(1.5)


WEIGHTS: dict[str, Callable[[nn.Module], Any]] = {
    "saved": lambda net: scaled(net, 2, "weight"),
    "not saved": lambda net: scaled(net, 0, "weight"),
    "bias": lambda net: scaled(net, 2, "bias"),
    ".data": lambda net: net[2].weight.data.mul_(1.5),
    "frozen": lambda net: net[2].requires_grad_(False),
    "re-bound": lambda net: setattr(net[2], "weight", nn.Parameter(net[2].weight.detach() * 2)),
    "step": lambda net: torch.optim.SGD(net.parameters(), 0.1).step(),
}


@pytest.mark.parametrize("way", WEIGHTS)
def test_weights_changed_before_the_backward(backend, device, way):
    """A weight that the backward needs and that was written since raises eager's error; others do no harm."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        old = list(net.parameters())
        for i in range(8):
            loss = net(torch.randn(4, 3, device=device)).square().sum()
            if i in (0, 1, 3, 5):
                WEIGHTS[way](net)
            yield error_of(loss.backward), grads(net, *old)

    assert counts(*same(train, backend))[3:] == (0, 0)


def test_a_buffer_changed_before_the_backward(backend, device):
    """A buffer that the backward needs, written by the user or by the next forward, raises eager's error."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w, state = leaf(device, 3), torch.ones(3, device=device)

        def f(x: Tensor) -> Tensor:
            state.mul_(0.5)
            return (w * state).sum() + x.sum()

        g = wrap(f)
        for i in range(12):
            loss = g(torch.randn(3, device=device))
            if i in (3, 7):
                state.add_(1)
            if i in (5, 9):
                g(torch.randn(3, device=device))
            yield error_of(loss.backward), w.grad, state

    same(train, backend)


def test_hooks_and_gradients_of_results(backend, device):
    """Hooks that a user puts on results, and `retain_grad`, see the gradients of eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen = wrap(mlp(device)), []
        for _ in range(6):
            y = net(torch.randn(4, 3, device=device))
            y.retain_grad()
            y.register_hook(lambda g: seen.append(g) or g * 2)
            y.square().sum().backward()
            yield list(seen), y.grad, grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_eviction_between_forward_and_backward(backend, device):
    """A graph that is evicted before its backward still gives the right gradients."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(12):
            ys = [net(torch.randn(size, 3, device=device)) for size in ((4, 5, 6) if i % 2 else (4, 4, 5))]
            sum(y.square().sum() for y in ys).backward()
            yield ys, grads(net)

    (graphed,) = same(train, backend, max_graphs=1)
    assert graphed.stats().evictions > 1


def test_reset_with_several_forwards_waiting(backend, device):
    """After `reset()`, waiting backwards are right, beside those of the new graphs."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(6):
            ys = [net(torch.randn(4, 3, device=device)) for _ in range(2)]
            if i % 2:
                reset(net)
            ys += [net(torch.randn(4, 3, device=device)) for _ in range(2)]
            for y in ys[::-1]:
                y.square().sum().backward()
                yield grads(net)

    same(train, backend)


def test_a_wrapper_that_dies_before_the_backward(backend, device):
    """A result outlives its wrapper, and goes backward after it."""
    w, v = leaf(device, 3), None
    v = w.detach().clone().requires_grad_()
    graphed = graphify(lambda x: (x * v).exp().sum(), backend=backend)
    for _ in range(4):
        x = torch.randn(3, device=device)
        want, got = (x * w).exp().sum(), graphed(x)
    died = weakref.ref(graphed)
    del graphed
    assert died() is None
    want.backward()
    got.backward()
    equal(w.grad, v.grad)


def test_nothing_outlives_its_use(backend, device):
    """After training steps, results, inputs, wrapper and parameters die with their last reference, without gc."""
    gc.collect()
    gc.disable()
    try:
        net = graphify(mlp(device), backend=backend)
        for step in range(6):
            x = leaf(device, 4, 3)
            y = net(x)
            loss = y.square().sum()
            if step % 2:
                loss.backward()
            refs = [weakref.ref(t) for t in (x, y, loss)]
            del x, y, loss
            assert [r() for r in refs] == [None] * 3
        refs = [weakref.ref(o) for o in (net, net[0], net[0].weight, net[0].weight.grad)]
        clear(net)
        assert refs.pop()() is None
        del net
        for _ in range(100):  # a device's backward lets go on a thread of its own, a moment later
            if all(r() is None for r in refs):
                break
            time.sleep(0.01)
        assert [r() for r in refs] == [None] * 3
    finally:
        gc.enable()


# -- modes


def test_autocast_per_call(backend, device):
    """Autocast on, off and switched off inside it: each call computes as eager, with the backward outside."""
    cast = functools.partial(torch.autocast, device.type, torch.bfloat16)

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(15):
            with cast(enabled=i % 3 > 0), cast(enabled=i % 3 == 1):
                y = net(torch.randn(4, 3, device=device))
            opt.zero_grad()
            y.float().square().sum().backward()
            opt.step()
            yield y, grads(net), list(net.parameters())

    assert counts(*same(train, backend)) == (2, 2, 11, 0, 0)


def test_autocast_inside(backend, device):
    """Autocast inside the function, and its backward under another autocast, give eager's gradients."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        f = wrap(torch.autocast(device.type, torch.bfloat16)(lambda x: net(x).float().square().sum()))
        for i in range(6):
            loss = f(torch.randn(4, 3, device=device))
            with torch.autocast(device.type, torch.bfloat16, enabled=i % 2 == 1):
                loss.backward()
            yield loss, grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_shapes_interleaved(backend, device):
    """Steps over changing batch sizes replay each size's graph."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for i in range(15):
            opt.zero_grad()
            net(torch.randn((4, 7, 1)[i % 3], 3, device=device)).square().mean().backward()
            opt.step()
            yield grads(net), list(net.parameters())

    assert counts(*same(train, backend)) == (3, 3, 9, 0, 0)


def test_saved_tensor_hooks_around_a_call(backend, device):
    """Hooks on saved tensors that are set around a call change no gradient."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            with torch.autograd.graph.save_on_cpu(pin_memory=False) if i % 2 else torch.enable_grad():
                y = net(torch.randn(4, 3, device=device))
            y.square().sum().backward()
            yield y, grads(net)

    same(train, backend)


@REBOUND
def test_functional_call_in_training(backend, device):
    """`functional_call` with parameters of one's own gives the gradients of those, and leaves the module's alone."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            given = {name: leaf(device, *p.shape) for name, p in net.named_parameters()}
            x = torch.randn(4, 3, device=device)
            if i % 2:
                torch.func.functional_call(net, given, x).square().sum().backward()
            net(x).sum().backward()
            yield grads(net), [p.grad for p in given.values()]

    same(train, backend, fallback="eager")


@pytest.mark.parametrize("warmup", [2, 4])
def test_several_warm_ups(backend, device, warmup):
    """More warm-ups are as many eager training steps."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(8):
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)

    assert counts(*same(train, backend, warmup=warmup)) == (warmup, 1, 7 - warmup, 0, 0)


def test_capture_ahead_of_training(backend, device):
    """`capture()` with gradients on leaves no trace, and the first step is a replay."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).to(device)
    graphed = graphify(copy.deepcopy(plain), backend=backend)
    example = torch.randn(8, 3).to(device)
    random = torch.get_rng_state()
    graphed.capture(example)
    equal(random, torch.get_rng_state())
    equal(plain.state_dict(), graphed.state_dict())
    assert grads(graphed) == [None] * 6
    for i in range(5):
        x = torch.randn(8, 3, device=device)
        for net in (plain, graphed):
            torch.manual_seed(i)
            net(x).square().sum().backward()
        equal(grads(plain), grads(graphed))
        equal(plain.state_dict(), graphed.state_dict())
    assert counts(graphed) == (0, 0, 5, 0, 0)


# -- copies and threads


def test_a_copy_of_a_trained_module(backend, device):
    """A deep copy of a module in training has gradients, weights and graphs of its own."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(4):
            net(torch.randn(4, 3, device=device)).square().sum().backward()
        twin = copy.deepcopy(net)
        for _ in range(4):
            for m in (net, twin):
                m(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net, twin)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_two_wrappers_of_one_module(backend, device):
    """Two wrappers, and the plain module between them, add up in the same parameters."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)
        ways = [wrap(net), net, wrap(net)]
        for i in range(15):
            ways[i % 3](torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)

    for graphed in same(train, backend):
        assert counts(graphed) == (1, 1, 3, 0, 0)


def test_threads_train_at_once(backend, device):
    """Threads that train copies in one pool at the same time get the weights that one alone would get."""
    inner, pool = mlp(device), GraphPool()
    xs = [torch.randn(4, 3, device=device) for _ in range(8)]

    def train(net: nn.Module) -> list[Tensor]:
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for x in xs:
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
        return [p.detach() for p in net.parameters()]

    want = train(copy.deepcopy(inner))
    found = together(4, lambda: train(graphify(copy.deepcopy(inner), backend=backend, pool=pool)))
    assert len(found) == 4
    for got in found:
        equal(want, got)


def test_threads_share_a_graphed_module(backend, device):
    """Threads that take gradients through one graphed module each get those of their own data."""
    if backend == "cuda":
        pytest.skip("on a device an eager gradient during a recording raises: test_gate.py")
    plain = mlp(device)
    graphed = graphify(copy.deepcopy(plain), backend=backend)
    data = iter([[torch.randn(4, 3, device=device) for _ in range(10)] for _ in range(4)])

    def gradients() -> list[Any]:
        found = []
        for x in next(data):
            found.append((x, torch.autograd.grad(graphed(x).square().sum(), tuple(graphed.parameters()))))
        return found

    results = together(4, gradients)
    assert len(results) == 4
    for x, got in itertools.chain(*results):
        equal(torch.autograd.grad(plain(x).square().sum(), tuple(plain.parameters())), got)
    assert counts(graphed)[3:] == (0, 0)


def test_backward_in_another_thread(backend, device):
    """A backward may run in another thread than its forward."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(6):
            loss = net(torch.randn(4, 3, device=device)).square().sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            yield grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_data_rebound_before_the_backward(backend, device):
    """A weight whose `.data` was replaced since the forward gives eager's gradient, or is refused."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)
        f = wrap(lambda x: x * w)
        for i in range(9):
            x = leaf(device, 3)
            y = f(x)
            if i == 6:
                w.data = w.detach() * 2
            y.square().sum().backward()
            yield grads(x, w)

    same_or_loud(train, backend)


def test_parameters_cast_before_the_backward(backend, device):
    """Parameters that were cast to another dtype since the forward get eager's gradient, or are refused."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(14):
            y = net(torch.randn(4, 3, device=device, dtype=net[0].weight.dtype))
            if i in (1, 6, 10):
                net.float() if i == 6 else net.double()
            y.sum().backward()
            yield grads(net)
            clear(net)

    same_or_loud(train, backend)


def test_freezing(backend, device):
    """Layers frozen and thawed between steps get a gradient or None as in eager; each state has its own graph."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(24):
            state = i // 3 % 4
            net[0].requires_grad_(state in (0, 2))
            net[2].requires_grad_(state in (0, 1))
            y = net(torch.randn(4, 3, device=device))
            if y.requires_grad:
                y.square().sum().backward()
            yield y, grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (4, 4, 16, 0, 0)


def test_freezing_at_each_call(backend, device):
    """A net that is frozen and thawed at every step, as a GAN's often is, replays all the same."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(14):
            net.requires_grad_(i % 2 == 0)
            x = leaf(device, 4, 3)
            net(x).square().sum().backward()
            yield grads(net, x)

    assert counts(*same(train, backend)) == (2, 2, 10, 0, 0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_graphed_block_inside_a_checkpoint(backend, device, reentrant, dropout):
    """A graphed block may be recomputed by `checkpoint` in the backward, alone or between plain layers."""

    def train(wrap: Wrap) -> Iterator[Any]:
        block = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(dropout)).to(device))
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), block, nn.Linear(3, 3), nn.Tanh()).to(device)
        for _ in range(6):
            x = leaf(device, 4, 3)
            y = checkpoint(net, checkpoint(block, x, use_reentrant=reentrant), use_reentrant=reentrant)
            y.square().sum().backward()
            yield y, grads(net, x), torch.rand(2, device=device)

    same(train, backend)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection(backend, device):
    """Training under `detect_anomaly` gives eager's gradients."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            with torch.autograd.set_detect_anomaly(i % 4 > 1):
                net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)

    same(train, backend)


def test_an_argument_saved_and_then_written_inside(backend, device):
    """A function that overwrites what its own backward needs gets eager's error from each backward."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3, 3)

        def forward(x: Tensor) -> Tensor:
            y = x @ w
            x.add_(1.0)
            return y.relu()

        f = wrap(forward)
        for _ in range(5):
            y = f(torch.randn(2, 3, device=device))
            yield y, error_of(lambda y=y: y.sum().backward()), w.grad

    same(train, backend)


def test_a_leaf_and_what_was_made_of_it(backend, device):
    """A leaf outside gets what reaches it directly and through another outside tensor, each once."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)
        derived = w + 1.0
        f = wrap(lambda x: x * derived + w)
        for _ in range(5):
            f(torch.randn(2, 3, device=device)).square().sum().backward(retain_graph=True)
            yield w.grad

    assert counts(*same(train, backend)) == (1, 1, 3, 0, 0)


def test_a_cast_weight_used_several_times(backend, device):
    """Under autocast the gradients of a weight add up in the precision in which they do in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 8, 8)

        def chain(x: Tensor) -> Tensor:
            for _ in range(4):
                x = (x @ w).tanh()
            return x

        f = wrap(chain)
        for _ in range(5):
            with torch.autocast(device.type, torch.bfloat16):
                loss = f(torch.randn(4, 8, device=device)).float().square().sum()
            loss.backward()
            yield loss, w.grad

    assert counts(*same(train, backend)) == (1, 1, 3, 0, 0)
