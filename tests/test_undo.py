"""What operators write, and how it is taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphify._undo import UndoLog, writes_of


class Logged(TorchDispatchMode):
    """Gives each write to a log before it happens, and remembers what was written."""

    def __init__(self, log: UndoLog) -> None:
        super().__init__()
        self.log = log
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in writes_of(func, args, kwargs or {}):
            self.log.before_write(tensor)
            self.written.append(tensor)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log() -> UndoLog:
    return UndoLog()


def batch_norm(x: Tensor, mean: Tensor, var: Tensor) -> None:
    F.batch_norm(x, mean, var, training=True)


def fused_adamw(p: Tensor, mean: Tensor, var: Tensor) -> None:
    step = torch.tensor(1.0)
    torch._fused_adamw_(
        [p], [torch.ones_like(p)], [mean], [var], [], [step],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


WRITERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "in place": (lambda a, b, c: a.add_(b), (0,)),
    "into a view": (lambda a, b, c: b[1:].mul_(2), (1,)),
    "out=": (lambda a, b, c: torch.add(a, b, out=c), (2,)),
    "two outs": (lambda a, b, c: torch.max(a, 0, out=(b[0], torch.empty(3, dtype=torch.int64))), (1,)),
    "foreach": (lambda a, b, c: torch._foreach_add_([a, b], [c, c]), (0, 1)),
    "batch norm in training": (lambda a, b, c: batch_norm(a, b[0], c[0]), (1, 2)),
    "instance norm": (lambda a, b, c: F.instance_norm(a.view(1, 3, 3), b[0], c[0], use_input_stats=True), (1, 2)),
    "fused AdamW": (fused_adamw, (0, 1, 2)),
    "setitem": (lambda a, b, c: a.__setitem__(0, 5.0), (0,)),
    "a bit of everything": (lambda a, b, c: (a.fill_(1), b.copy_(a), c.index_add_(0, torch.tensor([1]), b[:1])), (0, 1, 2)),
}  # fmt: skip


class TestWrites:
    @pytest.mark.parametrize("writer", WRITERS)
    def test_are_found_and_taken_back(self, log: UndoLog, writer: str) -> None:
        """Each way to write is seen before it happens; afterwards values and versions are as before."""
        write, changed = WRITERS[writer]
        mine = [torch.rand(3, 3) + 1 for _ in range(3)]
        before, versions = [t.clone() for t in mine], [t._version for t in mine]
        with Logged(log) as seen, torch.no_grad():
            write(*mine)

        storages = {t.untyped_storage()._cdata for t in seen.written}
        for index, tensor in enumerate(mine):
            assert (tensor.untyped_storage()._cdata in storages) == (index in changed)
            assert torch.equal(tensor, before[index]) == (index not in changed)
        log.rollback()
        assert all(map(torch.equal, mine, before))
        assert [t._version for t in mine] == versions

    def test_batch_norm_in_eval_writes_nothing(self, log: UndoLog) -> None:
        """Without training the statistics are only read."""
        net = nn.BatchNorm1d(3).eval()
        with Logged(log) as seen:
            net(torch.randn(2, 3))
        assert seen.written == []

    def test_every_collective_writes(self) -> None:
        """Collectives have no marks: each of their tensors counts as written."""
        pytest.importorskip("torch.distributed")
        if not hasattr(torch.ops.c10d, "allreduce_"):
            pytest.skip("torch was built without collectives")
        x = torch.ones(2)
        assert writes_of(torch.ops.c10d.allreduce_.default, ([x], None, None, None), {}) == [x]

    def test_a_higher_order_operator_reports_inside(self) -> None:
        """It has no schema, and its inner operators are seen one by one."""
        assert writes_of(torch.ops.higher_order.cond, (torch.ones(1),), {}) == []

    def test_keyword_outs(self) -> None:
        """`out=` is found among the keyword arguments."""
        x, out = torch.ones(2), torch.empty(2)
        assert writes_of(torch.ops.aten.add.out, (x, x), {"out": out}) == [out]


class TestRollback:
    def test_metadata(self, log: UndoLog) -> None:
        """Shapes, strides and storages that in-place calls changed come back too."""
        turned, grown, set_to = torch.randn(2, 3), torch.randn(2), torch.randn(2)
        before = [t.clone() for t in (turned, grown, set_to)]
        pointer = set_to.data_ptr()
        with Logged(log):
            turned.t_().zero_()
            grown.resize_(100).fill_(1)
            set_to.set_(torch.zeros(7))
        log.rollback()

        assert all(map(torch.equal, (turned, grown, set_to), before))
        assert turned.is_contiguous()
        assert set_to.data_ptr() == pointer

    def test_values_only(self, log: UndoLog) -> None:
        """What the host did can stay: the version and the shape of a run that did happen."""
        x = torch.randn(2, 3)
        before, version = x.clone(), x._version
        with Logged(log):
            x.t_().zero_()
        log.rollback(values_only=True)

        assert torch.equal(x, before.t())
        assert x._version > version

    def test_shrunk_storages(self, log: UndoLog) -> None:
        """A storage that the host emptied after a write gets its size and its values back."""
        x = torch.randn(4)
        before = x.clone()
        with Logged(log):
            x.zero_()
        x.untyped_storage().resize_(0)
        log.rollback()

        assert torch.equal(x, before)

    def test_expanded_and_overlapping(self, log: UndoLog) -> None:
        """A tensor whose elements share memory is restored by its storage."""
        base = torch.randn(1, 3)
        before = base.clone()
        with Logged(log):
            base.expand(4, 3)[2].zero_()
        log.rollback()

        assert torch.equal(base, before)

    @pytest.mark.parametrize("inside", [False, True])
    def test_inference_tensors(self, log: UndoLog, inside: bool) -> None:
        """Tensors of inference mode are restored outside of it, and others inside."""
        with torch.inference_mode(not inside):
            x = torch.ones(3)
        with torch.inference_mode(), Logged(log):
            x.zero_()
        with torch.inference_mode(inside):
            log.rollback()

        assert x.tolist() == [1, 1, 1]

    def test_a_leaf_that_requires_grad(self, log: UndoLog) -> None:
        """A parameter stays a leaf, and what autograd saved of it stays valid."""
        weight = nn.Parameter(torch.ones(3))
        loss = (weight * weight).sum()
        with Logged(log), torch.no_grad():
            weight.zero_()
        log.rollback()
        loss.backward()

        assert weight.grad is not None
        assert weight.grad.tolist() == [2, 2, 2]

    def test_sparse(self, log: UndoLog) -> None:
        """A sparse tensor has no storage of its own and is restored as a whole."""
        x = torch.eye(3).to_sparse()
        with Logged(log):
            x.mul_(5)
        log.rollback()

        assert torch.equal(x.to_dense(), torch.eye(3))

    def test_under_modes_of_the_caller(self, log: UndoLog) -> None:
        """Saving and restoring are not seen by anybody's mode, nor changed by autocast."""
        x = torch.ones(3)
        with Logged(log) as seen:
            x.zero_()
            count = len(seen.written)
            with torch.autocast("cpu", torch.bfloat16):
                log.rollback()

        assert len(seen.written) == count
        assert x.tolist() == [1, 1, 1]

    def test_twice(self, log: UndoLog) -> None:
        """A rolled back log is empty: a second rollback undoes nothing that came after."""
        x = torch.ones(3)
        log.before_write(x)
        x.zero_()
        log.rollback()
        x.fill_(2)
        log.rollback()

        assert x.tolist() == [2, 2, 2]


class TestLimits:
    def test_large_storages_are_named_not_copied(self) -> None:
        """Above the limit a tensor is listed and keeps what was written."""
        log = UndoLog(limit=16)
        small, large = torch.ones(4), torch.ones(5)
        for tensor in (small, large, large[1:]):
            log.before_write(tensor)
            tensor.zero_()
        assert log.skipped == [large]
        log.rollback()

        assert small.tolist() == [1, 1, 1, 1]
        assert large.tolist() == [0, 0, 0, 0, 0]

    def test_memory_of_the_run_itself(self, log: UndoLog) -> None:
        """What the run made needs no undoing."""
        x = torch.ones(3)
        log.born(x)
        log.before_write(x)
        x.zero_()
        log.rollback()

        assert x.tolist() == [0, 0, 0]

    def test_clear_keeps_what_was_written(self, log: UndoLog) -> None:
        """A run that is to count is kept by clearing the log."""
        x = torch.ones(3)
        log.before_write(x)
        x.zero_()
        log.clear()
        log.rollback()

        assert x.tolist() == [0, 0, 0]
