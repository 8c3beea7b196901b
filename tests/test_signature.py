"""What makes two calls the same call: specs, shared memory, switches, tracers, explanations."""

from __future__ import annotations

import contextlib
import enum
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphify import _ambient, _specs
from graphify._signature import (
    Ambient,
    Shared,
    Signature,
    TensorSpec,
    ambient,
    ambient_reader,
    explain,
    inactive,
    matcher_of,
    overlap,
    refusal,
    specs_of,
)
from graphify._tree import tree_of


class Mode(enum.Enum):
    A = 1
    B = 2


class Opt(enum.Flag):
    A = 1
    B = 2


class Sub(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("graphify runs no code of a subclass")


def spec(tensor: Tensor) -> Any:
    return specs_of(1)((tensor,))[0]


def inference_tensor(*size: int) -> Tensor:
    with torch.inference_mode():
        return torch.ones(*size)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


VARIANTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.ones(2, 3),
    "shape": lambda: torch.ones(3, 2),
    "rank": lambda: torch.ones(6),
    "stride": lambda: torch.ones(3, 2).t(),
    "expanded": lambda: torch.ones(1, 1).expand(2, 3),
    "dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "conj": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "neg": lambda: torch._neg_view(torch.ones(2, 3)),
    "requires_grad": lambda: torch.ones(2, 3, requires_grad=True),
    "inference": lambda: inference_tensor(2, 3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "sparse csr": lambda: torch.ones(2, 3).to_sparse_csr(),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "subclass": lambda: torch.ones(2, 3).as_subclass(Sub),
    "zero rows": lambda: torch.ones(0, 3),
    "scalar": lambda: torch.ones(()),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

# ---------------------------------------------------------------- specs


def test_specs_hold_the_named_fields() -> None:
    """A spec is a plain tuple that equals, and hashes as, a TensorSpec."""
    tensor = torch.ones(3, 2, requires_grad=True).t()
    expected = TensorSpec(
        shape=(2, 3),
        stride=(1, 2),
        dtype=torch.float32,
        device=torch.device("cpu"),
        requires_grad=True,
        inference=False,
        conj=False,
        neg=False,
        kind=Tensor,
        layout=torch.strided,
    )

    assert spec(tensor) == expected
    assert hash(spec(tensor)) == hash(expected)
    assert TensorSpec(*spec(tensor)).stride == (1, 2)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_property_tells_tensors_apart(name: str) -> None:
    """Two tensors have one spec where they are made alike, and only there; every spec can be a key."""
    alike = [other for other, make in VARIANTS.items() if spec(make()) == spec(VARIANTS[name]())]

    assert alike == [name]
    assert isinstance(hash(spec(VARIANTS[name]())), int)


@pytest.mark.parametrize("n", [0, 1, 2, 16, 17, 200])
def test_many_specs_are_one_by_one_specs(n: int) -> None:
    """Reading n tensors at once is reading each, strange ones among them or not."""
    made = [VARIANTS[name]() for name in STAGED]
    tensors = tuple(made[i % len(made)] for i in range(n))

    assert specs_of(n)(tensors) == tuple(map(spec, tensors))
    for strange in ("subclass", "sparse csr", "nested"):
        tensors = (*tensors, VARIANTS[strange]())
        assert specs_of(len(tensors))(tensors) == tuple(map(spec, tensors))


def test_no_function_mode_slows_the_reading_down() -> None:
    """A default device is a mode around every getter, at 10 us each; specs and storages are read without it."""

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} went through the mode")

    tensor = torch.ones(2, 3)
    expected = spec(tensor), specs_of(20)((tensor,) * 20), overlap((tensor, tensor)), None
    with Watching():
        assert (
            spec(tensor),
            specs_of(20)((tensor,) * 20),
            overlap((tensor, tensor)),
            refusal(tensor),
        ) == expected


def test_a_spec_keeps_no_tensor_alive() -> None:
    """Specs and matchers hold facts about tensors, not tensors."""
    tensor = torch.ones(2)
    ref = weakref.ref(tensor)
    kept = spec(tensor), matcher_of([tensor])
    del tensor
    gc.collect()

    assert ref() is None
    assert kept[1](torch.ones(2))


# ---------------------------------------------------------------- matchers

MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "default device": lambda: torch.device("cpu"),
}
REFUSED = ("meta", "sparse", "sparse csr", "nested", "jagged", "subclass")
STAGED = [name for name in VARIANTS if name not in REFUSED]


