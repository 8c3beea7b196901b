"""Cases B: arguments of every kind, and what makes two calls one signature."""

from __future__ import annotations

import contextlib
import enum
from typing import Any, NamedTuple

import pytest
import torch
from checks import counts, equal, follows_eager, rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphify import GraphifyWarning, InputError, graphify, handle
from graphify.testing import Call


def nested(b: dict[str, Any]) -> torch.Tensor:
    return b["a"][0] + sum(b["c"])


def test_b10_tensors_nested_in_containers(backend, device):
    """Tensors inside dicts, lists and tuples are the call's own, at any depth."""
    calls = [({"a": [x], "c": (y, z)},) for x, y, z in zip(rows(3), rows(3), rows(3), strict=True)]
    follows_eager(calls, backend, device, target=nested)


def test_b10_deeply_nested_with_other_dtypes(backend, device):
    """Depth and mixed dtypes make no difference."""

    def f(tree: Any, *rest: Any, **named: Any) -> Any:
        return [tree[0]["k"][0][0] * 2, {n: v[0].sum() for n, v in named.items()}, rest[1][0].float() - 1]

    calls = [
        (Call(([{"k": ((x,),)}], "text", [i]), {"u": (x.double(),), "v": [x.bfloat16(), None]}))
        for x, i in zip(rows(2, 3), rows(4, dtype=torch.int32), strict=True)
    ]
    follows_eager(calls, backend, device, target=f)


