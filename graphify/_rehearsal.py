"""Recording ahead of time: warm-ups and the capture leave no trace."""

from __future__ import annotations

from ._entry import Entry, Refusal
from ._graph import Call
from ._optimizers import steps
from ._record import NeedsGradError
from ._recorder import GRADIENTS, Recorder, tangled
from ._results import TangledError
from ._stand_ins import set_aside
from ._trial import trial
from ._undo import TooLargeError
from ._watch import Watch, watching
from .errors import CaptureError, alone

__all__ = ["rehearse"]


def rehearse(recorder: Recorder, entry: Entry, call: Call, like: Entry | None = None, *, blank: bool) -> None:
    """Record the graph of this entry without trace; `blank`: the call is nothing but padding.

    What warm-ups taught about `like`, an entry of other sizes, holds here, unless the capture shows that it
    does not, as where a kernel is tuned for each size.

    Raises:
        CaptureError: it writes memory that no trial puts back, and the call is not blank, or a whole step.
    """
    if like is not None and not entry.warmed:
        entry.resemble(like)
        rehearse(recorder, entry, call, blank=blank)
        if entry.graph is not None:
            return
        entry.refusal, entry.warmed = None, 0
    backend, device, lessons = recorder.setting.backend, entry.device_or_raise(), recorder.lessons
    try:
        for _ in range(recorder.options.warmup - entry.warmed):
            _run(recorder, entry, call, blank)
    except TooLargeError as error:
        alone(error)
        raise _too_large(recorder.setting.name, blank) from None
    if entry.refusal is not None:
        return
    try:
        with trial(backend, device, lessons.survey(call), lessons.known_generators()) as log:
            log.spares = lambda: entry.whole or not blank
            recorder.make_graph(entry, call, log)
    except TooLargeError as error:
        alone(error)
        raise _too_large(recorder.setting.name, blank) from None
    except NeedsGradError:
        entry.refusal = GRADIENTS
    except TangledError as error:
        entry.refusal = tangled(error)
    except CaptureError as error:
        entry.refusal = Refusal("uncapturable", alone(error))
    if entry.graph is not None:
        entry.graph.recording.ran = False
        recorder.verify_first(entry)


def _run(recorder: Recorder, entry: Entry, call: Call, blank: bool) -> None:
    backend, device, lessons = recorder.setting.backend, entry.device_or_raise(), recorder.lessons
    survey = lessons.survey(call)
    with (
        backend.scope(device),
        trial(backend, device, survey, lessons.known_generators()) as log,
        set_aside(t for _, t in survey.tensors()),
    ):
        watch = Watch(device, undo=log)
        with watching(watch, backend.listen), steps() as found:
            # Padding touches no state, but a step moves weights also where no row has a gradient.
            log.spares = lambda: not blank or watch.backward or bool(found)
            result = recorder.setting.repeats.learn(lambda: recorder.setting.run(call.values))
        renewed = watch.renewed(call.tensors)
    lessons.learn(entry, call, watch, result, found, renewed)


def _too_large(name: str, blank: bool) -> CaptureError:
    kind = "is a whole step over" if blank else "writes"
    return CaptureError(
        f"`{name}` {kind} tensors above 256 MiB",
        why="ahead of time it must leave no trace, and of memory of that size no copy is made to put back",
        fix="call it: its first calls are real, and capture it"
        + ("" if blank else "; or declare `buckets`, which are captured with nothing but padding"),
    )