@pytest.fixture(params=["torch's test", "ours"])
def private(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of matching: torch's private test, and the one where torch has none."""
    if request.param == "ours":
        monkeypatch.setattr(_specs, "_tensor_guards", lambda: None)


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("mode", MODES)
def test_matchers_agree_with_specs(mode: str) -> None:
    """A matcher says yes exactly where the specs are equal, under each mode."""
    made = [VARIANTS[name]() for name in STAGED]
    with MODES[mode]():
        for a in made:
            match = matcher_of([a])
            for b in made:
                assert match(b) == (spec(a) == spec(b)), (a, b)


@pytest.mark.usefixtures("private")
def test_matchers_take_several() -> None:
    """Every tensor is tested, in order; one given twice may be denied but never wrongly allowed."""
    a, b = torch.ones(2), torch.ones(3)
    match = matcher_of([a, b])

    assert match(torch.zeros(2), torch.zeros(3)) is True
    assert match(torch.zeros(3), torch.zeros(2)) is False
    assert match(a, a) is False
    assert matcher_of([])() is True


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("meta", "it is on the meta device and has no values"),
        ("sparse", "its layout is torch.sparse_coo: only strided tensors"),
        ("sparse csr", "its layout is torch.sparse_csr"),
        ("nested", "it is a nested tensor"),
        ("jagged", "it is a nested tensor"),
        ("subclass", f"it is a {__name__}.Sub, a subclass of Tensor"),
    ],
)
def test_refusals_name_the_reason(name: str, part: str) -> None:
    """What has no buffer to copy into is refused with the reason and what to pass; nothing else is."""
    reason = refusal(VARIANTS[name]())

    assert reason is not None
    assert part in reason
    assert "Pass " in reason


def test_ordinary_tensors_are_not_refused() -> None:
    """Plain tensors, parameters, buffers, views, conjugates and inference tensors can all be staged."""
    assert [name for name, make in VARIANTS.items() if refusal(make()) is None] == STAGED
    assert refusal(torch.nn.Buffer(torch.ones(2))) is None
    assert refusal(torch.ones(2).share_memory_()) is None


def test_a_fake_tensor_is_refused() -> None:
    """A fake tensor looks like one on a real device but has no values."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        tensor = torch.ones(2)

    assert refusal(tensor) == "it is a fake tensor and has no values. Pass a real one."
    assert spec(tensor)[0] is None


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_a_quantised_tensor_is_refused() -> None:
    """A quantised tensor's values depend on more than its buffer."""
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)

    assert "it is quantised" in str(refusal(tensor))


def test_a_lazy_parameter_is_refused() -> None:
    """A parameter of a lazy module has not even a shape before the module's first call."""
    reason = "it has no values yet: call its lazy module once before."

    assert refusal(torch.nn.LazyLinear(2).weight) == refusal(torch.nn.UninitializedBuffer()) == reason


# ---------------------------------------------------------------- shared memory


def test_overlap_of_distinct_tensors_is_none() -> None:
    """No memory shared, nothing to say; neighbours in one storage share none either."""
    base = torch.zeros(6)

    assert overlap(()) is None
    assert overlap((base,)) is None
    assert overlap((base, torch.zeros(6))) is None
    assert overlap((base[:3], base[3:])) is None
    assert overlap((base[:0], base)) is None
    assert overlap((torch.zeros(0), torch.zeros(0))) is None


def test_overlap_says_how_tensors_lie() -> None:
    """Offsets are bytes from the group's first byte, wherever that lies in the storage."""
    base = torch.zeros(10)
    other = torch.zeros(4)

    assert overlap((base[2:5], other, base[3:])) == ((Shared(0, 0, 0), Shared(2, 4, 2)),)
    assert overlap((base[5:], base[3:7])) == ((Shared(0, 8, 0), Shared(1, 0, 1)),)
    assert overlap((base[4:7], base[5:])) == overlap((base[:3], base[1:]))
    assert overlap((other, base, other, base)) == (
        (Shared(0, 0, 0), Shared(2, 0, 0)),
        (Shared(1, 0, 1), Shared(3, 0, 1)),
    )


