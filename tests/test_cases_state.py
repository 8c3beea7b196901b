"""Cases C and the inference side of D: weights, buffers, modes, randomness, hooks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import counts, equal, follows_eager, rows
from torch import nn

from graphify import CaptureError, GraphedModule, GraphifyWarning, graphify, handle
from graphify.testing import Call


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("b", torch.zeros(3))
        self.scale = torch.full((3,), 2.0)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.scale = fn(self.scale)
        return super()._apply(fn, recurse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * self.w + self.b) * self.scale


class Pair:
    """A graphed module and its eager twin, changed alike."""

    def __init__(
        self, make: Callable[[], nn.Module], backend: str, device: torch.device, **options: Any
    ) -> None:
        self.plain = make().to(device)
        self.device = device
        self.inner = copy.deepcopy(self.plain)
        self.graphed = graphify(self.inner, backend=backend, **options)
        self.kept: list[tuple[Any, Any]] = []

    def change(self, verb: Callable[[nn.Module], Any]) -> None:
        verb(self.plain)
        verb(self.graphed)

    def check(self, *shape: int, count: int = 4, dtype: torch.dtype = torch.float32) -> None:
        for x in rows(*shape, count=count, dtype=dtype):
            with torch.no_grad():
                x = x.to(self.device)
                self.kept.append((self.plain(x.clone()), self.graphed(x)))
            for want, got in self.kept:
                equal(want, got)
            equal(self.plain.state_dict(), self.graphed.state_dict())


def state(value: float, device: torch.device) -> dict[str, torch.Tensor]:
    return {k: torch.full_like(v, value) for k, v in Net().to(device).state_dict().items()}


def test_b27_load_state_dict_in_place_needs_no_new_graph(backend, device):
    """New weights copied into the old ones are read by the next replay."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)
    for value in (0.5, 0.25):
        pair.change(lambda m: m.load_state_dict(state(value, device)))
        pair.check(2, 3)
    assert counts(pair.graphed) == (1, 1, 10, 0, 0)


REBIND: dict[str, Callable[[nn.Module, torch.device], Any]] = {
    "assign=True": lambda m, d: m.load_state_dict(state(0.5, d), assign=True),
    "new Parameter": lambda m, d: setattr(m, "w", nn.Parameter(torch.full((3,), 4.0, device=d))),
    ".data": lambda m, d: setattr(m.w, "data", torch.full((3,), 5.0, device=d)),
    ".data of a submodule": lambda m, d: setattr(m.fc.weight, "data", torch.full((3, 3), 5.0, device=d)),
    "plain attribute": lambda m, d: setattr(m, "scale", torch.full((3,), 6.0, device=d)),
    "buffer": lambda m, d: setattr(m, "b", torch.full((3,), 7.0, device=d)),
    "submodule": lambda m, d: setattr(
        m, "fc", nn.Linear(3, 3, device=d).requires_grad_(False).apply(constant)
    ),
    "new attribute type": lambda m, d: setattr(m, "scale", 3.0),
    "set_": lambda m, d: m.b.set_(torch.full((3,), 8.0, device=d)),
}


@torch.no_grad()
def constant(m: nn.Module) -> None:
    for p in m.parameters():
        p.fill_(0.5)


