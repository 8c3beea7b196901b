"""Cases D: training. The graphed callable and a plain one play one scenario; all that they show must be equal."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import counts, equal
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import Wrap, clear, grads, leaf, mlp, reset, right_or_eagers_error, same, same_or_loud

from graphify import GraphifyError, disabled, graphify


def test_b38_gradients_add_up(backend, device):
    """Backwards without a step in between add up, in the tensor that the user already holds."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(6):
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_b38_held_gradients_stay(backend, device):
    """A gradient that the user took away from its parameter keeps its numbers whatever comes after."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(6):
            for _ in range(2):
                net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (1, 1, 10, 0, 0)


def test_b39_accumulation_with_static_outputs(backend, device):
    """Where outputs are the graph's own, gradients and the results that carry them are still the caller's."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(5):
            y = net(torch.randn(4, 3, device=device))
            y.square().sum().backward()
            yield y, grads(net)

    assert counts(*same(train, backend, outputs="static")) == (1, 1, 3, 0, 0)


@pytest.mark.parametrize("to_none", [(True,), (False,), (True, False), (False, False, True)])
def test_b40_zero_grad_either_way(backend, device, to_none):
    """Gradients set to None or to zeros, in any order, give eager's weights at each step."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for i in range(8):
            opt.zero_grad(set_to_none=to_none[i % len(to_none)])
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            opt.step()
            yield grads(net), list(net.parameters())

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_b40_a_gradient_the_user_set(backend, device):
    """A `.grad` that the user put there is accumulated into in place, whenever it is put there."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(10):
            if i % 3 == 0:
                for p in net.parameters():
                    p.grad = torch.full_like(p, float(i))
            yield grads(net)
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)

    assert counts(*same(train, backend)) == (1, 1, 8, 0, 0)


def test_b41_forwards_leave_gradients_alone(backend, device):
    """Warm-up, capture and replay of a forward neither make nor change a `.grad`; nor do its backward's."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        x = leaf(device, 4, 3)
        for start in (None, 1.0):
            for p in (*net.parameters(), x):
                p.grad = None if start is None else torch.full_like(p, start)
            for _ in range(4):
                net(x)
                yield grads(net, x)
        for _ in range(4):
            yield torch.autograd.grad(net(x).sum(), net[0].weight)
            yield grads(net, x)

    assert counts(*same(train, backend)) == (1, 1, 10, 0, 0)


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle, self.w = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, idle: Tensor) -> Tensor:
        return x * self.w + (self.idle * 2).detach()


def test_b42_unused_parameters_and_inputs(backend, device):
    """A parameter or input that does not reach the result gets None, not zeros."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, x, idle = wrap(Partly().to(device)), leaf(device, 3), leaf(device, 3)
        for i in range(6):
            net(x, idle).sum().backward()
            yield grads(net, x, idle)
            if i % 2:
                clear(net, x, idle)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_b45_an_argument_with_a_history(backend, device):
    """An argument that was computed, or written in place, passes its gradient on to where it came from."""

    def train(wrap: Wrap) -> Iterator[Any]:
        f, w = wrap(lambda r, s: (r * s).tanh()), leaf(device, 3)
        for _ in range(5):
            part = leaf(device, 4, 2)
            r = torch.zeros(4, 2, 3, device=device)
            r[..., 1] = part
            f(r, w * 2).square().sum().backward()
            yield grads(part, w)

    assert counts(*same(train, backend)) == (1, 1, 3, 0, 0)


def test_b45_in_the_middle_of_a_net(backend, device):
    """A graphed block between plain layers trains the whole net."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = nn.Sequential(nn.Linear(5, 3), wrap(mlp(device)), nn.Linear(2, 1)).to(device)
        opt = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(6):
            opt.zero_grad()
            net(torch.randn(4, 5, device=device)).square().sum().backward()
            opt.step()
            yield grads(net), list(net.parameters())

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


@pytest.mark.parametrize("order", [1, -1])
def test_b46_several_forwards_before_the_backwards(backend, device, order):
    """Forwards that wait for their backward keep their own activations, in whatever order the backwards come."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(4):
            ys = [net(torch.randn(4, 3, device=device)) for _ in range(3)]
            for y in ys[::order]:
                y.square().sum().backward()
                yield grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (1, 3, 8, 0, 0)


