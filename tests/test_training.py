"""Training promises beyond the numbered cases: a plain and a graphed callable play one scenario, and show the same."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import counts, equal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from training import Wrap, clear, error_of, grads, leaf, mlp, same, same_or_loud

from graphify import CaptureError, graphify

REBOUND = pytest.mark.filterwarnings("ignore:.*re-bound:graphify.GraphifyWarning")

# -- outside tensors that need a gradient


class Holder:
    def __init__(self, w: Tensor) -> None:
        self.w, self.ws = w, {"a": [w]}

    def attribute(self, x: Tensor) -> Tensor:
        return x * self.w

    def item(self, x: Tensor) -> Tensor:
        return x * self.ws["a"][0]


def by_default(w: Tensor) -> Callable[..., Any]:
    def f(x: Tensor, w: Tensor = w) -> Tensor:
        return x * w

    return f


def through(v: Tensor) -> Callable[..., Any]:
    return lambda x: x * v


def namespace(o: types.SimpleNamespace) -> Callable[..., Any]:
    return lambda x: x * o.w


OUTSIDE: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "closure": through,
    "default": by_default,
    "partial": lambda w: functools.partial(lambda w, x: x * w, w),
    "attribute": lambda w: Holder(w).attribute,
    "item": lambda w: Holder(w).item,
    "namespace": lambda w: namespace(types.SimpleNamespace(w=w)),
    "view": lambda w: through(w[:2].view(-1)[1:4]),
    "non-leaf": lambda w: through(w * 2),
    "leaf and non-leaf": lambda w: lambda x, v=w * 2: x * w + v,
    "non-leaf made inside": lambda w: lambda x: x * (w * 2).exp(),
    "detached": lambda w: lambda x: x * w.detach() + w,
    "non-leaf argument": lambda w: functools.partial(lambda x, v: x * v, v=w.flip(0)),
}


@pytest.mark.parametrize("place", OUTSIDE)
def test_outside_tensors_get_their_gradient(backend, device, place):
    """A tensor that the function finds outside, wherever and of whatever history, gets the gradient of each call."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3, 3)
        f = wrap(OUTSIDE[place](w))
        for _ in range(6):
            f(torch.randn(3, device=device)).square().sum().backward(retain_graph=True)
            yield w.grad

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_kept_gradients_and_hooks_of_non_leaves(backend, device):
    """`retain_grad` and hooks of computed tensors, outside and among the arguments, see each gradient once."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w, seen = leaf(device, 3), []
        outside = w * 2
        f = wrap(lambda x: (x * outside).tanh())
        for _ in range(6):
            x = leaf(device, 3) * 2
            for t in (x, outside):
                t.retain_grad()
            hooks = [t.register_hook(lambda g: seen.append(g) or g * 3) for t in (x, outside)]
            f(x).sum().backward(retain_graph=True)
            yield x.grad, outside.grad, w.grad, sorted(seen, key=str)
            seen.clear()
            for hook in hooks:
                hook.remove()

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


@REBOUND
def test_a_non_leaf_made_anew_for_each_call(backend, device):
    """A weight that is computed outside before each call passes its gradient on to where it came from."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w, holder = leaf(device, 3), {}
        f = wrap(lambda x: x * holder["w"])
        for _ in range(12):
            holder["w"] = w.exp()
            f(torch.randn(3, device=device)).square().sum().backward()
            yield w.grad

    same(train, backend, fallback="eager")


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(3, 2))


def spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(3, 2))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Flatten(0), nn.Hardtanh(0, 4), Lookup())


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.detach().long()) * x[:, None]


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).mul_(2)
        y[:, 0].add_(self.w[0])
        y += self.w
        out = torch.zeros_like(y)
        out[:, 1:] = y[:, :-1]
        with torch.no_grad():
            scale = out.abs().max()
        return out / (1 + scale)


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return a * w + b, (a * x * 2 + b).sum(0)


class Customised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b = Custom.apply(x, self.w)
        return a.sin() + b


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[None].expand(5, -1, -1))[0]


def image() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(nn.Linear(3, 16), nn.Unflatten(1, (1, 4, 4)), body, nn.Flatten(), nn.Linear(2, 1))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(3, 4), nn.Unflatten(0, (2, 2)), layer)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = graphify(nn.Linear(3, 3))
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.w).tanh()


NETS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "embedding": embedding,
    "in place": Inplace,
    "custom function": Customised,
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)),
    "no bias, double": lambda: nn.Linear(3, 2, bias=False).double(),
    "complex": lambda: nn.Linear(3, 2, dtype=torch.complex64),
    "lstm": Recurrent,
    "image": image,
    "attention": attention,
    "graphed inside": Nested,
}


