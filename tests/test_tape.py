"""The tape: replays equal eager bit for bit, capture has no effect, and a device's hazards show."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape_cases import CASES, Subject
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from graphify.backends._tape_steps import settled
from graphify.backends.tape import TapeBackend, TapePool, TapeRecording
from graphify.errors import CaptureError, GraphifyError

CPU = torch.device("cpu")
tape = TapeBackend()


def record(
    run: Callable[[], Any], pool: TapePool | None = None, *own: torch.Generator
) -> tuple[TapeRecording, Any]:
    with tape.scope(CPU):
        return tape.record(run, tape.pool(CPU) if pool is None else pool, own)


def tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def same(left: object, right: object) -> bool:
    """Equal bits, NaN included; shapes and dtypes too."""
    ours, theirs = tensors(left), tensors(right)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(ours, theirs, strict=True)
    )  # fmt: skip


def copies(found: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in found]


def twins(case: Callable[[], Subject]) -> tuple[Subject, Subject]:
    torch.manual_seed(3)
    eager = case()
    torch.manual_seed(3)
    return eager, case()


class TestEqualToEager:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_replays(self, case: Callable[[], Subject]) -> None:
        """Results, state and random streams of three replays with new data are eager's, bit for bit."""
        eager, taped = twins(case)
        first = eager.inputs()
        for subject in (eager, taped):
            torch.manual_seed(0)
            subject.run(*(t.clone() for t in first))
        statics = tuple(t.clone() for t in first)
        recording, out = record(lambda: taped.run(*statics))

        for call in range(1, 4):
            data = eager.inputs()
            torch.manual_seed(call)
            expected = eager.run(*(t.clone() for t in data))
            stream = torch.get_rng_state()
            for static, new in zip(statics, data, strict=True):
                static.copy_(new)
            torch.manual_seed(call)
            recording.replay()

            assert same(out, expected)
            assert same(taped.state(), eager.state())
            assert torch.equal(stream, torch.get_rng_state())

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_capture_has_no_effect(self, case: Callable[[], Subject]) -> None:
        """A capture changes no input, state or random stream, and no result can be taken for a number."""
        subject = case()
        statics = subject.inputs()
        subject.run(*(t.clone() for t in statics))
        before = copies([*statics, *subject.state()])
        stream = torch.get_rng_state()

        _, out = record(lambda: subject.run(*statics))

        assert same([*statics, *subject.state()], before)
        assert torch.equal(stream, torch.get_rng_state())
        for result in tensors(out):
            if result.is_floating_point() or result.is_complex():
                assert result.isnan().all()
            else:
                assert (result == (1 if result.dtype is torch.bool else torch.iinfo(result.dtype).min)).all()

    def test_a_tape_keeps_no_views(self) -> None:
        """Views and aliases are no work: three linear layers with activations are five operators."""
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        x = torch.randn(2, 4)

        recording, _ = record(lambda: net(x.view(2, 4)).t().contiguous().view(-1)[:3])

        assert recording.nodes == 6  # and one copy, which `contiguous` makes of the transpose
        assert recording.bytes == 6 * 2 * 4 * 4

    def test_layout_in_place_is_no_work(self) -> None:
        """`t_` and its like change what the host knows of a tensor; their memory is as it was."""
        x = torch.randn(2, 3)

        recording, out = record(lambda: x.clone().t_().unsqueeze_(0) * 2)
        recording.replay()
        recording.replay()

        assert recording.nodes == 2
        assert same(out, x.t()[None] * 2)

    def test_memory_that_the_host_gave_back(self) -> None:
        """A storage that Python empties after its last use has room again at each replay."""
        x = torch.randn(1000)

        def run() -> Tensor:
            y = x * 2
            z = y + 1
            y.untyped_storage().resize_(0)
            return z

        recording, out = record(run)
        recording.replay()

        assert same(out, x * 2 + 1)

    def test_numpy_memory_stays_the_hosts(self) -> None:
        """A tensor over NumPy's memory is read where it is, and never filled with NaN."""
        numpy = pytest.importorskip("numpy")
        table = numpy.ones(3, dtype=numpy.float32)

        recording, out = record(lambda: torch.from_numpy(table) * 2)
        table[0] = 5
        recording.replay()

        assert out.tolist() == [10, 2, 2]
        assert table.tolist() == [5, 1, 1]

    def test_replays_leave_no_version(self) -> None:
        """Recording counts as one write, replays as none: what autograd saved outside stays valid."""
        state, x = torch.zeros(3), torch.ones(3, requires_grad=True)
        versions = state._version
        recording, _ = record(lambda: state.add_(1))
        assert state._version == versions + 1
        product = x * state

        recording.replay()
        recording.replay()

        assert state._version == versions + 1
        product.sum().backward()


