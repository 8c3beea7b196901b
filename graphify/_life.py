"""The life of a wrapper's signatures: found, warmed up, recorded, refused, evicted."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._code import names_of
from ._entries import Entries
from ._entry import Entry, Refusal, Table, host_value
from ._gate import close_gates
from ._graph import Call, Graph, Order, Setting
from ._habits import Habits
from ._instances import MOST, Instances, graphs_of
from ._lessons import Lessons
from ._optimizers import UnbuiltError, steps
from ._options import Options
from ._plain import Plain
from ._record import NeedsGradError, Recorded, record
from ._results import TangledError
from ._signature import TensorSpec, refusal
from ._specification import root_of
from ._trial import trial
from ._undo import TooLargeError, UndoLog
from ._verdicts import other_place
from ._verify import Verified, Verifier
from ._watch import Watch, watching
from .errors import CaptureError, InputError, alone

__all__ = ["Life"]

log = logging.getLogger("graphify")

_GRAD = Refusal(
    "grad",
    advice="its results need gradients in some calls of one kind and in others not: detach them, or call it under "
    "torch.no_grad() or torch.inference_mode()",
)
_TANGLED = Refusal(
    "views",
    advice="its results need gradients and are views that cannot be taken of a copy: return the whole tensor, "
    "and take the views outside",
)
_ON_A_CPU = "its tensors are on a CPU: move them to the device, or use backend='tape' or 'eager'"
_RETRIES = 3


class Life:
    """All entries of one wrapper, and what its calls taught about the code behind it."""

    def __init__(self, setting: Setting, options: Options, names: Sequence[str]) -> None:
        self.setting, self.options = setting, options
        self.counts: Counter[str] = Counter()
        self.plain = Plain(setting, options.fallback, self.counts)
        self.habits = Habits(self.plain.say, options.static_args)
        self.entries = Entries(setting, options, names, self.counts)
        self.lessons = Lessons(setting, self.plain, self.entries)

    # -- finding

    def recent(self, table: Table, tensors: Sequence[Tensor]) -> Entry | None:
        """Nothing: sizes are no key where they are not declared."""

    def find(self, table: Table, key: Any, tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Entry:
        """The entry that speaks of this call; a new one when none does."""
        sibling = None
        for entry in list(table.entries.get(key, ())):
            if entry.fits(tensors) or (self._lift(entry) and entry.fits(tensors)):
                self.entries.touch(entry)
                return entry
            sibling = entry if entry.meets_other_gradients() else sibling
            self._note_miss(entry)
        entry = self._new(table, key, Call(table.tree, values, tensors))
        if sibling is not None and entry.refusal is None:
            entry.resemble(sibling)
        return entry

    def _lift(self, entry: Entry) -> bool:
        """An optimizer's float that changes is a value no longer: its next recording has a tensor in its place."""
        changed, numbers = False, {place.id: place for place in entry.numbers}
        read = any("param_groups" in names_of(code).loads for code, _ in self.lessons.executed.scopes())
        while entry.guard is not None and (miss := entry.miss()) is not None:
            place = None if miss.place is None else numbers.pop(miss.place, None)
            if place is None or not self.lessons.numbers.lift(place, entry.device_or_raise(), read=read):
                break
            entry.release(place)
            changed = True
        if changed and entry.graph is not None:
            self.entries.discard(entry)
        return changed

    def alike(self, entry: Entry) -> Entry | None:
        """A recorded entry that differs in sizes only, where code that was compiled for its sizes cannot matter."""
        if self.lessons.executed.everything:
            return None
        found = (
            e for e in self.entries.ready if e.tree == entry.tree and e.key[:2] == entry.key[:2] and e.holds()
        )
        return next((e for e in found if e.patterns is None and e.device == entry.device), None)

    def _note_miss(self, entry: Entry) -> None:
        """Forget an entry whose tensors have moved: its graph would read memory that is no longer meant."""
        miss = entry.miss() if entry.guard is not None and not entry.holds() else None
        if miss is None:
            return
        log.info("%s: %s", self.setting.name, miss)
        if not miss.moved:
            self.habits.count_value(("place", miss.place, miss.name), miss.now, miss.name)
            return
        if entry.graph is not None:
            self.habits.rebound(miss.name, idle=entry.graph.uses == 0)
        self.entries.forget(entry)

    def _new(self, table: Table, key: Any, call: Call) -> Entry:
        device, hosts, refused = self.placement(call)
        entry = Entry(table.tree, key, device)
        entry.refusal = refused
        entry.label = _label(call)
        if hosts:
            self._expect(entry, call, hosts)
        self._stay(entry, call)
        self._watch_opaque(entry, call)
        self.habits.count_tokens(table, key)
        self.entries.add(table, entry)
        return entry

    def placement(self, call: Call) -> tuple[torch.device | None, list[int], Refusal | None]:
        """The device to record on, the host scalars among the tensors, or why there is neither."""
        for path, tensor in zip(call.tree.tensor_paths, call.tensors, strict=True):
            why = refusal(tensor)
            if why is not None:
                return None, [], Refusal("layout", InputError(f"argument `{path}`: {why}"))
        try:
            device = self.setting.backend.device_of(call.tensors)
        except InputError as error:
            return None, [], Refusal("devices", error)
        if device is None:
            return None, [], Refusal("cpu", advice=_ON_A_CPU)
        hosts = [i for i, t in enumerate(call.tensors) if t.device.type != device.type]
        for i in hosts:
            if call.tensors[i].dim():
                elsewhere = other_place(call.tree.tensor_paths[i], call.tensors[i], device)
                return None, [], Refusal("devices", elsewhere)
        return device, hosts, None

    def _expect(self, entry: Entry, call: Call, hosts: list[int]) -> None:
        """A host scalar is a value, until it has shown so many that it is better staged as a tensor."""
        values = tuple(host_value(call.tensors[i]) for i in hosts)
        if not self.habits.many_scalars(entry, values):
            entry.expect(call.tensors, hosts)
            return
        entry.staged = frozenset(hosts)
        paths = ", ".join(f"`{entry.tree.tensor_paths[i]}`" for i in hosts)
        entry.label += f" ({paths} staged from the host: equal to rounding)"

    def _stay(self, entry: Entry, call: Call) -> None:
        """Arguments that are never copied are part of the signature by their address."""
        static = self.options.static_args
        leaves = [i for i, path in enumerate(call.tree.tensor_paths) if static and root_of(path) in static]
        if not leaves or entry.refusal is not None:
            return
        entry.stay(call.tensors, leaves)
        for i in leaves:
            self.habits.count_address(call.tree.tensor_paths[i], call.tensors[i])

    def _watch_opaque(self, entry: Entry, call: Call) -> None:
        """An opaque argument is compared by identity: its entries die with it."""
        life, number = weakref.ref(self), id(entry)

        def gone(_: Any) -> None:
            alive = life()
            known = alive.entries.get(number) if alive is not None else None
            if alive is not None and known is not None:
                alive._outlive(known)

        for _, value in call.opaque():
            entry.opaque.append(weakref.ref(value, gone))

    def _outlive(self, entry: Entry) -> None:
        without_graph = entry.graph is None
        self.entries.forget(entry)
        if without_graph:
            self.habits.lose(entry)

    # -- advancing

    def advance(self, entry: Entry, call: Call) -> Any:
        """Make this call's result by the way that brings its signature nearer to a graph."""
        if entry.refusal is None:
            entry.refusal = self._too_often(entry)
        if entry.refusal is not None:
            return self.plain.refuse(entry.refusal, call)
        if self.entries.sealed and entry.graph is None:
            return self.plain.missed(entry, call, self.entries.ready)
        if entry.wait > 0:
            entry.wait -= 1
            return self.plain.run("evicted", call)
        with self.setting.pool.lock:
            if entry.graph is not None:
                return entry.graph(call.tensors, call.values)
            if entry.warmed < self.options.warmup:
                return self.lessons.warm_up(entry, call)
            return self._record(entry, call)

    def _too_often(self, entry: Entry) -> Refusal | None:
        number = self.lessons.numbers.refusal()
        if number is not None:
            return number
        warm = entry.warmed >= self.options.warmup
        return self.habits.refusal(entry, self.entries.ready, warm=warm)

    def _record(self, entry: Entry, call: Call) -> Any:
        again = False
        try:
            take_back = self._make_graph(entry, call)
        except NeedsGradError:
            again = True
        except TangledError:
            entry.refusal = _TANGLED
        except UnbuiltError as error:
            again = entry.built < _RETRIES
            entry.refusal = None if again else Refusal("uncapturable", error)
            alone(error)
        except CaptureError as error:
            entry.refusal = Refusal("uncapturable", alone(error))
        except Exception as error:
            self._note_failure(entry, error)
            if self.setting.backend.is_oom(error):
                self.entries.make_way()
            raise
        if again:  # out here, where no traceback keeps what the run made
            return self._once_more(entry, call)
        if entry.graph is None:
            assert entry.refusal is not None
            return self.plain.refuse(entry.refusal, call)
        result = self._replay_first(graphs_of(entry.graph)[0], call, take_back)
        self._verify_first(entry)
        self.counts["captures"] += 1
        return result

    def _verify_first(self, entry: Entry) -> None:
        """From here on compare with eager, a few times; before, a capture's own replay."""
        for graph in graphs_of(entry.graph):
            self._verify(entry, graph)

    def _verify(self, entry: Entry, graph: Graph) -> None:
        times = self.options.verified
        if times and entry.large:
            text = "is not verified: it writes tensors above 256 MiB, of which no copy is made"
            self.plain.say("verify", text)
        elif times:
            verifier = Verifier(
                self.setting,
                entry.tree,
                entry.device_or_raise(),
                self.lessons.executed,
                self.lessons.generators,
                times=times,
                rounding=bool(entry.staged or self.lessons.numbers.lifted(entry.numbers)),
            )
            verifier.begin(graph)

    def verify_size(self, whole: Graph, made: Graph, *, cut: bool) -> None:
        """Verify a bucket's graph in calls of one size; `cut`: it is not the bucket's own size."""
        checked = self.options.check_padding
        if isinstance(whole, Verified) and (checked or not cut):
            whole.verifier.at_size(cut=cut, state=checked is True or not cut).begin(made)

    def _replay_first(self, graph: Graph, call: Call, take_back: Callable[[], None]) -> Any:
        """Do the work of the call whose run was recorded; where that cannot begin, nothing has happened."""
        launch, begun = graph.launch, []

        def launched() -> Sequence[Tensor]:
            fresh = launch()
            begun.append(True)
            return fresh

        graph.launch = launched
        try:
            # A recording run that was real has read its inputs, and may have changed them.
            result = graph(call.tensors, call.values, staged=graph.recording.ran)
        except BaseException:
            if not begun:
                take_back()
                graph.recording.ran = False
            raise
        finally:
            graph.launch = launch
        graph.replays = 0
        return result

    def _once_more(self, entry: Entry, call: Call) -> Any:
        """The run did what no warm-up did before: this call is one more."""
        entry.built += 1
        if entry.built > _RETRIES:
            entry.refusal = _GRAD
            return self.plain.refuse(_GRAD, call)
        return self.lessons.warm_up(entry, call)

    def _note_failure(self, entry: Entry, error: Exception) -> None:
        """After the user's own error the signature starts again, but not for ever."""
        entry.warmed = 0
        self.habits.forget_rebinds()
        entry.evictions += 1
        entry.wait = 2**entry.evictions - 2
        log.info("%s: recording failed with %r", self.setting.name, error)

    def _make_graph(self, entry: Entry, call: Call, undo: UndoLog | None = None) -> Callable[[], None]:
        """Record, and when memory runs out once more in a new pool."""
        try:
            return self._make_graph_here(entry, call, undo)
        except Exception as error:
            if not self.setting.backend.is_oom(error):
                raise
        self.entries.make_way()  # out here, where no traceback keeps what the run made
        return self._make_graph_here(entry, call, undo)

    def _make_graph_here(self, entry: Entry, call: Call, undo: UndoLog | None) -> Callable[[], None]:
        self.entries.make_room()
        if entry.whole:
            close_gates()
        with self.setting.backend.scope(entry.device_or_raise()):
            try:
                graph, guard, take_back = self._recorded(entry, call, undo)
            except CaptureError:
                if not self._give_way(entry, call):
                    raise
                graph, guard, take_back = self._recorded(entry, call, undo)
        if graph.instance is None:
            entry.settle(graph, guard)
        else:
            entry.settle(Instances(graph, self._more(entry)), guard)
        self.entries.settle(entry)
        self.counts["recordings"] += 1
        nodes, seconds = graph.nodes, graph.seconds
        log.info("%s: recorded %s: %d nodes in %.3f s", self.setting.name, entry.label, nodes, seconds)
        return take_back

    def _give_way(self, entry: Entry, call: Call) -> bool:
        """Whether something that was to be a tensor can be a value instead: the code reads it on the host."""
        if entry.staged:
            self.habits.scalars_are_read = True
            entry.expect(call.tensors, entry.staged)
            return True
        return self.lessons.numbers.give_up(entry.numbers)

    def _recorded(self, entry: Entry, call: Call, undo: UndoLog | None) -> Recorded:
        specs = [TensorSpec(*spec) for spec in self.entries.tables[entry.tree.spec].specs(call.tensors)]
        numbers = self.lessons.numbers.lifted(entry.numbers) if entry.whole else None
        order = Order(
            call,
            specs,
            entry.device_or_raise(),
            entry.staged,
            frozenset(i for i, _ in entry.addresses),
            entry.patterns,
            entry.capacity,
            numbers,
        )
        return record(self.setting, order, self.lessons.executed, self.lessons.known_generators(), undo)

    def _more(self, entry: Entry) -> Callable[[tuple[Tensor, ...], tuple[Any, ...]], Any]:
        life, mine = weakref.ref(self), weakref.ref(entry)

        def more(tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Any:
            alive, kept = life(), mine()
            assert alive is not None, "a call is made through its wrapper"
            assert kept is not None, "a call is made through its entry"
            return alive.another(kept, Call(kept.tree, values, tensors))

        return more

    def another(self, entry: Entry, call: Call) -> Any:
        """A forward while the backwards of all earlier ones are still to come: one more instance, up to a limit."""
        with self.setting.pool.lock:
            instances = entry.graph
            if isinstance(instances, Instances) and len(instances.graphs) < MOST and not self.entries.sealed:
                try:
                    with self.setting.backend.scope(entry.device_or_raise()):
                        graph, _, take_back = self._recorded(entry, call, None)
                except Exception as error:
                    if not self.setting.backend.is_oom(error):
                        raise
                    graph = None
                if graph is None:
                    self.entries.make_way()
                    return self._record(entry, call)
                instances.graphs.append(graph)
                self.counts["recordings"] += 1
                result = self._replay_first(graph, call, take_back)
                self._verify(entry, graph)
                self.counts["captures"] += 1
                return result
        return self.plain.run("instances", call)

    def rehearse(self, entry: Entry, call: Call, like: Entry | None = None) -> None:
        """Record ahead of time: warm-ups and the capture leave no trace.

        What warm-ups taught about `like`, an entry of other sizes, holds here, unless the capture shows that it
        does not, as where a kernel is tuned for each size.

        Raises:
            CaptureError: a whole step, which would really be taken: it writes memory that no trial puts back.
        """
        if like is not None and not entry.warmed:
            entry.resemble(like)
            self.rehearse(entry, call)
            if entry.graph is not None:
                return
            entry.refusal, entry.warmed = None, 0
        backend, device = self.setting.backend, entry.device_or_raise()
        try:
            for _ in range(self.options.warmup - entry.warmed):
                self._rehearse_run(entry, call)
        except TooLargeError as error:
            alone(error)
            raise self._too_large() from None
        if entry.refusal is not None:
            return
        try:
            with trial(backend, device, self.lessons.survey(call), self.lessons.known_generators()) as log:
                log.spares = lambda: entry.whole
                self._make_graph(entry, call, log)
        except TooLargeError as error:
            alone(error)
            raise self._too_large() from None
        except NeedsGradError:
            entry.refusal = _GRAD
        except TangledError:
            entry.refusal = _TANGLED
        except CaptureError as error:
            entry.refusal = Refusal("uncapturable", alone(error))
        if entry.graph is not None:
            entry.graph.recording.ran = False
            self._verify_first(entry)

    def _rehearse_run(self, entry: Entry, call: Call) -> None:
        backend, device = self.setting.backend, entry.device_or_raise()
        with (
            backend.scope(device),
            trial(backend, device, self.lessons.survey(call), self.lessons.known_generators()) as log,
        ):
            watch = Watch(device, undo=log)
            with watching(watch, backend.listen), steps() as found:
                # Padding touches no state, but a step moves weights also where no row has a gradient.
                log.spares = lambda: watch.backward or bool(found)
                result = self.setting.run(call.values)
        self.lessons.learn(entry, call, watch, result, found)

    def _too_large(self) -> CaptureError:
        return CaptureError(
            f"`{self.setting.name}` is a whole step over tensors above 256 MiB",
            why="ahead of time it must leave no trace, and of memory of that size no copy is made to put back",
            fix="call it: its first calls are real steps, and capture it",
        )

    def clear(self) -> None:
        """Forget everything but the counts."""
        self.entries.clear()
        self.habits.forget_rebinds()


def _label(call: Call) -> str:
    """A signature in a user's words."""
    parts = [
        f"{path}: {str(t.dtype).removeprefix('torch.')}{'' if refusal(t) else list(t.shape)}"
        for path, t in zip(call.tree.tensor_paths, call.tensors, strict=True)
    ]
    parts += [
        f"{path}={value!r}"
        for path, value in zip(call.tree.const_paths, call.consts, strict=True)
        if value is not None
    ]
    return ", ".join(parts[:12]) + (", ..." if len(parts) > 12 else "") or "no arguments"