@pytest.mark.parametrize("name", NETS)
def test_kinds_of_nets(backend, device, name):
    """Layers that compute weights, write in place, look up or bring a backward of their own train as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(NETS[name]().to(device))
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        dtype = next(net.parameters()).dtype
        for _ in range(6):
            opt.zero_grad()
            y = net(torch.randn(4, 3, device=device, dtype=dtype))
            y.abs().square().sum().backward()
            opt.step()
            # Copies: cuDNN gives the gradients of an LSTM one memory, a replay gives each its own.
            yield y, [p.grad.clone() for p in net.parameters()], list(net.state_dict().values())

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_sparse_gradients_are_equal_or_refused(backend, device):
    """A layer with sparse gradients gives eager's, or is refused."""

    def train(wrap: Wrap) -> Iterator[Any]:
        table = wrap(nn.Embedding(5, 2, sparse=True).to(device))
        for _ in range(5):
            table(torch.randint(5, (4,), device=device)).square().sum().backward()
            yield [g.to_dense() for g in grads(table)]
            clear(table)

    same_or_loud(train, backend)


def test_a_penalty_beside_the_net(backend, device):
    """Parameters that the loss uses outside of the graph, too, get both gradients."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(6):
            loss = net(torch.randn(4, 3, device=device)).square().sum()
            (loss + 0.1 * sum(p.square().sum() for p in net.parameters())).backward()
            yield grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_a_function_without_arguments(backend, device):
    """A penalty that reads weights only is captured as well."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)
        f = wrap(lambda: w.square().sum())
        for _ in range(6):
            loss = f()
            loss.backward()
            yield loss, w.grad

    same(train, backend)


# -- arguments


def test_one_tensor_as_two_arguments(backend, device):
    """A tensor, or views of one, passed twice gets the sum of both gradients."""

    def train(wrap: Wrap) -> Iterator[Any]:
        f = wrap(lambda a, b: a * b.exp())
        for i in range(12):
            x = leaf(device, 4)
            pair = ((x, x), (x, leaf(device, 4)), (x[:3], x[1:]))[i % 3]
            f(*pair).sum().backward()
            yield grads(x)

    assert counts(*same(train, backend)) == (3, 3, 6, 0, 0)


def test_an_argument_that_needs_a_gradient_may_not_be_written(backend, device):
    """A function that edits an argument which needs a gradient is refused, and edits nothing."""
    graphed = graphify(lambda x: x.mul_(2).sum(), backend=backend)
    w = leaf(device, 3)
    with pytest.raises(CaptureError, match="`x`"):
        for _ in range(3):
            x = w * 1
            before = x.detach().clone()
            graphed(x).backward()
    equal(before, x.detach())


def test_an_argument_without_gradient_may_be_written(backend, device):
    """An argument that needs no gradient may be edited by the function, and the backward reads it as it was then."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)
        f = wrap(lambda x: (x.add_(1) * w).sum())
        for _ in range(6):
            x = torch.randn(3, device=device)
            f(x).backward()
            yield x, w.grad

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_an_argument_in_written_outside_memory_is_refused(backend, device):
    """An argument that shares memory with an outside tensor that the call writes is refused when gradients are on."""
    state, w = torch.zeros(4, device=device), leaf(device, 4)

    def f(x: Tensor) -> Tensor:
        state.add_(1)
        return x * w

    graphed = graphify(f, backend=backend)
    with pytest.raises(CaptureError, match="`x`"):
        for _ in range(3):
            graphed(state)


def test_structured_arguments_and_a_loss_inside(backend, device):
    """A batch in a dictionary, targets and the loss inside the function: gradients reach every float of it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = mlp(device)

        def loss_of(batch: dict[str, Any], scale: float = 1.0) -> Tensor:
            return F.cross_entropy(net(batch["x"][0]), batch["y"]) * scale

        f = wrap(loss_of)
        for i in range(9):
            x, y = leaf(device, 4, 3), torch.randint(2, (4,), device=device)
            loss = f({"x": [x], "y": y}, scale=1.0 + i % 2)
            loss.backward()
            yield loss, grads(net, x)

    assert counts(*same(train, backend)) == (2, 2, 5, 0, 0)


