"""Calls whose rows hold what their padding holds: what padding changes cannot show in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._entry import Entry
from ._graph import Call
from ._padding import Fit
from ._trust import Proof, listed

__all__ = ["tells"]

_ENOUGH = 8
"""How many such calls of one bucket may come before its padding is trusted: each costs a look at its data."""


def tells(say: Callable[[str, str], None], bucket: Entry, fit: Fit, fills: Sequence[Any], call: Call) -> bool:
    """Whether a proof with this call would show what those of its bucket so far could not."""
    proof: Proof = bucket.proof
    hidden = proof.hides(fit)
    if not hidden:
        return False
    if hidden & fit.told(fit.padded(call.tensors, fills)):
        return True
    bucket.proof = proof._replace(alike=proof.alike + 1)
    if proof.alike + 1 >= _ENOUGH:
        leaves = {leaf for leaf, _ in hidden}
        names = [f"`{path}`" for leaf, path in enumerate(call.tree.tensor_paths) if leaf in leaves]
        say(
            "alike",
            f"got {listed(names)} whose rows hold in every call what their padding holds: that such padding changes nothing"
            " is trusted, not proved. Call it, or `capture_buckets`, with real data, or give `pad=` a value that no row"
            " has",
        )
        bucket.proof = proof._replace(untold=proof.untold - hidden)
    return False