@pytest.mark.parametrize("way", REBIND)
def test_b27_rebound_state_is_noticed(backend, device, way):
    """Whatever way a parameter, buffer, attribute or submodule is re-bound, the next call reads the new one."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)
    pair.change(lambda m: REBIND[way](m, device))
    pair.check(2, 3)
    assert counts(pair.graphed)[:2] == (2, 2)


def test_b27_rebinding_at_every_call_is_right_and_named(backend, device):
    """State that is re-bound before each call is always right; the habit is refused by name or run eagerly."""
    pair = Pair(Net, backend, device, fallback="eager")
    with pytest.warns(GraphifyWarning, match="re-bound"):
        for i in range(20):
            pair.change(lambda m: setattr(m, "scale", torch.full((3,), float(i), device=device)))
            pair.check(2, 3, count=2)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "through the CPU": lambda m: m.to("cpu").to(m.home),
    "surgery": lambda m: setattr(m, "fc", nn.Identity()),
    "replaced buffer": lambda m: setattr(m, "b", torch.ones_like(m.b)),
    "deleted submodule": lambda m: (delattr(m, "extra"), setattr(m, "extra", None)),
}


class Movable(nn.Module):
    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self.home = home
        self.fc = nn.Linear(3, 3)
        self.extra = nn.Linear(3, 3)
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x.to(self.b.dtype)) + self.b
        return y if self.extra is None else self.extra(y)


@pytest.mark.parametrize("move", MOVES)
def test_b28_moves_and_surgery(backend, device, move):
    """A module moved, cast or rebuilt after capture is computed with as it is now."""
    pair = Pair(lambda: Movable(device), backend, device)
    pair.check(2, 3)
    pair.change(MOVES[move])
    pair.check(2, 3)
    pair.change(lambda m: m.float())
    pair.check(2, 3)


def test_b30_mutation_that_fails_half_way(backend, device):
    """A swap of weights that raises after the first tensor leaves a module that is still computed right."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)

    def broken(m: nn.Module) -> None:
        with pytest.raises(RuntimeError, match="half-way"):
            m.w = nn.Parameter(torch.full((3,), 9.0, device=device))
            raise RuntimeError("half-way")

    pair.change(broken)
    pair.check(2, 3)


def test_b31_weights_connected_after_capture(backend, device):
    """All parameters swapped out of place after capture are the ones used."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)

    def swap(m: nn.Module) -> None:
        for child in m.modules():
            for name, p in list(child._parameters.items()):
                if p is not None:
                    child._parameters[name] = nn.Parameter(p.detach() * 2 + 1)

    for _ in range(2):
        pair.change(swap)
        pair.check(2, 3)


@pytest.mark.filterwarnings("ignore:`Net` runs eagerly.*re-bound:graphify.GraphifyWarning")
def test_b31_functional_call_uses_the_given_parameters(backend, device):
    """`functional_call` on a graphed module computes with the parameters it is given, and leaves the module's own."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)
    for i in range(5):
        given = {k: torch.full_like(v, float(i)) for k, v in pair.plain.named_parameters()}
        x = torch.randn(2, 3, device=device)
        with torch.no_grad():
            equal(
                torch.func.functional_call(pair.plain, given, x),
                torch.func.functional_call(pair.graphed, given, x),
            )
        pair.check(2, 3, count=2)


def test_b32_storage_freed_and_mapped_again(backend, device):
    """A buffer whose storage was freed and allocated anew is read where it is now."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)
    keep = []

    def remap(m: nn.Module) -> None:
        storage = m.b.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        keep.append(torch.empty(size, dtype=torch.uint8, device=device))
        storage.resize_(size)
        m.b.fill_(11.0)

    pair.change(remap)
    pair.check(2, 3)


def test_b33_forward_is_never_patched(backend, device):
    """Recapture works again and again, two wrappers of one module do not meet, the module itself stays plain."""
    module = Net().to(device)
    before = dict(vars(module))
    one, two = graphify(module, backend=backend), graphify(module, backend=backend)
    with torch.no_grad():
        for _ in range(4):
            for x in [t.to(device) for t in rows(2, 3, count=3)]:
                want = Net.forward(module, x)
                for m in (one, two, module):
                    equal(want, m(x))
            handle(one).reset()
    assert vars(module).keys() == before.keys()
    assert "forward" not in vars(module)
    assert counts(one)[1] == 4
    assert counts(two)[1] == 1


def test_b34_graphs_that_never_engage_say_so(backend, device):
    """A function that cannot be captured raises by default, and warns once and counts when eager is allowed."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    strict = graphify(f, backend=backend)
    for x in [t.to(device) for t in rows(3, count=3)]:
        with pytest.raises(CaptureError, match="read on the host"):
            strict(x)
    soft = graphify(f, backend=backend, fallback="eager")
    with pytest.warns(GraphifyWarning, match="read on the host") as seen:
        for x in [t.to(device) for t in rows(3, count=6)]:
            equal(f(x), soft(x))
    assert len(seen) == 1
    assert counts(soft)[1:3] == (0, 0)
    assert soft.stats().reasons.total() == counts(soft)[3] >= 5