def test_b46_a_block_used_three_times_in_one_loss(backend, device):
    """A block with shared weights, applied again and again, gets the sum of its gradients."""

    def train(wrap: Wrap) -> Iterator[Any]:
        block = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device))
        for _ in range(4):
            block(block(block(torch.randn(4, 3, device=device)))).sum().backward()
            yield grads(block)

    assert counts(*same(train, backend))[3:] == (0, 0)


def test_b46_siamese(backend, device):
    """Two branches of one net meet in one loss."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(5):
            left, right = (net(torch.randn(4, 3, device=device)) for _ in range(2))
            (left - right).square().sum().backward()
            yield grads(net)
            clear(net)

    assert counts(*same(train, backend)) == (1, 2, 7, 0, 0)


def test_b46_gan(backend, device):
    """A discriminator that sees real and made data, then carries the generator's gradient, trains as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        gen = wrap(mlp(device))
        dis = wrap(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).to(device))
        opts = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (gen, dis)]
        for _ in range(6):
            fake = gen(torch.randn(4, 3, device=device))
            opts[1].zero_grad()
            real = dis(torch.randn(4, 2, device=device))
            (F.softplus(-real) + F.softplus(dis(fake.detach()))).mean().backward()
            opts[1].step()
            opts[0].zero_grad()
            F.softplus(-dis(fake)).mean().backward()
            opts[0].step()
            yield grads(gen, dis), [*gen.parameters(), *dis.parameters()]

    gen, dis = same(train, backend)
    assert counts(gen) == (1, 1, 4, 0, 0)
    assert counts(dis)[3:] == (0, 0)


def test_b47_input_overwritten_before_the_backward(backend, device):
    """An input that is refilled before the backward gives the gradient of its old numbers, or eager's error."""
    plain, graphed = mlp(device), None
    graphed = graphify(copy.deepcopy(plain), backend=backend)
    for _ in range(5):
        x = torch.randn(4, 3, device=device)
        y, old = graphed(x), x.clone()
        x.copy_(torch.randn(4, 3))
        work = lambda: torch.autograd.grad(y.square().sum(), tuple(graphed.parameters()))
        right_or_eagers_error(
            work, lambda: torch.autograd.grad(plain(old).square().sum(), tuple(plain.parameters()))
        )
    assert counts(graphed)[3:] == (0, 0)


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda y: y.mul_(100),
    "relu_": F.relu_,
    "setitem": lambda y: y.__setitem__(0, 5.0),
    "part": lambda y: y[1:].mul_(3),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["sigmoid", "exp", "relu", "sin"])
def test_b48_output_edited_before_the_backward(backend, device, name, edit):
    """A result that its owner edits in place gives the right gradient, or the error that eager gives."""

    def result(f: Callable[..., Any], x: Tensor, copied: bool) -> Any:
        y = f(x)
        y = y.clone() if copied else y
        EDITS[edit](y)
        return y.detach().clone(), torch.autograd.grad(y.square().sum(), x)

    plain = getattr(torch, name)
    graphed = graphify(lambda x: plain(x), backend=backend)
    for _ in range(6):
        x = leaf(device, 4)
        right_or_eagers_error(lambda: result(graphed, x, False), lambda: result(plain, x, True))
    assert counts(graphed)[3:] == (0, 0)


class Roles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.late: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.tied(self.first(x).tanh()).tanh())
        return y if self.late is None else y @ self.late


