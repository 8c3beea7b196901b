"""What a forward saves for its backward, noted while it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._undo import version_of

__all__ = ["Saved", "modified", "saving"]


class Saved:
    """A tensor that a forward saved for its backward, and how often it had been written by then."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself could be a result: a reference cycle
        self.version = version_of(tensor)
        self.overwritten = self.stale = False
        self.used = False
        """Whether a backward has asked for it since somebody set this to False."""

    def settle(self) -> None:
        """The forward is over: what it wrote since is no longer what it saved."""
        self.overwritten = version_of(self.tensor) != self.version

    def expect(self, version: int) -> None:
        """The replay to go back from left it at this version."""
        self.version, self.stale = version, self.tensor._version != version

    def unpack(self) -> Tensor:
        """Give the tensor to the backward, or eager's error."""
        self.used = True
        if self.overwritten or self.stale:
            raise modified(self.tensor, self.version)
        return self.tensor


def modified(tensor: Tensor, version: int | None) -> RuntimeError:
    """Eager's error for a saved tensor that was written since."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
    )


@contextmanager
def saving(saved: list[Saved]) -> Iterator[None]:
    """Note every tensor that the body saves for its backward.

    Replays write where these lie, so that torch's own check of their versions must not run: it does not for
    tensors that went through hooks.
    """

    def pack(tensor: Tensor) -> Saved:
        saved.append(Saved(tensor))
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, Saved.unpack):
        yield
    for kept in saved:
        kept.settle()