def test_b36_checkpoints_are_those_of_the_module(backend, device):
    """Keys, parameters and buffers of a graphed module are the module's very own, both ways."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)
    g, m = pair.graphed, pair.inner
    assert list(g.state_dict()) == list(pair.plain.state_dict())
    assert all(a is b for a, b in zip(g.parameters(), m.parameters(), strict=True))
    assert [n for n, _ in g.named_modules()] == [n for n, _ in m.named_modules()]
    assert isinstance(g, GraphedModule)
    assert isinstance(g, Net)
    g.load_state_dict(pair.plain.state_dict())
    pair.plain.load_state_dict(g.state_dict())
    assert g.eval() is g
    assert not any(c.training for c in m.modules())
    pair.plain.eval()
    torch.optim.SGD(g.parameters(), 0.1)
    pair.check(2, 3)


def copies(graphed: Any) -> list[Any]:
    buffer = io.BytesIO()
    torch.save(graphed, buffer)
    buffer.seek(0)
    return [
        copy.deepcopy(graphed),
        pickle.loads(pickle.dumps(graphed)),
        torch.load(buffer, weights_only=False),
    ]


def test_b37_copies_are_independent(backend, device):
    """Deep copies, pickles and saved modules start without graphs and with weights of their own."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)
    for c in copies(pair.graphed):
        twin = copy.deepcopy(pair.plain)
        for m in (c, twin):
            nn.init.constant_(m.w, 5.0)
        assert counts(c) == (0, 0, 0, 0, 0)
        with torch.no_grad():
            for x in [t.to(device) for t in rows(2, 3)]:
                equal(twin(x), c(x))
        assert counts(c)[2] == 3
    pair.check(2, 3)
    assert counts(pair.graphed)[2] == 6


def test_b37_moving_average_copy(backend, device):
    """A moving average of the weights, kept in a deep copy, follows the original and is replayed."""
    pair = Pair(Net, backend, device)
    ema, twin = copy.deepcopy(pair.graphed), copy.deepcopy(pair.plain)
    with torch.no_grad():
        for x in [t.to(device) for t in rows(2, 3, count=6)]:
            pair.change(lambda m: m.w.add_(1))
            for a, b, p in zip(ema.parameters(), twin.parameters(), pair.plain.parameters(), strict=True):
                a.lerp_(p, 0.5)
                b.lerp_(p, 0.5)
            equal(twin(x), ema(x))
    assert counts(ema)[2] == 4


# -- D, inference


def test_b43_no_trainable_parameter(backend, device):
    """Functions and frozen modules without anything trainable are captured with grad mode on."""
    index = torch.tensor([[0, 1, 0]])
    make = lambda: lambda x, i=index: x.gather(0, i.to(x.device))
    follows_eager([(x, index) for x in rows(2, 3)], backend, device, make=make, grad=True)
    frozen = lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    follows_eager([(x,) for x in rows(4, 3)], backend, device, make=frozen, grad=True)


@pytest.mark.parametrize("shared", [False, True])
def test_b51_batch_norm_statistics(backend, device, shared):
    """Running statistics move exactly once per call, for a layer used twice too."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bn(self.bn(x) + 1) if shared else self.bn(x)

    follows_eager([(x,) for x in rows(4, 3, count=7)], backend, device, make=Twice)


def test_b51_cumulative_batch_norm_reads_the_host(backend, device):
    """momentum=None reads the batch counter on the host: refused by name, and equal to eager where eager is allowed."""
    strict = graphify(nn.BatchNorm1d(3, momentum=None).to(device), backend=backend)
    with torch.no_grad():
        with pytest.raises(CaptureError, match="read on the host"):
            for x in rows(4, 3, count=2):
                strict(x.to(device))
        pair = Pair(lambda: nn.BatchNorm1d(3, momentum=None), backend, device, fallback="eager")
        with pytest.warns(GraphifyWarning, match="read on the host"):
            pair.check(4, 3, count=7)


def test_b53_state_advances_once_per_call(backend, device):
    """Closed-over, global, attribute and buffer state advances exactly as in eager."""

    def make() -> Any:
        count, table = torch.zeros(()), {"pos": torch.zeros((), dtype=torch.int64)}

        def f(x: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            table["pos"] += 2
            return x + count * table["pos"]

        return f

    if backend == "cuda":
        pytest.skip("the state of this function lies on the CPU")
    follows_eager([(x,) for x in rows(3, count=7)], backend, device, make=make)


class Cache(nn.Module):
    """A static key-value cache with a position on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(8, 3))
        self.register_buffer("pos", torch.zeros(1, dtype=torch.int64))
        self.seen = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.k.index_copy_(0, self.pos, x[None])
        self.pos.add_(1)
        return self.k.cumsum(0)


