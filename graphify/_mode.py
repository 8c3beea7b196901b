"""A dispatch mode beside which `torch.compile` stays alive."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InfraMode"]


class InfraMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """An infra mode: a plain one would switch `torch.compile` off inside, for good."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Keep `torch.compile` alive inside."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default imports all of Dynamo at the first operator, to keep it out of `__torch_dispatch__`.
        return False