class Bystander(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} reached a mode of the caller")


AROUND: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a dispatch mode": Bystander,
}


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("graphify_kernels", "FRAGMENT") as found:
        yield found


class TestThreadState:
    """Kernels read the thread's modes below autograd: a replay has the recorded ones, not the caller's."""

    @pytest.mark.parametrize("around", AROUND)
    def test_modes_of_the_caller(self, around: str) -> None:
        """An LSTM's forward and backward replay alike under any mode of the caller."""
        torch.manual_seed(3)
        lstm, x = nn.LSTM(6, 8), torch.randn(5, 2, 6)

        def run() -> object:
            y = lstm(x)[0]
            return y, torch.autograd.grad(y.sum(), list(lstm.parameters()))

        expected = run()
        recording, out = record(run)
        with AROUND[around]():
            recording.replay()

        assert same(out, expected)

    def test_inference_tensors(self) -> None:
        """What was recorded in inference mode replays outside of it, tensors made and written there included."""
        with torch.inference_mode():
            kept = torch.zeros(3)
        x = torch.ones(3)

        def run() -> Tensor:
            with torch.inference_mode():
                kept.add_(x)
                return kept * 2

        recording, out = record(run)
        recording.replay()
        recording.replay()

        assert kept.tolist() == [2, 2, 2]
        assert out.tolist() == [4, 4, 4]
        assert out.is_inference()

    def test_default_dtype(self) -> None:
        """A replay under another default dtype says so: factories would make other tensors."""
        recording, _ = record(lambda: torch.full((2,), 1.0))
        torch.set_default_dtype(torch.float64)
        try:
            with pytest.raises(GraphifyError, match="default dtype"):
                recording.replay()
        finally:
            torch.set_default_dtype(torch.float32)

    def test_what_a_kernel_reads(self, library: torch.library.Library) -> None:
        """A kernel finds the grad and inference mode it was recorded in, and one tensor twice as one tensor."""
        seen: list[object] = []

        def look(x: Tensor, y: Tensor) -> Tensor:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), x is y))
            return x.clone()

        library.define("look(Tensor x, Tensor y) -> Tensor")
        library.impl("look", look, "CPU")
        x = torch.ones(2)

        def run() -> None:
            torch.ops.graphify_kernels.look(x, x)
            with torch.no_grad():
                torch.ops.graphify_kernels.look(x, x.clone())
            with torch.inference_mode():
                torch.ops.graphify_kernels.look(x, x)

        recording, _ = record(run)
        recorded = seen.copy()
        seen.clear()
        with torch.inference_mode():
            recording.replay()

        assert recorded == [(True, False, True), (False, False, False), (False, True, True)]
        assert seen == recorded

    def test_operators_without_results(self, library: torch.library.Library) -> None:
        """An operator that returns nothing did something: it is repeated, and so is one that only draws."""
        calls: list[str] = []

        def draw() -> None:
            calls.append("draw")
            torch.rand(1)

        library.define("note(Tensor x) -> ()")
        library.define("draw() -> ()")
        library.impl("note", lambda x: calls.append("note"), "CPU")
        library.impl("draw", draw, "CompositeExplicitAutograd")
        x = torch.ones(2)

        recording, _ = record(lambda: (torch.ops.graphify_kernels.note(x), torch.ops.graphify_kernels.draw()))
        recording.replay()

        assert calls == ["note", "draw"] * 2

    def test_a_result_of_another_kind(self, library: torch.library.Library) -> None:
        """A kernel that makes another result at replay is loud, never a silent cast."""
        wide = [False]
        library.define("kind(Tensor x) -> Tensor")
        library.impl("kind", lambda x: x.double() if wide[0] else x.clone(), "CPU")
        x = torch.ones(2)
        recording, _ = record(lambda: torch.ops.graphify_kernels.kind(x))
        recording.replay()
        wide[0] = True

        with pytest.raises(GraphifyError, match=r"graphify_kernels.kind.*float64 at replay.*float32"):
            recording.replay()

    def test_fewer_or_more_results(self, library: torch.library.Library) -> None:
        """A list of another length is loud too."""
        count = [2]
        library.define("some(Tensor x) -> Tensor[]")
        library.impl("some", lambda x: [x.clone() for _ in range(count[0])], "CPU")
        x = torch.ones(2)
        recording, _ = record(lambda: torch.ops.graphify_kernels.some(x))
        recording.replay()
        for count[0] in (1, 3):
            with pytest.raises(GraphifyError, match=r"graphify_kernels.some"):
                recording.replay()