def test_empty_batches(backend, device):
    """A batch without rows gives zero gradients, as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            net(torch.randn(4 * (i % 2), 3, device=device)).sum().backward()
            yield grads(net)
            clear(net)

    same(train, backend)


# -- results


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x).tanh()
        return self.a(y), self.b(y)


@pytest.mark.parametrize("used", ["a", "ab", "aabb", "a b"])
def test_partial_use_of_results(backend, device, used):
    """Only what the results that were used depend on gets a gradient; the rest stays None."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Heads().to(device))
        for i in range(12):
            heads = dict(zip("ab", net(torch.randn(4, 3, device=device)), strict=True))
            names = used.split()[i % len(used.split())] if " " in used else used[i % len(used)]
            (heads["a"] + heads["b"] if used == "ab" and i % 3 == 2 else heads[names]).sum().backward()
            yield grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 10, 0, 0)


def test_results_backward_one_after_the_other(backend, device):
    """Two results of one call may go backward one by one, the graph being kept, and add up."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Heads().to(device))
        for _ in range(6):
            a, b = net(torch.randn(4, 3, device=device))
            a.sum().backward(retain_graph=True)
            yield grads(net)
            b.sum().backward()
            yield grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_results_of_every_kind(backend, device):
    """Detached, integer and None results, arguments and parameters handed back, views and one result twice."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = nn.Parameter(torch.randn(3, device=device))

        def f(x: Tensor, z: Tensor) -> dict[str, Any]:
            y = x * w
            return {
                "y": y, "again": y, "view": y[0], "detached": y.detach(), "index": y.argmax(-1), "none": None,
                "number": 7, "x": x, "part of x": x[1:], "w": w, "part of w": w[1:], "z": z, "plain": z + 1,
                "mask": y > 0, "t": y.t(), "frozen": (w * 2).detach(),
            }  # fmt: skip

        g = wrap(f)
        for _ in range(6):
            x, z = leaf(device, 4, 3), torch.randn(4, device=device)
            out = g(x, z)
            assert out["x"] is x
            assert out["w"] is w
            assert out["z"] is z
            names = ("y", "again", "view", "x", "part of x", "w", "part of w", "t")
            sum((i + 1) * out[name].square().sum() for i, name in enumerate(names)).backward()
            yield out, grads(x, w)
            clear(w)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)
        self.extra: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).tanh()
        self.extra = y.square().mean()
        return self.two(y)


def test_a_loss_that_is_left_in_an_attribute(backend, device):
    """A result that the function leaves in an attribute carries its gradient, too."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Auxiliary().to(device))
        for i in range(8):
            y = net(torch.randn(4, 3, device=device))
            (net.extra if i % 3 == 2 else y.sum() + net.extra).backward()
            yield net.extra, grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_views_among_results_show_each_others_edits(backend, device):
    """A result and a view of it share memory, and an edit of one is differentiated through both, as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        f = wrap(lambda x: (lambda y: (y, y.view(-1), y[0]))(x * 2))
        for _ in range(6):
            x = leaf(device, 2, 3)
            y, flat, row = f(x)
            yield error_of(lambda: y.mul_(3))
            yield error_of(lambda: (y.square().sum() + flat.sum() + row.sum()).backward())
            yield y, flat, row, x.grad

    same_or_loud(train, backend)


class Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_undefined_incoming_gradients(backend, device):
    """A gradient that a user's own function leaves undefined stays undefined."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Heads().to(device))
        for i in range(8):
            a, b = net(torch.randn(4, 3, device=device))
            (Drop.apply(a) + (Drop.apply(b) if i == 5 else b.sum())).backward()
            yield grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return (y * w).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors


def test_gradients_that_are_saved_tensors(backend, device):
    """A backward that returns what it saved hands out memory of the caller's own."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)
        f = wrap(lambda x: Saved.apply(x, w))
        for _ in range(6):
            x = leaf(device, 3)
            yield torch.autograd.grad(f(x), (w,))
            yield torch.autograd.grad(f(x), (x, w))[1:]

    assert counts(*same(train, backend)) == (1, 1, 10, 0, 0)


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "expanded": lambda y: y.sum().backward(),
    "rows expanded": lambda y: y.sum(0).square().sum().backward(),
    "transposed": lambda y: (y.t().contiguous() ** 2).sum().backward(),
    "strided": lambda y: y[:, ::2].square().sum().backward(),
    "given": lambda y: y.backward(torch.ones(6, 4, device=y.device).t()),
    "given, a slice": lambda y: y.backward(torch.full((4, 9), 0.5, device=y.device)[:, 1:7]),
    "given, one number": lambda y: y.backward(torch.full((), 0.25, device=y.device).expand(4, 6)),
}