def test_b49_each_gradient_to_its_parameter(backend, device):
    """Parameters of one shape, tied ones and one that is registered late each get their own gradient."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Roles().to(device))
        for i in range(10):
            if i == 5:
                net.late = nn.Parameter(torch.randn(3, 3, device=device))
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield {name: p.grad for name, p in net.named_parameters()}

    assert counts(*same(train, backend)) == (2, 2, 6, 0, 0)


def test_b50_an_input_that_needs_a_gradient_at_times(backend, device):
    """Whether an input needs a gradient may change from call to call, in either order."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(18):
            x = torch.randn(4, 3, device=device, requires_grad=i // 3 % 2 == 1)
            net(x).square().sum().backward()
            yield grads(net, x)

    assert counts(*same(train, backend)) == (2, 2, 14, 0, 0)


def test_b51_batch_norm_statistics_in_training(backend, device):
    """Running statistics and the batch counter move once per forward and not in a backward, bit for bit."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).to(device))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(7):
            opt.zero_grad()
            loss = net(torch.randn(8, 3, device=device)).square().mean()
            yield dict(net.named_buffers())
            loss.backward()
            opt.step()
            yield loss, grads(net), list(net.state_dict().values())

    assert counts(*same(train, backend)) == (1, 1, 5, 0, 0)


def test_b53_state_advances_once_per_training_call(backend, device):
    """State that the forward writes, and that its backward reads, moves once per call."""

    def train(wrap: Wrap) -> Iterator[Any]:
        w, mean = leaf(device, 3), torch.zeros(3, device=device)

        def f(x: Tensor) -> Tensor:
            mean.lerp_(x.detach(), 0.5)
            return (x - mean) * w

        g = wrap(f)
        for _ in range(6):
            g(torch.randn(3, device=device)).sum().backward()
            yield w.grad, mean

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_b55_train_and_eval_with_gradients(backend, device):
    """Training, evaluation and a frozen BatchNorm take turns, with gradients in each."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device))
        for i in range(18):
            net.train(i % 6 < 3)
            net[1].train(i % 3 == 0)
            net(torch.randn(8, 3, device=device)).square().sum().backward()
            yield grads(net), list(net.buffers())

    assert counts(*same(train, backend)) == (4, 4, 10, 0, 0)


def test_b56_dropout_in_training(backend, device):
    """Masks are renewed at each step, used again in the backward, and draw what eager draws."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5), nn.Linear(32, 1)).to(device))
        for i in range(8):
            y = net(torch.randn(4, 3, device=device))
            yield torch.rand(2, device=device), torch.rand(2)
            y.sum().backward()
            yield y, grads(net), torch.rand(2, device=device)
            if i % 3 == 2:
                torch.manual_seed(i)
                clear(net)

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_b57_draws_between_forward_and_backward(backend, device):
    """A backward that draws random numbers draws those of eager."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + torch.rand_like(grad)

    def train(wrap: Wrap) -> Iterator[Any]:
        f, w = wrap(lambda x: Noisy.apply(x * w)), leaf(device, 3)
        for _ in range(6):
            y = f(torch.randn(3, device=device))
            yield torch.rand(2, device=device)
            y.sum().backward()
            yield w.grad, torch.rand(2, device=device)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


def test_b58_a_generator_of_the_users_own_in_training(backend, device):
    """Noise from an explicit generator is eager's, in results and gradients, and so is the generator after."""

    def train(wrap: Wrap) -> Iterator[Any]:
        gen, w = torch.Generator(device).manual_seed(5), leaf(device, 3)
        f = wrap(lambda x: x * w * torch.rand(x.shape, generator=gen, device=x.device))
        for _ in range(6):
            f(torch.randn(3, device=device)).sum().backward()
            yield w.grad, gen.get_state(), torch.rand(2, generator=gen, device=device)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, preserve: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.block = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.preserve = preserve

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)
        return x


def checkpointed(device: torch.device, *options: Any) -> Callable[[Wrap], Iterator[Any]]:
    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(Checkpointed(*options).to(device))
        for _ in range(6):
            net(leaf(device, 4, 3)).square().sum().backward()
            yield grads(net), torch.rand(2, device=device)

    return train


def test_b59_checkpointing_without_randomness(backend, device):
    """Activation checkpointing that keeps no random state is captured, recomputation and all."""
    assert counts(*same(checkpointed(device, 0.0, False), backend)) == (1, 1, 4, 0, 0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_b59_checkpointing_with_randomness(backend, device, dropout):
    """Checkpointing that puts the random state back gives eager's gradients or is refused."""
    same_or_loud(checkpointed(device, dropout, True), backend)


def test_b60_training_under_autocast(backend, device):
    """Weights that an optimizer changes inside one autocast block are used by the next call in it."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast(device.type, torch.bfloat16):
                for _ in range(4):
                    opt.zero_grad()
                    y = net(torch.randn(4, 3, device=device))
                    y.float().square().sum().backward()
                    opt.step()
                    torch.clear_autocast_cache()
                    yield y, grads(net), list(net.parameters())
                    assert torch.is_autocast_cache_enabled()

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_b62_grad_scaler_outside(backend, device):
    """A scaler around a graphed module scales, skips the step with the infinity in it, and grows, as in eager."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=2)
        for i in range(8):
            opt.zero_grad()
            x = torch.randn(4, 3, device=device) * (float("inf") if i == 3 else 1.0)
            with torch.autocast(device.type, torch.bfloat16):
                y = net(x)
            scaler.scale(y.float().sum()).backward()
            scaler.step(opt)
            scaler.update()
            yield scaler.get_scale(), grads(net), list(net.parameters())

    assert counts(*same(train, backend)) == (1, 1, 6, 0, 0)


def test_b65_double_backward_is_refused(backend, device):
    """`create_graph=True` raises and names `disabled()`, under which it works; training goes on after it."""
    plain = mlp(device)
    graphed = graphify(copy.deepcopy(plain), backend=backend)

    def penalty(net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), net[0].weight)

    for i in range(8):
        x = leaf(device, 4, 3)
        for net in (plain, graphed):
            net(x).square().sum().backward()
        equal(grads(plain), grads(graphed))
        if i > 2:
            with pytest.raises(GraphifyError, match=r"disabled\(\)"):
                penalty(graphed, x)
        with disabled():
            equal(penalty(plain, x), penalty(graphed, x))


