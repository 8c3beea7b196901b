"""What is known of calls of one exact size, whose graph is a bucket's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from ._entry import Entry, Table
from ._layout import disjoint
from ._padding import Fit
from .errors import InputError

__all__ = ["Sized", "parted"]


class Sized(Entry):
    """What is known of calls of one exact size."""

    def __init__(self, table: Table, key: Any, fit: Fit, fills: Sequence[tuple[Any, bool]]) -> None:
        super().__init__(table.tree, key, None)
        self.fit, self.choices = fit, fills
        self.fills = [fill for fill, _ in fills]

    def follow(self, bucket: Entry, graph: Any) -> None:
        """Use this graph for as long as the bucket does and its guard holds."""
        whole, holds = bucket.graph, bucket.holds
        self.bucket, self.graph, self.admits = bucket, graph, bucket.admits
        self.holds = lambda: bucket.graph is whole and holds()


def parted(paths: Sequence[str], fit: Fit, groups: Any, tensors: Sequence[Tensor]) -> InputError | None:
    """Tensors that share elements would be padded apart; one tensor given twice is padded once."""
    padded = fit.dims().keys()
    for group in groups or ():
        firsts = sorted({shared.first for shared in group})
        pairs = [pair for pair in combinations(firsts, 2) if not padded.isdisjoint(pair)]
        if not all(disjoint(tensors[a], tensors[b]) for a, b in pairs):
            names = " and ".join(f"`{paths[shared.place]}`" for shared in group)
            return InputError(
                f"{names} share memory, and padding would part them. Pass clones, or leave them out of `buckets`."
            )
    return None
