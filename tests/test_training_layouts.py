"""Gradients that are not strided, which only a backward that runs eagerly gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import Wrap, clear, grads, same

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphify.GraphifyWarning"),
]


class Mixed(nn.Module):
    """A sparse embedding among other layers; `tied`: its weight is the last layer's, too, where it gets a dense one."""

    def __init__(self, *, layers: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, sparse=True)
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        self.tied = tied

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layers(self.embedding(ids))
        return F.linear(h, self.embedding.weight) if self.tied else h


def shown(net: nn.Module) -> list[Any]:
    """The layouts of gradients and their content, which no two backwards share."""
    return [(str(g.layout), g.to_dense().clone()) for g in grads(net) if g is not None]


def ids_of(device: torch.device) -> Tensor:
    return torch.randint(0, 7, (4,), device=device)


@pytest.mark.parametrize("layers", [0, 1, 6])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("before", ["none", "sparse", "dense", "kept"])
def test_a_sparse_gradient_is_accumulated_as_in_eager(backend, device, layers: int, tied: bool, before: str):
    """Whatever `.grad` is before: nothing, sparse, dense, or what the last backward left."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Mixed(layers=layers, tied=tied).to(device)
        graphed = wrap(net)
        for _ in range(5):
            if before != "kept":
                clear(net)
            if before in ("sparse", "dense"):
                weight = net.embedding.weight
                grad = torch.ones_like(weight)
                weight.grad = grad.to_sparse(1) if before == "sparse" else grad
            graphed(ids_of(device)).square().sum().backward()
            yield shown(net)

    same(train, backend, fallback="eager")


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_sparse_gradients_of_several_forwards_add_up(backend, device, tied: bool):
    """Two forwards wait for one backward, or for one each."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Mixed(layers=6, tied=tied).to(device)
        graphed = wrap(net)
        for i in range(8):
            clear(net)
            one, two = graphed(ids_of(device)), graphed(ids_of(device))
            if i % 2 and not tied:  # the sum of four is rounded in another order
                (one.square().sum() + two.sum()).backward()
            else:
                one.square().sum().backward()
                two.sum().backward()
            yield shown(net)

    same(train, backend, fallback="eager")


def test_a_sparse_gradient_is_the_callers_own(backend, device):
    """What a backward gave stays when the next call overwrites the graph's copy of the indices."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Mixed(layers=0, tied=False).to(device)
        graphed = wrap(net)
        for i in range(5):
            clear(net)
            graphed(torch.tensor([i, i + 1, i, 0], device=device)).sum().backward()
            kept = net.embedding.weight.grad
            graphed(torch.tensor([6, 6, 6, 6], device=device)).sum()
            yield kept.to_dense(), kept.is_coalesced()

    same(train, backend, fallback="eager")


def test_a_sparse_gradient_of_an_argument(backend, device):
    """An argument, too, may get one, by `backward` and by `torch.autograd.grad`."""

    def train(wrap: Wrap) -> Iterator[Any]:
        graphed = wrap(lambda w, ids: F.embedding(ids, w, sparse=True) * 2)
        for i in range(6):
            w = torch.randn(7, 3, device=device, requires_grad=True)
            y = graphed(w, ids_of(device)).square().sum()
            if i % 2:
                (grad,) = torch.autograd.grad(y, w)
            else:
                y.backward()
                grad = w.grad
            assert grad is not None
            yield str(grad.layout), grad.to_dense()

    same(train, backend, fallback="eager")


def test_results_of_several_nodes_give_sparse_gradients(backend, device):
    """Results that come from other parameters have nodes of their own, in front of sparse gradients as of others."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Mixed(layers=6, tied=i == 1) for i in range(2))

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.parts[0](ids), self.parts[1](ids) + self.parts[0].layers[0].weight.sum()

    def train(wrap: Wrap) -> Iterator[Any]:
        net = Two().to(device)
        graphed = wrap(net)
        for i in range(9):
            clear(net)
            one, two = graphed(ids_of(device))
            if i % 3 == 0:
                (one.square().sum() + two.square().sum()).backward()
            elif i % 3 == 1:
                one.sum().backward(retain_graph=True)
                two.square().sum().backward()
            else:
                two.sum().backward()
            yield shown(net)

    same(train, backend, fallback="eager")


@pytest.mark.parametrize("kind", [None, torch.float32, torch.bfloat16], ids=["any", "wider", "same"])
@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has one dtype for a tensor and its gradient"
)
def test_gradients_of_another_dtype(backend, device, kind: torch.dtype | None, layers: int):
    """Parameters whose gradients may have another dtype get what eager gives, recorded or not."""

    def train(wrap: Wrap) -> Iterator[Any]:
        net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).to(device, torch.bfloat16)
        for p in net.parameters():
            p.grad_dtype = kind
        graphed = wrap(net)
        for i in range(6):
            if i % 2:
                clear(net)
            graphed(torch.randn(4, 3, device=device, dtype=torch.bfloat16)).float().square().sum().backward()
            yield grads(net)

    same(train, backend, fallback="eager")
