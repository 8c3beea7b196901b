"""The graph of one entry: recorded, replayed for the first time, verified, and recorded again for more instances."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from ._entries import Entries
from ._entry import Entry, Refusal
from ._gate import close_gates
from ._graph import Call, Graph, Order, Setting
from ._habits import Habits
from ._instances import MOST, Instances, graphs_of
from ._lessons import Lessons
from ._optimizers import UnbuiltError
from ._options import Options
from ._plain import Plain
from ._record import NeedsGradError, Recorded, record
from ._results import TangledError
from ._signature import TensorSpec
from ._undo import UndoLog
from ._verify import Verified, Verifier
from .errors import CaptureError, alone

__all__ = ["GRADIENTS", "Recorder", "tangled"]

log = logging.getLogger("graphify")

GRADIENTS = Refusal(
    "grad",
    advice="its results need gradients in some calls of one kind and in others not: detach them, or call it under "
    "torch.no_grad() or torch.inference_mode()",
)
_RETRIES = 3


def tangled(error: TangledError) -> Refusal:
    """Calls of this kind run eagerly."""
    return Refusal(error.reason, advice=error.advice)


class Recorder:
    """Makes the graphs of one wrapper."""

    def __init__(
        self,
        setting: Setting,
        options: Options,
        plain: Plain,
        entries: Entries,
        lessons: Lessons,
        habits: Habits,
    ) -> None:
        self.setting, self.options = setting, options
        self.plain, self.entries, self.lessons, self.habits = plain, entries, lessons, habits

    def record(self, entry: Entry, call: Call) -> Any:
        """Record this call, and make its result by the first replay."""
        again = False
        try:
            take_back = self.make_graph(entry, call)
        except NeedsGradError:
            again = True
        except TangledError as error:
            entry.refusal = tangled(error)
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
        if entry.graph is None:  # out here, where no traceback keeps what the run made
            return self._instead(entry, call, again)
        result = self._replay_first(graphs_of(entry.graph)[0], call, take_back)
        self.verify_first(entry)
        self.plain.counts["captures"] += 1
        return result

    def _instead(self, entry: Entry, call: Call, again: bool) -> Any:
        """Make the result without a graph: by one more warm-up, where the run did what none did before."""
        if not again:
            assert entry.refusal is not None
            return self.plain.refuse(entry.refusal, call)
        entry.built += 1
        if entry.built > _RETRIES:
            entry.refusal = GRADIENTS
            return self.plain.refuse(GRADIENTS, call)
        return self.lessons.warm_up(entry, call)

    def _note_failure(self, entry: Entry, error: Exception) -> None:
        """After the user's own error the signature starts again, but not for ever."""
        entry.warmed = 0
        self.habits.forget_rebinds()
        entry.evictions += 1
        entry.wait = 2**entry.evictions - 2
        log.info("%s: recording failed with %r", self.setting.name, error)

    # -- recording

    def make_graph(self, entry: Entry, call: Call, undo: UndoLog | None = None) -> Callable[[], None]:
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
        self.plain.counts["recordings"] += 1
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
        recorder, mine = weakref.ref(self), weakref.ref(entry)

        def more(tensors: tuple[Tensor, ...], values: tuple[Any, ...]) -> Any:
            alive, kept = recorder(), mine()
            assert alive is not None, "a call is made through its wrapper"
            assert kept is not None, "a call is made through its entry"
            return alive._another(kept, Call(kept.tree, values, tensors))

        return more

    def _another(self, entry: Entry, call: Call) -> Any:
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
                    return self.record(entry, call)
                instances.graphs.append(graph)
                self.plain.counts["recordings"] += 1
                result = self._replay_first(graph, call, take_back)
                self._verify(entry, graph)
                self.plain.counts["captures"] += 1
                return result
        return self.plain.run("instances", call)

    # -- the first replays

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

    def verify_first(self, entry: Entry) -> None:
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

    def verify_size(self, whole: Graph, made: Graph, *, cut: bool, padded: Collection[int]) -> None:
        """Verify a bucket's graph in calls of one size; `cut`: it is not the bucket's own size.

        `padded` has the arguments whose sizes are bucketed.
        """
        checked = self.options.check_padding
        if isinstance(whole, Verified) and (checked or not cut):
            state = checked is True or not cut
            whole.verifier.at_size(cut=cut, state=state, padded=padded).begin(made)