class TestHazards:
    """What goes wrong on a device goes wrong here."""

    def test_the_next_replay_overwrites_a_result(self) -> None:
        """A result is graph memory."""
        x = torch.ones(3)
        recording, out = record(lambda: x * 2)
        recording.replay()
        assert out.tolist() == [2, 2, 2]
        x.fill_(5)
        recording.replay()
        assert out.tolist() == [10, 10, 10]

    def test_a_dropped_result_may_be_reused(self) -> None:
        """A later recording's replay spoils what nobody held when it was captured."""
        x, pool = torch.ones(3), tape.pool(CPU)
        first, out = record(lambda: x * 2, pool)
        reader, read = record(lambda out=out: out + 1, pool)
        del out
        later, _ = record(lambda: x * 3, pool)
        first.replay()
        reader.replay()
        assert read.tolist() == [3, 3, 3]

        later.replay()
        reader.replay()

        assert read.isnan().all()

    def test_a_result_held_at_a_capture_is_safe_from_it(self) -> None:
        """What somebody holds when a later recording is captured keeps its memory."""
        x, pool = torch.ones(3), tape.pool(CPU)
        first, out = record(lambda: x * 2, pool)
        view = out[:2]
        del out
        later, _ = record(lambda: x * 3, pool)

        first.replay()
        later.replay()

        assert view.tolist() == [2, 2]

    def test_saved_activations_count_as_held(self) -> None:
        """Autograd's saved tensors are safe from later recordings as long as its graph lives."""
        x, pool = torch.ones(3), tape.pool(CPU)
        weight = torch.full((3,), 2.0, requires_grad=True)
        forward, out = record(lambda: ((x * 3) * weight).sum(), pool)
        later, _ = record(lambda: x * 5, pool)
        backward, grad = record(
            lambda: torch.autograd.grad(out, weight, retain_graph=True)[0], tape.pool(CPU)
        )

        forward.replay()
        later.replay()
        backward.replay()

        assert grad.tolist() == [3, 3, 3]

    def test_an_earlier_replay_spoils_memory_that_was_its_own(self) -> None:
        """A recording that was captured into another's free memory loses all it holds, results too."""
        x, pool = torch.ones(3), tape.pool(CPU)
        earlier, _kept = record(lambda: (x * 2) * 3, pool)  # x * 2 is free after it
        later, out = record(lambda: x + 1, pool)
        later.replay()
        assert out.tolist() == [2, 2, 2]

        earlier.replay()

        assert out.isnan().all()

    def test_an_earlier_recording_without_free_memory_is_harmless(self) -> None:
        """Where nothing was free, a later recording has memory of its own."""
        x, pool = torch.ones(3), tape.pool(CPU)
        earlier, _kept = record(lambda: x * 2, pool)
        later, out = record(lambda: x + 1, pool)
        later.replay()
        earlier.replay()

        assert out.tolist() == [2, 2, 2]

    def test_pools_do_not_meet(self) -> None:
        """Recordings of two pools never spoil each other."""
        x = torch.ones(3)
        first, out = record(lambda: (x * 2) * 3)
        reader, read = record(lambda out=out: out + 1)
        first.replay()
        del out
        other, _ = record(lambda: (x * 5) * 6)
        other.replay()
        reader.replay()

        assert read.tolist() == [7, 7, 7]

    def test_a_closed_recording_spoils_nothing(self) -> None:
        """Closing takes a recording out of its pool."""
        x, pool = torch.ones(3), tape.pool(CPU)
        earlier, _kept = record(lambda: (x * 2) * 3, pool)
        later, out = record(lambda: x + 1, pool)
        earlier.close()
        later.replay()

        assert out.tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="closed"):
            earlier.replay()

    def test_closing_frees(self) -> None:
        """A closed recording's memory is gone with its results, without the garbage collector."""
        x, pool = torch.ones(3), tape.pool(CPU)
        recording, out = record(lambda: (x * 2) * 3, pool)
        other, _kept = record(lambda: x + 1, pool)
        other.replay()
        inner = StorageWeakRef(next(iter(recording.memory.values())).untyped_storage())
        outer = StorageWeakRef(out.untyped_storage())
        del out
        assert not outer.expired()

        recording.close()
        recording.close()

        assert inner.expired()
        assert outer.expired()


