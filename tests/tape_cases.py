"""Functions to put on the tape: each case makes a function, its inputs, and the state that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Run = Callable[..., object]


class Subject(NamedTuple):
    """One of two equal twins: a function, inputs for call number n, and the tensors it leaves changed."""

    run: Run
    inputs: Callable[[], tuple[Tensor, ...]]
    state: Callable[[], list[Tensor]]


def of_module(module: nn.Module, *shape: int, channels_last: bool = False) -> Subject:
    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(shape)
        return (x.to(memory_format=torch.channels_last) if channels_last else x,)

    return Subject(module, inputs, lambda: list(module.state_dict().values()))


def of_function(run: Run, *inputs: Callable[[], Tensor], state: tuple[Tensor, ...] = ()) -> Subject:
    return Subject(run, lambda: tuple(make() for make in inputs), lambda: list(state))


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def integers(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, shape)


def mlp() -> Subject:
    return of_module(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), 5, 8
    )


def _conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def conv_train() -> Subject:
    return of_module(_conv_net(), 2, 3, 8, 8)


def conv_channels_last() -> Subject:
    net = _conv_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return of_module(net, 2, 3, 8, 8, channels_last=True)


def conv_eval() -> Subject:
    return of_module(_conv_net().eval(), 2, 3, 8, 8)


def instance_norm_with_statistics() -> Subject:
    return of_module(nn.InstanceNorm1d(4, track_running_stats=True, affine=True), 3, 4, 6)


def _encoder() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)


def encoder_train() -> Subject:
    return of_module(_encoder(), 2, 5, 16)


def encoder_fast_path() -> Subject:
    subject = of_module(_encoder().eval(), 2, 5, 16)

    def run(x: Tensor) -> object:
        with torch.no_grad():
            return subject.run(x)

    return subject._replace(run=run)


def lstm() -> Subject:
    return of_module(nn.LSTM(6, 8, num_layers=2, dropout=0.3), 5, 2, 6)


def lstm_bidirectional() -> Subject:
    return of_module(nn.LSTM(6, 8, bidirectional=True), 5, 2, 6)


def gru() -> Subject:
    return of_module(nn.GRU(6, 8), 5, 2, 6)


def embeddings() -> Subject:
    table, bag, norm = nn.Embedding(20, 8), nn.EmbeddingBag(20, 8), nn.LayerNorm(8)
    return of_function(lambda i: norm(table(i)) + bag(i).unsqueeze(1), integers(20, 3, 4))


def renormalised_embedding() -> Subject:
    table = nn.Embedding(20, 8, max_norm=0.5)
    return of_function(table, integers(20, 3, 4), state=(table.weight,))


def attention() -> Subject:
    return of_function(F.scaled_dot_product_attention, *[normal(2, 4, 6, 8)] * 3)


def attention_with_dropout() -> Subject:
    return of_function(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), *[normal(2, 4, 6, 8)] * 3
    )


def attention_of_one_tensor() -> Subject:
    attend = nn.MultiheadAttention(16, 4, batch_first=True).eval()

    def run(x: Tensor) -> object:
        with torch.inference_mode():
            return attend(x, x, x, need_weights=False)[0]

    return of_function(run, normal(2, 5, 16))


def random_operators() -> Subject:
    own = torch.Generator().manual_seed(5)
    twin = torch.Generator().manual_seed(6)
    made = torch.empty(4, 3)

    def run(x: Tensor) -> object:
        made.uniform_(generator=own)
        return (
            *(torch.rand_like(x), torch.bernoulli(x.sigmoid()), torch.randperm(7), torch.normal(x, 1.0)),
            *(torch.multinomial(x.softmax(-1), 2, generator=twin), made + x, F.dropout(x, 0.5)),
        )

    return of_function(run, normal(4, 3), state=(made,))


def views_and_writes() -> Subject:
    kept = torch.zeros(4, 6)

    def run(x: Tensor) -> object:
        y = x.clone()
        y[0].mul_(2)
        y.view(-1)[3] = 5.0
        torch.add(x, 1, out=kept)
        turned = y.t_()
        turned.add_(1)
        left, right = turned.split(3)
        torch._foreach_add_([left, right], 2.0)
        kept.diagonal().fill_(7)
        grown = torch.empty(0)
        torch.mul(left, 3, out=grown)
        return turned, left, right.expand(2, *right.shape), kept.clone(), grown

    return of_function(run, normal(4, 6), state=(kept,))


def constants_made_inside() -> Subject:
    def run(x: Tensor) -> object:
        total = torch.tensor([1.0, 2.0, 3.0])
        total += x.sum(0)
        return total, x * torch.tensor(2.0), torch.as_tensor([0.5]) * x

    return of_function(run, normal(4, 3))


def orders() -> Subject:
    def run(x: Tensor) -> object:
        top = torch.topk(x, 2)
        return (
            torch.sort(x),
            top.values,
            x.max(0),
            x.cumsum(1),
            torch.where(x > 0, x, -x),
            x.argmax(),
            x > 0.5,
        )

    return of_function(run, normal(4, 6))


def indices() -> Subject:
    def run(x: Tensor, i: Tensor) -> object:
        y = x.scatter_add(0, i, torch.ones_like(x))
        y[i[0]] += 1
        return x[i[:, 0]], x.gather(1, i), y, x.index_select(0, i[0]), y.index_put((i[0],), x[0])

    return of_function(run, normal(4, 4), integers(4, 4, 4))


def algebra() -> Subject:
    def run(x: Tensor, y: Tensor) -> object:
        inverse, _ = torch.linalg.inv_ex(x @ x.mT + torch.eye(4))
        return (
            torch.einsum("ij,jk->ik", x, y),
            inverse,
            torch.linalg.vector_norm(x),
            torch.fft.rfft(x).conj() * 2,
        )

    return of_function(run, normal(4, 4), normal(4, 4))


def autocast() -> Subject:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def run(x: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = net(x)
        return y, y.float().softmax(-1)

    return of_function(run, normal(5, 8))


def mixed_modes() -> Subject:
    net, recurrent = nn.Linear(6, 6), nn.LSTM(6, 6)

    def run(x: Tensor) -> object:
        with torch.inference_mode():
            frozen = net(x).relu_()
        with torch.no_grad():
            plain = recurrent(x)[0]
        y = recurrent(net(x))[0]
        (grad,) = torch.autograd.grad(y.sum(), net.weight)
        return frozen, plain, y, grad

    return of_function(run, normal(5, 2, 6))


def _with_gradients(module: nn.Module, *shape: int) -> Subject:
    def run(x: Tensor) -> object:
        y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        return y, torch.autograd.grad(y.square().sum(), list(module.parameters()))

    return of_module(module, *shape)._replace(run=run)


def mlp_gradients() -> Subject:
    return _with_gradients(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), 5, 8)


def conv_gradients() -> Subject:
    return _with_gradients(_conv_net(), 2, 3, 8, 8)


def encoder_gradients() -> Subject:
    return _with_gradients(_encoder(), 2, 5, 16)


def lstm_gradients() -> Subject:
    return _with_gradients(nn.LSTM(6, 8, num_layers=2, dropout=0.3), 5, 2, 6)


def sign_gradients() -> Subject:
    def run(x: Tensor) -> object:
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y.sign() * y.abs()).sum(), y)  # meets a zero tensor without memory

    return of_function(run, normal(4))


def mapped_gradients() -> Subject:
    slope = torch.func.vmap(torch.func.grad(lambda t: (t.sin() ** 2).sum()))
    return of_function(slope, normal(4, 3))


def checkpointed() -> Subject:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def run(x: Tensor) -> object:
        y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
        return y, torch.autograd.grad(y.sum(), list(net.parameters()))

    return of_function(run, normal(3, 6))


def _training_step(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Subject:
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    optimizer = make(list(net.parameters()))

    def run(x: Tensor, target: Tensor) -> object:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def state() -> list[Tensor]:
        held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [*net.state_dict().values(), *held]

    return Subject(run, lambda: (torch.randn(5, 8), torch.randint(0, 3, (5,))), state)


def sgd_step() -> Subject:
    return _training_step(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


def adamw_step() -> Subject:
    return _training_step(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


def custom_operators() -> Subject:
    kept = torch.zeros(4, 3)

    def run(x: Tensor) -> object:
        torch.ops.graphify_tests.add_into(kept, x)
        return torch.ops.graphify_tests.doubled(x) + kept

    return of_function(run, normal(4, 3), state=(kept,))


@torch.library.custom_op("graphify_tests::add_into", mutates_args=("target",))
def _add_into(target: Tensor, x: Tensor) -> None:
    target.add_(x)


@torch.library.custom_op("graphify_tests::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return x * 2


CASES: list[Callable[[], Subject]] = [
    *(mlp, conv_train, conv_channels_last, conv_eval, instance_norm_with_statistics),
    *(encoder_train, encoder_fast_path, lstm, lstm_bidirectional, gru, embeddings, renormalised_embedding),
    *(attention, attention_with_dropout, attention_of_one_tensor, random_operators),
    *(views_and_writes, constants_made_inside, orders, indices, algebra, autocast, mixed_modes),
    *(mlp_gradients, conv_gradients, encoder_gradients, lstm_gradients, sign_gradients, mapped_gradients),
    *(checkpointed, sgd_step, adamw_step, custom_operators),
]