def test_b13_keywords_in_any_order(backend, device):
    """Keyword tensors are refilled; their order and positional forms make no other signature."""

    def f(x: torch.Tensor, y: torch.Tensor, *, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (x + y) * mask * scale

    forms = [
        lambda x, m: Call((x, x + 1), {"mask": m, "scale": 2.0}),
        lambda x, m: Call((x,), {"scale": 2.0, "mask": m, "y": x * 3}),
        lambda x, m: Call((), {"y": x, "mask": m, "x": x.clone(), "scale": 2.0}),
    ]
    calls = [
        forms[i % 3](x, m) for i, (x, m) in enumerate(zip(rows(3, count=9), rows(3, count=9), strict=True))
    ]
    stats = follows_eager(calls[:2] + calls[3:5], backend, device, target=f)
    assert stats.captures == 1
    follows_eager(calls, backend, device, target=f)


def test_b13_methods_take_keywords_too(backend, device):
    """A module's forward and a method bind their keywords as a function does."""

    class M(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, /, *args: torch.Tensor, mask: torch.Tensor | None = None, **more: Any
        ):
            out = x + sum(args, torch.zeros((), device=x.device))
            return (out if mask is None else out * mask) + sum(more.values())

    calls = [Call((x, x * 2), {"z": x + 1, "mask": m}) for x, m in zip(rows(3), rows(3), strict=True)]
    follows_eager(calls, backend, device, make=M)


def test_b14_defaults_are_filled(backend, device):
    """A default left out, given or passed as None is the same call; another value is another signature."""

    def f(x: torch.Tensor, y: torch.Tensor | None = None, n: int = 2) -> torch.Tensor:
        return x * n if y is None else x * n + y

    x = rows(3, count=12)
    same = [
        Call((x[0],)),
        Call((x[1], None)),
        Call((x[2],), {"n": 2}),
        Call((x[3],), {"y": None}),
        Call((x[4], None, 2)),
    ]
    stats = follows_eager(same, backend, device, target=f)
    assert stats.captures == 1
    other = [Call((t,), {"n": 3}) if i % 2 else Call((t,)) for i, t in enumerate(x)]
    follows_eager(other, backend, device, target=f, replays=8)


def test_b14_bad_calls_raise_what_the_function_raises(backend, device):
    """Missing, extra and doubled arguments raise the function's own TypeError, before and after capture."""

    def f(x: torch.Tensor, y: torch.Tensor | None = None, *, n: int = 2) -> torch.Tensor:
        return x * n

    graphed = graphify(f, backend=backend)
    x = torch.ones(2, device=device)
    bad = [((), {}), ((x, x, x), {}), ((x,), {"x": x}), ((x,), {"zz": 1})]
    for _ in range(4):
        for args, kwargs in bad:
            with pytest.raises(TypeError) as wanted:
                f(*args, **kwargs)
            with pytest.raises(TypeError) as raised:
                graphed(*args, **kwargs)
            assert str(raised.value) == str(wanted.value)
        equal(f(x), graphed(x))


class Mode(enum.Enum):
    ADD = "add"
    MUL = "mul"


def test_b15_constants_by_value_and_type(backend, device):
    """Constants that hash alike (1, 1.0, True) or print alike are signatures of their own."""

    def f(x: torch.Tensor, mode: Any, k: Any, flag: Any) -> Any:
        y = x * k if mode in ("a", Mode.ADD) else x - k
        return (y, k, -y) if flag else (y, k, flag)

    x = torch.arange(1, 5)
    combos = [
        ("a", 1, None),
        ("a", 1.0, None),
        ("a", True, None),
        ("b", 1, False),
        (Mode.ADD, 1, True),
        (Mode.MUL, 2, None),
    ]
    calls = [(x * i, *combos[i % 6]) for i in range(24)]
    follows_eager(calls, backend, device, target=f, replays=12)


def test_b15_signed_zero_nan_and_other_plain_values(backend, device):
    """0.0 and -0.0 differ, NaN equals itself; dtypes, sizes, slices, strings and bytes go by value."""

    def f(x: torch.Tensor, k: Any, other: Any) -> Any:
        y = torch.atan2(torch.full_like(x, k), x) if isinstance(k, float) else x.to(k)
        return y, other

    x = -torch.ones(3)
    ks = [0.0, -0.0, float("nan"), torch.float64, torch.float16]
    others = [slice(1, 2), torch.Size([2]), b"b", "b", frozenset({1})]
    calls = [(x * (i + 1), ks[i % 5], others[i % 5]) for i in range(20)]
    follows_eager(calls, backend, device, target=f, replays=10)


def test_b15_sets_are_refused_by_name(backend, device):
    """A set is an InputError that names the argument; with fallback="eager" the call runs plainly."""
    graphed = graphify(lambda x, s: x * len(s), backend=backend)
    with pytest.raises(InputError, match="`s` is a set"):
        graphed(torch.ones(2, device=device), {1, 2})
    soft = graphify(lambda x, s: x * len(s), backend=backend, fallback="eager")
    with pytest.warns(GraphifyWarning, match="`s` is a set") as seen:
        for i in range(4):
            x = torch.randn(2, device=device)
            equal(x * (i + 1), soft(x, set(range(i + 1))))
    assert len(seen) == 1
    assert counts(soft) == (0, 0, 0, 4, 0)


class Out(NamedTuple):
    a: torch.Tensor
    b: tuple[Any, ...]


def test_b16_structures_come_back(backend, device):
    """Results keep container types, key order and constants."""

    def f(x: torch.Tensor, kind: str) -> Any:
        return {
            "dict": {"b": x, "a": (x * 2, None, 3), "c": [x + 1, "text", 2.5]},
            "named": Out(x + 1, (x, [x])),
            "list": [x, (x,), []],
            "tuple": (x * 2,),
            "none": None,
            "struct": torch.max(x, dim=0),
            "shape": (x.shape, x.size(0), x.dtype),
        }[kind]

    kinds = ["dict", "named", "list", "tuple", "struct", "shape"]
    calls = [(x, kinds[i % 6]) for i, x in enumerate(rows(3, 2, count=24))]
    follows_eager(calls, backend, device, target=f, replays=12)


def test_b16_fresh_containers_at_each_call(backend, device):
    """A container of a result belongs to the caller: changing it changes no later result."""
    calls = [Call((x,), after=lambda twin, out: out["l"].append(out.pop("d"))) for x in rows(3)]
    follows_eager(calls, backend, device, target=lambda x: {"l": [x + 1], "d": {"k": x * 2}})


def test_b17_step_number_is_never_frozen(backend, device):
    """A Python number that changes at each call is right each time, and after eight values named in a warning."""
    graphed = graphify(lambda x, step: x * step, backend=backend)
    with pytest.warns(GraphifyWarning, match="`step`.*pass it as a tensor") as seen:
        for step in range(10):
            for x in [t.to(device) for t in rows(3, count=3)]:
                equal(x * step, graphed(x, step))
    assert len(seen) == 1
    assert counts(graphed) == (10, 10, 10, 0, 0)


def test_b17_workaround_a_tensor_step(backend, device):
    """The number passed as a tensor makes one graph for every step."""
    graphed = graphify(lambda x, step: x * step, backend=backend)
    for step in range(10):
        x, s = torch.randn(3, device=device), torch.tensor(float(step), device=device)
        equal(x * s, graphed(x, s))
    assert counts(graphed) == (1, 1, 8, 0, 0)


def test_b17_numbers_inside_containers_and_attributes(backend, device):
    """A number in a dict argument or on `self` is never frozen either."""

    class Scaler:
        def __init__(self) -> None:
            self.k = 1.0

        def __call__(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
            return x * self.k + options["shift"][0]

    def set_k(value: float):
        return lambda twin: setattr(plain_of(twin), "k", value)

    calls = [
        Call((x, {"shift": [i // 6]}), before=set_k(float(i // 3))) for i, x in enumerate(rows(3, count=12))
    ]
    follows_eager(calls, backend, device, make=Scaler, replays=4)


def plain_of(twin: Any) -> Any:
    return getattr(twin, "__wrapped__", twin)


@pytest.mark.parametrize(
    "pair",
    [
        (torch.int64, torch.float32),
        (torch.float32, torch.float64),
        (torch.bool, torch.uint8),
        (torch.float16, torch.bfloat16),
        (torch.complex64, torch.float32),
    ],
)
def test_b19_dtype_differs_between_calls(backend, device, pair):
    """Another dtype is another signature: nothing is cast into the first one's buffer."""
    calls = [
        (x,) for group in zip(rows(3, dtype=pair[0]), rows(3, dtype=pair[1]), strict=True) for x in group
    ]
    follows_eager(calls, backend, device, target=lambda x: (x, x + x), replays=6)


def test_b20_scalar_tensor_argument(backend, device):
    """A 0-dim CPU tensor as argument is used with its present value, and the result lies where eager's does."""
    graphed = graphify(lambda x, s: x * s, backend=backend)
    for i in range(12):
        x, s = torch.randn(3, device=device), torch.tensor(float(i // 3))
        equal(x * s, graphed(x, s))
    graphed.reset()
    assert counts(graphed)[2] >= 4


def test_b20_unused_cpu_tensor(backend, device):
    """A 0-dim CPU tensor that nobody reads is no obstacle."""
    graphed = graphify(lambda x, unused: x + 1, backend=backend)
    s = torch.tensor(4.0)
    for x in [t.to(device) for t in rows(3)]:
        equal(x + 1, graphed(x, s))
    assert counts(graphed)[2] == 3


VIEWS = {
    "contiguous": lambda x: x,
    "expanded": lambda x: x[:1].expand(4, 6),
    "expanded inside": lambda x: x[:, :1].expand(4, 6),
    "sliding window": lambda x: x.view(-1).as_strided((4, 6), (1, 1)),
    "transposed": lambda x: x.view(6, 4).t(),
    "every other column": lambda x: torch.cat([x, x + 1], 1)[:, ::2],
    "every other row": lambda x: torch.cat([x, x + 1])[::2],
    "odd offset": lambda x: torch.cat([x.flatten(), x[0, :1]])[1:].view(4, 6),
    "narrow": lambda x: torch.cat([x, x], 1)[:, 1:7],
    "size one, stride zero": lambda x: x.as_strided((4, 1, 6), (6, 0, 1)),
    "scalar expanded": lambda x: x[0, 0].expand(4, 6),
    "negative bit": lambda x: torch._neg_view(x),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_b21_b22_layouts_of_inputs(backend, device, view):
    """Values and strides of results equal eager for every layout of the input, expanded ones included."""

    def f(x: torch.Tensor) -> Any:
        return (
            x * 2,
            x.exp().sum(-1),
            x.stride(),
            torch.empty_like(x).stride(),
            x.reshape(-1),
            x.is_contiguous(),
        )

    calls = [(VIEWS[view](x),) for x in rows(4, 6, count=6)]
    follows_eager(calls, backend, device, target=f)


def test_b21_expanded_input_that_is_returned(backend, device):
    """An expanded input comes back as the caller's own object."""
    follows_eager(
        [(x.expand(4, 3),) for x in rows(1, 3)], backend, device, target=lambda x: (x, x + 1, x[1:])
    )


def test_b22_layouts_take_turns(backend, device):
    """Two layouts of one shape are two signatures."""
    calls = [
        (VIEWS[name](x),) for x in rows(4, 6, count=6) for name in ("contiguous", "transposed", "expanded")
    ]
    stats = follows_eager(
        calls, backend, device, target=lambda x: (x * 2, x.stride(), x.flatten()), replays=12
    )
    assert stats.captures == 3


def test_b22_channels_last(backend, device):
    """A channels_last image keeps its memory format through the graph."""
    calls = [(x.to(memory_format=torch.channels_last),) for x in rows(2, 3, 4, 4)]
    follows_eager(calls, backend, device, make=lambda: torch.nn.Conv2d(3, 4, 3))


def test_b22_view_of_the_argument_itself(backend, device):
    """`x.view(-1)` that fails for a layout fails as in eager, whatever was captured for another."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1) + 1

    calls = [(VIEWS[name](x),) for x in rows(4, 6) for name in ("contiguous", "transposed", "odd offset")]
    stats = follows_eager(calls, backend, device, target=f, replays=8)
    assert stats.errors == 5


def test_b22_memory_between_the_elements(backend, device, request):
    """A function that steps outside the argument's own elements sees what eager sees, or is refused."""
    calls = [(torch.cat([x, x + 1], 1)[:, ::2],) for x in rows(4, 6)]
    follows_eager(
        calls, backend, device, target=lambda x: x.as_strided((4, 11), (12, 1)) * 2, loud_ok=True, replays=0
    )


def test_b23_growing_dimension_captures_nothing(backend, device):
    """A size that is new at each call is never captured, only warmed up."""
    calls = [(torch.randn(n, 2),) for n in range(8, 60)]
    stats = follows_eager(calls, backend, device, target=lambda x: x.softmax(0), replays=0)
    assert stats.captures == 0
    assert stats.warmups == 52


def test_b23_captures_are_bounded(backend, device):
    """Sizes that come back do not capture without end."""
    graphed = graphify(lambda x: x.softmax(0), backend=backend, max_graphs=4)
    for n in [*range(8, 28)] * 4:
        x = torch.randn(n, device=device)
        equal(x.softmax(0), graphed(x))
    assert len(graphed.graphs) <= 4
    assert counts(graphed)[1] <= 40


def modes(device_type: str) -> list[Any]:
    return [
        contextlib.nullcontext,
        lambda: torch.autocast(device_type, torch.bfloat16),
        torch.inference_mode,
        lambda: torch.autocast(device_type, torch.float16),
        torch.enable_grad,
        lambda: default_dtype(torch.float64),
        deterministic,
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: torch.device("meta"),
    ]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_b25_the_fast_path_of_attention_is_part_of_the_signature(backend, device):
    """An encoder layer takes the path that is allowed now, bit for bit, each as its own graph."""
    net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().to(device)
    graphed = graphify(net, backend=backend)
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad():
            for i, x in enumerate(rows(2, 3, 8, count=12)):
                torch.backends.mha.set_fastpath_enabled(i // 4 != 1)
                equal(net(x.to(device)), graphed(x.to(device)))
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    assert counts(graphed) == (2, 2, 8, 0, 0)


def test_b25_ambient_modes_are_part_of_the_signature(backend, device):
    """Autocast, grad and inference mode, default dtype and device, and kernel switches each make a signature."""
    w = torch.randn(4, 4)

    def f(x: torch.Tensor) -> Any:
        like = torch.ones(2, device=x.device)
        return (
            x @ x,
            like,
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.ones(1).device.type,
        )

    kinds = modes(device.type)
    kinds = kinds[:-1] if backend == "cuda" else kinds
    w.add_(1)
    calls = [
        Call((x,), context=kinds[i % len(kinds)]) for i, x in enumerate(rows(4, 4, count=4 * len(kinds)))
    ]
    stats = follows_eager(calls, backend, device, target=f, replays=2 * len(kinds), loud_ok=False)
    assert stats.captures == len(kinds)


def test_b25_attention_under_chosen_kernels(backend, device):
    """A change of the allowed attention kernels is never answered with the other kernel's graph."""
    graphed = graphify(torch.nn.functional.scaled_dot_product_attention, backend=backend)
    for _ in range(4):
        for kinds in ([SDPBackend.MATH], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            with sdpa_kernel(kinds):
                q = torch.randn(1, 2, 8, 16, device=device)
                equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), graphed(q, q, q))
    assert counts(graphed) == (2, 2, 4, 0, 0)


def test_b26_counts_are_exact(backend, device):
    """Each call is counted once, as what it was."""
    graphed = graphify(lambda x: x + 1, backend=backend)
    for number in range(1, 7):
        graphed(torch.full((2,), float(number), device=device))
        expected = (1, int(number > 1), max(number - 2, 0), 0, 0)
        assert counts(graphed) == expected
        assert graphed.stats().calls == number
        assert graphed.stats().recordings == int(number > 1)
    assert [g.replays for g in graphed.graphs] == [4]


def test_b26_errors_and_eager_calls_are_counted(backend, device):
    """A call that raises is an error, one under `disabled()` is eager with its reason."""
    from graphify import disabled

    def f(x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise KeyError("mine")
        return x + 1

    graphed = graphify(f, backend=backend)
    x = torch.ones(2, device=device)
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            graphed(x, fail=True)
        with disabled():
            graphed(x)
        graphed(x)
    assert counts(graphed) == (1, 1, 1, 3, 3)
    assert handle(graphed).stats().reasons == {"disabled": 3}