def explode(error: BaseException) -> object:
    raise error


class TestFailure:
    def test_leaves_no_trace(self) -> None:
        """A failing run's own error surfaces; values, versions, shapes, streams and modes are as before."""
        net = nn.BatchNorm1d(4)
        held, turned, grown = torch.randn(3, 4), torch.randn(2, 3), torch.randn(2)
        own = torch.Generator().manual_seed(1)
        kept = [*net.state_dict().values(), held, turned, grown]
        before, versions = copies(kept), [t._version for t in kept]
        streams, error = (torch.get_rng_state(), own.get_state()), ValueError("mine")

        def run() -> None:
            net(held * torch.rand(3, 4))
            held.t_().fill_(torch.nan)
            turned.squeeze_().add_(torch.rand(3, generator=own))
            grown.resize_(50).fill_(1)
            raise error

        with pytest.raises(ValueError, match="mine") as caught:
            record(run)

        assert caught.value is error
        assert same(kept, before)
        assert [t._version for t in kept] == versions
        assert torch.equal(streams[0], torch.get_rng_state())
        assert torch.equal(streams[1], own.get_state())
        assert not _get_current_dispatch_mode_stack()
        assert not tape.busy()

    def test_the_next_capture_works(self) -> None:
        """A failure is forgotten, in its pool and on its thread."""
        x, pool = torch.ones(3), tape.pool(CPU)
        with pytest.raises(KeyboardInterrupt):
            record(lambda: explode(KeyboardInterrupt()), pool)
        recording, out = record(lambda: x * 2, pool)
        recording.replay()

        assert out.tolist() == [2, 2, 2]

    def test_a_run_that_raises_a_tensor_error(self) -> None:
        """Errors of torch itself come through with their text."""
        with pytest.raises(RuntimeError, match="must match the size"):
            record(lambda: torch.ones(2) + torch.ones(3))


SEEDERS: dict[str, Callable[[Tensor, torch.Generator], object]] = {
    "manual_seed": lambda x, own: (torch.manual_seed(4), x * 2),
    "at the end": lambda x, own: (x * 2, torch.manual_seed(4)),
    "set_rng_state": lambda x, own: (
        torch.rand(1),
        torch.set_rng_state(torch.Generator().get_state()),
        x * 2,
    ),
    "a generator's seed": lambda x, own: (own.manual_seed(4), x * 2),
    "between draws": lambda x, own: (torch.rand(1, generator=own), own.manual_seed(1), x * 2),
}