def test_b53_static_cache_with_device_position(backend, device):
    """A decode loop over a cache written in place equals eager, and can be rewound between calls."""
    rewind = lambda m: m.pos.zero_()
    calls = [Call((x,), before=rewind if i == 5 else None) for i, x in enumerate(rows(3, count=9))]
    follows_eager(calls, backend, device, make=Cache)


def test_b53_capture_ahead_of_time_leaves_no_trace(backend, device):
    """`capture()` moves no buffer and no random stream."""
    pair = Pair(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), Cache2()), backend, device)
    with torch.no_grad():
        example = torch.randn(4, 3, device=device)
        before, rng = copy.deepcopy(pair.graphed.state_dict()), torch.get_rng_state()
        handle(pair.graphed).capture(example)
        equal(before, pair.graphed.state_dict())
        equal(rng, torch.get_rng_state())
    assert counts(pair.graphed) == (0, 0, 0, 0, 0)


class Cache2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        return x + self.total


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_b55_train_and_eval_switch(backend, device):
    """Each combination of training flags is a signature of its own, and going back finds the old graph."""
    flips = {
        3: lambda m: m.eval(),
        6: lambda m: m.train(),
        9: lambda m: m.net[1].eval(),
        12: lambda m: m.eval(),
        15: lambda m: m.net[2].train(),
        18: lambda m: m.train(),
    }
    calls = [Call((x,), before=flips.get(i)) for i, x in enumerate(rows(4, 3, count=21))]
    stats = follows_eager(calls, backend, device, make=Modes, replays=13)
    assert stats.captures == 4


def test_b56_dropout_masks_are_renewed_and_seeded(backend, device):
    """Every call draws a new mask, and one seed gives one sequence."""
    graphed = graphify(nn.Dropout(0.5), backend=backend)
    x = torch.ones(200, device=device)
    runs = []
    for _ in range(3):
        torch.manual_seed(7)
        runs.append([graphed(x) for _ in range(5)])
    for run in runs:
        assert all(not torch.equal(a, b) for i, a in enumerate(run) for b in run[:i])
        equal(runs[0], run)
    torch.manual_seed(7)
    plain = nn.Dropout(0.5)
    equal([plain(x) for _ in range(5)], runs[0])


