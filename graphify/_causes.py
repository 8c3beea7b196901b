"""Why a replay differs from eager, and what to write: what Python holds since the capture, and kinds of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ._code import Executed
from ._places import MISSING, is_plain, same
from ._survey import Survey

__all__ = ["IN_BACKWARD", "PADDED", "UNORDERED", "UNRECORDED", "Held"]

_KEEP = (
    "keep it in a tensor that the function reads, pass it as an argument, or name it plainly in the function"
)
IN_BACKWARD = (
    "Python takes part in the backward (a hook, or a Function's own), and ran when that was recorded",
    "keep what it reads in a tensor, or make the call inside `with graphify.disabled():`",
)
UNORDERED = (
    "two replays differ: some of the work is in no order, such as a kernel on another stream",
    "make the other stream wait, and join it before the end (`wait_stream`)",
)
UNRECORDED = (
    "some of the work is not in the recording: on another stream, or on memory (numpy, `data_ptr`, an extension)",
    "use torch operators on the current stream, or call that part outside the graphed function",
)
PADDED = (
    f"padding changes it, as the data that it was proved with did not show; or {UNRECORDED[0]}",
    f"mask the padded rows, or, where it is wrong without padding, too, {UNRECORDED[1]}",
)


class _Changed(NamedTuple):
    """What is not as it was at the capture, by name."""

    name: str
    before: Any
    now: Any


class Held:
    """What Python held at the capture, whether or not the code names it."""

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        # Only values: a survey would keep the very instance alive whose graphs die with it.
        survey = Survey(roots, Executed(everything=True))
        places = (held for held in survey.places.values() if held[0].kind != "attr")
        self._places = [
            (place, value) for place, value in places if is_plain(value) or issubclass(type(value), Tensor)
        ]
        self._bulk = survey.bulk

    def cause(self, *, near: bool) -> tuple[str, str] | None:
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

    def _changed(self) -> Iterator[_Changed]:
        for place, before in self._places:
            now = place.read()
            if not same(now, before):
                kind = "the closure variable " if place.kind == "cell" else ""
                yield _Changed(f"{kind}`{place.name}`", before, "nothing" if now is MISSING else now)
        for bulk in self._bulk:
            if bulk.read() != bulk.content:
                yield _Changed(f"`{bulk.name}`", None, None)