class TestRefused:
    def test_a_capture_inside_a_capture(self) -> None:
        """One thread records one graph at a time, and says so."""
        x, pool = torch.ones(3), tape.pool(CPU)
        with pytest.raises(CaptureError, match="capture inside a capture"):
            record(lambda: tape.record(lambda: x * 2, pool, ()), pool)
        assert not tape.busy()

    def test_higher_order_operators(self) -> None:
        """`torch.cond` is named, with the user's own line."""
        x = torch.ones(3)
        with pytest.raises(CaptureError, match="`cond` is a higher-order operator") as caught:
            record(lambda: torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)))
        assert "test_tape.py" in str(caught.value.where)

    @pytest.mark.parametrize(
        ("make", "kind"),
        [
            (lambda x: x.to_sparse(), "sparse_coo"),
            (lambda x: torch.nested.as_nested_tensor([x, x[:1]]), "nested"),
        ],
        ids=["sparse", "nested"],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_results_without_plain_memory(self, make: Callable[[Tensor], Tensor], kind: str) -> None:
        """A result that a replay cannot refill is refused by its layout."""
        x = torch.ones(3, 2)
        with pytest.raises(CaptureError, match=f"a {kind} tensor"):
            record(lambda: make(x))

    def test_subclasses_that_hide_operators(self) -> None:
        """A tensor with a dispatch of its own, and nothing to unwrap, is refused by its class."""

        class Hidden(Tensor):
            @classmethod
            def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                raise AssertionError

        x = torch.ones(3).as_subclass(Hidden)  # type: ignore[type-var]
        with pytest.raises(CaptureError, match="gets a Hidden"):
            record(lambda: x * 2)

    @pytest.mark.parametrize("seeder", SEEDERS)
    def test_python_that_moves_a_generator(self, seeder: str) -> None:
        """A generator that Python code moves inside is refused: a replay would not move it."""
        x, own = torch.ones(3), torch.Generator().manual_seed(1)
        streams = torch.get_rng_state(), own.get_state()

        with pytest.raises(CaptureError, match="moved a random generator"):
            record(lambda: SEEDERS[seeder](x, own), None, own)

        assert torch.equal(streams[0], torch.get_rng_state())
        assert torch.equal(streams[1], own.get_state())

    def test_a_checkpoint_with_dropout(self) -> None:
        """A checkpoint that replays random numbers is refused; its message says which option helps."""
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        x = torch.randn(3, 4)

        def run() -> object:
            y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
            return torch.autograd.grad(y.sum(), list(net.parameters()))

        with pytest.raises(CaptureError, match="preserve_rng_state=False"):
            record(run)

    def test_forked_draws_that_end_as_they_began(self) -> None:
        """`fork_rng` is seen between its draws, although the stream ends where it began."""
        x = torch.ones(3)

        def run() -> Tensor:
            with torch.random.fork_rng(devices=[]):
                noise = torch.rand(3)
            return x + noise

        with pytest.raises(CaptureError, match=r"moved a random generator between `aten\.rand"):
            record(run)

    @pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
    def test_the_profilers_operators_are_not_named(self, inside: bool) -> None:
        """A generator moved beside a profiler's range is told by the operators that the function itself calls."""
        x = torch.ones(3)

        def run() -> Tensor:
            y = x * 2
            if not inside:
                torch.manual_seed(1)
            with torch.profiler.record_function("a part"):
                z = y + 1
                if inside:
                    torch.manual_seed(1)
            return z * torch.rand(3)

        last = "add" if inside else "mul"
        with pytest.raises(
            CaptureError,
            match=rf"moved a random generator after `aten\.{last}\.Tensor`\n  where: .*test_tape",
        ):
            record(run)


class TestCompiled:
    def test_runs_as_written_and_stays_compiled(self) -> None:
        """A compiled function is recorded as the operators it was written in, and is compiled again after."""
        runs: list[str] = []

        def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
            runs.append("compiled")
            return lambda *args: runs.append("run") or graph(*args)

        function = torch.compile(lambda t: t.sin() + 1, backend=compiler)
        x = torch.zeros(3)
        function(x)
        recording, out = record(lambda: function(x) * 2)
        x.fill_(1)
        recording.replay()

        assert same(out, (x.sin() + 1) * 2)
        assert runs == ["compiled", "run"]
        function(x)
        assert runs == ["compiled", "run", "run"]
        torch._dynamo.reset()

    def test_a_first_compile_inside_a_capture(self) -> None:
        """Compiled code that the tape could not hold back is found out after the run."""
        script = """if True:
            import torch
            from graphify.backends.tape import TapeBackend
            from graphify.errors import CaptureError
            tape, x = TapeBackend(), torch.ones(3)
            try:
                tape.record(lambda: torch.compile(torch.sin, backend="eager")(x), tape.pool(x.device), ())
            except CaptureError as error:
                print(error)
            """
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert "first time inside a capture" in found.stdout


class TestThreads:
    def test_other_threads_are_not_recorded(self) -> None:
        """Work of another thread during a capture is its own: real at once, and not repeated."""
        x, other = torch.ones(3), torch.zeros(3)

        def run() -> Tensor:
            worker = threading.Thread(target=lambda: other.add_(1))
            worker.start()
            worker.join()
            return x * 2

        recording, _ = record(run)
        recording.replay()

        assert recording.nodes == 1
        assert other.tolist() == [1, 1, 1]

    def test_busy_is_of_a_thread(self) -> None:
        """Only the thread that records is busy."""
        seen: list[bool] = []

        def run() -> None:
            seen.append(tape.busy())
            worker = threading.Thread(target=lambda: seen.append(tape.busy()))
            worker.start()
            worker.join()

        record(run)

        assert seen == [True, False]


class TestSubclasses:
    def test_wrappers_are_recorded_inside(self) -> None:
        """A wrapper subclass that can be taken apart is recorded by the operators on its parts."""
        values = torch.randn(6, 3)
        lengths = torch.tensor([0, 2, 6])
        ragged = torch.nested.nested_tensor_from_jagged(values, lengths)

        recording, out = record(lambda: ragged * 2)
        values.fill_(4)
        recording.replay()

        assert torch.equal(out.values(), values * 2)

    def test_plain_subclasses(self) -> None:
        """A subclass without a dispatch of its own is a tensor like any other."""

        class Named(Tensor):
            pass

        x = torch.ones(3).as_subclass(Named)  # type: ignore[type-var]
        recording, out = record(lambda: x * 2)
        recording.replay()

        assert type(out) is Named
        assert out.tolist() == [2, 2, 2]


class TestCollectives:
    @pytest.fixture
    def group(self, tmp_path: Any) -> Any:
        dist = pytest.importorskip("torch.distributed")
        if not (dist.is_available() and dist.is_gloo_available()):
            pytest.skip("torch was built without gloo")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        yield dist
        dist.destroy_process_group()

    def test_all_reduce(self, group: Any) -> None:
        """A collective is waited for at replay, whether the run waited for its handle or not."""
        x = torch.ones(3)

        def run() -> Tensor:
            y = x * 2
            group.all_reduce(y, async_op=True).wait()
            return y + 1

        recording, out = record(run)
        assert x.tolist() == [1, 1, 1]
        x.fill_(5)
        recording.replay()

        assert out.tolist() == [11, 11, 11]

    def test_handles_are_waited_for(self) -> None:
        """Whatever an operator of `c10d` answers beside tensors is waited for."""
        waited: list[int] = []
        work = SimpleNamespace(wait=lambda: waited.append(1))
        result = [torch.ones(2)], work

        assert settled(SimpleNamespace(namespace="c10d"), result) is result
        assert waited == [1]

    @pytest.mark.filterwarnings("ignore")
    def test_functional_all_reduce(self, group: Any) -> None:
        """Functional collectives, whose results are wrapper subclasses, replay too."""
        functional = pytest.importorskip("torch.distributed._functional_collectives")
        x = torch.ones(3)

        recording, out = record(lambda: functional.all_reduce(x, "sum", group.group.WORLD) * 2)
        x.fill_(5)
        recording.replay()

        assert out.tolist() == [10, 10, 10]
