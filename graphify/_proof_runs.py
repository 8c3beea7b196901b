"""The runs of a proof: a call at its exact size and padded, each a trial that leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._cuts import Learner, teach
from ._exacts import Exacts
from ._gradients import gradients
from ._graph import Call
from ._layout import family_key
from ._left import apart, form_of, is_state
from ._lessons import Lessons
from ._marks import Extra, Mark, Marks
from ._material import copied, from_batch, memory_of, stirred, weights, written
from ._nearness import unlike
from ._optimizers import steps
from ._padding import Fit
from ._specification import root_of
from ._survey import Survey
from ._touched import Touched
from ._tree import Tree, tree_of
from ._trial import is_large, trial
from ._trust import padding_error, remedy
from ._undo import UndoLog
from ._watch import Watch, watching
from .errors import PaddingError, again

__all__ = ["SIZE", "Marked", "Run", "Runs"]

SIZE = "padding adds rows: a size that is used as a number is the bucket's, and each padded row takes part"
_COPY = "a bucket has a copy of the argument, which the next call fills"
_CLONE = "leave a clone, return it, or take this dimension out of `buckets`"

Marked = dict[object, Mark]
"""By the path of an argument, or by memory from outside."""
Cutter = Callable[[list[Tensor], Collection[int], Sequence[Tensor]], list[Tensor]]


class Run(NamedTuple):
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
    left: dict[str, Any]
    """What it left in places of Python, containers taken apart: values, and of tensors the form."""
    marks: Marked
    """What it wrote of memory that a stirred start could make illegal, and of arguments."""
    watch: Watch

    @property
    def state(self) -> dict[str, Tensor]:
        """All that it left outside."""
        return self.memory | self.python


class Runs:
    """The runs of one call, one after the other."""

    def __init__(
        self,
        lessons: Lessons,
        device: torch.device,
        call: Call,
        fit: Fit,
        fills: Sequence[tuple[Any, bool]],
        *,
        state: bool,
        static: Collection[str],
        exacts: Exacts[Run],
    ) -> None:
        self.state, self.fills, self._exacts = state, fills, exacts
        self.lessons, self.device, self.call, self.fit = lessons, device, call, fit
        self.cuts: list[Learner] = []
        self.watch: Watch | None = None
        paths = call.tree.tensor_paths
        self.unnamed = [paths[leaf] for leaf in fit.dims() if not fills[leaf][1]]
        """Padded arguments for which no `pad` is given: what stands there must not matter."""
        self._lent = {
            id(t)
            for path, t in zip(paths, call.tensors, strict=True)
            if root_of(path) in static and is_large(t)
        }
        """Arguments by reference of which no copy is made, as of any memory of their size."""
        self._exact: list[Tensor] = []
        self.told: frozenset[tuple[int, int]] = frozenset()
        """Where the padded run could show what padding changes."""

    def exact(self) -> Run:
        """The run that eager makes."""
        known = self._exacts.of(self.lessons, self.call)
        if known is not None:
            run, self.cuts = known
        else:
            run = self._run(self._copies(self.call.tensors), self._whole)
            self.check_offences()
            self._exacts.keep(self.lessons, self.call, run, self.cuts)
        self._exact = run.results
        return run

    def check_offences(self) -> None:
        """Raise for what the latest run did that no graph can hold."""
        found = None if self.watch is None else self.lessons.offence(self.watch, ())
        if found is not None:
            raise again(found)

    def padded(
        self,
        stir: Sequence[Tensor] = (),
        *,
        other: bool = False,
        extra: Mapping[object, Extra] = MappingProxyType({}),
    ) -> Run:
        """A run of the bucket's size, its results cut; `other`: with other padding where none was named."""
        fills = [from_batch if other and not chosen else fill for fill, chosen in self.fills]
        detached = {id(t): t if id(t) in self._lent else t.detach() for t in self.call.tensors}
        padded = self.fit.padded([detached[id(t)] for t in self.call.tensors], fills)
        self.told |= self.fit.told(padded)
        tensors = self._copies(padded)
        return self._run(tensors, self._cut, stir, extra)

    def live(self, stir: Sequence[Tensor]) -> Run:
        """A run at the exact size from other numbers in this memory."""
        return self._run(self._copies(self.call.tensors), lambda results, outside, tensors: results, stir)

    def _guard(self, log: UndoLog, tensors: Sequence[Tensor]) -> None:
        """Let no run write what is not put back; its own copies need not be."""
        log.spares = lambda: True
        for tensor in tensors:
            if id(tensor) not in self._lent:
                log.born(tensor)

    @contextmanager
    def _blaming(self, cut: Cutter) -> Iterator[None]:
        """What only a padded run raises is the padding's fault; what the backend raises around it is not."""
        try:
            yield
        except PaddingError:
            raise
        except Exception as error:
            if cut != self._cut or self.lessons.setting.backend.is_oom(error):
                raise
            raise self.error(f"raises {error!r} when padded", "it runs at its exact size") from error

    def _copies(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies, laid out alike, that a run may write and take gradients of; one tensor given twice stays one."""
        made: dict[int, Tensor] = {}
        for tensor, own in zip(tensors, self.call.tensors, strict=True):
            if id(tensor) in self._lent:
                made[id(tensor)] = tensor
            elif id(tensor) not in made:
                with torch.inference_mode(own.is_inference()), torch.no_grad():
                    mine = copied(tensor.detach())
                made[id(tensor)] = mine.requires_grad_() if own.requires_grad else mine
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
            raise self.error(f"returns {len(results)} tensors, not {len(self.cuts)}, when padded", SIZE)
        if any(r.dim() != e.dim() for r, e in zip(results, self._exact, strict=True)):
            raise self.error("returns tensors of other dimensions when padded", SIZE)
        teach(self.cuts, fit.full, results, tensors, lambda _, result: family_key(result) in outside)
        cut: list[Tensor] = []
        for learner, result, expected in zip(self.cuts, results, self._exact, strict=True):
            ways = [(way, way(result, fit.live, fit.full)) for way in learner.cuts(fit)]
            near = [w for w in ways if unlike(expected, w[1].detach(), rounding=True) is None]
            learner.choose(fit, [way for way, _ in near or ways])
            cut.append((near or ways)[0][1])
        return cut

    def _run(
        self,
        tensors: tuple[Tensor, ...],
        cut: Cutter,
        stir: Sequence[Tensor] = (),
        extra: Mapping[object, Extra] = MappingProxyType({}),
    ) -> Run:
        lessons, backend = self.lessons, self.lessons.setting.backend
        call = Call(self.call.tree, self.call.tree.rebuild(tensors, self.call.consts), tensors)
        survey = lessons.survey(call)
        with (
            backend.scope(self.device, aside=not torch.is_grad_enabled()),
            trial(backend, self.device, survey, lessons.known_generators()) as log,
        ):
            self._guard(log, tensors)
            for tensor in stir:
                log.before_write(tensor)
                memory_of(tensor).copy_(stirred(memory_of(tensor)))
            memory = dict(zip(call.tree.tensor_paths, tensors, strict=True))
            for key, more in extra.items():
                tensor = memory[key] if isinstance(key, str) else more.tensor
                log.before_write(tensor)
                more.begin(memory_of(tensor))
            watch = Watch(self.device, given=tensors, undo=log)
            self.watch = watch
            marks = Marks(self._unstirred(watch, tensors))
            watch.around = marks.around
            with watching(watch, backend.listen), steps(), self._blaming(cut):
                result = lessons.setting.run(call.values)
            watch.around = None
            with self._blaming(cut):
                run = self._taken(result, watch, marks, survey, call, cut)
        left = [*run.results, *run.state.values(), *run.arguments, *run.grads.values()]
        backend.hand_over([*left, *(t for mark in run.marks.values() for t in (mark.mask, mark.left))])
        return run

    def _unstirred(self, watch: Watch, tensors: Sequence[Tensor]) -> Callable[[Tensor], bool]:
        """What no other start is tried for: integers, which may be indices, and arguments that are not padded."""
        dims = self.fit.dims()
        whole = {family_key(t) for leaf, t in enumerate(tensors) if leaf not in dims}
        born, given = watch.born, watch.given  # not the watch, which is to hold this

        def wanted(tensor: Tensor) -> bool:
            key = family_key(tensor)
            if tensor.layout is not torch.strided or key in born or is_large(tensor):
                return False
            return key in whole if key in given else not tensor.is_floating_point()

        return wanted

    def _taken(self, result: Any, watch: Watch, marks: Marks, survey: Survey, call: Call, cut: Cutter) -> Run:
        """Copy what a run left while it is still there."""
        roots = (result,)
        tree = tree_of(roots, ["output"])
        found = tree.unpack(roots)
        assert found is not None, "a value has the structure that was read off it"
        names = {family_key(t): f"`{place.name}`" for place, t in survey.tensors()}
        live = cut(list(found[0]), names.keys() | watch.outside.keys(), call.tensors)
        left = self._left(survey, call, watch)
        python = self._bound(left, survey, watch.touched)
        memory = written(watch, names) if self.state else {}
        grads = {} if watch.backward else self._gradients(live, watch.outside, call, names)
        arguments = [
            torch.empty(0) if id(t) in self._lent else self.fit.lives(i, t.detach()).clone()
            for i, t in enumerate(call.tensors)
        ]
        results = [t.detach().clone() for t in live]
        marked = self._named(marks, names, call)
        forms = {name: form_of(part) for name, part in left.items()}
        return Run(tree, found[1], results, memory, python, arguments, grads, forms, marked, watch)

    def _named(self, marks: Marks, names: dict[int, str], call: Call) -> Marked:
        paths = {family_key(t): path for path, t in zip(call.tree.tensor_paths, call.tensors, strict=True)}
        named = names | {key: f"argument `{path}`" for key, path in paths.items()}
        # Of an argument each run has a copy of its own.
        return {paths.get(key, key): mark for key, mark in marks.found(named).items()}

    def _left(self, survey: Survey, call: Call, watch: Watch) -> dict[str, Any]:
        """What the run left in places of Python, none of it memory that a bucket has for arguments.

        Where the function's own state is not compared, what it reads again is left out, as a workspace that grows.
        """
        own = frozenset() if self.state else self.lessons.executed.reads() | watch.executed.reads()
        changes = survey.changes(self.lessons.survey(call, after=True))
        left = apart((change.place.name, change.after) for change in changes if not is_state(change, own))
        paths = call.tree.tensor_paths
        mine = {family_key(call.tensors[leaf]): paths[leaf] for leaf in self.fit.dims()}
        for name, part in left.items():
            path = mine.get(family_key(part)) if isinstance(part, Tensor) else None
            if path is not None:
                raise self.error(f"{name} is left as memory of `{path}`", _COPY, _CLONE)
        return left

    def _bound(self, left: dict[str, Any], survey: Survey, touched: Touched) -> dict[str, Tensor]:
        """The tensors among it, and gradients of parameters where memory is compared."""
        found = {name: part for name, part in left.items() if isinstance(part, Tensor)}
        for place, leaf in survey.tensors() if self.state else ():
            if leaf.is_leaf and leaf.requires_grad and id(leaf) in touched.before:
                found |= {} if leaf.grad is None else {f"`{place.name}.grad`": leaf.grad}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def _gradients(
        self, live: Sequence[Tensor], outside: dict[int, Tensor], call: Call, names: dict[int, str]
    ) -> dict[str, Tensor]:
        """Gradients of a weighted sum of the live results."""
        graded = [r for r in live if r.requires_grad] if torch.is_grad_enabled() else []
        found: dict[str, tuple[int, Tensor]] = {}
        for leaf, (path, tensor) in enumerate(zip(call.tree.tensor_paths, call.tensors, strict=True)):
            if tensor.requires_grad:
                found[f"`{path}`"] = (leaf, tensor)
        for key, tensor in outside.items():
            if tensor.requires_grad:
                found[names.get(key, f"a tensor {tuple(tensor.shape)} from outside")] = (-1, tensor)
        wanted = {name: tensor for name, (_, tensor) in found.items()}
        incoming, is_oom = [weights(r) for r in graded], self.lessons.setting.backend.is_oom
        made = gradients(graded, incoming, wanted, is_oom) or {}
        return {
            f"the gradient of {name}": self.fit.lives(found[name][0], g).clone()
            for name, g in made.items()
            if g is not None
        }

    def error(self, what: str, why: str, fix: str = "") -> PaddingError:
        """What padding changes in this call."""
        return padding_error(self.lessons.setting.name, self.fit, what, why, fix or remedy(self.unnamed))