def test_layouts_of_incoming_gradients(backend, device):
    """Expanded, transposed and strided incoming gradients, in any order, give eager's gradients."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Sequential(nn.Linear(3, 6), nn.Tanh()).to(device))
        for name in [*LOSSES, *reversed(LOSSES), *LOSSES, "given", *LOSSES]:
            x = leaf(device, 4, 3)
            LOSSES[name](net(x))
            yield grads(net, x)
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 4 * len(LOSSES) - 1, 0, 0)


CONJ: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: (y * (1 + 2j)).abs().sum(),
    "conj": lambda y: (y.conj() * (1 + 2j)).sum().abs(),
    "imag": lambda y: y.imag.square().sum(),
    "neg": lambda y: (y.conj().imag * y.real).sum(),
}


def test_lazy_bits_of_incoming_gradients(backend, device):
    """Incoming gradients with a lazy conj or neg bit, or none, each mean what they mean in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Linear(3, 2, dtype=torch.complex64).to(device))
        for name in [*CONJ, *CONJ, *reversed(CONJ), *CONJ]:
            CONJ[name](net(torch.randn(4, 3, device=device, dtype=torch.complex64))).backward()
            yield grads(net)

    assert counts(*same(train, backend)) == (1, 1, 14, 0, 0)


def test_layouts_of_gradients(backend, device):
    """Gradients of channels-last weights and of transposed inputs have eager's strides."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Conv2d(3, 2, 2).to(device, memory_format=torch.channels_last))
        for _ in range(5):
            x = torch.randn(2, 4, 4, 3, device=device).permute(0, 3, 1, 2).requires_grad_()
            net(x).square().sum().backward()
            yield grads(net, x)
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 3, 0, 0)


def test_several_results_edited_in_place(backend, device):
    """Results of one call may be edited one by one, detached in place, and used together."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Heads().to(device))
        for i in range(8):
            a, b = net(torch.randn(4, 3, device=device))
            a.mul_(2)
            with torch.no_grad():
                b.add_(1)
            if i % 2:
                b.detach_()
            (a.square().sum() + b.square().sum()).backward()
            yield a, b, grads(net)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


# -- gradients are the caller's


def test_gradients_clipped(backend, device):
    """`clip_grad_norm_` and `clip_grad_value_` outside edit what the optimizer then uses, and nothing else."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opt = torch.optim.Adam(net.parameters(), lr=0.1)
        for i in range(8):
            opt.zero_grad(set_to_none=i % 3 == 0)
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            nn.utils.clip_grad_value_(net.parameters(), 0.2)
            opt.step()
            yield grads(net), list(net.parameters())

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_hooks_of_parameters_and_inputs(backend, device):
    """Tensor hooks fire once per backward, may replace the gradient, and come and go between calls."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen, hooks = wrap(mlp(device)), [], []
        for i in range(14):
            if i in (4, 7):
                hooks.append(net[0].weight.register_hook(lambda g: seen.append(g) or g * 2))
            if i == 10:
                hooks.pop().remove()
            x = leaf(device, 4, 3)
            x.register_hook(lambda g: seen.append(g))
            seen.clear()
            net(x).square().sum().backward()
            yield list(seen), grads(net, x)

    assert counts(*same(train, backend)) == (1, 1, 12, 0, 0)


def test_hooks_set_before_the_first_call(backend, device):
    """Hooks that are there when forward and backward are captured fire once, then as before."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen = mlp(device), []
        for p in net.parameters():
            p.register_hook(lambda g: seen.append(g) or g + 1)
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        net = wrap(net)
        for _ in range(6):
            seen.clear()
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield sorted(list(t.shape) for t in seen), grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_hooks_of_the_accumulation(backend, device):
    """Hooks on the nodes that accumulate, and hooks on several gradients at once, fire as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen = wrap(mlp(device)), []
        params = list(net.parameters())
        nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in params[:2]]
        for i in range(10):
            if i == 3:
                nodes[0].register_hook(lambda *_: seen.append("post"))
                nodes[1].register_prehook(lambda gs: seen.append("pre") or (gs[0] * 2,))
            if i == 6:
                torch.autograd.graph.register_multi_grad_hook(params, lambda gs: seen.append(gs))
            seen.clear()
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield sorted(seen, key=str)[:2], grads(net)

    assert counts(*same(train, backend)) == (1, 1, 8, 0, 0)


