"""The first replays of a graph beside eager runs of the same calls, each run a trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._code import Executed
from ._gradients import gradients
from ._graph import Call, Graph, Setting
from ._layout import family_key
from ._material import weights
from ._nearness import unlike
from ._optimizers import steps
from ._options import disabled
from ._places import MISSING, is_plain, same
from ._survey import Survey
from ._tree import Tree, tree_of
from ._trial import HostRandomness, Snapshot, is_large, trial
from ._undo import below
from ._watch import Watch, watching
from .errors import InputError, VerificationError

__all__ = ["Verified", "Verifier"]

_ARGUMENT = "argument "
_WORDS = ("replayed", "in eager")
_ONCE = "Python runs when a graph is recorded; a replay repeats device work only"
_KEEP = (
    "keep it in a tensor that the function reads, pass it as an argument, or name it plainly in the function"
)


_GRADIENT = "the gradient of "
_IN_BACKWARD = (
    "Python takes part in the backward (a hook, or a Function's own), and ran when that was recorded",
    "keep what it reads in a tensor, or make the call inside `with graphify.disabled():`",
)
_UNORDERED = (
    "two replays differ: some of the work is in no order, such as a kernel on another stream",
    "make the other stream wait, and join it before the end (`wait_stream`)",
)
_UNRECORDED = (
    "some of the work is not in the recording: on another stream, or on memory (numpy, `data_ptr`, an extension)",
    "use torch operators on the current stream, or call that part outside the graphed function",
)


class Verified(Graph):
    """A graph whose first replays are verified; then it becomes a plain one."""

    verifier: Verifier

    def __call__(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...], staged: bool = False) -> Any:
        """Replay, and compare with eager."""
        return self.verifier.replay(self, tensors, values)


class _Call(Call):
    """A verified call; `lent`: a static output may be among its arguments."""

    lent = False


Backward = dict[str, Tensor | None]
"""What one backward gave, by what it is the gradient of."""


class _Left(NamedTuple):
    """What one run left, copied before anything else could write there."""

    tree: Tree | None
    """Of the result; None where no structure could be read off it."""
    tokens: tuple[Any, ...]
    results: Sequence[Tensor]
    memory: dict[str, Tensor]
    python: dict[str, Any]
    grads: dict[str, Tensor | None]
    backward: list[Backward | None]
    """For each recorded backward."""
    streams: Any
    drawn: list[str]

    def copies(self) -> Iterator[Tensor]:
        """Every tensor that was copied for it."""
        yield from self.results
        yield from self.memory.values()
        passed = (grad for found in self.backward if found is not None for grad in found.values())
        others = (*self.python.values(), *self.grads.values(), *passed)
        yield from (t for t in others if isinstance(t, Tensor))


class _Kept(NamedTuple):
    """What Python held at the capture, whether or not the code names it: content by name, and how to read it now."""

    name: str
    before: Any
    now: Any


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
        # Only values: a survey would keep the very instance alive whose graphs die with it.
        survey = Survey([(setting.name, setting.target), *setting.optimizers], Executed(everything=True))
        places = (held for held in survey.places.values() if held[0].kind != "attr")
        self._places = [
            (place, value) for place, value in places if is_plain(value) or isinstance(value, Tensor)
        ]
        self._bulk = survey.bulk

    def begin(self, graph: Graph) -> None:
        """Verify the next replays of this graph."""
        if self.left[0] > 0:
            graph.__class__ = Verified
            graph.verifier = self  # type: ignore[attr-defined]

    def at_size(self, *, cut: bool, state: bool) -> Verifier:
        """The same for calls of one size of a bucket; `cut`: eager runs at another size than the graph.

        Without `state` only results and arguments are compared: padding may write the rest.
        """
        made = object.__new__(Verifier)
        made.__dict__.update(self.__dict__)
        made.cut, made.rounding, made.state = cut, self.rounding or cut, state
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
            what = self._difference(expected, found, rounding=self.rounding) if compared else None
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

    def _eager(self, graph: Graph, call: _Call) -> tuple[_Left, Watch]:
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

    def _replayed(self, graph: Graph, call: _Call, watch: Watch) -> tuple[Any, _Left, Snapshot]:
        """The result of a replay, what it left, and the way back."""
        survey, host = self._survey(call), HostRandomness(self.device)
        before = Snapshot(self.setting.backend, self.device, survey, [*self.generators.values()])
        for tensor in [*self._in_reach(graph, call, survey, watch).values(), *_written(watch)]:
            before.log.before_write(tensor)
        try:
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
        wanted = {_ARGUMENT + f"`{p}`": t for p, t in zip(call.tree.tensor_paths, call.tensors, strict=True)}
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
        with trial(backend, self.device, survey, [*self.generators.values()]) as log:
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
        held = [(f"{_ARGUMENT}`{path}`", t) for path, t in zip(paths, tensors, strict=True)]
        if call.lent and watch is not None:
            # A replay ends every loan: an argument may be one, which nobody may touch after.
            written = watch.written | {family_key(tensors[i]) for i, _ in graph.mutated}
            held = [(name, t) for name, t in held if family_key(t) in written]
        theirs = {id(t) for t in tensors}
        held += [(f"`{place.name}`", t) for place, t in survey.tensors() if id(t) not in theirs]
        held += [(f"a tensor {tuple(t.shape)} from outside", t) for t in graph.kept]
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in held:
            if isinstance(tensor, nn.Parameter) and not name.startswith(_ARGUMENT):
                continue
            if tensor.layout is torch.strided and not is_large(tensor):
                found.setdefault(family_key(tensor), (name, tensor))
        return dict(found.values())

    def _taken(
        self, result: Any, graph: Graph, call: _Call, survey: Survey, host: HostRandomness, watch: Watch
    ) -> _Left:
        """Copy what a run left while it is still there."""
        tree, tokens, results = _read(result)
        names = {family_key(t): f"`{place.name}`" for place, t in survey.tensors()}
        memory = self._in_reach(graph, call, survey, watch)
        for tensor in _written(watch):
            memory.setdefault(
                names.get(family_key(tensor), f"a tensor {tuple(tensor.shape)} from outside"), tensor
            )
        python = {f"`{c.place.name}`": c.after for c in survey.changes(self._survey(call))}
        leaves = {f"`{place.name}.grad`": t for place, t in survey.tensors() if t.is_leaf and t.requires_grad}
        return _Left(
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

    def _settled(self, graph: Graph, call: _Call, expected: _Left, found: _Left, what: str) -> Any:
        """The replay once more where eager itself differs by as much from run to run; else the error."""
        again, watch = self._eager(graph, call)
        steady = self._difference(expected, again, rounding=False) is None
        near = steady or self._difference(expected, again, rounding=True) is None
        if not steady and near and self._difference(expected, found, rounding=True) is None:
            return self._replayed(graph, call, watch)[0]
        passed = _IN_BACKWARD if what.startswith(_GRADIENT) else None
        why, fix = self._cause(near=near) or passed or self._cause_of_work(graph, call, found, watch)
        raise VerificationError(f"`{self.setting.name}`: {what}", why=why, fix=fix)

    def _cause(self, *, near: bool) -> tuple[str, str] | None:
        """The likely cause where Python holds it."""
        for kept in self._changed():
            if isinstance(kept.before, Tensor):
                return f"{kept.name} is re-bound since the capture, and the graph reads the old memory", _KEEP
            if isinstance(kept.before, (int, float, complex)):
                return (
                    f"a baked scalar: {kept.name} is {kept.now!r}, and was {kept.before!r} at the capture",
                    _KEEP,
                )
            return f"host state: {kept.name} changed since the capture, where no guard looks for it", _KEEP
        if not near:
            text = "host state: eager itself gives another result at each run, by something that Python does not show"
            return f"{text} (a file, a clock, a counter in C)", "pass what it reads as an argument"
        return None

    def _difference(self, expected: _Left, found: _Left, *, rounding: bool) -> str | None:
        """The first thing that one run left otherwise than another."""
        what = _unlike_results(expected, found, rounding=rounding)
        if what is None:
            memories = [left.memory for left in (expected, found)]
            if not self.state:
                memories = [
                    {n: t for n, t in memory.items() if n.startswith(_ARGUMENT)} for memory in memories
                ]
            what = _unlike_all(*memories, rounding=rounding)
        if what is None and self.state:
            what = _unlike_state(expected, found, rounding=rounding)
        return what if what is not None else _unlike_backward(expected, found, rounding=rounding)

    def _changed(self) -> Iterator[_Kept]:
        for place, before in self._places:
            now = place.read()
            if not same(now, before):
                kind = "the closure variable " if place.kind == "cell" else ""
                yield _Kept(f"{kind}`{place.name}`", before, "nothing" if now is MISSING else now)
        for bulk in self._bulk:
            if bulk.read() != bulk.content:
                yield _Kept(f"`{bulk.name}`", None, None)

    def _cause_of_work(self, graph: Graph, call: _Call, found: _Left, watch: Watch) -> tuple[str, str]:
        """The likely cause where Python is the same: the work that was recorded is not all, or not in order."""
        _, again, before = self._replayed(graph, call, watch)
        before.undo()
        graph.replays -= 1
        if self._difference(found, again, rounding=True) is not None:
            return _UNORDERED
        return _UNRECORDED


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
    storage = tensor.untyped_storage()
    with torch.inference_mode(False), below():
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


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


# -- comparing


def _unlike_state(expected: _Left, found: _Left, *, rounding: bool) -> str | None:
    return (
        _unlike_all(expected.python, found.python, rounding=rounding)
        or _unlike_all(expected.grads, found.grads, rounding=rounding)
        or _unlike_streams(expected, found)
    )


def _unlike_backward(expected: _Left, found: _Left, *, rounding: bool) -> str | None:
    for one, other in zip(expected.backward, found.backward, strict=False):
        if one is not None and other is not None:
            what = _unlike_all(one, other, rounding=rounding)
            if what is not None:
                return f"{_GRADIENT}{what}"
    return None


def _unlike_results(expected: _Left, found: _Left, *, rounding: bool) -> str | None:
    if expected.tree is None or found.tree is None or expected.tree != found.tree:
        return "`output` is of another structure in eager"
    for path, left, right in zip(expected.tree.const_paths, expected.tokens, found.tokens, strict=True):
        if left != right:
            return f"`{path}` is {right!r} replayed, {left!r} in eager"
    for path, one, other in zip(expected.tree.tensor_paths, expected.results, found.results, strict=True):
        what = unlike(one, other, rounding=rounding, words=_WORDS)
        if what is not None:
            return f"`{path}`: {what}"
    return None


def _unlike_all(expected: Mapping[str, Any], found: Mapping[str, Any], *, rounding: bool) -> str | None:
    for name in {**expected, **found}:
        left, right = expected.get(name, MISSING), found.get(name, MISSING)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            what = unlike(left, right, rounding=rounding, words=_WORDS)
        elif is_plain(left) and is_plain(right) and same(right, left):
            what = None
        elif left is MISSING or right is MISSING or is_plain(left) or is_plain(right):
            what = f"left as {_shown(right)} by the replay, as {_shown(left)} by eager"
        else:
            what = None
        if what is not None:
            return f"{name}: {what}"
    return None


def _shown(value: Any) -> str:
    if value is MISSING:
        return "it was"
    return repr(value) if is_plain(value) else f"a {type(value).__name__}"


def _unlike_streams(expected: _Left, found: _Left) -> str | None:
    for name in expected.drawn:
        if name not in found.drawn:
            return f"the stream of {name} moves in eager only"
    for (generator, left), (_, right) in zip(expected.streams, found.streams, strict=True):
        if not torch.equal(left, right):
            return f"the random stream of {generator.device} is at another place than in eager"
    return None
