"""What the owner of results does in training: backwards of all kinds, optimizer steps, edits in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._layout import overlaps_itself
from ._checks import check_count, check_kind, check_one_of
from ._data import fits, make_tensor
from ._leaves import arguments, collecting, floats, parameters, results
from ._twins import Act, Outcome, Twin

__all__ = [
    "LOSSES",
    "Backward",
    "Drop",
    "Edit",
    "EditArguments",
    "Gradients",
    "HoldGradients",
    "Hook",
    "SetGradients",
    "Update",
    "ZeroGradients",
]


def _weights(like: Tensor, layout: str, seed: int) -> Tensor:
    shape = tuple(like.shape)
    layout = layout if fits(layout, shape, like.dtype) else "contiguous"
    return make_tensor(shape, like.dtype, layout=layout, seed=seed).to(like.device)


_LOSSES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda result, seed: result.sum(),
    "mean": lambda result, seed: result.mean(),
    "square": lambda result, seed: (result * result).sum(),
    "row": lambda result, seed: (result[:1] if result.dim() else result).sum(),
    "weighted": lambda result, seed: (result * _weights(result, "contiguous", seed)).sum(),
    "weighted transposed": lambda result, seed: (result * _weights(result, "transposed", seed)).sum(),
}
"""A number to go back from, of one result; the gradient that comes in is expanded, or laid out like the weights."""

_INCOMING = ("contiguous", "transposed", "stepped", "offset", "expanded", "conj", "neg")
LOSSES = (*_LOSSES, *(f"direct {layout}" for layout in _INCOMING))
"""How a backward begins: from a loss, or directly with a gradient of some layout."""

Roots = tuple[list[Tensor], list[Tensor] | None]


def _roots(wanted: list[Tensor], loss: str, seed: int) -> Roots:
    if loss.startswith("direct "):
        layout = loss.removeprefix("direct ")
        return wanted, [_weights(result, layout, seed + index) for index, result in enumerate(wanted)]
    terms = [_LOSSES[loss](result, seed + index) for index, result in enumerate(wanted)]
    reals = [(term.real if term.is_complex() else term).double() for term in terms]
    return [torch.stack(reals).sum() if len(reals) > 1 else reals[0]], None


def _check_numbers(name: str, values: object) -> None:
    check_kind(name, values, (tuple, list), "a tuple of numbers, as in (0,)")
    assert isinstance(values, (tuple, list))
    for value in values:
        check_count(name, value)


def _calls(twin: Twin, ago: tuple[int, ...]) -> list[Outcome]:
    return [twin.outcomes[-1 - back] for back in ago if back < len(twin.outcomes)]


def _wanted(twin: Twin, ago: tuple[int, ...], picks: tuple[int, ...]) -> list[Tensor]:
    return [result for outcome in _calls(twin, ago) for result in results(outcome, picks)]


@dataclass(frozen=True, repr=False)
class Backward(Act):
    """A backward from results of the calls so long `ago`: all results that require gradients, or these `picks`.

    `loss` is one of LOSSES; `into` restricts it to "parameters" or "arguments", as `backward(inputs=...)` does.
    """

    ago: tuple[int, ...] = (0,)
    loss: str = "sum"
    picks: tuple[int, ...] = ()
    retain: bool = False
    into: str = ""
    seed: int = 0
    goes_back = True

    def __post_init__(self) -> None:
        _check_numbers("Backward: ago", self.ago)
        _check_numbers("Backward: picks", self.picks)
        check_kind("Backward: seed", self.seed, int, "an int")
        check_one_of("Backward: loss", self.loss, LOSSES)
        check_one_of("Backward: into", self.into, ("", "parameters", "arguments"))

    def __call__(self, twin: Twin) -> None:
        """Gradients come to the leaves."""
        wanted = _wanted(twin, self.ago, self.picks)
        inputs = _inputs(twin, self.ago, self.into) if self.into else None
        if not wanted or inputs == []:
            return
        with torch.enable_grad():
            roots, gradients = _roots(wanted, self.loss, self.seed)
            torch.autograd.backward(roots, gradients, retain_graph=self.retain, inputs=inputs)


@dataclass(frozen=True, repr=False)
class Gradients(Act):
    """`torch.autograd.grad` from results to "parameters", "arguments" or "all" of both; kept and compared.

    `create` asks for the graph of the gradients too, which a replay does not have: it must say so.
    """

    ago: tuple[int, ...] = (0,)
    loss: str = "sum"
    picks: tuple[int, ...] = ()
    retain: bool = False
    to: str = "all"
    seed: int = 0
    create: bool = False
    goes_back = keeps = True

    def __post_init__(self) -> None:
        _check_numbers("Gradients: ago", self.ago)
        _check_numbers("Gradients: picks", self.picks)
        check_kind("Gradients: seed", self.seed, int, "an int")
        check_one_of("Gradients: loss", self.loss, LOSSES)
        check_one_of("Gradients: to", self.to, ("parameters", "arguments", "all"))

    def __call__(self, twin: Twin) -> None:
        """Keep the gradients, None where nothing leads to."""
        wanted, inputs = _wanted(twin, self.ago, self.picks), _inputs(twin, self.ago, self.to)
        if not wanted or not inputs:
            return
        with torch.enable_grad():
            roots, gradients = _roots(wanted, self.loss, self.seed)
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                roots,
                inputs,
                gradients,
                retain_graph=self.retain,
                create_graph=self.create,
                allow_unused=True,
            )
        # Eager may give one tensor for several inputs; graphed ones are fresh, each its own object.
        twin.held.append([None if gradient is None else gradient.detach() for gradient in found])


def _inputs(twin: Twin, ago: tuple[int, ...], which: str) -> list[Tensor]:
    found = parameters(twin) if which in ("parameters", "all") else []
    if which in ("arguments", "all"):
        found += [tensor for outcome in _calls(twin, ago) for tensor in arguments(outcome)]
    return list({id(tensor): tensor for tensor in found}.values())


def _writable(tensor: Tensor) -> bool:
    return not tensor.is_inference() and not overlaps_itself(tensor)


@dataclass(frozen=True, repr=False)
class Edit(Act):
    """Multiply one result in place, before or after its backward, with autograd or behind its back."""

    ago: tuple[int, ...] = (0,)
    pick: int = 0
    factor: float = 0.5
    recorded: bool = True
    optional = quiet = True

    def __post_init__(self) -> None:
        _check_numbers("Edit: ago", self.ago)
        check_count("Edit: pick", self.pick)

    def __call__(self, twin: Twin) -> None:
        """What eager forbids (a leaf, a view of many) is left out on both sides."""
        found = [t for outcome in _calls(twin, self.ago) for t in floats(outcome.value) if _writable(t)]
        if found:
            with torch.set_grad_enabled(self.recorded):
                found[self.pick % len(found)].mul_(self.factor)


@dataclass(frozen=True, repr=False)
class EditArguments(Act):
    """Overwrite the float arguments of a call in place, as a loader that reuses its buffers does."""

    ago: tuple[int, ...] = (0,)
    factor: float = 0.5
    quiet = True

    def __post_init__(self) -> None:
        _check_numbers("EditArguments: ago", self.ago)

    def __call__(self, twin: Twin) -> None:
        """Behind autograd's back, for leaves too."""
        for outcome in _calls(twin, self.ago):
            for tensor in floats((outcome.args, outcome.kwargs)):
                if _writable(tensor):
                    with torch.no_grad():
                        tensor.mul_(self.factor)