def test_overlap_tells_one_object_from_two() -> None:
    """`f(x, x)` and `f(x, x.detach())` are different calls: `a is b` is true in one of them."""
    x = torch.zeros(2)

    assert overlap((x, x)) == ((Shared(0, 0, 0), Shared(1, 0, 0)),)
    assert overlap((x, x.detach())) == ((Shared(0, 0, 0), Shared(1, 0, 1)),)


def test_overlap_skips_what_has_no_storage() -> None:
    """A sparse tensor is refused elsewhere; here it does not hide what the others share."""
    x = torch.zeros(2)

    assert overlap((torch.eye(2).to_sparse(), x, x)) == ((Shared(1, 0, 1), Shared(2, 0, 1)),)


ranges = st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 4), st.integers(1, 3))


@settings(deadline=None, max_examples=300)
@given(st.lists(ranges, max_size=6))
def test_overlap_groups_are_the_connected_ranges(places: list[tuple[int, int, int, int]]) -> None:
    """Groups are what a search over all pairs of ranges finds."""
    bases = torch.zeros(30), torch.zeros(30)
    views = [bases[which].as_strided((n,), (step,), at) for which, at, n, step in places]
    ends = [(which, at, at + (n - 1) * step) for which, at, n, step in places]
    groups = {i: {i} for i, view in enumerate(views) if view.numel()}
    for i, j in itertools.product(list(groups), repeat=2):
        (a, low, high), (b, other_low, other_high) = ends[i], ends[j]
        if a == b and low <= other_high and other_low <= high:
            joined = groups[i] | groups[j]
            groups.update(dict.fromkeys(joined, joined))
    found = {frozenset(shared.place for shared in group) for group in overlap(views) or ()}

    assert found == {frozenset(group) for group in groups.values() if len(group) > 1}
    for group in overlap(views) or ():
        low = min(ends[shared.place][1] for shared in group)
        assert [shared.offset for shared in group] == [4 * (ends[shared.place][1] - low) for shared in group]


# ---------------------------------------------------------------- switches


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    old = get()
    put(value)
    try:
        yield
    finally:
        put(old)


def attribute(owner: Any, name: str, value: Any) -> Any:
    return setting(lambda: getattr(owner, name), lambda v: setattr(owner, name, v), value)


@contextlib.contextmanager
def _precision() -> Iterator[None]:
    with setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"):
        yield


@contextlib.contextmanager
def _warn_only() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _sdp_priority() -> Iterator[None]:
    order = list(torch.nn.attention.SDPBackend.__members__.values())[1:3]
    with torch.nn.attention.sdpa_kernel(order, set_priority=True):
        yield