def test_b57_random_streams_equal_eager(backend, device):
    """What is drawn outside between calls equals eager, from the first call on."""
    noisy = lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    def draws(f: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        out = []
        for x in (torch.arange(6.0, device=device) + i for i in range(6)):
            out += [f(x), torch.rand(3, device=device), torch.rand(2)]
        return out

    equal(draws(noisy), draws(graphify(noisy, backend=backend)))


def test_b57_random_stream_after_a_failed_capture(backend, device):
    """A capture that fails, or raises the user's error, draws nothing and leaves the generators usable."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + torch.rand_like(x)
        notes.append(1)
        return y

    notes: list[int] = []
    graphed = graphify(f, backend=backend)
    torch.manual_seed(5)
    graphed(torch.ones(3, device=device))
    torch.manual_seed(5)
    want = torch.rand(3, device=device)
    torch.manual_seed(5)
    with pytest.raises(CaptureError):
        graphed(torch.ones(3, device=device))
    equal(want, torch.rand(3, device=device))
    assert len(notes) == 1


def test_b57_host_randomness_is_refused_by_name(backend, device):
    """A draw from Python's own generator inside the function is refused, and moves nothing."""
    import random

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * random.random()

    graphed = graphify(f, backend=backend)
    x = torch.ones(2, device=device)
    graphed(x)
    before = random.getstate()
    with pytest.raises(CaptureError, match="draws from"):
        graphed(x)
    assert random.getstate() == before
    soft = graphify(f, backend=backend, fallback="eager")
    with pytest.warns(GraphifyWarning, match="draws from"):
        for i in range(5):
            random.seed(i)
            got = soft(x)
            random.seed(i)
            equal(f(x), got)


def test_b57_a_seed_inside_is_refused(backend, device):
    """A function that seeds is not captured, also where the first run finds the generators seeded just so."""

    def f(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x * 2

    x = torch.ones(2, device=device)
    with pytest.raises(CaptureError, match=r"`torch\.manual_seed` is called inside"):
        graphify(f, backend=backend)(x)
    soft = graphify(f, backend=backend, fallback="eager")
    with pytest.warns(GraphifyWarning, match=r"`torch\.manual_seed` is called inside"):
        for _ in range(5):
            equal(f(x), soft(x))
            drawn = torch.rand(3), torch.rand(3, device=device)
            f(x)
            equal((torch.rand(3), torch.rand(3, device=device)), drawn)


def test_b60_autocast_weight_cache(backend, device):
    """Weights changed inside one autocast block are used by the next call in it; the cache setting stays."""
    pair = Pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), backend, device)
    for _ in range(2):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            for x in [t.to(device) for t in rows(2, 3)]:
                torch.clear_autocast_cache()
                equal(pair.plain(x), pair.graphed(x))
                assert torch.is_autocast_cache_enabled()
                pair.change(lambda m: m[0].weight.mul_(2))
    assert counts(pair.graphed)[2] == 8


def test_b65_function_transforms_run_plainly(backend, device):
    """Under torch.func's grad, vmap, jvp and jacrev the plain function runs, counted, never zeros."""
    f = lambda x: (x * x).sum()
    graphed = graphify(f, backend=backend)
    for x in [t.to(device) for t in rows(3)]:
        equal(f(x), graphed(x))
        equal(torch.func.grad(f)(x), torch.func.grad(graphed)(x))
        equal(torch.vmap(f)(x[:, None]), torch.vmap(graphed)(x[:, None]))
        equal(torch.func.jvp(f, (x,), (x,)), torch.func.jvp(graphed, (x,), (x,)))
        equal(torch.func.jacrev(f)(x), torch.func.jacrev(graphed)(x))
    assert counts(graphed)[:3] == (1, 1, 3)
    assert graphed.stats().reasons == {"functorch": 20}


GRAD_MODES = [torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)]


def test_b67_grad_mode_is_part_of_the_signature(backend, device):
    """Each grad mode has its own graph, with eager's flags on the results."""
    calls = [Call((x,), context=GRAD_MODES[i % 4]) for i, x in enumerate(rows(3, count=16))]
    follows_eager(calls, backend, device, target=lambda x: (x * 2, x, x[1:]), replays=10)


def test_b67_grad_mode_with_parameters(backend, device):
    """A module called for training in between has graphs of its own then, and its gradients are eager's."""
    pair = Pair(Net, backend, device)
    pair.check(2, 3)
    for x in [t.to(device) for t in rows(2, 3)]:
        for m in (pair.plain, pair.graphed):
            m(x).sum().backward()
        equal([p.grad for p in pair.plain.parameters()], [p.grad for p in pair.graphed.parameters()])
    pair.check(2, 3)
    assert pair.graphed.stats().reasons == {}


