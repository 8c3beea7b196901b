"""The first replays of a graph beside eager runs of the same calls, each run a trial."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._causes import IN_BACKWARD, PADDED, UNORDERED, UNRECORDED, Held
from ._code import Executed
from ._gradients import gradients
from ._graph import Call, Graph, Setting
from ._layout import family_key
from ._left import ARGUMENT, GRADIENT, Backward, Left, difference
from ._material import memory_of, weights
from ._optimizers import steps
from ._options import disabled
from ._survey import Survey
from ._touched import hearing_grads
from ._tree import Tree, tree_of
from ._trial import HostRandomness, Snapshot, is_large, trial
from ._undo import below
from ._watch import Watch, watching
from .errors import InputError, VerificationError

__all__ = ["Verified", "Verifier"]


class Verified(Graph):
    """A graph whose first replays are verified; then it becomes a plain one."""

    verifier: Verifier

    def __call__(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...], staged: bool = False) -> Any:
        """Replay, and compare with eager."""
        return self.verifier.replay(self, tensors, values)


class _Call(Call):
    """A verified call; `lent`: a static output may be among its arguments."""

    lent = False


class Verifier:
    """What the replays of one recording are compared with; several sizes of one bucket share the count."""

    def __init__(
        self,
        setting: Setting,
        tree: Tree,
        device: torch.device,
        executed: Executed,
        generators: Mapping[int, torch.Generator],
        *,
        times: int,
        rounding: bool,
    ) -> None:
        self.setting, self.tree, self.device, self.executed = setting, tree, device, executed
        self.generators, self.rounding, self.cut, self.state = generators, rounding, False, True
        self.left = [times]
        self.padded: Collection[int] = ()
        self.held = Held([(setting.name, setting.target), *setting.optimizers])

    def begin(self, graph: Graph) -> None:
        """Verify the next replays of this graph."""
        if self.left[0] > 0:
            graph.__class__ = Verified
            graph.verifier = self  # type: ignore[attr-defined]

    def at_size(self, *, cut: bool, state: bool, padded: Collection[int]) -> Verifier:
        """The same for calls of one size of a bucket; `cut`: eager runs at another size than the graph.

        Without `state` only results and the `padded` arguments are compared: padding may write the rest.
        """
        made = object.__new__(Verifier)
        made.__dict__.update(self.__dict__)
        made.cut, made.rounding, made.state = cut, self.rounding or cut, state
        made.padded = padded
        return made

    def replay(self, graph: Graph, tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Any:
        """The result of a replay that left what eager leaves.

        Raises:
            VerificationError: what differs; everything is as it was before the call.
        """
        with graph.pool.lock:
            if self.left[0] <= 0:
                self._end(graph)
                return graph(tensors, values)
            call = _Call(self.tree, values, tensors)
            call.lent = bool(graph.pool.retired)
            expected, watch = self._eager(graph, call)
            result, found, before = self._replayed(graph, call, watch)
            compared = not (self.cut and watch.drew)  # else the padded rows draw numbers, too
            what = difference(expected, found, rounding=self.rounding, state=self.state) if compared else None
            if what is not None:
                del result
                before.undo()
                graph.replays -= 1
                result = self._settled(graph, call, expected, found, what)
            self.left[0] -= 1
            if self.left[0] <= 0:
                self._end(graph)
            return result

    def _end(self, graph: Graph) -> None:
        graph.__class__ = Graph
        vars(graph).pop("verifier", None)

    # -- runs

    def _eager(self, graph: Graph, call: _Call) -> tuple[Left, Watch]:
        """What a run of the function leaves; nothing of it stays."""
        backend, survey = self.setting.backend, self._survey(call)
        generators = [*self.generators.values()]
        with (
            disabled(),
            backend.scope(self.device, aside=not torch.is_grad_enabled()),
            trial(backend, self.device, survey, generators) as log,
        ):
            for tensor in self._in_reach(graph, call, survey).values():
                log.before_write(tensor)
            host, watch = HostRandomness(self.device), Watch(self.device, given=call.tensors, undo=log)
            with watching(watch, backend.listen), steps():
                result = self.setting.run(call.values)
            left = self._taken(result, graph, call, survey, host, watch)
            left = left._replace(backward=self._backward(result, graph, call, survey, watch))
        backend.hand_over(left.copies())
        return left, watch

    def _replayed(self, graph: Graph, call: _Call, watch: Watch) -> tuple[Any, Left, Snapshot]:
        """The result of a replay, what it left, and the way back."""
        survey, host = self._survey(call), HostRandomness(self.device)
        before = Snapshot(self.setting.backend, self.device, survey, [*self.generators.values()])
        for tensor in [*self._in_reach(graph, call, survey, watch).values(), *_written(watch)]:
            before.log.before_write(tensor)
        touched = before.log.touched
        touched.join(watch.touched)
        try:
            with hearing_grads(touched.hear):
                result = Graph.__call__(graph, call.tensors, call.values)
            left = self._taken(result, graph, call, survey, host, watch)
            return result, left._replace(backward=self._replayed_backward(result, graph, call, watch)), before
        except BaseException:
            before.undo()
            raise

    def _backward(
        self, result: Any, graph: Graph, call: _Call, survey: Survey, watch: Watch
    ) -> list[Backward | None]:
        """The gradients of arguments and of what the eager run read, for made-up ones like those met so far."""
        wanted = {ARGUMENT + f"`{p}`": t for p, t in zip(call.tree.tensor_paths, call.tensors, strict=True)}
        names = {id(t): f"`{place.name}`" for place, t in survey.tensors()}
        for tensor in watch.outside.values():
            wanted.setdefault(names.get(id(tensor), f"a tensor {tuple(tensor.shape)} from outside"), tensor)
        needing = {name: t for name, t in wanted.items() if t.requires_grad}
        results, left = _read(result)[2], list[Backward | None]()
        # On this thread, which has the pool's lock.
        with torch.autograd.set_multithreading_enabled(False):
            for backward in graph.backwards():
                carriers, incoming, found = _carriers(graph, backward, results), _incoming(backward), None
                if carriers is not None and incoming is not None:
                    found = gradients(carriers, incoming, needing, self.setting.backend.is_oom)
                left.append(found and {name: None if g is None else _copy(g) for name, g in found.items()})
        return left

    def _replayed_backward(
        self, result: Any, graph: Graph, call: _Call, watch: Watch
    ) -> list[Backward | None]:
        """Those of a replay, whose backward has a trial of its own: the caller's is still to come."""
        survey, backend = self._survey(call), self.setting.backend
        with (
            trial(backend, self.device, survey, [*self.generators.values()]) as log,
            hearing_grads(log.touched.hear),
        ):
            log.touched.join(watch.touched)
            for tensor in [*self._in_reach(graph, call, survey, watch).values(), *_written(watch)]:
                log.before_write(tensor)
            return self._backward(result, graph, call, survey, watch)

    def _survey(self, call: Call) -> Survey:
        return Survey([*self.setting.roots(call), ("arguments", list(call.values))], self.executed)

    def _in_reach(
        self, graph: Graph, call: _Call, survey: Survey, watch: Watch | None = None
    ) -> dict[str, Tensor]:
        """What a run may write where no dispatcher sees it; parameters, which are large, nobody writes so."""
        paths, tensors = call.tree.tensor_paths, call.tensors
        held = [(f"{ARGUMENT}`{path}`", t) for path, t in zip(paths, tensors, strict=True)]
        if call.lent and watch is not None:
            # A replay ends every loan: an argument may be one, which nobody may touch after.
            written = watch.written | {family_key(tensors[i]) for i, _ in graph.mutated}
            held = [(name, t) for name, t in held if family_key(t) in written]
        theirs = {id(t) for t in tensors}
        held += [(f"`{place.name}`", t) for place, t in survey.tensors() if id(t) not in theirs]
        held += [(f"a tensor {tuple(t.shape)} from outside", t) for t in graph.kept]
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in held:
            if isinstance(tensor, nn.Parameter) and not name.startswith(ARGUMENT):
                continue
            if tensor.layout is torch.strided and not is_large(tensor):
                found.setdefault(family_key(tensor), (name, tensor))
        return dict(found.values())

    def _taken(
        self, result: Any, graph: Graph, call: _Call, survey: Survey, host: HostRandomness, watch: Watch
    ) -> Left:
        """Copy what a run left while it is still there."""
        tree, tokens, results = _read(result)
        names = {family_key(t): f"`{place.name}`" for place, t in survey.tensors()}
        memory = self._in_reach(graph, call, survey, watch)
        for tensor in _written(watch):
            memory.setdefault(
                names.get(family_key(tensor), f"a tensor {tuple(tensor.shape)} from outside"), tensor
            )
        for leaf, path in enumerate(call.tree.tensor_paths) if not self.state else ():
            if leaf not in self.padded:
                memory.pop(f"{ARGUMENT}`{path}`", None)
        python = {f"`{c.place.name}`": c.after for c in survey.changes(self._survey(call))}
        touched = watch.touched.before
        leaves = {
            f"`{place.name}.grad`": t for place, t in survey.tensors() if id(t) in touched and t.is_leaf
        }
        return Left(
            tree,
            tokens,
            [_copy(t) for t in results],
            {name: _copy(_whole(t)) for name, t in memory.items()},
            {name: _copy(value) if isinstance(value, Tensor) else value for name, value in python.items()},
            {name: None if t.grad is None else _copy(t.grad) for name, t in leaves.items()},
            [],
            self.setting.backend.rng_state([*self.generators.values()]),
            host.drawn(),
        )

    # -- judging

    def _settled(self, graph: Graph, call: _Call, expected: Left, found: Left, what: str) -> Any:
        """The replay once more where eager itself differs by as much from run to run; else the error."""
        again, watch = self._eager(graph, call)
        steady = difference(expected, again, rounding=False, state=self.state) is None
        near = steady or difference(expected, again, rounding=True, state=self.state) is None
        if not steady and near and difference(expected, found, rounding=True, state=self.state) is None:
            return self._replayed(graph, call, watch)[0]
        passed = IN_BACKWARD if what.startswith(GRADIENT) else None
        why, fix = self.held.cause(near=near) or passed or self._cause_of_work(graph, call, found, watch)
        raise VerificationError(f"`{self.setting.name}`: {what}", why=why, fix=fix)

    def _cause_of_work(self, graph: Graph, call: _Call, found: Left, watch: Watch) -> tuple[str, str]:
        """The likely cause where Python is the same: the work that was recorded is not all, or not in order."""
        _, again, before = self._replayed(graph, call, watch)
        before.undo()
        graph.replays -= 1
        if difference(found, again, rounding=True, state=self.state) is not None:
            return UNORDERED
        return PADDED if self.cut else UNRECORDED


