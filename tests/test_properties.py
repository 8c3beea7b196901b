"""Random programs over random sequences of calls: graphed equals eager in all that a caller can see, or says so."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from strategies import (
    Case,
    Pair,
    Record,
    Tally,
    all_follow_eager,
    call_sequences,
    options,
    programs,
    pytrees,
    tensors,
)

from graphify.testing import Call, assert_matches_eager


@st.composite
def cases(draw: st.DrawFn, device: str) -> Case:
    program = draw(programs())
    calls = draw(call_sequences(program, min_calls=4, max_calls=7, device=device))
    return Case(program.make, calls, draw(options()))


def test_random_programs_equal_eager_or_refuse_loudly(backend: str, device: torch.device) -> None:
    """Outputs, arguments, state, aliasing, random streams and earlier results: as eager leaves them, or an error."""
    all_follow_eager(cases(device.type), backend, device, replay=0.6)


def doubled(tree: Any) -> Any:
    """The same containers around twice the numbers."""
    if isinstance(tree, torch.Tensor):
        return tree * 2
    if isinstance(tree, Record):
        return Record(doubled(tree.value), doubled(tree.note))
    if isinstance(tree, Pair):
        return Pair(doubled(tree.left), doubled(tree.right))
    if isinstance(tree, dict):
        return {key: doubled(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(doubled(item) for item in tree)
    return tree


def renewed(tree: Any, step: int) -> Any:
    """The same tree with other values in tensors of the same layouts."""
    if isinstance(tree, torch.Tensor):
        fresh = torch.empty(0, dtype=tree.dtype).set_(
            tree.untyped_storage().clone(), tree.storage_offset(), tree.shape, tree.stride()
        )
        fresh = fresh.conj() if tree.is_conj() else fresh
        fresh = torch._neg_view(fresh) if tree.is_neg() else fresh
        flat = torch.empty(0, dtype=tree.dtype).set_(fresh.untyped_storage()) if tree.numel() else fresh
        if tree.dtype == torch.bool:
            flat.logical_xor_(torch.tensor(step % 2 == 1))
        else:
            flat.add_(step)
        return fresh
    if isinstance(tree, Record):
        return Record(renewed(tree.value, step), renewed(tree.note, step))
    if isinstance(tree, Pair):
        return Pair(renewed(tree.left, step), renewed(tree.right, step))
    if isinstance(tree, dict):
        return {key: renewed(value, step) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(renewed(item, step) for item in tree)
    return tree


def test_any_argument_tree_comes_back_as_from_eager(backend: str, device: torch.device) -> None:
    """Containers, constants and tensors of any layout go in and come out with types, strides and values of eager."""

    def around(tree: Any) -> Case:
        return Case(lambda _: doubled, [Call((renewed(tree, step),)) for step in range(4)], {})

    all_follow_eager(pytrees(tensors()).map(around), backend, device, part=0.2, replay=0.5)


@pytest.mark.parametrize("writes", [False, True])
def test_arguments_that_share_memory_behave_as_in_eager(
    backend: str, device: torch.device, writes: bool
) -> None:
    """The same tensor twice, overlapping and disjoint views of one: reads and writes through one are seen by all."""

    def combine(*views: torch.Tensor) -> Any:
        if writes:
            views[0].mul_(0.5)
        total = views[0].clone()
        for view in views[1:]:
            total = total + view
        return total, views[-1], views[0][1:]

    def over(starts: list[int], step: int) -> Case:
        bases = [torch.randn(16) for _ in range(4)]
        calls = [Call(tuple(base[start : start + 6 * step : step] for start in starts)) for base in bases]
        return Case(lambda _: combine, calls, {})

    windows = st.lists(st.integers(0, 4), min_size=2, max_size=4)
    cases = st.builds(over, windows, st.sampled_from([1, 2]))
    all_follow_eager(cases, backend, device, part=0.2, replay=0.5)


def test_seeds_count_in_a_deep_run() -> None:
    """A deep run that is split over processes draws other programs in each."""
    assert not settings.get_profile("deep").derandomize


# -- what these properties found once


def test_a_plain_value_inside_a_held_object_is_part_of_the_signature(
    backend: str, device: torch.device
) -> None:
    """An attribute of an object that the function holds is read anew at every call, as in eager."""

    def make() -> Any:
        config = Record(0.5)
        return lambda x: x * config.value

    def change(twin: Any) -> None:
        twin.__closure__[0].cell_contents.value = 3.0

    calls = [Call((torch.randn(3),), before=change if number == 3 else None) for number in range(6)]

    stats = assert_matches_eager(make=make, calls=calls, backend=backend, device=device)

    assert stats.replays >= 2


def test_batch_norm_moves_once_per_call_in_inference_mode(backend: str, device: torch.device) -> None:
    """Statistics that no schema marks as written are put back after a capture in inference mode too."""
    calls = [Call((torch.randn(3, 4),), context=torch.inference_mode) for _ in range(4)]

    stats = assert_matches_eager(torch.nn.BatchNorm1d(4), calls, backend=backend, device=device)

    assert stats.replays == 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_writes_into_arguments_come_back_from_every_call(
    backend: str, device: torch.device, context: Any
) -> None:
    """The call that captures, and each replay, leaves the caller's tensor as eager does."""

    def step(x: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        x[0].add_(1.0)
        torch.mul(box[0], 2.0, out=box[0])
        return x * 2

    calls = [Call((torch.randn(3, 4), [torch.randn(2, 2).t()]), context=context) for _ in range(5)]

    stats = assert_matches_eager(step, calls, backend=backend, device=device)

    assert stats.replays == 3


def test_inference_tensors_are_made_where_eager_makes_them(backend: str, device: torch.device) -> None:
    """An inference_mode block inside marks its own results and no others."""

    def step(x: torch.Tensor) -> Any:
        outside = x + 1
        with torch.inference_mode():
            inside = x * 2
        return outside, inside, torch.empty_like(x).fill_(0.5)

    calls = [Call((torch.randn(3),), context=torch.no_grad) for _ in range(4)]

    stats = assert_matches_eager(step, calls, backend=backend, device=device)

    assert stats.replays == 2


def test_inputs_that_need_grad_are_staged_under_grad_mode(backend: str, device: torch.device) -> None:
    """A leaf that needs grad may be an argument of a call whose results need none."""
    calls = [Call((torch.randn(3, requires_grad=True),), context=torch.enable_grad) for _ in range(4)]

    def step(x: torch.Tensor) -> Any:
        return x.detach() * 2, x.detach(), x[1:].detach()

    stats = assert_matches_eager(step, calls, backend=backend, device=device)

    assert stats.replays == 2


def test_a_refusal_comes_before_anything_has_moved(backend: str, device: torch.device) -> None:
    """A host read refuses the call; arguments, buffers and random numbers are then as before it."""
    norm = torch.nn.BatchNorm1d(4)

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(torch.rand(4, device=x.device))
            return self.norm(x) * float(x.sum() > 0)

    tally = Tally()
    calls = [Call((torch.randn(3, 4),), context=torch.no_grad) for _ in range(3)]

    assert_matches_eager(Reads(), calls, backend=backend, device=device, loud_ok=tally.refuse)

    assert tally.loud


LAZY = {
    "conj": lambda z: (z.conj(), z * 2),
    "neg": lambda z: (z.conj().imag, z.real * 2),
    "both": lambda z: (z.conj(), z.conj().imag, z.real * 2, z * 2),
}


@pytest.mark.parametrize("kind", LAZY)
def test_lazily_negated_or_conjugated_inputs_are_staged(
    backend: str, device: torch.device, kind: str
) -> None:
    """Inputs keep their conj and neg bits, also where several are copied at once."""

    def step(*parts: torch.Tensor) -> Any:
        return [part * 2 for part in parts], [part.is_conj() for part in parts], parts[0][1:]

    calls = [LAZY[kind](torch.randn(3, dtype=torch.complex64)) for _ in range(4)]

    stats = assert_matches_eager(step, calls, backend=backend, device=device)

    assert stats.replays == 2


@pytest.mark.parametrize("first", [0, 1])
def test_disjoint_views_of_one_base_are_inputs_like_any_others(
    backend: str, device: torch.device, first: int
) -> None:
    """Whether two arguments that do not overlap come from one storage or from two, both are staged."""
    calls = []
    for number in range(8):
        base = torch.randn(2, 4)
        apart = (base[:1].clone(), base[1:].clone())
        calls.append(apart if number % 2 == first else (base[:1], base[1:]))

    stats = assert_matches_eager(lambda x, y: (x + 1, y * 2), calls, backend=backend, device=device)

    assert stats.replays >= 4


def test_a_refusal_puts_the_functions_own_generator_back(backend: str, device: torch.device) -> None:
    """A generator that the function holds stands after a refused call where it stood before."""

    def make() -> Any:
        generator = torch.Generator(device).manual_seed(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(3, generator=generator, device=x.device)
            return noise * float(x.sum() > 0)

        return step

    calls = [(torch.randn(3),) for _ in range(3)]
    tally = Tally()

    assert_matches_eager(make=make, calls=calls, backend=backend, device=device, loud_ok=tally.refuse)

    assert tally.loud


class Grown(torch.nn.Module):
    """What parts of a parameter say of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        parts = [self.weight.flatten(), self.weight.narrow(0, 0, 2), *self.weight.unsafe_split(2)]
        return x + parts[0][0], [(part.requires_grad, part._is_view()) for part in parts]


def transposed(*sizes: int) -> torch.Tensor:
    return torch.randn(*reversed(sizes)).permute(*reversed(range(len(sizes))))


KERNELS = {
    # `matmul` folds a batch into one matrix if its second factor, a view of a parameter, needs grad.
    "GRU": (lambda: torch.nn.GRU(4, 4), lambda: transposed(4, 4)),
    "Linear": (lambda: torch.nn.Linear(4, 7), lambda: transposed(5, 3, 4)),
    # One kernel for the whole layer calls `matmul` inside.
    "Transformer": (
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        lambda: transposed(5, 3, 8),
    ),
    # Made of `matmul`, yet autocast keeps all of it in float32.
    "matrix_power": (lambda: lambda x: torch.linalg.matrix_power(x, 3), lambda: torch.randn(3, 3)),
    "cdist": (lambda: lambda x: torch.cdist(x, x), lambda: torch.randn(40, 4)),
    # One kernel that multiplies by lazy conjugates inside.
    "pinv": (lambda: torch.linalg.pinv, lambda: torch.randn(3, 3, dtype=torch.complex64)),
    "views": (Grown, lambda: torch.randn(3)),
}


def with_autocast(context: Any, device: torch.device) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(context())
    stack.enter_context(torch.autocast(device.type, torch.bfloat16))
    return stack


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cast", [False, True])
def test_watching_a_run_changes_no_kernel(
    backend: str, device: torch.device, kind: str, context: Any, cast: bool
) -> None:
    """Operators that call others take the very kernels of eager: while watched, recorded and replayed."""
    if kind == "pinv" and (backend == "cuda" or cast):
        pytest.skip("a host read on a device; no complex numbers under autocast")
    make, sample = KERNELS[kind]
    around = (lambda: with_autocast(context, device)) if cast else context
    calls = [Call((sample(),), context=around) for _ in range(4)]

    stats = assert_matches_eager(make=make, calls=calls, backend=backend, device=device)

    assert stats.replays == 2


def test_composite_operators_see_autocast_in_inference_mode(backend: str, device: torch.device) -> None:
    """Watching a run does not change its numbers: inference mode hands composite operators over whole."""
    around = lambda: with_autocast(torch.inference_mode, device)
    calls = [Call((torch.randn(2, 4),), context=around) for _ in range(4)]

    stats = assert_matches_eager(torch.nn.GRU(4, 4), calls, backend=backend, device=device)

    assert stats.replays == 2


collections = 0


def test_what_the_garbage_collector_runs_is_not_the_functions_code(
    backend: str, device: torch.device
) -> None:
    """A callback of the collector may count in a global while a call is watched or captured."""

    def count(phase: str, info: dict[str, int]) -> None:
        global collections  # noqa: PLW0603 - what real callbacks do
        collections += 1

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x + len([[] for _ in range(20)])
        return x

    threshold = gc.get_threshold()
    gc.callbacks.append(count)
    gc.set_threshold(5)
    try:
        stats = assert_matches_eager(
            step, [(torch.randn(3),) for _ in range(4)], backend=backend, device=device
        )
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(count)

    assert collections > 0
    assert stats.replays == 2
