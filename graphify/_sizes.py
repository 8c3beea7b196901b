"""Calls of many sizes over the graphs of few: each size finds its bucket, is padded, proved, and cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._alike import tells
from ._axes import Axes
from ._cuts import Learner, Way, teach
from ._entry import Entry, Refusal, Table
from ._exacts import Exacts
from ._fitted import Padded, fitted, through_padding
from ._forms import plain_layout
from ._graph import Call, Graph
from ._layout import family_key
from ._lazy import LazyError
from ._life import Life
from ._padding import Fills, Fit
from ._proofs import prove
from ._rehearsal import rehearse
from ._signature import overlap
from ._sized import Sized, parted
from ._specification import Specification
from ._tree import tensors_of
from ._trust import Proof, trusted, untried
from ._untried import at_exact_size, foresees, padded
from ._verdicts import shared_memory
from .errors import CaptureError, InputError, PaddingError, alone

__all__ = ["Sizes"]

_MANY = 1024


class Sizes:
    """All calls of one wrapper whose sizes are bucketed."""

    def __init__(self, life: Life, wanted: Specification, fills: Fills) -> None:
        self.life, self.wanted, self.fills = life, wanted, fills
        self._axes: dict[Any, Axes] = {}
        self._laid: dict[Any, Specification] = {}
        self._unsafe: set[Any] = set()
        self._learners: dict[Any, tuple[Learner, ...]] = {}
        self._exacts: Exacts[Any] = Exacts()

    # -- finding

    def recent(self, table: Table, tensors: Sequence[Tensor]) -> Entry | None:
        """The entry that the last call of these sizes had."""
        try:
            live = None if table.axes is None else table.axes.live(tensors)
        except InputError:  # which the whole way says by itself
            return None
        entry = None if live is None else table.recent.get(live)
        if entry is not None and entry.bucket is not None:
            self.life.entries.touch(entry.bucket)
        return entry

    def find(self, table: Table, key: Any, tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Entry:
        """The entry of this exact size; that of the signature itself where nothing is bucketed."""
        entry = table.sized.get(key)
        if entry is None:
            made = self._new(table, key, tensors, values)
            if not isinstance(made, Sized):
                return made
            entry = made
        if entry.graph is not None and not (
            entry.holds() and (entry.admits is None or entry.admits(tensors))
        ):
            entry.drop()
        if isinstance(entry, Sized) and entry.bucket is not None:
            self.life.entries.touch(entry.bucket)
            table.axes, table.recent[entry.fit.live] = entry.fit.axes, entry
        return entry

    def axes_of(self, table: Table, tensors: Sequence[Tensor]) -> Axes:
        """The bucketed sizes of calls like this one.

        Raises:
            InputError: a dimension that a tensor does not have.
        """
        family = (table.tree, tuple(t.dim() for t in tensors))
        if family not in self._axes:
            wanted = self._laid.get(family, self.wanted)
            self._axes[family] = wanted.axes_of(table.tree.tensor_paths, family[1])
        return self._axes[family]

    def _new(self, table: Table, key: Any, tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Entry:
        """The first call of a size."""
        call = Call(table.tree, values, tensors)
        if self.life.placement(call)[2] is None:
            try:
                entry = self._sized(table, key, tensors)
            except InputError as error:
                entry = None
                self.life.find(table, key, tensors, values).refusal = Refusal("input", error)
            if entry is not None:
                if len(table.sized) >= _MANY:
                    self.life.entries.forget_sizes()
                table.sized[key] = entry
                return entry
        return self.life.find(table, key, tensors, values)

    def _sized(self, table: Table, key: Any, tensors: Sequence[Tensor]) -> Sized | None:
        if self.wanted.auto:
            self._lay(table, tensors)
        axes = self.axes_of(table, tensors)
        if not axes.buckets:
            return None
        live = axes.sizes([t.shape for t in tensors])
        full = axes.fit(live)
        entry = Sized(table, key, Fit(axes, live, full or live), self.choices(table))
        if full is None:
            entry.refusal = Refusal("above", advice=f"{axes.above(live)}: add a larger size to `buckets`")
        elif 0 in live:
            entry.refusal = Refusal("empty")
        elif (shared := parted(table.tree.tensor_paths, entry.fit, key[3], tensors)) is not None:
            entry.refusal = Refusal("input", shared)
        return entry

    def _lay(self, table: Table, tensors: Sequence[Tensor]) -> None:
        """Lay buckets over sizes that vary, and lay them anew when a call does not fit."""
        family = (table.tree, tuple(t.dim() for t in tensors))
        watcher = self.life.habits.watcher(table, [t.shape for t in tensors])
        if family in self._unsafe or (family not in self._laid and watcher.exact_pays):
            return
        if family in self._laid and self._holds(self._axes[family], tensors):
            return
        found = watcher.proposal()
        if found is not None:
            self._laid[family] = found
            self._axes.pop(family, None)
            table.forget_sizes()
            self.life.plain.say(
                "auto",
                f"{'; '.join(watcher.ranges())}: such calls share graphs from now on, as with\n{found}",
            )

    def _holds(self, axes: Axes, tensors: Sequence[Tensor]) -> bool:
        try:
            return axes.fit(axes.sizes([t.shape for t in tensors])) is not None
        except InputError:  # sizes that were equal by chance
            return False

    def choices(self, table: Table) -> list[tuple[Any, bool]]:
        """The fill of each tensor, and whether the user chose it."""
        return [self.fills.of(path) for path in table.tree.tensor_paths]

    # -- advancing

    def advance(self, entry: Entry, call: Call) -> Any:
        """Make this call's result by the way that brings its bucket nearer to a graph."""
        call.refuse_stale()
        if not isinstance(entry, Sized):
            return self.life.advance(entry, call)
        if entry.refusal is not None:
            return self.life.plain.refuse(entry.refusal, call)
        # As in `Life.advance`: a plain run may go backward.
        with torch.autograd.set_multithreading_enabled(False), self.life.setting.pool.lock:
            bucket = self.bucket_of(entry, call)
            if self.life.entries.sealed and bucket.graph is None:
                return self.life.plain.missed(bucket, call, self.life.entries.ready)
            if bucket.refusal is None:
                self._learn(entry, bucket, call)
            if bucket.refusal is not None and isinstance(bucket.refusal.error, LazyError):
                bucket.refusal = None
                return self.life.plain.run("lazy", call)
            if bucket.refusal is not None:
                return self.life.plain.refuse(bucket.refusal, call)
            conflict = self._conflict(bucket, call)
            if conflict is not None:
                return self.life.plain.refuse(conflict, call)
            if bucket.wait > 0:
                bucket.wait -= 1
                return self.life.plain.run("evicted", call)
            as_is = entry.fit.is_as_is(call.tensors)
            ways = None if as_is else self._ways(entry, bucket, call)
            if ways is None and not as_is:
                return self._taught(entry, bucket, call)
            return self._through(entry, bucket, ways, call)

    def bucket_of(self, entry: Sized, call: Call) -> Entry:
        """The entry of the bucket's own size."""
        return self._bucket(entry, entry.fit.padded(call.tensors, entry.fills), call)

    def at(self, table: Table, key: Any, tensors: Sequence[Tensor], full: tuple[int, ...]) -> Sized:
        """A call like this one in a bucket of these sizes, whatever its own."""
        axes = self.axes_of(table, tensors)
        return Sized(table, key, Fit(axes, axes.sizes([t.shape for t in tensors]), full), self.choices(table))

    @contextmanager
    def in_a_row(self) -> Iterator[None]:
        """Buckets are rehearsed inside, from one call: what one met, others need not meet again."""
        setting = self.life.setting
        with setting.surveys.kept(), setting.repeats.in_a_row():
            try:
                yield
            finally:
                self._exacts = Exacts()

    def rehearse(self, entry: Sized, call: Call) -> Entry:
        """Record a bucket ahead of time, without trace, and prove it where the call shows how."""
        blank = entry.fit.blank(call.tensors, entry.fills)
        bucket = self._bucket(entry, blank, call)
        if bucket.graph is None and bucket.refusal is None:
            padding = Call(call.tree, call.tree.rebuild(blank, call.consts), blank)
            rehearse(self.life.recorder, bucket, padding, self.life.alike(bucket), blank=True)
        inside = all(0 < live <= full for live, full in zip(entry.fit.live, entry.fit.full, strict=True))
        if inside and bucket.refusal is None and not bucket.large:
            self._learn(entry, bucket, call)
            if bucket.refusal is not None:
                self.life.entries.discard(bucket)
        return bucket

    def _bucket(self, entry: Sized, padded: tuple[Tensor, ...], call: Call) -> Entry:
        # Not the entry's own table, which would be a reference cycle.
        table = self.life.entries.tables[entry.tree.spec]
        key = (entry.key[0], entry.key[1], table.specs(padded), overlap(padded))
        bucket = self.life.find(table, key, padded, call.tree.rebuild(padded, call.consts))
        bucket.capacity = self._capacity(entry, call.tensors)
        return bucket

    def _capacity(self, entry: Sized, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        axes = entry.fit.axes
        largest = axes.padded_shapes([t.shape for t in tensors], [bucket.largest for bucket in axes.buckets])
        dims = entry.fit.dims()
        return tuple(math.prod(shape) if leaf in dims else 0 for leaf, shape in enumerate(largest))

    def _through(self, entry: Sized, bucket: Entry, ways: Sequence[Way] | None, call: Call) -> Any:
        graph = bucket.graph
        if graph is not None:
            made = self._fit(entry, bucket, ways)
            if bucket.proof is None or not bucket.proof.hides(entry.fit):
                entry.follow(bucket, made)
            return made(call.tensors, call.values)

        def run(tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Any:
            return self.life.advance(bucket, Call(call.tree, values, tensors))

        return through_padding(run, entry.fit, ways, entry.fills, call)

    def _fit(self, entry: Sized, bucket: Entry, ways: Sequence[Way] | None) -> Any:
        """The bucket's graph for calls of this size."""
        whole, fit = bucket.graph, entry.fit
        if not isinstance(whole, Graph) or whole.outcome is None:
            return Padded(whole, fit, ways, entry.fills, entry.tree)
        made = whole.fits.get(entry.key)
        if made is None:
            made = fitted(whole, self.life.setting, fit, ways, entry.fills, entry.tree)
            whole.fits[entry.key] = made
            self.life.recorder.verify_size(whole, made, cut=not fit.is_full, padded=fit.dims())
        return made

    # -- proving

    def _learn(self, entry: Sized, bucket: Entry, call: Call) -> None:
        """Prove at the first call with padding that it changes nothing."""
        proof: Proof | None = bucket.proof
        fit, say = entry.fit, self.life.plain.say
        known = proof is not None and (proof.lived is not None or proof.is_clear(fit))
        if fit.is_as_is(call.tensors) or (known and not tells(say, bucket, fit, entry.fills, call)):
            return
        if bucket.large:
            if self.life.options.check_padding is True:
                self.life.plain.say("untried", trusted(bucket.large))
            bucket.proof = untried()
            return
        try:
            bucket.proof = prove(
                self.life.lessons,
                bucket.device_or_raise(),
                call,
                fit,
                entry.choices,
                check=self.life.options.check_padding,
                static=self.life.options.static_args,
                exacts=self._exacts,
            )
        except PaddingError as error:
            alone(error)
            bucket.refusal = (
                self._give_up(entry, call, error) if self.wanted.auto else Refusal("padding", error)
            )
        except CaptureError as error:
            bucket.refusal = Refusal("uncapturable", alone(error))
        else:
            if proof is not None:
                bucket.proof = bucket.proof._replace(untold=bucket.proof.untold & proof.untold)
            self._share(entry, bucket)

    def _give_up(self, entry: Sized, call: Call, error: PaddingError) -> Refusal:
        """Nobody asked for padding: where it would change results, sizes stay exact."""
        family = (entry.tree, tuple(t.dim() for t in call.tensors))
        self._unsafe.add(family)
        self._laid.pop(family, None)
        self._axes.pop(family, None)
        self.life.entries.tables[entry.tree.spec].forget_sizes()
        return Refusal("padding", advice=f'its sizes vary, and `buckets="auto"` cannot pad them: {error}')

    def _share(self, entry: Sized, bucket: Entry) -> None:
        """What one bucket showed of the shapes of results, all know."""
        proof: Proof | None = bucket.proof
        if proof is None or proof.tree is None:
            return
        known = self._learners.setdefault((entry.tree, entry.key[:2], proof.tree.spec), proof.cuts)
        if known is proof.cuts:
            return
        if all(learner.agrees(new) for learner, new in zip(known, proof.cuts, strict=True)):
            for learner, new in zip(known, proof.cuts, strict=True):
                learner.merge(new)
            bucket.proof = proof._replace(cuts=known)

    def _conflict(self, bucket: Entry, call: Call) -> Refusal | None:
        touched = bucket.proof.touched if bucket.proof is not None else frozenset()
        for path, tensor in zip(call.tree.tensor_paths, call.tensors, strict=True):
            if family_key(tensor) in touched:
                return Refusal("uncapturable", shared_memory(self.life.setting.name, path))
        return None

    def _ways(self, entry: Sized, bucket: Entry, call: Call) -> list[Way] | None:
        """How results become those of this call; None when a run must show it first."""
        proof: Proof | None = bucket.proof
        assert proof is not None, "a bucket is proved before it is used for less"
        if proof.awaits(entry.fit):
            return None
        layout = plain_layout(call.tensors)
        ways = [learner.way(entry.fit, layout) for learner in proof.cuts]
        known = [way for way in ways if way is not None]
        return known if len(known) == len(ways) else None

    def _taught(self, entry: Sized, bucket: Entry, call: Call) -> Any:
        """Run once at the exact size, or where no trial may run at the bucket's, which shows the shapes of results."""
        proof: Proof | None = bucket.proof
        assert proof is not None
        if proof.lived is None:
            result, cuts = self.life.plain.run("cut", call), proof.cuts
            teach(cuts, entry.fit.live, tensors_of(result), call.tensors, lambda i, _: cuts[i].is_outside())
            return result
        if foresees(proof, entry.fit, call):
            return padded(self.life, bucket, entry.fit, entry.fills, call)
        result = at_exact_size(self.life, bucket, entry.fit, call)
        if proof.tree is None:
            self._share(entry, bucket)
        return result
