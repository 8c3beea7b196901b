"""What is known of calls of one exact size, whose graph is a bucket's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._entry import Entry, Table
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


def parted(paths: Sequence[str], fit: Fit, groups: Any) -> InputError | None:
    """Tensors that share memory would be padded apart; one tensor given twice is padded once."""
    for group in groups or ():
        places = [shared.place for shared in group]
        if len({shared.first for shared in group}) > 1 and not fit.dims().keys().isdisjoint(places):
            names = " and ".join(f"`{paths[place]}`" for place in places)
            return InputError(
                f"{names} share memory, and padding would part them. Pass clones, or leave them out of `buckets`."
            )
    return None