@dataclass(frozen=True, repr=False)
class Update(Act):
    """A step of gradient descent, in place, on all parameters that have a gradient; `clip` bounds the norm before."""

    rate: float = 0.1
    clip: float | None = None
    quiet = True

    def __post_init__(self) -> None:
        check_kind("Update: rate", self.rate, (int, float), "a number")
        check_kind("Update: clip", self.clip, (int, float, type(None)), "a number or None")

    def __call__(self, twin: Twin) -> None:
        """Kept finite, so that later steps still show something."""
        trained = [tensor for tensor in parameters(twin) if tensor.grad is not None]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(trained, self.clip)
        with torch.no_grad():
            for tensor in trained:
                assert tensor.grad is not None
                tensor.sub_(tensor.grad.nan_to_num(0.0, 1.0, -1.0).clamp(-1.0, 1.0) * self.rate)


@dataclass(frozen=True, repr=False)
class ZeroGradients(Act):
    """What `zero_grad` does, on parameters and on arguments."""

    set_to_none: bool = True
    quiet = True

    def __call__(self, twin: Twin) -> None:
        """None, or zeros in the same tensors."""
        for leaf in collecting(twin):
            if self.set_to_none:
                leaf.grad = None
            elif leaf.grad is not None:
                leaf.grad.detach_().zero_()


@dataclass(frozen=True, repr=False)
class HoldGradients(Act):
    """Keep the `.grad` tensors of the parameters: whether they change afterwards is compared."""

    quiet = True

    def __call__(self, twin: Twin) -> None:
        """The tensors themselves."""
        twin.held.append([tensor.grad for tensor in parameters(twin)])


@dataclass(frozen=True, repr=False)
class SetGradients(Act):
    """Give each parameter a `.grad` of the caller's own."""

    seed: int = 0
    quiet = True

    def __call__(self, twin: Twin) -> None:
        """Of the parameter's strides, as torch asks for."""
        for index, tensor in enumerate(parameters(twin)):
            tensor.grad = torch.empty_like(tensor).copy_(_weights(tensor, "contiguous", self.seed + index))


@dataclass(frozen=True, repr=False)
class Hook(Act):
    """Hang a hook on a parameter that scales its gradient or, `accumulated`, looks at it afterwards; calls are counted."""

    pick: int = 0
    factor: float = 0.5
    accumulated: bool = False
    quiet = True

    def __post_init__(self) -> None:
        check_count("Hook: pick", self.pick)

    def __call__(self, twin: Twin) -> None:
        """The hook stays."""
        found = [*parameters(twin), *(leaf for leaf in collecting(twin) if leaf.requires_grad)]
        if not found:
            return
        heard: list[Any] = []
        twin.held.append(heard)
        leaf: Any = found[self.pick % len(found)]

        def scale(gradient: Tensor | None) -> Tensor | None:  # torch gives None where a Function gave None
            heard.append(None if gradient is None else tuple(gradient.shape))
            return None if gradient is None else gradient * self.factor

        def look(leaf: Tensor) -> None:
            heard.append(None if leaf.grad is None else tuple(leaf.grad.shape))

        if self.accumulated:
            leaf.register_post_accumulate_grad_hook(look)
        else:
            leaf.register_hook(scale)


@dataclass(frozen=True, repr=False)
class Drop(Act):
    """Let go of a call's result."""

    ago: tuple[int, ...] = (0,)
    quiet = True

    def __post_init__(self) -> None:
        _check_numbers("Drop: ago", self.ago)

    def __call__(self, twin: Twin) -> None:
        """Its graph is free as soon as nothing else holds it."""
        for back in self.ago:
            if back < len(twin.outcomes):
                twin.drop(-1 - back)
