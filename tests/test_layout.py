"""Where tensors lie: what shares memory has one key, whether torch tells it by a private name or not."""

from __future__ import annotations

import pytest
import torch

from graphify import _layout
from graphify._layout import family_key


@pytest.mark.parametrize(
    "address", [_layout._storage_address, _layout._storage_number], ids=["private", "public"]
)
def test_one_key_for_shared_memory(monkeypatch: pytest.MonkeyPatch, address: object) -> None:
    """Views, detached copies and other dtypes on one storage have the key of their base, and nothing else has it."""
    monkeypatch.setattr(_layout, "_storage_address", address)
    base, other = torch.zeros(4, 6), torch.zeros(4, 6)
    sharing = [base.t(), base[1:, ::2], base.detach(), base.view(torch.int32), base.expand(2, 4, 6)]
    sharing.append(torch.empty(0).set_(base.untyped_storage(), 3, (2,), (1,)))
    assert {family_key(t) for t in sharing} == {family_key(base)} == {base.untyped_storage()._cdata}
    sparse = other.to_sparse()
    assert len({family_key(t) for t in (base, other, sparse, base.clone())}) == 4
    assert family_key(sparse) == family_key(sparse)