def test_b65_transforms_of_a_trained_module(backend, device):
    """`torch.func` runs the plain function of a module that is being trained, with and without its parameters."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(4):
            x = torch.randn(4, 3, device=device)
            net(x).sum().backward()
            params = dict(net.named_parameters())
            loss = lambda p, x: torch.func.functional_call(net, p, x).square().sum()
            yield grads(net), torch.func.grad(loss)(params, x)
            yield torch.func.grad(lambda x: net(x).sum())(x), torch.vmap(net)(x[:, None])
            yield torch.func.jvp(net, (x,), (x,))

    (graphed,) = same(train, backend)
    assert counts(graphed)[:3] == (1, 1, 2)
    assert set(graphed.stats().reasons) == {"functorch"}


def test_b65_jacobians_and_gradcheck(backend, device):
    """`torch.autograd.functional.jacobian` and `gradcheck` work through replays."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device).double())
        for _ in range(3):
            x = torch.randn(2, 3, device=device, dtype=torch.double)
            yield torch.autograd.functional.jacobian(net, x)
            yield torch.autograd.gradcheck(net, x.requires_grad_())

    assert counts(*same(train, backend))[3:] == (0, 0)


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)]


def test_b67_grad_modes_take_turns_in_training(backend, device):
    """Calls with and without gradients, and in inference mode, have graphs of their own and eager's flags."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(16):
            with MODES[i % 4]():
                y = net(torch.randn(4, 3, device=device))
            if y.requires_grad:
                y.square().sum().backward()
            yield y, grads(net)

    assert counts(*same(train, backend)) == (3, 3, 10, 0, 0)


def test_b68_training_after_inference_mode(backend, device):
    """Calls in inference mode first, or in between, spoil no training."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(16):
            with torch.inference_mode() if i // 4 % 2 == 0 else contextlib.nullcontext():
                y = net(torch.randn(4, 3, device=device))
            if y.requires_grad:
                y.square().sum().backward()
            yield y, grads(net)

    assert counts(*same(train, backend)) == (2, 2, 12, 0, 0)


def test_b69_hooks_of_the_module_in_training(backend, device):
    """Forward and backward hooks of the graphed module itself, and hooks of its parameters, run at each step."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, seen = wrap(mlp(device)), {}
        note = lambda name, value: seen.setdefault(name, []).append(value)
        net.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        net.register_forward_hook(lambda m, args, out: out + 1)
        net.register_full_backward_pre_hook(lambda m, out: note("before", out) or (out[0] * 3,))
        net.register_full_backward_hook(lambda m, inner, outer: note("after", (inner, outer)))
        net[0].weight.register_hook(lambda g: note("hook", g) or g * 2)
        net[2].bias.register_post_accumulate_grad_hook(lambda p: note("accumulated", p.grad.clone()))
        for _ in range(6):
            seen.clear()
            net(leaf(device, 4, 3)).square().sum().backward()
            yield dict(sorted(seen.items())), grads(net)

    assert counts(*same(train, backend)) == (1, 1, 4, 0, 0)


@pytest.mark.parametrize("effect", ["gradient", "python"])
def test_b69_backward_hooks_of_a_child(backend, device, effect):
    """A backward hook of a child takes part as in eager, or is refused; never silently skipped."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net, log = mlp(device), []
        if effect == "python":
            net[1].register_full_backward_hook(lambda m, inner, outer: log.append(1))
        else:
            net[1].register_full_backward_hook(lambda m, inner, outer: (inner[0] * 2,))
        net = wrap(net)
        for _ in range(6):
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net), len(log)

    same_or_loud(train, backend)


