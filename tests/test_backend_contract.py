"""What every backend promises: one suite, run on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphify.backends import named
from graphify.backends.base import Backend, Recording, Replay


class Bench:
    """A backend with the device it works on, and one pool."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.pool = backend.pool(device)

    def record(
        self, run: Callable[[], Any], pool: Any = None, generators: Sequence[torch.Generator] = ()
    ) -> tuple[Recording, Any]:
        with self.backend.scope(self.device):
            return self.backend.record(run, self.pool if pool is None else pool, generators)

    def graph(
        self, run: Callable[[], Any], statics: Sequence[Tensor] = (), pool: Any = None
    ) -> tuple[Replay, Recording]:
        """Record, with results flat, and plan the replays."""
        recording, results = self.record(run, pool)
        flat = [results] if isinstance(results, Tensor) else list(results)
        copies = [(static, i) for i, static in enumerate(statics)]
        return self.backend.replayer(recording, copies, flat), recording

    def warm(self, run: Callable[[], Any]) -> Any:
        with self.backend.scope(self.device):
            return run()

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)


@pytest.fixture
def bench(backend: str, device: torch.device) -> Bench:
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return Bench(named(backend), device)


def same_bits(left: Tensor, right: Tensor) -> bool:
    raw = [torch.view_as_real(t) if t.is_complex() else t for t in (left.cpu(), right.cpu())]
    return left.dtype == right.dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in raw))


class TestReplay:
    def test_sees_new_inputs(self, bench: Bench) -> None:
        """A replay computes from what its static inputs hold then, bit for bit like eager."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(bench.device)
        static = bench.randn(3, 4)
        with torch.no_grad():
            bench.warm(lambda: net(static))
            replay, _ = bench.graph(lambda: net(static), [static])
            replay.launch()
            for _ in range(3):
                x = bench.randn(3, 4)
                replay.stage([x])
                (found,) = replay.launch()

                assert torch.equal(found, net(x))

    def test_record_and_first_replay_are_one_run(self, bench: Bench) -> None:
        """State moves once for both together, and once for each replay after."""
        total, x = bench.ones(3), bench.ones(3)
        recording, _ = bench.record(lambda: total.add_(x) * 2)
        recording.replay()
        assert total.tolist() == [2, 2, 2]
        recording.replay()
        recording.replay()
        assert total.tolist() == [4, 4, 4]

    def test_results_are_stable_until_the_next_replay(self, bench: Bench) -> None:
        """Graph memory holds a result until the recording runs again, whatever else happens."""
        x = bench.ones(3)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        x.fill_(5)
        _ = [bench.randn(3) for _ in range(10)]
        assert out.tolist() == [2, 2, 2]
        recording.replay()
        assert out.tolist() == [10, 10, 10]

    def test_launches_give_fresh_results(self, bench: Bench) -> None:
        """What a launch answers is the caller's: no later launch touches it."""
        static = bench.ones(2, 3)
        replay, _ = bench.graph(lambda: (static * 2, static + 1), [static])
        replay.launch()
        replay.stage([bench.ones(2, 3) * 4])
        first = replay.launch()
        replay.stage([bench.ones(2, 3) * 7])
        second = replay.launch()

        assert [t[0, 0].item() for t in (*first, *second)] == [8, 5, 14, 8]

    def test_results_keep_their_strides(self, bench: Bench) -> None:
        """A dense result is answered in its own memory format."""
        static = bench.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        replay, _ = bench.graph(lambda: static * 2, [static])
        (found,) = replay.launch()

        assert found.stride() == static.stride()
        assert torch.equal(found, static * 2)

    def test_no_inputs_and_no_results(self, bench: Bench) -> None:
        """A run may take nothing or make nothing."""
        total = bench.ones(2)
        replay, _ = bench.graph(lambda: (total.mul_(2), ())[1])
        replay.stage([])
        assert list(replay.launch()) == []
        assert total.tolist() == [2, 2]

    def test_a_result_that_is_an_input_or_outside(self, bench: Bench) -> None:
        """A run may give back what it was given, changed in place or not."""
        static, outside = bench.ones(3), bench.ones(3)
        recording, (first, second, third) = bench.record(lambda: (static, outside.add_(static), static * 3))
        assert first is static
        assert second is outside
        recording.replay()
        static.fill_(2)
        recording.replay()

        assert outside.tolist() == [4, 4, 4]
        assert third.tolist() == [6, 6, 6]

    def test_counts(self, bench: Bench) -> None:
        """A recording says how much work and memory it is."""
        x = bench.ones(1000)
        recording, _kept = bench.record(lambda: x * 2 + 1)
        assert recording.nodes >= 1
        assert recording.bytes >= 0


