"""`graphify.testing` finds faults of training: broken stand-ins are told from eager, by fixed and by random training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch import Tensor, nn

import graphify.testing
from graphify import CaptureError
from graphify.testing import (
    Act,
    Ambient,
    Backward,
    Call,
    Changes,
    Data,
    Drop,
    Edit,
    EditArguments,
    Gradients,
    HoldGradients,
    Hook,
    Program,
    SetGradients,
    Then,
    Update,
    ZeroGradients,
    assert_matches_eager,
    programs,
    training_sequences,
)
from graphify.testing._compare import Comparison

Wrap = Callable[[Any], Callable[..., Any]]
NAMES = {name: getattr(graphify.testing, name) for name in graphify.testing.__all__}


class Net(nn.Module):
    """Two weights of one shape, and an activation that is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Parameter(torch.randn(4, 4))
        self.second = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


def after(*acts: tuple[Act, ...], needing: bool = False) -> list[Call]:
    """One call per tuple of acts, with new data each."""
    return [
        Call((Data((3, 4), seed=number, requires_grad=needing),), context=Ambient("grad"), after=Then(done))
        for number, done in enumerate(acts, 1)
    ]


def plain(target: Any) -> Callable[..., Any]:
    """A stand-in that changes nothing."""
    return lambda *args, **kwargs: target(*args, **kwargs)


Run = tuple[Tensor, tuple[Tensor, ...]]
"""The result of a forward with its history, and the leaves that it began from."""


