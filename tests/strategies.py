"""The strategies of the tests are the library's own, those that users get."""

from __future__ import annotations

from graphify.testing import (
    Pair as Pair,
    Program as Program,
    Record as Record,
    call_sequences as call_sequences,
    programs as programs,
    pytrees as pytrees,
    tensors as tensors,
    training_sequences as training_sequences,
)
