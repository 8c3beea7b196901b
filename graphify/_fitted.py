"""A bucket's graph for calls of one size: the same recording behind narrower copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._cut_plan import CutPlan, cut_results
from ._cuts import Way
from ._flats import Flats, Tail
from ._graph import Call, Graph, Setting, plan_delivery
from ._inputs import StaticInputs
from ._layout import is_dense
from ._padding import Fit
from ._results import lending
from ._specification import same_path
from ._tree import Tree, tree_of
from ._undo import version_of
from .backends.base import Copy

__all__ = ["Padded", "fitted", "through_padding"]

Sources = Sequence[Tensor]
Finder = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Way]]
"""The ways of a run that shows them: from its results and its arguments."""


class Padded:
    """A bucket's graphs whose results need gradients, for calls of one size: padded before, cut after."""

    def __init__(
        self, graph: Any, fit: Fit, ways: Sequence[Way] | None, fills: Sequence[Any], tree: Tree
    ) -> None:
        self.graph, self.fit, self.ways, self.fills, self.tree = graph, fit, ways, fills, tree
        self.conflicts: frozenset[int] = graph.conflicts
        self.step: None = None

    def __call__(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Any:
        """Replay a graph of the bucket for these tensors."""
        return through_padding(self.graph, self.fit, self.ways, self.fills, Call(self.tree, values, tensors))


def through_padding(
    graph: Callable[[tuple[Tensor, ...], tuple[Any, ...]], Any],
    fit: Fit,
    ways: Sequence[Way] | Finder | None,
    fills: Sequence[Any],
    call: Call,
) -> Any:
    """Make a call of the bucket's size, and its result one of the call's; what it writes, the caller gets."""
    call.refuse_stale()
    padded = fit.padded(call.tensors, fills)
    versions = [version_of(t) for t in padded]
    result = graph(padded, call.tree.rebuild(padded, call.consts))
    for leaf, (mine, static) in enumerate(zip(call.tensors, padded, strict=True)):
        if mine is not static and (static.is_inference() or version_of(static) != versions[leaf]):
            _write_back(mine, fit.lives(leaf, static))
    return _cut_result(result, fit, ways, call.tensors, padded)


def _write_back(mine: Tensor, live: Tensor) -> None:
    with torch.inference_mode(mine.is_inference()), torch.no_grad():
        # An inference tensor has no version that would tell.
        if not mine.is_inference() or not torch.equal(mine, live):
            mine.copy_(live)


def _cut_result(
    result: Any, fit: Fit, ways: Sequence[Way] | Finder | None, tensors: Sources, padded: Sources
) -> Any:
    if ways is None and all(mine is static for mine, static in zip(tensors, padded, strict=True)):
        return result
    roots = (result,)
    tree = tree_of(roots, ["output"])
    found = tree.unpack(roots)
    assert found is not None, "a value has the structure that was read off it"
    if ways is None:
        own = {id(p): t for p, t in zip(padded, tensors, strict=True)}
        made = [own.get(id(t), t) for t in found[0]]
    else:
        known = ways(found[0], padded) if callable(ways) else ways
        made = cut_results(found[0], known, tensors, fit)
    return tree.rebuild(made, tree.consts(roots))[0]


def fitted(
    graph: Graph, setting: Setting, fit: Fit, ways: Sequence[Way] | None, fills: Sequence[Any], tree: Tree
) -> Graph:
    """The graph of a bucket for calls of one size; a call of it costs what a call of any graph does."""
    assert graph.outcome is not None, "the recording kept what it returned"
    made, inputs = Graph(setting, graph.recording, graph.memory), graph.inputs
    made.paths = graph.paths
    made.inputs, made.step, made.conflicts = inputs, graph.step, graph.conflicts
    made.kept, made.bumped, made.unguarded = graph.kept, graph.bumped, graph.unguarded
    lives = _lives(fit, inputs.tensors)
    made.mutated = [(i, lives[i]) for i, _ in graph.mutated]
    plan = CutPlan(graph.outcome, ways or (), inputs.tensors, lives, fit)
    lent = setting.static_outputs and all(map(is_dense, plan.copied))
    theirs = {i for i, path in enumerate(tree.tensor_paths) if same_path(path) in setting.lent}
    copies = _copies(inputs, lives, fit, theirs)
    made.copied = plan.copied
    made.stage, launch = setting.backend.replayer(
        graph.recording, copies, [] if lent else plan.copied, shared=True
    )
    if lent and plan.copied:
        launch = lending(launch, plan.copied, setting.backend, setting.pool)
    made.launch = plan.moded(launch)
    behind = _behind(inputs, setting.flats, fit, fills, theirs | {i for i, _ in graph.mutated})
    made.fill = _filler(inputs, behind, [(lives[i], i) for i in theirs & fit.dims().keys()], fit)
    plan_delivery(made, plan, graph.outcome, tree)
    return made


def _copies(inputs: StaticInputs, lives: Sources, fit: Fit, theirs: set[int]) -> list[Copy]:
    """What every call copies: one tensor that stands for two arguments once, a buffer that users fill not at all."""
    dims, statics = fit.dims(), inputs.tensors
    first = {id(static): i for i, static in reversed(list(enumerate(statics)))}
    copies = [(lives[i], i) for i in dims if first[id(statics[i])] == i and i not in theirs]
    return [*copies, *((static, i) for static, i in inputs.copies if i not in dims)]


def _is_in_place(given: Tensor, live: Tensor) -> bool:
    """Whether a tensor is the very part of a static input that it would be copied to."""
    steps = zip(given.shape, given.stride(), live.stride(), strict=True)
    return given.data_ptr() == live.data_ptr() and all(n == 1 or a == b for n, a, b in steps)


def _lives(fit: Fit, statics: Sources) -> list[Tensor]:
    """The live part of each static input; one tensor that stands for two arguments stays one."""
    lives: dict[int, Tensor] = {}
    with torch.no_grad():
        for i, static in enumerate(statics):
            lives.setdefault(id(static), static if fit.is_full else fit.lives(i, static))
    return [lives[id(static)] for static in statics]


class _Behind(NamedTuple):
    """The padded part of one static input; `open`: something else than calls may write it, too."""

    tail: Tail
    live: tuple[int, ...]
    open: bool


def _behind(
    inputs: StaticInputs, flats: Flats, fit: Fit, fills: Sequence[Any], written: set[int]
) -> list[_Behind]:
    shapes = fit.axes.padded_shapes([t.shape for t in inputs.tensors], fit.live)
    found: dict[int, _Behind] = {}
    for leaf, places in fit.dims().items():
        static = inputs.tensors[leaf]
        if id(static) not in found:
            tail = flats.tail(static, [dim for dim, _ in places], fills[leaf])
            found[id(static)] = _Behind(tail, shapes[leaf], leaf in written)
    return list(found.values())


def _filler(
    inputs: StaticInputs, behind: Sequence[_Behind], theirs: Sequence[Copy], fit: Fit
) -> Callable[[Sources], None]:
    """What fills everything that the copies leave out: odd leaves, and what stands behind the live part."""
    others = inputs.filler(without=fit.dims())
    inference = any(t.is_inference() for t in inputs.tensors)

    def fill(sources: Sources) -> None:
        if others is not None:
            others(sources)
        with torch.inference_mode() if inference else torch.no_grad():
            # Other parts of a lent buffer, which may be one for all: each is read before any is written.
            moved = [(live, sources[i].clone()) for live, i in theirs if not _is_in_place(sources[i], live)]
            for live, given in moved:
                live.copy_(given)
            for tail, size, is_open in behind:
                if is_open:
                    tail.spoil()
                tail.clean(size)

    return fill