CUDA = torch.backends.cuda
SWITCHES: dict[str, tuple[str, Callable[[], Any]]] = {
    "grad_mode": ("cuda cpu", torch.no_grad),
    "inference_mode": ("cuda cpu", torch.inference_mode),
    "autocast": ("cpu", lambda: torch.autocast("cpu", torch.bfloat16)),
    "default_dtype": (
        "cuda cpu",
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    ),
    "default_device": ("cuda cpu", lambda: torch.device("meta")),
    "deterministic": (
        "cuda cpu",
        lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "deterministic_warn_only": ("cuda cpu", _warn_only),
    "fill_uninitialized": (
        "cuda cpu",
        lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
    "float32_precision": ("cuda cpu", _precision),
    "flash_sdp": ("cuda cpu", lambda: setting(CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, False)),
    "math_sdp": ("cuda cpu", lambda: setting(CUDA.math_sdp_enabled, CUDA.enable_math_sdp, False)),
    "math_sdp_reduced": (
        "cuda cpu",
        lambda: setting(
            CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp, True
        ),
    ),
    "sdp_priority": ("cuda cpu", _sdp_priority),
    "mem_efficient_sdp": (
        "cuda",
        lambda: setting(CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, False),
    ),
    "cudnn_sdp": ("cuda", lambda: setting(CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp, False)),
    "cudnn": ("cuda", lambda: attribute(torch.backends.cudnn, "enabled", False)),
    "cudnn_benchmark": ("cuda", lambda: attribute(torch.backends.cudnn, "benchmark", True)),
    "cudnn_deterministic": ("cuda", lambda: attribute(torch.backends.cudnn, "deterministic", True)),
    "fp16_reduction": (
        "cuda",
        lambda: attribute(CUDA.matmul, "allow_fp16_reduced_precision_reduction", False),
    ),
    "bf16_reduction": (
        "cuda",
        lambda: attribute(CUDA.matmul, "allow_bf16_reduced_precision_reduction", False),
    ),
    "fp16_accumulation": ("cuda", lambda: attribute(CUDA.matmul, "allow_fp16_accumulation", True)),
    "attention_fastpath": (
        "cuda cpu",
        lambda: setting(
            torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
        ),
    ),
    "process_hooks": (
        "cuda cpu",
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None),
    ),
    "mkldnn": ("cpu", lambda: attribute(torch.backends.mkldnn, "enabled", False)),
    "mkldnn_deterministic": ("cpu", lambda: attribute(torch.backends.mkldnn, "deterministic", True)),
}


def read(device_type: str, private: bool) -> Ambient:
    return _ambient._reader(device_type, private)()


@pytest.mark.parametrize("private", [True, False], ids=["private getters", "public ways"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_is_seen(name: str, device_type: str, private: bool) -> None:
    """Flipping a switch changes its field, for the devices that it concerns, and putting it back restores it."""
    devices, flipped = SWITCHES[name]
    if name == "sdp_priority" and not private:
        devices = ""  # torch has no public way to read it
    # Setting the old switch back leaves "ieee" where the new one had "none".
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    before = read(device_type, private)
    with flipped():
        during = read(device_type, private)
    after = read(device_type, private)

    assert before == after
    assert (getattr(before, name) != getattr(during, name)) == (device_type in devices)


def test_every_field_has_a_switch() -> None:
    """No field goes without a test; the device's index needs a device."""
    assert set(SWITCHES) == set(Ambient._fields) - {"device_index"}


def test_private_and_public_ways_agree() -> None:
    """Both ways read the same values, but for what only one of them can say."""
    for device_type in ("cpu", "cuda"):
        private, public = read(device_type, True)._asdict(), read(device_type, False)._asdict()
        differ = {name for name in private if private[name] != public[name]}

        assert differ <= {"sdp_priority", "float32_precision"}


def test_mixed_precision_switches_are_read() -> None:
    """Once old and new TF32 switches were mixed, torch's old getters raise; the state is read all the same."""
    reader = ambient_reader("cuda")
    conv = torch.backends.cudnn.conv
    before = reader()
    with attribute(conv, "fp32_precision", "ieee" if conv.fp32_precision != "ieee" else "tf32"):
        during = reader()

    assert during.float32_precision != before.float32_precision
    assert reader() == before


def test_ambient_is_a_hashable_record() -> None:
    """A key can hold it, and messages can name its fields."""
    assert ambient("cpu") == ambient_reader("cpu")() == read("cpu", True)
    assert isinstance(hash(ambient("cuda")), int)
    assert ambient("cpu").grad_mode is True
    assert ambient("cuda").mkldnn is None
    assert ambient("cpu").device_index is None


def test_autocast_of_another_device_does_not_matter() -> None:
    """CPU autocast does not change what kernels of a CUDA device compute."""
    before = ambient("cuda")
    with torch.autocast("cpu"):
        assert ambient("cuda") == before
        assert ambient("cpu").autocast is torch.bfloat16


# ---------------------------------------------------------------- tracers


class AnyDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class AnyFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[True, False], ids=["private getters", "public ways"])
def why(request: pytest.FixtureRequest) -> Callable[[], str | None]:
    """Both ways of asking whether graphs are off."""
    return _ambient._inactive_by(_ambient._probes(request.param))


def test_active_by_default(why: Callable[[], str | None]) -> None:
    """No mode, no tracer: graphs are on; a default device, autocast and inference mode do not switch them off."""
    assert why() is inactive() is None
    with torch.device("cpu"), torch.autocast("cpu"), torch.inference_mode():
        assert why() is None


def test_modes_switch_graphs_off(why: Callable[[], str | None]) -> None:
    """Somebody who watches every op or call must see them, so the plain function runs."""
    with AnyDispatch():
        assert why() == "mode"
    with AnyFunction():
        assert why() == "mode"
        with torch.device("cpu"):
            assert why() == "mode"
    with torch.device("cpu"), AnyFunction():
        assert why() == "mode"
    assert why() is None


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_transforms_switch_graphs_off(transform: Any, why: Callable[[], str | None]) -> None:
    """Inside torch.func the tensors are wrappers that no graph can read."""
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(why())
        return x.sum()

    transform(f)(torch.ones(2))

    assert seen == ["functorch"]
    assert why() is None


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tracing_switches_graphs_off(why: Callable[[], str | None]) -> None:
    """A trace must record the plain function."""
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(why())
        return x + 1

    torch.jit.trace(f, torch.ones(2), check_trace=False)

    assert seen == ["compiling"]
    assert why() is None


def test_fake_and_proxy_modes_switch_graphs_off(why: Callable[[], str | None]) -> None:
    """torch.export and make_fx run the function under modes of their own."""
    fx = pytest.importorskip("torch.fx.experimental.proxy_tensor")
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(why())
        return x + 1

    fx.make_fx(f, tracing_mode="fake")(torch.ones(2))

    assert seen == ["mode"]


def test_dynamo_sees_its_own_test_first() -> None:
    """Dynamo folds `inactive` to "compiling", so it inlines the plain function without a break."""
    seen = []

    def f(x: Tensor) -> Tensor:
        return x + 1 if inactive() == "compiling" else x - 1

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(f, backend=backend, fullgraph=True)

    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(seen) == 1


# ---------------------------------------------------------------- explaining


def signature_of(
    *roots: Any, names: str = "x y z", mode: Callable[[], Any] = contextlib.nullcontext
) -> Signature:
    tree = tree_of(roots, names.split()[: len(roots)])
    leaves = tree.unpack(roots)
    assert leaves is not None
    with mode():
        now = ambient("cpu")
    tensors = specs_of(len(leaves[0]))(leaves[0])
    return Signature(tree, now, leaves[1], tensors, overlap(leaves[0]))


X = torch.ones(16, 4)


@pytest.mark.parametrize(
    ("new", "old", "text"),
    [
        ((X,), (X,), "nothing differs"),
        ((torch.ones(8, 4),), (X,), "`x`: shape (8, 4) instead of (16, 4)"),
        ((torch.ones(4, 16).t(),), (X,), "`x`: stride (1, 16) instead of (4, 1)"),
        ((X.double(),), (X,), "`x`: dtype torch.float64 instead of torch.float32"),
        ((X, {"k": torch.ones(2)}), (X, {"k": torch.ones(3)}), "`y['k']`: shape (2,) instead of (3,)"),
        ((X, 2), (X, 1), "`y`: 2 instead of 1"),
        ((X, "b"), (X, "a"), "`y`: 'b' instead of 'a'"),
        ((X, 0.0), (X, -0.0), "`y`: 0.0 instead of -0.0"),
        ((X, float("nan")), (X, 2.0), "`y`: nan instead of 2.0"),
        ((X, slice(1)), (X, slice(2)), "`y`: slice(None, 1, None) instead of slice(None, 2, None)"),
        ((X, 1j), (X, 2j), "`y`: complex(0.0, 1.0) instead of complex(0.0, 2.0)"),
        ((X, range(3)), (X, range(2)), "`y`: range(0, 3, 1) instead of range(0, 2, 1)"),
        ((X, 1.0), (X, 1), "`y`: type float instead of int"),
        ((X, None), (X, X.clone()), "`y`: a constant that was not there before"),
        ((X, [X.clone(), X.clone()]), (X, [X.clone()]), "`y[1]`: a tensor that was not there before"),
        ((X, [X.clone()]), (X, [X.clone(), 1]), "`y[1]`: no longer there"),
        ((X, {"a": 1, "b": 2}), (X, {"b": 2, "a": 1}), "other containers, or their keys in another order"),
        ((X, Mode.A), (X, Mode.B), "`y`: Mode.A instead of Mode.B"),
        ((X, Opt.A | Opt.B), (X, Opt.B), "`y`: Opt(3) instead of Opt(2)"),
        ((X, frozenset({2, 1})), (X, frozenset()), "`y`: frozenset(1, 2) instead of frozenset()"),
        ((X, print), (X, len), "`y`: another builtin_function_or_method object"),
        ((X, X), (X, X.clone()), "`x`, `y`: these share memory in another way than before"),
    ],
)
def test_explain_names_the_first_difference(new: Any, old: Any, text: str) -> None:
    """A miss is explained by the argument's name, with both values."""
    assert explain(signature_of(*new), signature_of(*old)) == text


def test_explain_names_a_switch() -> None:
    """What differs may be no argument at all."""
    new, old = signature_of(X, mode=torch.no_grad), signature_of(X)

    assert explain(new, old) == "grad mode: False instead of True"