def _read(result: Any) -> tuple[Tree | None, tuple[Any, ...], Sequence[Tensor]]:
    roots = (result,)
    try:
        tree = tree_of(roots, ("output",))
    except InputError:
        return None, (), ()
    found = tree.unpack(roots)
    assert found is not None, "a value has the structure that was read off it"
    return tree, found[1], found[0]


def _written(watch: Watch) -> list[Tensor]:
    """What an eager run wrote of memory that was there before."""
    return [t for key, t in watch.outside.items() if key in watch.written and not is_large(t)]


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), below():
        return tensor.clone()


def _whole(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in: what is behind a view counts, too."""
    with torch.inference_mode(False), below():
        return memory_of(tensor)


def _carriers(graph: Graph, backward: Graph, results: Sequence[Tensor]) -> list[Tensor] | None:
    """The results whose gradients this backward takes; None where a run has none of the kind."""
    met = [p for p, given in zip(graph.primaries, backward.mask, strict=True) if given]
    there = all(p.leaf < len(results) and not (p.is_base and results[p.leaf]._base is None) for p in met)
    found = [p.of(results) for p in met] if there else []
    return found if there and all(t.requires_grad for t in found) else None


def _incoming(backward: Graph) -> list[Tensor] | None:
    """Made-up gradients, laid out as those that it was recorded for; None where these share memory."""
    made = []
    statics = backward.inputs.tensors
    if len({family_key(t) for t in statics}) < len(statics):
        return None
    for static in statics:
        if static.is_conj() or static.is_neg():
            return None
        repeated = [n > 1 and stride == 0 for n, stride in zip(static.shape, static.stride(), strict=True)]
        size = [1 if again else n for again, n in zip(repeated, static.shape, strict=True)]
        one = torch.empty_strided(size, static.stride(), dtype=static.dtype, device=static.device)
        made.append(one.copy_(weights(one)).expand(static.shape))
    return made