@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")
def test_a_gradient_with_other_strides(backend, device):
    """A `.grad` that the user made with other strides than its parameter is accumulated into as it lies."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            if i % 3 == 1:
                net[0].weight.grad = torch.ones(3, 4, device=device).t()
                net[2].weight.grad = torch.ones(2, 8, device=device)[:, ::2]
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_backward_under_no_grad(backend, device):
    """A backward may run under `no_grad`, and with an incoming gradient that needs one itself."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            y = net(torch.randn(4, 3, device=device))
            with torch.set_grad_enabled(i % 2 == 0):
                y.backward(leaf(device, 4, 2))
            yield grads(net)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_an_optimizer_in_the_backward(backend, device):
    """Post-accumulate hooks that step and free each gradient at once train as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opts = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

        def step(p: Tensor) -> None:
            opts[p].step()
            opts[p].zero_grad()

        for p in opts:
            p.register_post_accumulate_grad_hook(step)
        for _ in range(6):
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net), [p.detach().clone() for p in net.parameters()]

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_an_optimizer_with_a_closure(backend, device):
    """LBFGS, which calls forward and backward several times a step, finds the same weights."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5)
        x = torch.randn(4, 3, device=device)

        def closure() -> Tensor:
            opt.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            yield opt.step(closure), list(net.parameters())

    assert counts(*same(train, backend))[3:] == (0, 0)


def test_autograd_grad(backend, device):
    """`torch.autograd.grad` of parameters, inputs or some of them gives fresh tensors and fills no `.grad`."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        idle = leaf(device, 3)
        for i in range(12):
            x = leaf(device, 4, 3)
            of = ((*net.parameters(), x), (x,), (net[2].weight, net[0].bias), (idle, x))[i % 4]
            yield torch.autograd.grad(net(x).square().sum(), of, allow_unused=True)
            yield grads(net, x, idle)

    assert counts(*same(train, backend)) == (1, 1, 10, 0, 0)


def test_backward_with_chosen_inputs(backend, device):
    """`backward(inputs=...)` fills those gradients and no others."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(9):
            x = leaf(device, 4, 3)
            chosen = ([net[0].weight], [x, net[2].bias], None)[i % 3]
            net(x).square().sum().backward(inputs=chosen)
            yield grads(net, x)

    assert counts(*same(train, backend)) == (1, 1, 7, 0, 0)


def test_retain_graph(backend, device):
    """A kept graph may go backward again, also after another call; one that was freed raises eager's error."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(6):
            loss = net(torch.randn(4, 3, device=device)).square().sum()
            for _ in range(3):
                loss.backward(retain_graph=True)
                yield grads(net)
            net(torch.randn(4, 3, device=device)).sum().backward()
            loss.backward()
            yield grads(net), error_of(loss.backward)
            clear(net)

    assert counts(*same(train, backend))[3:] == (0, 0)


def test_a_hook_that_raises(backend, device):
    """An error from the user's own hook surfaces as it is, and the steps after it are right."""

    def fail(grad: Tensor) -> None:
        raise ValueError("mine")

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(8):
            loss = net(leaf(device, 4, 3)).square().sum()
            if i in (0, 1, 2, 5):
                clear(net)
                hook = net[2].weight.register_hook(fail)
                with pytest.raises(ValueError, match="mine"):
                    loss.backward()
                hook.remove()
                clear(net)
            else:
                loss.backward()
            yield grads(net)

    assert counts(*same(train, backend))[3:] == (0, 0)


def test_a_second_backward_raises_in_the_graphed_part(backend, device):
    """The second backward through a graph that was freed raises the text of eager, and breaks nothing."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(6):
            loss = net(torch.randn(4, 3, device=device)).sum()
            loss.backward()
            yield error_of(loss.backward), grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_what_was_handed_out_may_be_overwritten(backend, device):
    """Results and gradients that their owner fills with NaN spoil no later call."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(8):
            x = leaf(device, 4, 3)
            y = net(x)
            yield y.detach().clone()
            y.square().sum().backward()
            yield [g.clone() for g in grads(net, x)]
            for t in (y.detach(), *grads(net, x)):
                t.fill_(float("nan"))
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_a_second_backward_where_nothing_was_saved(backend, device):
    """A function that saves nothing goes backward as often as in eager, without the graph being kept."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w = leaf(device, 3)
        f = wrap(lambda x: (x + w).neg())
        for i in range(6):
            y = f(torch.randn(3, device=device))
            for _ in range(3):
                yield error_of(y.sum().backward), w.grad
                if i % 2:
                    f(torch.randn(3, device=device))

    same(train, backend)