class _Paired(torch.autograd.Function):
    """Hands a run out without its history, and goes back through it when asked."""

    @staticmethod
    def forward(ctx: Any, stand: Stand, *inputs: Tensor) -> Tensor:
        ctx.stand, ctx.run = stand, stand.record(inputs, ctx.needs_input_grad[1:])
        ctx.save_for_backward(torch.zeros(()))
        return stand.handed_out(ctx.run[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.stand.check(ctx)
        return None, *ctx.stand.gradients(ctx.run, gradient)


class Stand:
    """A graphed stand-in with a backward of its own, without a fault; the kinds of fault are its subclasses."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def __call__(self, x0: Tensor) -> Tensor:
        out: Tensor = _Paired.apply(self, x0, self.net.first, self.net.second)
        return out

    def record(self, inputs: tuple[Tensor, ...], needing: tuple[bool, ...]) -> Run:
        """A forward on leaves that share the memory of these."""
        leaves = tuple(t.detach().requires_grad_(n) for t, n in zip(inputs, needing, strict=True))
        with torch.enable_grad():
            swapped = {"first": leaves[1], "second": leaves[2]}
            return torch.func.functional_call(self.net, swapped, leaves[:1]), leaves

    def handed_out(self, result: Tensor) -> Tensor:
        """What the caller gets."""
        return result.detach().clone()

    def check(self, ctx: Any) -> None:
        """Raise what torch raises where the graph was freed."""
        ctx.saved_tensors

    def gradients(self, run: Run, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, first and second."""
        needing = [leaf for leaf in run[1] if leaf.requires_grad]
        found = iter(torch.autograd.grad(run[0], needing, gradient, retain_graph=True))
        return tuple(next(found) if leaf.requires_grad else None for leaf in run[1])


class Stale(Stand):
    """Activations belong to the latest forward."""

    latest: Run

    def record(self, inputs: tuple[Tensor, ...], needing: tuple[bool, ...]) -> Run:
        self.latest = super().record(inputs, needing)
        return self.latest

    def gradients(self, run: Run, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return super().gradients(self.latest, gradient)


class Stolen(Stand):
    """Gradients are static buffers, and `.grad` becomes one of them."""

    static: dict[Any, Tensor] | None = None

    def gradients(self, run: Run, gradient: Tensor) -> tuple[Tensor | None, ...]:
        self.static = self.static or {}
        return tuple(
            None if g is None else self.static.setdefault((place, g.shape), g.clone()).copy_(g).detach()
            for place, g in enumerate(super().gradients(run, gradient))
        )


class Swapped(Stand):
    """The gradients of the two weights change places."""

    def gradients(self, run: Run, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, one, other = super().gradients(run, gradient)
        return x, other, one


class Zeros(Stand):
    """An input that needs no gradient gets one all the same, and so does a frozen weight."""

    def gradients(self, run: Run, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for leaf in (self.x, self.net.first, self.net.second):
            if leaf.is_leaf and leaf.grad is None and not leaf.requires_grad:
                leaf.grad = torch.zeros_like(leaf)
        return super().gradients(run, gradient)

    def __call__(self, x0: Tensor) -> Tensor:
        self.x = x0
        return super().__call__(x0)


class LiveWeights(Stand):
    """The backward reads what is in memory then, whatever was written since."""

    def record(self, inputs: tuple[Tensor, ...], needing: tuple[bool, ...]) -> Run:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
            return super().record(inputs, needing)


class NeverFreed(Stand):
    """A second backward works, although the first let go of the graph."""

    def check(self, ctx: Any) -> None: ...


class SharedResult(LiveWeights):
    """The result that is handed out is what the backward reads, and nobody looks at its version."""

    def handed_out(self, result: Tensor) -> Tensor:
        return result.detach()


class Twice(Stand):
    """A hook of the user's fires twice per backward."""

    def gradients(self, run: Run, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = super().gradients(run, gradient)
        for hook in (self.net.first._backward_hooks or {}).values():
            hook(found[1])
        return found


class Squashed(Net):
    """A net whose backward reads its result."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


BACKWARD, ZERO = Backward(), ZeroGradients()
FAULTS: dict[str, tuple[type[Stand], list[Call], str]] = {
    "stale activations": (
        Stale,
        after((), (Backward((1,)), Backward((0,)))),
        r"^call 2 of 2, Backward\(ago=\(1,\)\) differs from eager:\n  self.first.grad: values",
    ),
    "a stolen .grad": (Stolen, after((BACKWARD,), (BACKWARD,)), "self.first.grad: values"),
    "a stolen .grad that is held": (
        Stolen,
        after((BACKWARD, HoldGradients(), ZERO), (BACKWARD,)),
        r"held\[0\]\[0\]: values: 16 of 16 differ|self.first.grad: aliasing",
    ),
    "swapped gradients": (Swapped, after((BACKWARD,)), "self.first.grad: values"),
    "gradients that change places when asked for": (
        Swapped,
        after((Gradients(to="parameters"),)),
        r"held\[0\]\[0\]: values: 16 of 16 differ",
    ),
    "zeros for None": (Zeros, after((BACKWARD,)), r"args\[0\].grad: type: eager None"),
    "a step in between": (
        LiveWeights,
        after((BACKWARD,), (), (BACKWARD, Update(), Backward((1,)))),
        r"call 3 of 3, Backward\(ago=\(1,\)\) differs from eager:\n  self.first.grad: values",
    ),
    "a hook that fires twice": (
        Twice,
        after((Hook(), BACKWARD)),
        r"held\[0\]: length: eager 1, graphed 2",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_training_is_named(kind: str) -> None:
    """Each kind of wrong gradient is found where it shows first; a stand-in without the fault passes."""
    wrong, calls, message = FAULTS[kind]

    assert_matches_eager(Net(), calls, graphed=Stand)
    with pytest.raises(AssertionError) as caught:
        assert_matches_eager(Net(), calls, graphed=wrong)

    assert re.search(message, str(caught.value)), str(caught.value)


def test_a_result_that_the_backward_reads_must_not_be_the_users() -> None:
    """An edit behind autograd's back gives the right gradient or eager's error, never one of the edited numbers."""
    calls = after((BACKWARD,), (Edit(recorded=False), BACKWARD))

    assert_matches_eager(Squashed(), calls, graphed=plain)
    with pytest.raises(AssertionError, match=r"call 2 of 2, Backward\(\) differs from eager"):
        assert_matches_eager(Squashed(), calls, graphed=SharedResult)


def test_the_right_gradient_is_as_good_as_eagers_error() -> None:
    """Where eager refuses a backward, a stand-in may give the gradient of the forward that was made."""
    edits = [Edit(recorded=False), Edit(), EditArguments(), Update()]
    calls = after((BACKWARD,), *[(edit, BACKWARD, Update(), ZERO) for edit in edits])

    assert_matches_eager(Squashed(), calls, graphed=plain)
    assert_matches_eager(Squashed(), calls, graphed=Stand)
    assert_matches_eager(Squashed(), after((Edit(recorded=False), BACKWARD)), graphed=Stand)


def test_an_error_that_eager_does_not_raise_is_named() -> None:
    """A backward that fails in one twin only is a difference; a loud refusal is one unless it is allowed."""

    def failing(error: Exception) -> Wrap:
        def wrap(target: Any) -> Callable[..., Any]:
            def call(x: Tensor) -> Tensor:
                out: Tensor = target(x)

                def fail(gradient: Tensor) -> None:
                    raise error

                out.register_hook(fail)
                return out

            return call

        return wrap

    calls = after((BACKWARD, ZERO), (BACKWARD,))
    with pytest.raises(AssertionError) as caught:
        assert_matches_eager(Net(), calls, graphed=failing(RuntimeError("lost")))
    with pytest.raises(AssertionError, match="eager succeeds, graphed raised CaptureError: no"):
        assert_matches_eager(Net(), calls, graphed=failing(CaptureError("no")))
    assert_matches_eager(Net(), calls, graphed=failing(CaptureError("no")), loud_ok=True)

    assert str(caught.value) == (
        "call 1 of 2, Backward() differs from eager:\n  exception: eager none, graphed RuntimeError: lost"
    )


def test_an_error_that_only_eager_raises_is_named() -> None:
    """A second backward through a graph that was freed must raise what eager raises."""
    calls = after((BACKWARD, BACKWARD))

    assert_matches_eager(Net(), calls, graphed=plain)
    with pytest.raises(
        AssertionError, match="eager RuntimeError: Trying to backward .* second time.*graphed none"
    ):
        assert_matches_eager(Net(), calls, graphed=NeverFreed)


def test_gradients_may_be_fresher_than_eagers_but_not_less_fresh() -> None:
    """Eager hands out views of one gradient at times; a graphed twin need not, and may never where eager does not."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.left, self.right]) * 2.0

    class Apart(Joined):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.left.clone() * 1.0, self.right.clone() * 1.0]) * 2.0

    def freshly(target: Any) -> Callable[..., Any]:
        for leaf in (target.left, target.right):
            leaf.register_hook(lambda gradient: gradient.clone())
        return plain(target)

    def shared(target: Any) -> Callable[..., Any]:
        return lambda x: Joined.forward(target, x)

    calls = after((Backward(loss="weighted", retain=True), Gradients(to="parameters", loss="weighted")))

    assert_matches_eager(Joined(), calls, graphed=freshly)
    with pytest.raises(AssertionError, match=r"self.right.grad: aliasing: eager has its own memory"):
        assert_matches_eager(Apart(), calls, graphed=shared)


def test_strides_of_gradients_where_they_matter() -> None:
    """Of two gradients the stride of a dimension of size 1 does not count; any other does, as in results all do."""
    told = []
    for shape in ((1, 4), (3, 4)):
        one, other = (torch.ones(shape, requires_grad=True) for _ in range(2))
        one.grad, other.grad = torch.ones(shape), torch.ones(shape[::-1]).t()
        both = Comparison()
        both.walk("x", one, other)
        both.walk("y", one.grad.clone(), other.grad.clone())
        told.append(both.take())
    assert told[0] == ["y: stride: eager (4, 1), graphed (1, 1)"]
    assert told[1] == [f"{path}: stride: eager (4, 1), graphed (1, 3)" for path in ("x.grad", "y")]


def test_gradients_of_the_base_of_an_argument_are_compared() -> None:
    """An argument may be rows of a leaf that no call holds."""
    base = Data((4, 4), requires_grad=True)
    rows = graphify.testing.Rows(base, 0, 3)
    calls = [Call((rows,), context=Ambient("grad"), after=Then((BACKWARD,)))]

    def detached(target: Any) -> Callable[..., Any]:
        def call(x: Tensor) -> Tensor:
            out: Tensor = target(x)
            x.register_hook(lambda gradient: gradient * 2.0)
            return out

        return call

    with pytest.raises(AssertionError, match=r"args\[0\]._base.grad: values"):
        assert_matches_eager(Net(), calls, graphed=detached)


def test_sums_over_several_calls_may_be_rounded_in_another_order() -> None:
    """One backward through two calls adds up in the order of the engine: equal to rounding, and no more than that."""

    def by(amount: float) -> Wrap:
        def wrap(target: Any) -> Callable[..., Any]:
            target.first.register_hook(lambda gradient: gradient * (1.0 + amount))
            return plain(target)

        return wrap

    joint = after((), (Backward((0, 1)), Update()), (BACKWARD,))
    joint[2].after = Then(())

    assert_matches_eager(Net(), joint, graphed=by(1e-6))
    with pytest.raises(AssertionError, match=r"self.first.grad: values"):
        assert_matches_eager(Net(), joint, graphed=by(1e-2))
    with pytest.raises(AssertionError, match=r"self.first.grad: values"):
        assert_matches_eager(Net(), after((BACKWARD,)), graphed=by(1e-6))


def test_each_act_does_what_it_says() -> None:
    """Gradients come, are added up, zeroed, held and set; weights move; results and arguments are edited and dropped."""
    seen: list[dict[str, Any]] = []

    class Look(Act):
        quiet = True

        def __repr__(self) -> str:
            return "Look()"

        def __call__(self, twin: Any) -> None:
            net, (x,) = twin.plain, twin.outcomes[-1].args
            facts = {"w": net.first.detach().clone(), "grad": net.first.grad, "x": x.detach().clone()}
            facts |= {"x.grad": x.grad, "out": twin.outcomes[-1].value, "held": list(twin.held)}
            seen.append(facts)

    look = Look()
    acts = (BACKWARD, look, ZeroGradients(set_to_none=False), HoldGradients(), look, ZERO, look)
    acts2 = (SetGradients(seed=5), look, Update(), look, Edit(recorded=False), look, EditArguments(), look)
    acts3 = (Backward(into="parameters"), look, Drop(), look)

    assert_matches_eager(Net(), after(acts, acts2, acts3, needing=True), graphed=plain)

    eager = seen[::2]
    assert eager[0]["grad"] is eager[1]["grad"]
    assert eager[0]["x.grad"] is not None
    assert not eager[1]["grad"].any()
    assert eager[1]["held"][0][0] is eager[1]["grad"]
    assert eager[2]["grad"] is None
    assert eager[3]["grad"].any()
    assert not torch.equal(eager[4]["w"], eager[3]["w"])
    assert eager[5]["out"] is eager[4]["out"]
    assert torch.equal(eager[6]["x"], eager[5]["x"] * 0.5)
    assert eager[7]["x.grad"] is None
    assert eager[7]["grad"] is not None
    assert eager[8]["out"] is None


@pytest.mark.parametrize("accumulated", [False, True])
def test_hooks_count_and_scale(accumulated: bool) -> None:
    """A hook hears each backward once; one on the gradient scales it."""
    net = Net()

    assert_matches_eager(net, after((Hook(accumulated=accumulated), BACKWARD), (BACKWARD,)), graphed=Stand)


def test_what_eager_forbids_is_left_out() -> None:
    """An edit that eager refuses (of a leaf that requires gradients) is made on neither side."""
    calls = [Call((Data((3,), requires_grad=True),), context=Ambient("grad"), after=Then((Edit(), BACKWARD)))]

    assert_matches_eager(lambda x: x, calls, graphed=plain)


STANDS = [Stale, Stolen, Swapped, Zeros, LiveWeights, NeverFreed]
PROGRAM = Program(
    """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1.0, 1.0, 16).view(4, 4))
        self.second = nn.Parameter(torch.linspace(-0.5, 1.5, 16).view(4, 4))
    def forward(self, x0):
        return torch.tanh(x0 @ self.first) @ self.second

def make():
    return Model()
""",
    inputs=(graphify.testing.Input("x0", ("n", 4)),),
    state=(
        graphify.testing.State("first", "weight", ""),
        graphify.testing.State("second", "weight", ""),
    ),
    modes=("no_grad", "grad"),
)


@pytest.mark.parametrize("stand", STANDS)
def test_random_training_finds_each_fault(stand: type[Stand]) -> None:
    """Two hundred random sequences are enough for any of these."""

    @settings(max_examples=200, database=None, phases=[Phase.generate])
    @given(training_sequences(PROGRAM))
    def run(calls: list[Call]) -> None:
        assert_matches_eager(make=PROGRAM.make, calls=calls, graphed=stand)

    with pytest.raises(
        AssertionError, match=r"^call \d of \d.* differs from eager:\n  (?!exception: eager none)"
    ):
        run()


def test_random_training_passes_what_is_right() -> None:
    """The same sequences over a stand-in with a right backward of its own find nothing."""

    @settings(max_examples=100)
    @given(training_sequences(PROGRAM))
    def run(calls: list[Call]) -> None:
        assert_matches_eager(make=PROGRAM.make, calls=calls, graphed=Stand)

    run()


def test_trained_programs_train_and_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program runs through its calls, most calls are followed by a backward, and the repr is the same again."""
    done: Counter[str] = Counter()

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done["backwards"] += 1
            return run(*args, **kwargs)

        return call

    for name in ("backward", "grad"):
        monkeypatch.setattr(torch.autograd, name, counted(getattr(torch.autograd, name)))

    def listen(target: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done["calls"] += 2  # the eager twin makes it as well
            try:
                return target(*args, **kwargs)
            except Exception as error:
                done["errors"] += str(error) != "refused"
                raise

        return call

    @settings(max_examples=100)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        program = data.draw(programs(trained=True))
        calls = data.draw(training_sequences(program))
        for call in calls:
            assert repr(eval(repr(call), dict(NAMES))) == repr(call)
        assert eval(repr(program), dict(NAMES)) == program
        assert "grad" in program.modes
        assert_matches_eager(make=program.make, calls=calls, graphed=listen)

    run()

    assert done["errors"] == 0
    assert done["backwards"] >= 0.5 * done["calls"], done


def test_changes_of_weights_reach_them() -> None:
    """A weight is frozen, thawed and replaced by name, in a module or wherever a function holds it."""
    program = Program(
        "def make():\n    leaf = torch.ones(3).requires_grad_()\n    def step(x):\n        return x * leaf\n    return step\n"
    )
    step: Any = program.make()
    leaf = step.__closure__[0].cell_contents

    Changes((("require", "leaf", 0, False),))(step)
    frozen = leaf.requires_grad
    Changes((("require", "leaf", 0, True), ("renew", "leaf", 4)))(step)

    assert not frozen
    assert leaf.requires_grad
    assert step.__closure__[0].cell_contents is not leaf
    assert isinstance(step.__closure__[0].cell_contents, nn.Parameter)