class Unused(nn.Module):
    """Uses one of two layers, whichever its argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, first: bool = True) -> Tensor:
        return (self.one if first else self.two)(x)


def _reduce(rank: int, inner: nn.Module, backend: str, device: str) -> None:
    options = {"find_unused_parameters": isinstance(inner, Unused)}
    plain = DistributedDataParallel(copy.deepcopy(inner), **options)
    graphed = DistributedDataParallel(graphify(inner, backend=backend), **options)
    opts = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (plain, graphed)]
    torch.manual_seed(rank + 1)
    for i in range(10):
        x = torch.randn(4, 3, device=device)
        args = (x, i % 2 == 0) if isinstance(inner, Unused) else (x,)
        for net, opt in zip((plain, graphed), opts, strict=True):
            opt.zero_grad(set_to_none=i % 2 == 0)
            with net.no_sync() if i in (3, 6) else contextlib.nullcontext():
                net(*args).square().sum().backward()
            net(*args).sum().backward()
            opt.step()
        equal(grads(plain), grads(graphed))
        equal(list(plain.parameters()), list(graphed.parameters()))
        mine = torch.cat([p.flatten() for p in graphed.parameters()]).detach()
        all_of_them = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(all_of_them, mine)
        equal(*all_of_them)
    number = 2 if isinstance(inner, Unused) else 1
    assert counts(graphed.module) == (number, number, 20 - 2 * number, 0, 0), counts(graphed.module)


def _ddp_rank(rank: int, store: str, backend: str, device: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for make in (lambda: mlp(torch.device(device)), lambda: Unused().to(device)):
        torch.manual_seed(0)
        _reduce(rank, make(), backend, device)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # a thread of torch that asks for the GIL while Python ends takes the process down


def test_b71_distributed_data_parallel(backend, device, tmp_path: Path):
    """Two processes train a graphed module inside DDP: the gradients are reduced, and equal those of plain DDP."""
    torch.multiprocessing.spawn(_ddp_rank, (str(tmp_path / "store"), backend, str(device)), nprocs=2)


@pytest.mark.filterwarnings("ignore:.*re-bound:graphify.GraphifyWarning")
def test_b73_parameters_made_anew_in_training(backend, device):
    """Parameters that are re-allocated before each call get the gradients of that call."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for _ in range(12):
            net[0].weight = nn.Parameter(net[0].weight.detach() * 0.9)
            net(torch.randn(4, 3, device=device)).square().sum().backward()
            yield grads(net)

    same(train, backend, fallback="eager")


def test_b87_b98_reset_between_forward_and_backward(backend, device):
    """The backward of a forward that was made before `reset()` is right, and training goes on."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        for i in range(12):
            y = net(torch.randn(4, 3, device=device))
            if i in (1, 4, 8):
                reset(net)
            y.square().sum().backward()
            yield y, grads(net)

    assert counts(*same(train, backend)) == (4, 4, 4, 0, 0)


def test_b59_reentrant_checkpointing(backend, device):
    """Checkpointing of the reentrant kind gives eager's gradients or is refused."""
    same_or_loud(checkpointed(device, 0.0, False, True), backend)


@pytest.mark.parametrize("grad", [False, True])
def test_b65_forward_mode(backend, device, grad):
    """Under `forward_ad.dual_level` the plain function runs, and tangents pass through, whatever was captured before."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(mlp(device))
        with torch.set_grad_enabled(grad):
            for _ in range(4):
                yield net(torch.randn(4, 3, device=device)).detach()
                with forward_ad.dual_level():
                    x = forward_ad.make_dual(
                        torch.randn(4, 3, device=device), torch.ones(4, 3, device=device)
                    )
                    yield [t.detach() for t in forward_ad.unpack_dual(net(x))]

    assert counts(*same(train, backend)) == (1, 1, 2, 4, 0)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
def test_b65_batched_gradients(backend, device):
    """Several gradients at once by `is_grads_batched`, and vectorized Jacobians, are eager's or are refused."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = wrap(nn.Linear(3, 2).to(device))
        for _ in range(5):
            x = leaf(device, 3)
            rows = torch.eye(2, device=device)
            yield torch.autograd.grad(net(x), (x, net.weight), rows, is_grads_batched=True)
            yield torch.autograd.functional.jacobian(net, x, vectorize=True)

    same_or_loud(train, backend)