def test_b68_inference_mode_then_outside_and_back(backend, device):
    """A first call inside inference_mode spoils no later one outside, and the reverse."""
    for order in (
        (torch.inference_mode, torch.no_grad, torch.enable_grad),
        (torch.enable_grad, torch.inference_mode),
    ):
        calls = [Call((x,), context=order[i // 4]) for i, x in enumerate(rows(3, count=4 * len(order)))]
        follows_eager(calls, backend, device, target=lambda x: x.sin() + 1, replays=2 * len(order))


def test_b68_inference_tensors_as_arguments(backend, device):
    """Inference tensors and ordinary ones take turns as arguments, inside inference_mode and outside."""
    graphed = graphify(lambda x: (x + 1, x), backend=backend)
    for i in range(16):
        with torch.inference_mode(i % 2 == 0):
            x = torch.randn(3, device=device)
        with torch.inference_mode(i % 4 < 2):
            equal((x + 1, x), graphed(x))
    assert counts(graphed)[2] == 8


def test_b68_inference_state(backend, device):
    """A buffer made and written in inference_mode is read and written by replays in it."""
    with torch.inference_mode():
        state = torch.zeros(3, device=device)
        graphed = graphify(lambda x: state.add_(x) * 2, backend=backend)
        twin = torch.zeros(3, device=device)
        for x in [t.to(device) for t in rows(3, count=6)]:
            twin += x
            equal(twin * 2, graphed(x))
            equal(twin, state)
    assert counts(graphed)[2] == 4


def test_b69_hooks_of_the_module_run_at_every_call(backend, device, request):
    """Forward hooks and pre-hooks of the graphed module itself run at each call, and may change the result."""
    seen: list[str] = []

    def hooked() -> nn.Module:
        m = nn.Linear(3, 3)
        m.register_forward_pre_hook(lambda m, args: (seen.append("pre"), (args[0] + 1,))[1])
        m.register_forward_hook(lambda m, args, out: (seen.append("post"), out * 2)[1])
        return m

    plain = hooked().to(device)
    inner = hooked().to(device)
    inner.load_state_dict(plain.state_dict())
    graphed = graphify(inner, backend=backend)
    seen.clear()
    with torch.no_grad():
        for x in [t.to(device) for t in rows(2, 3, count=6)]:
            equal(plain(x), graphed(x))
    assert seen == ["pre", "post"] * 12
    assert counts(graphed)[2] == 4


def test_b69_hooks_added_and_removed_after_capture(backend, device):
    """A hook added to a child, or removed, after capture takes part at the next call."""
    pair = Pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend, device)
    pair.check(2, 3)
    handles: list[Any] = []
    pair.change(lambda m: handles.append(m[0].register_forward_hook(lambda m, args, out: out + 10)))
    pair.check(2, 3)
    for h in handles:
        h.remove()
    pair.check(2, 3)


def test_b69_child_hook_with_python_effect_is_refused(backend, device):
    """A hook on a child that only does Python work (a counter) is refused, never silently skipped."""
    log: list[int] = []
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device)
    net[0].register_forward_hook(lambda m, args, out: log.append(1))
    graphed = graphify(net, backend=backend)
    with torch.no_grad():
        graphed(torch.randn(2, 3, device=device))
        with pytest.raises(CaptureError, match="log"):
            graphed(torch.randn(2, 3, device=device))
    assert log == [1]


def test_b69_features_kept_by_a_child_hook_are_the_users_own(backend, device):
    """Features that a hook on a child stores away keep their numbers when the next call is made."""
    features: dict[str, torch.Tensor] = {}
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device)
    net[0].register_forward_hook(lambda m, args, out: features.__setitem__("feat", out))
    graphed = graphify(net, backend=backend)
    kept = []
    with torch.no_grad():
        for x in [t.to(device) for t in rows(2, 3, count=6)]:
            try:
                graphed(x)
            except CaptureError as error:
                assert "features" in str(error)  # noqa: PT017
                return
            kept.append((nn.functional.linear(x, net[0].weight, net[0].bias), features["feat"]))
            for want, got in kept:
                equal(want, got)


