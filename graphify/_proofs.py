"""Proofs that padding changes nothing: a bucket's run beside one at the exact size and one with other padding.

Each run is a trial and leaves no trace. Memory above 256 MiB that a run writes is neither put back nor compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._autograd import unhooked
from ._cuts import Learner, teach
from ._graph import Call
from ._layout import family_key, first_byte, span, view_of
from ._life import Life
from ._nearness import unlike
from ._optimizers import steps
from ._padding import Fit
from ._specification import root_of
from ._survey import Survey
from ._tree import Tree, tree_of
from ._trial import is_large, trial
from ._undo import UndoLog
from ._watch import Watch, watching
from .errors import PaddingError

__all__ = ["Proof", "prove"]

_FIX = "mask the padded rows, give `pad=` a value that they ignore, or take this dimension out of `buckets`"
_SIZE = "padding adds rows: a size that is used as a number is the bucket's, and each padded row takes part"
_ROWS = "each padded row is written where its index says, as a live one is"
_COPY = "a bucket has a copy of the argument, which the next call fills"
_CLONE = "leave a clone, return it, or take this dimension out of `buckets`"
_SCRATCH = (
    "give `pad=` an index that nothing is written at, or, for a row that nobody reads,"
    ' write check_padding="outputs"'
)

Cutter = Callable[[list[Tensor], Collection[int], Sequence[Tensor]], list[Tensor]]


class Proof(NamedTuple):
    """What the runs of one bucket taught."""

    tree: Tree
    """Of the result."""
    cuts: tuple[Learner, ...]
    """One per tensor of the result."""
    touched: frozenset[int]
    """Outside memory that the function uses, when it writes any of it."""
    said: str
    """Why something was not compared; empty when all was."""

    def is_clear(self, fit: Fit) -> bool:
        """Whether the runs so far tell which part of each result is live in calls of this size."""
        return all(learner.is_clear(fit) for learner in self.cuts)


class _Run(NamedTuple):
    """What one trial run left, copied before it was undone."""

    tree: Tree
    tokens: tuple[Any, ...]
    results: list[Tensor]
    memory: dict[str, Tensor]
    """Whole storages from outside that it wrote."""
    python: dict[str, Tensor]
    """Attributes and gradients that it bound."""
    arguments: list[Tensor]
    grads: dict[str, Tensor]
    watch: Watch
    skipped: list[Tensor]

    @property
    def state(self) -> dict[str, Tensor]:
        """All that it left outside."""
        return self.memory | self.python


def prove(
    life: Life,
    device: torch.device,
    call: Call,
    fit: Fit,
    fills: Sequence[tuple[Any, bool]],
    *,
    check: bool | str,
) -> Proof:
    """Run a call at its exact size and padded in two ways, compare, and learn how results are cut.

    `fills` has the fill of each leaf, and whether the user chose it: then the second padding has it, too.

    Raises:
        CaptureError: the function can never be captured.
        PaddingError: what differs, with the smallest difference.
    """
    prover = _Prover(life, device, call, fit, state=check is True)
    exact = prover.exact()
    padded = prover.padded([fill for fill, _ in fills])
    why = _uncompared(exact, check)
    prover.check_rows_left(exact, padded)
    if not why:
        prover.compare(exact, padded, rounding=True)
        prover.check_writes([fill for fill, _ in fills], exact)
        if not all(chosen for leaf, (_, chosen) in enumerate(fills) if leaf in fit.dims()):
            other = prover.padded([fill if chosen else _from_batch for fill, chosen in fills])
            prover.compare(padded, other, rounding=False)
    outside = exact.watch.outside.keys()
    touched = frozenset(outside) if exact.watch.written & outside else frozenset()
    if not why and exact.skipped:
        why = f"{len(exact.skipped)} tensors above 256 MiB that it writes are not compared"
    return Proof(exact.tree, tuple(prover.cuts), touched, why)


def _uncompared(exact: _Run, check: bool | str) -> str:
    if not check:
        return "check_padding=False"
    return "it draws random numbers" if exact.watch.drew else ""


def _from_batch(buffer: Tensor, live: tuple[int, ...]) -> None:
    """Other padding of a kind that is sure to be legal: rows of the call itself, the last first."""
    for dim, size in enumerate(live):
        if behind := buffer.shape[dim] - size:
            rows = (-1 - torch.arange(behind, device=buffer.device)) % size
            buffer.narrow(dim, size, behind).copy_(buffer.index_select(dim, rows))


def _copied(tensor: Tensor) -> Tensor:
    low, high = span([tensor])
    flat = torch.empty(high - low, dtype=torch.uint8, device=tensor.device)
    flat.copy_(torch.empty_like(flat).set_(tensor.untyped_storage(), low, (high - low,), (1,)))
    return view_of(flat, tensor, first_byte(tensor) - low, tensor.shape, tensor.stride())


class _Prover:
    """The runs of one call, one after the other."""

    def __init__(self, life: Life, device: torch.device, call: Call, fit: Fit, *, state: bool) -> None:
        self.state = state
        self.life, self.device, self.call, self.fit = life, device, call, fit
        self.cuts: list[Learner] = []
        paths, static = call.tree.tensor_paths, life.options.static_args
        self._lent = {
            id(t)
            for path, t in zip(paths, call.tensors, strict=True)
            if root_of(path) in static and is_large(t)
        }
        """Arguments by reference of which no copy is made, as of any memory of their size."""
        self._exact: list[Tensor] = []

    def exact(self) -> _Run:
        """The run that eager makes."""
        run = self._run(self._copies(self.call.tensors), self._whole)
        found = self.life.offence(run.watch, ())
        if found is not None:
            raise found
        self._exact = run.results
        return run

    def check_rows_left(self, exact: _Run, padded: _Run) -> None:
        """Raise where an attribute would have the rows of a bucket, also where nothing else can be compared."""
        for name in exact.python.keys() & padded.python.keys() if self.state else ():
            here, there = tuple(padded.python[name].shape), tuple(exact.python[name].shape)
            if here != there:
                what = f"{name} depends on the padding: {here} padded, {there} at its exact size"
                raise self._error(what, _SIZE)

    def check_writes(self, fills: Sequence[Any], exact: _Run) -> None:
        """Raise where padded rows write memory that live rows leave alone, whatever it holds and they write."""
        big = {family_key(t) for t in exact.skipped}
        written = {
            key: t
            for key, t in exact.watch.outside.items()
            if key in exact.watch.written and key not in big and t.is_floating_point()
        }
        if not self.state or not written or exact.watch.backward:
            return
        stir = list(written.values())
        live = self._run(self._copies(self.call.tensors), lambda r, o, t: r, stir).memory
        found = self.padded(fills, stir).memory
        for name in live.keys() & found.keys():
            start = _stirred(live[name])
            alone = (live[name] == start) & (found[name] != start)
            if alone.any():
                raise self._error(f"padded rows write {int(alone.sum())} elements of {name}", _ROWS, _SCRATCH)

    def padded(self, fills: Sequence[Any], stir: Sequence[Tensor] = ()) -> _Run:
        """A run of the bucket's size, its results cut."""
        detached = {id(t): t if id(t) in self._lent else t.detach() for t in self.call.tensors}
        padded = self.fit.padded([detached[id(t)] for t in self.call.tensors], fills)
        tensors = self._copies(padded)
        return self._run(tensors, self._cut, stir)

    @contextmanager
    def _blaming(self, cut: Cutter) -> Iterator[None]:
        """What only a padded run raises is the padding's fault; what the backend raises around it is not."""
        try:
            yield
        except PaddingError:
            raise
        except Exception as error:
            if cut != self._cut or self.life.setting.backend.is_oom(error):
                raise
            raise self._error(f"raises {error!r} when padded", "it runs at its exact size") from error

    def _copies(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies, laid out alike, that a run may write and take gradients of; one tensor given twice stays one."""
        made: dict[int, Tensor] = {}
        for tensor, own in zip(tensors, self.call.tensors, strict=True):
            if id(tensor) in self._lent:
                made[id(tensor)] = tensor
            elif id(tensor) not in made:
                with torch.inference_mode(own.is_inference()), torch.no_grad():
                    copied = _copied(tensor.detach())
                made[id(tensor)] = copied.requires_grad_() if own.requires_grad else copied
        return tuple(made[id(t)] for t in tensors)

    def _whole(
        self, results: list[Tensor], outside: Collection[int], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """The results of the exact run, which show what each lies in."""
        self.cuts = [Learner() for _ in results]
        teach(self.cuts, self.fit.live, results, tensors, lambda _, result: family_key(result) in outside)
        return results

    def _cut(
        self, results: list[Tensor], outside: Collection[int], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Cut the results of a padded run; the first one shows which way of several is right."""
        fit = self.fit
        if len(results) != len(self.cuts):
            raise self._error(f"returns {len(results)} tensors, not {len(self.cuts)}, when padded", _SIZE)
        if any(r.dim() != e.dim() for r, e in zip(results, self._exact, strict=True)):
            raise self._error("returns tensors of other dimensions when padded", _SIZE)
        teach(self.cuts, fit.full, results, tensors, lambda _, result: family_key(result) in outside)
        cut: list[Tensor] = []
        for learner, result, expected in zip(self.cuts, results, self._exact, strict=True):
            ways = [(way, way(result, fit.live, fit.full)) for way in learner.cuts(fit)]
            near = [w for w in ways if unlike(expected, w[1].detach(), rounding=True) is None]
            learner.choose(fit, [way for way, _ in near or ways])
            cut.append((near or ways)[0][1])
        return cut

    def _run(self, tensors: tuple[Tensor, ...], cut: Cutter, stir: Sequence[Tensor] = ()) -> _Run:
        life, backend = self.life, self.life.setting.backend
        call = Call(self.call.tree, self.call.tree.rebuild(tensors, self.call.consts), tensors)
        survey = life.survey(call)
        with (
            backend.scope(self.device, aside=not torch.is_grad_enabled()),
            trial(backend, self.device, survey, life.known_generators()) as log,
        ):
            for tensor in stir:
                log.before_write(tensor)
                _memory_of(tensor).copy_(_stirred(_memory_of(tensor)))
            watch = Watch(self.device, given=tensors, undo=log)
            with watching(watch, backend.listen), steps(), self._blaming(cut):
                result = life.setting.run(call.values)
            with self._blaming(cut):
                run = self._taken(result, watch, log, survey, call, cut)
        backend.hand_over([*run.results, *run.state.values(), *run.arguments, *run.grads.values()])
        return run

    def _taken(
        self, result: Any, watch: Watch, log: UndoLog, survey: Survey, call: Call, cut: Cutter
    ) -> _Run:
        """Copy what a run left while it is still there."""
        roots = (result,)
        tree = tree_of(roots, ["output"])
        found = tree.unpack(roots)
        assert found is not None, "a value has the structure that was read off it"
        names = {family_key(t): f"`{place.name}`" for place, t in survey.tensors()}
        live = cut(list(found[0]), names.keys() | watch.outside.keys(), call.tensors)
        memory, python = _written(watch, log.skipped, names), self._rebound(survey, call)
        grads = {} if watch.backward else self._gradients(live, watch.outside, call, names)
        arguments = [
            torch.empty(0) if id(t) in self._lent else self.fit.lives(i, t.detach()).clone()
            for i, t in enumerate(call.tensors)
        ]
        results = [t.detach().clone() for t in live]
        return _Run(tree, found[1], results, memory, python, arguments, grads, watch, log.skipped)

    def _rebound(self, survey: Survey, call: Call) -> dict[str, Tensor]:
        """The tensors that the run left in Python's hands: attributes, and gradients of parameters."""
        changes = survey.changes(self.life.survey(call))
        dims = self.fit.dims()
        mine = {family_key(t): call.tree.tensor_paths[i] for i, t in enumerate(call.tensors) if i in dims}
        for change in changes if self.state else ():
            path = mine.get(family_key(change.after)) if isinstance(change.after, Tensor) else None
            if path is not None:
                raise self._error(f"`{change.place.name}` is left as memory of `{path}`", _COPY, _CLONE)
        left = {f"`{c.place.name}`": c.after for c in changes if isinstance(c.after, Tensor)}
        for place, leaf in survey.tensors():
            if leaf.is_leaf and leaf.requires_grad and leaf.grad is not None:
                left[f"`{place.name}.grad`"] = leaf.grad
        return {name: tensor.detach().clone() for name, tensor in left.items()}

    def _gradients(
        self, live: Sequence[Tensor], outside: dict[int, Tensor], call: Call, names: dict[int, str]
    ) -> dict[str, Tensor]:
        """Gradients of a weighted sum of the live results."""
        graded = [r for r in live if r.requires_grad] if torch.is_grad_enabled() else []
        if not graded:
            return {}
        found: dict[str, tuple[int, Tensor]] = {}
        for leaf, (path, tensor) in enumerate(zip(call.tree.tensor_paths, call.tensors, strict=True)):
            if tensor.requires_grad:
                found[f"`{path}`"] = (leaf, tensor)
        for key, tensor in outside.items():
            if tensor.requires_grad:
                found[names.get(key, f"a tensor {tuple(tensor.shape)} from outside")] = (-1, tensor)
        wanted, weights = [t for _, t in found.values()], [_weights(r) for r in graded]
        try:
            with unhooked(wanted):
                grads: Sequence[Tensor | None] = torch.autograd.grad(
                    graded, wanted, weights, allow_unused=True
                )
        except RuntimeError as error:
            if self.life.setting.backend.is_oom(error):
                raise
            return {}  # a backward that raises has no gradients to compare, and eager's raises when it comes
        return {
            f"the gradient of {name}": self.fit.lives(leaf, g).clone()
            for (name, (leaf, _)), g in zip(found.items(), grads, strict=True)
            if g is not None
        }

    def compare(self, expected: _Run, found: _Run, *, rounding: bool) -> None:
        """Raise for the first thing that differs between two runs."""
        if expected.tree != found.tree or expected.tokens != found.tokens:
            raise self._error("returns other values, not tensors, when padded", _SIZE)
        paths = [f"`{path}`" for path in expected.tree.tensor_paths]
        arguments = [f"argument `{path}`" for path in self.call.tree.tensor_paths]
        for names, left, right in (
            (paths, expected.results, found.results),
            (arguments, expected.arguments, found.arguments),
        ):
            self._compare_all(
                dict(zip(names, left, strict=True)), dict(zip(names, right, strict=True)), rounding
            )
        if self.state:
            self._compare_all(expected.state, found.state, rounding)
        self._compare_all(expected.grads, found.grads, rounding)

    def _compare_all(self, expected: dict[str, Tensor], found: dict[str, Tensor], rounding: bool) -> None:
        for name in {**expected, **found}:
            if name not in expected or name not in found:
                raise self._error(f"{name} is written in one run only", _SIZE)
            what = unlike(expected[name], found[name], rounding=rounding)
            if what is not None:
                with_what = "the padding" if rounding else "what the padding holds"
                raise self._error(f"{name} depends on {with_what}: {what}", _SIZE)

    def _error(self, what: str, why: str, fix: str = _FIX) -> PaddingError:
        sizes = [
            f"{bucket.name} {live} in {full}"
            for bucket, live, full in zip(self.fit.axes.buckets, self.fit.live, self.fit.full, strict=True)
        ]
        return PaddingError(f"`{self.life.setting.name}`, {', '.join(sizes)}: {what}", why=why, fix=fix)


def _written(watch: Watch, skipped: Sequence[Tensor], names: dict[int, str]) -> dict[str, Tensor]:
    """The outside memory that a run wrote, as it left it: whole storages, since rows behind a view count."""
    big = {family_key(t) for t in skipped}
    found = {}
    for key, tensor in watch.outside.items():
        if key in watch.written and key not in big:
            found[names.get(key, f"a tensor {tuple(tensor.shape)} from outside")] = _memory_of(tensor).clone()
    return found


def _memory_of(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, rows that it does not show included."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def _stirred(memory: Tensor) -> Tensor:
    """Values near 1 that no run would write by chance."""
    return (
        torch.arange(memory.numel(), device=memory.device, dtype=torch.float64)
        .cos()
        .div(2)
        .add(1)
        .to(memory.dtype)
    )


def _weights(result: Tensor) -> Tensor:
    """Incoming gradients that differ from element to element."""
    numbers = torch.arange(1, result.numel() + 1, device=result.device, dtype=torch.float32).cos()
    return numbers.reshape(result.shape).to(result.dtype)