class TestStage:
    DTYPES = (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    )

    def values(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            found = torch.tensor([-0.0, float("nan"), float("inf"), 1e-8, 3.3])
        elif dtype is torch.bool:
            found = torch.tensor([True, False, True, True, False])
        else:
            found = torch.tensor([0, 1, 255, 7, torch.iinfo(dtype).max])
        return found.to(dtype).to(device)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_one_input_arrives_bit_for_bit(self, bench: Bench, dtype: torch.dtype) -> None:
        """A staged input has the caller's very bits: no cast, no rounding, NaN and -0.0 too."""
        values = self.values(dtype, bench.device)
        static = torch.zeros_like(values)
        replay, _ = bench.graph(lambda: static.clone(), [static])
        replay.launch()
        replay.stage([values])
        (found,) = replay.launch()

        assert same_bits(found, values)

    def test_many_inputs_of_many_kinds(self, bench: Bench) -> None:
        """Inputs of all dtypes and strides arrive together, each from its own place in the call."""
        values = [self.values(dtype, bench.device) for dtype in self.DTYPES]
        values += [
            bench.randn(4, 3).t(),
            bench.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            bench.randn(0, 3),
        ]
        statics = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).zero_() for v in values
        ]
        recording, results = bench.record(lambda: [s.clone() for s in statics])
        copies = [(s, len(values) - 1 - i) for i, s in enumerate(statics)]
        replay = bench.backend.replayer(recording, copies, results)
        replay.launch()
        replay.stage(values[::-1])

        for found, value in zip(replay.launch(), values, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
            assert found.is_complex() or torch.equal(
                found.signbit() & ~found.isnan(), value.signbit() & ~value.isnan()
            )

    def test_inputs_that_require_grad(self, bench: Bench) -> None:
        """Staging leaves no autograd history on static inputs."""
        static = bench.ones(3)
        with torch.no_grad():
            replay, _ = bench.graph(lambda: static * 2, [static])
        replay.launch()
        replay.stage([bench.ones(3).requires_grad_()])

        assert not static.requires_grad

    def test_inference_tensors(self, bench: Bench) -> None:
        """A static input of inference mode is filled from outside of it."""
        with torch.inference_mode():
            static = bench.ones(3)
            replay, _ = bench.graph(lambda: static * 2, [static])
            replay.launch()
        replay.stage([bench.ones(3) * 4])
        (found,) = replay.launch()

        assert found.tolist() == [8, 8, 8]


class TestRandomStreams:
    def test_replays_draw_what_eager_draws(self, bench: Bench) -> None:
        """After one seed, dropout in replays has eager's masks, and the stream goes on in step."""
        x = bench.ones(64)
        recording, out = bench.record(lambda: F.dropout(x, 0.5))
        recording.replay()
        torch.manual_seed(7)
        expected = [F.dropout(x, 0.5) for _ in range(4)] + [torch.rand(3, device=bench.device)]
        torch.manual_seed(7)
        found = []
        for _ in range(4):
            recording.replay()
            found.append(out.clone())
        found.append(torch.rand(3, device=bench.device))

        assert all(map(torch.equal, found, expected))
        assert not torch.equal(found[0], found[1])

    def test_a_generator_of_its_own(self, bench: Bench) -> None:
        """A generator that the run was given moves as in eager."""
        own = torch.Generator(bench.device).manual_seed(3)
        x = bench.ones(64)
        recording, out = bench.record(lambda: x.bernoulli(0.5, generator=own), None, [own])
        recording.replay()
        own.manual_seed(3)
        expected = [x.bernoulli(0.5, generator=own) for _ in range(3)]
        own.manual_seed(3)
        for mask in expected:
            recording.replay()
            assert torch.equal(out, mask)

    def test_one_run_draws_once(self, bench: Bench) -> None:
        """Recording and the first replay move the stream as one run does."""
        x = bench.ones(64)
        torch.manual_seed(5)
        expected = F.dropout(x, 0.5), torch.rand(3, device=bench.device)
        torch.manual_seed(5)
        recording, out = bench.record(lambda: F.dropout(x, 0.5))
        recording.replay()

        assert torch.equal(out, expected[0])
        assert torch.equal(torch.rand(3, device=bench.device), expected[1])

    def test_states_can_be_put_back(self, bench: Bench) -> None:
        """A saved state repeats the stream of the default generator and of one's own."""
        own = torch.Generator(bench.device).manual_seed(3)
        torch.rand(1, device=bench.device)

        def draw() -> list[Tensor]:
            return [torch.rand(3, device=bench.device), torch.rand(3, device=bench.device, generator=own)]

        state = bench.backend.rng_state([own])
        first = draw()
        bench.backend.set_rng_state(state)

        assert all(map(torch.equal, draw(), first))


class TestPool:
    def test_two_recordings_take_turns(self, bench: Bench) -> None:
        """Recordings of one pool replay in any order, each from its own inputs."""
        a, b = bench.ones(3), bench.ones(3)
        first, _ = bench.graph(lambda: (a * 2) + 1, [a])
        second, _ = bench.graph(lambda: (b * 3) + 1, [b])
        first.launch()
        second.launch()
        for n, graph, factor in [
            (1, first, 2),
            (2, second, 3),
            (3, second, 3),
            (4, first, 2),
            (5, second, 3),
        ]:
            graph.stage([bench.ones(3) * n])
            assert graph.launch()[0].tolist() == [n * factor + 1] * 3

    def test_closing_one_leaves_the_other(self, bench: Bench) -> None:
        """A recording outlives its siblings in the pool."""
        x = bench.ones(3)
        recordings = [bench.record(lambda n=n: (x * n) + 1) for n in (2, 3, 4)]
        for recording, _ in recordings:
            recording.replay()
        recordings[0][0].close()
        recordings[2][0].close()
        survivor, out = recordings[1]
        survivor.replay()

        assert out.tolist() == [4, 4, 4]

    def test_a_pool_survives_its_recordings(self, bench: Bench) -> None:
        """A pool whose recordings are all closed takes new ones."""
        x = bench.ones(3)
        for n in (2, 3):
            recording, out = bench.record(lambda n=n: x * n)
            recording.replay()
            assert out.tolist() == [n, n, n]
            recording.close()
            del out


class TestClose:
    def test_twice_is_harmless(self, bench: Bench) -> None:
        """Closing is idempotent, and a closed recording does not replay."""
        x = bench.ones(3)
        recording, _ = bench.record(lambda: x * 2)
        recording.replay()
        recording.close()
        recording.close()
        with pytest.raises(RuntimeError, match="closed"):
            recording.replay()

    def test_frees(self, bench: Bench) -> None:
        """Nothing keeps the memory of results, nor what only the run referred to, after closing."""
        x, closed_over = bench.ones(3), bench.ones(3)
        recording, out = bench.record(lambda y=closed_over: x * y)
        recording.replay()
        memory = [StorageWeakRef(t.untyped_storage()) for t in (out, closed_over)]
        del out, closed_over
        recording.close()

        assert [ref.expired() for ref in memory] == [True, True]

    def test_dropping_frees_too(self, bench: Bench) -> None:
        """A recording that was never closed is freed with its last reference."""
        x = bench.ones(3)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        memory = StorageWeakRef(out.untyped_storage())
        del recording, out

        assert memory.expired()


class TestFailure:
    def test_the_users_error_surfaces(self, bench: Bench) -> None:
        """What the run raises comes out as it is, and the backend records again."""
        x, error = bench.ones(3), ValueError("mine")

        def run() -> Tensor:
            y = x * 2
            if y.dim() == 1:
                raise error
            return y

        with pytest.raises(ValueError, match="mine") as caught:
            bench.record(run)
        assert caught.value is error
        assert not bench.backend.busy()

        recording, out = bench.record(lambda: x * 3)
        recording.replay()
        assert out.tolist() == [3, 3, 3]
        assert torch.rand(2, device=bench.device).shape == (2,)

    def test_other_recordings_keep_working(self, bench: Bench) -> None:
        """A failed capture harms no recording that was made before in its pool."""
        x = bench.ones(3)
        recording, out = bench.record(lambda: (x * 2) + 1)
        recording.replay()
        with pytest.raises(ZeroDivisionError):
            bench.record(lambda: x * (1 // 0))
        x.fill_(4)
        recording.replay()

        assert out.tolist() == [9, 9, 9]

    def test_interrupts(self, bench: Bench) -> None:
        """A keyboard interrupt inside a run leaves the backend usable, too."""
        x = bench.ones(3)

        def run() -> None:
            x.add_(0)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            bench.record(run)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        assert out.tolist() == [2, 2, 2]


class TestLoans:
    def test_hold_the_numbers(self, bench: Bench) -> None:
        """A loan reads as the result, under a storage of its own."""
        x = bench.ones(3)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        loan = bench.backend.lend(out)

        assert loan.tensor.tolist() == [2, 2, 2]
        assert loan.tensor.untyped_storage()._cdata != out.untyped_storage()._cdata

    @pytest.mark.parametrize("reach", ["itself", "a view", "a detached copy"])
    def test_close_for_good(self, bench: Bench, reach: str) -> None:
        """Whoever uses a closed loan, a view or a detached copy of it fails or reads NaN; the graph does not."""
        x = bench.ones(3)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        loan = bench.backend.lend(out)
        kept = {"itself": loan.tensor, "a view": loan.tensor[1:], "a detached copy": loan.tensor.detach()}[
            reach
        ]
        loan.close()
        recording.replay()

        assert fails_or_nan(kept)
        assert out.tolist() == [2, 2, 2]

    def test_backward_through_a_closed_loan_fails(self, bench: Bench) -> None:
        """A product saved for backward is not computed from what a later replay left there."""
        x = bench.ones(3)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        loan = bench.backend.lend(out)
        weight = bench.ones(3).requires_grad_()
        loss = (loan.tensor * weight).sum()
        loan.close()

        with pytest.raises(RuntimeError):
            loss.backward()  # type: ignore[no-untyped-call]

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str
    )
    def test_close_in_every_dtype(self, bench: Bench, dtype: torch.dtype) -> None:
        """The numbers of a closed loan are gone whatever they were."""
        x = bench.ones(3).to(dtype)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        loan = bench.backend.lend(out)
        loan.close()

        assert fails_or_nan(loan.tensor)


def fails_or_nan(tensor: Tensor) -> bool:
    try:
        return bool((tensor * 1).isnan().all())
    except RuntimeError:
        return True


class TestPlace:
    def test_device_of(self, bench: Bench) -> None:
        """The device is the tensors' own; without tensors it is one the backend can use."""
        assert bench.backend.device_of([bench.ones(2), bench.ones(3)]) == bench.device
        none = bench.backend.device_of([])
        assert none is not None
        assert none.type == bench.device.type

    def test_busy_while_recording(self, bench: Bench) -> None:
        """A backend is busy on the recording thread, during the run only."""
        x, seen = bench.ones(3), []
        bench.record(lambda: (seen.append(bench.backend.busy()), x * 2)[1])

        assert seen == [True]
        assert not bench.backend.busy()

    def test_scopes_take_turns(self, bench: Bench) -> None:
        """Two threads are never inside at once; one thread may enter twice."""
        inside, most = [], []

        def work() -> None:
            with bench.backend.scope(bench.device), bench.backend.scope(bench.device):
                inside.append(1)
                most.append(len(inside))
                threading.Event().wait(0.01)
                inside.pop()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert most == [1, 1, 1, 1]

    def test_results_can_leave_a_scope(self, bench: Bench) -> None:
        """Tensors that were made inside are handed over, and replays are ordered after the pool's last."""
        x = bench.ones(3)
        with bench.backend.scope(bench.device):
            y = x * 2
        bench.backend.hand_over([y])
        bench.backend.order(bench.pool)

        assert y.tolist() == [2, 2, 2]

    def test_errors_are_told_apart(self, bench: Bench) -> None:
        """Memory that ran out is no capture error, and a user's error is neither."""
        out_of_memory, mine = torch.OutOfMemoryError("none left"), ValueError("mine")
        assert bench.backend.is_oom(out_of_memory)
        assert not bench.backend.is_oom(mine)
        assert not bench.backend.is_capture_error(mine)

    def test_replays_from_another_thread(self, bench: Bench) -> None:
        """A recording replays on a thread that did not make it."""
        x = bench.ones(3)
        recording, out = bench.record(lambda: x * 2)
        recording.replay()
        x.fill_(5)

        def work() -> None:
            bench.backend.order(bench.pool)
            recording.replay()
            if bench.device.type == "cuda":
                torch.cuda.synchronize()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

        assert out.tolist() == [10, 10, 10]