def test_b69_child_hook_that_is_an_object(backend, device):
    """The attributes and tensors of a hook object on a child are read as they are now."""

    class Hook:
        def __init__(self) -> None:
            self.k, self.t = 1.0, torch.ones(3, device=device)

        def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            return out * self.k + self.t

    hook = Hook()
    plain = nn.Linear(3, 3).to(device)
    net = nn.Sequential(copy.deepcopy(plain))
    net[0].register_forward_hook(hook)
    graphed = graphify(net, backend=backend)
    with torch.no_grad():
        for i in range(4):
            hook.k = float(i // 2)
            hook.t = torch.full((3,), float(i), device=device)
            for x in [t.to(device) for t in rows(2, 3, count=3)]:
                equal(plain(x) * hook.k + hook.t, graphed(x))


def test_b70_flag_that_refreshes_a_cached_cast(backend, device):
    """A bool argument that decides whether a cached cast is refreshed is part of the signature."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.ones(3))
            self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
            if is_first:
                self.low.copy_(self.w)
            return x * self.low

    calls = [Call((x, i % 3 == 0), before=lambda m: m.w.mul_(1.5)) for i, x in enumerate(rows(3, count=15))]
    follows_eager(calls, backend, device, make=Cast, replays=11)


def test_b73_parameters_made_anew_before_each_call(backend, device):
    """Parameters that a hook re-allocates at each call are always the present ones."""

    def fresh(m: nn.Module) -> None:
        m.w = nn.Parameter(m.w.detach() + 1)

    pair = Pair(Net, backend, device, fallback="eager")
    with pytest.warns(GraphifyWarning, match="re-bound"):
        for _ in range(16):
            pair.change(fresh)
            pair.check(2, 3, count=1)
            pair.check(2, 3, count=1)


class LeavesItsSize(nn.Module):
    """Sets an attribute that it never reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = len(x)
        return x * 2


class SetsByName(nn.Module):
    """The same by a string."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        setattr(self, "size", len(x))  # noqa: B010
        return x * 2


class TestWhatIsOnlyWritten:
    """What a place held before is no part of a signature whose run writes it and never reads it."""

    @pytest.mark.parametrize("fallback", ["raise", "eager"])
    def test_kinds_that_alternate(self, backend: str, device: torch.device, fallback: str) -> None:
        """Two sizes in turn are captured at their second calls, and each call leaves its own."""
        net = graphify(LeavesItsSize(), fallback=fallback, backend=backend)

        for n in (2, 3) * 6:
            x = torch.randn(n, 2, device=device)
            assert torch.equal(net(x), x * 2)
            assert net.size == n
        assert counts(net) == (2, 2, 8, 0, 0)

    def test_what_is_reset_between(self, backend: str, device: torch.device) -> None:
        """A value that is put back before each call keeps no call from its graph."""
        net = graphify(LeavesItsSize(), backend=backend)

        for _ in range(5):
            net.size = None
            net(torch.randn(2, 2, device=device))
            assert net.size == 2
        assert counts(net) == (1, 1, 3, 0, 0)

    def test_what_no_recording_can_repeat(self, backend: str, device: torch.device) -> None:
        """A recording is reached, and says what it refuses, where warm-ups went on for ever."""
        net = graphify(SetsByName(), backend=backend)
        for n in (2, 3):
            net(torch.randn(n, 2, device=device))
        with pytest.raises(CaptureError, match="size"):
            net(torch.randn(2, 2, device=device))

        aside = graphify(SetsByName(), fallback="eager", backend=backend)
        with pytest.warns(GraphifyWarning, match="size"):
            for n in (2, 3) * 6:
                x = torch.randn(n, 2, device=device)
                assert torch.equal(aside(x), x * 2)
                assert aside.size == n
        assert aside.stats().warmups == 2

    def test_what_the_code_reads_again(self, backend: str, device: torch.device) -> None:
        """A table that a run makes where there is none stays part of the signature: it may be taken away."""

        class Lazy(nn.Module):
            table: torch.Tensor | None = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.table is None:
                    self.table = torch.full((2,), 3.0, device=x.device)
                return x + self.table

        net = graphify(Lazy(), backend=backend)
        for again in (True, False, True, False, False, False):
            if again:
                net.table = None
            x = torch.randn(2, 2, device=device)
            assert torch.equal(net(x), x + 3)
        assert net.stats().replays > 0
