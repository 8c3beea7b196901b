"""The grammar of random programs: typed variables, families of statements, and the strategy that draws them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ._programs import Input, Program, State, render
from ._strategies import need_hypothesis

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["programs"]

WIDTH = 4
FLOATS = ("float32", "float64", "bfloat16")
Dims = tuple[int | str, ...]
ROWS: Dims = ("n", WIDTH)


class Var(NamedTuple):
    """A tensor variable; `roots` are the inputs and the state whose memory it may share."""

    name: str
    dims: Dims
    dtype: str
    roots: frozenset[str] = frozenset()
    writable: bool = True


class Writer:
    """Draws statements one by one and keeps the books: variables, state, inputs written to, modes allowed."""

    def __init__(self, draw: DrawFn, shape: str) -> None:
        self._st = need_hypothesis()
        self._draw = draw
        self.shape = shape
        self.body: list[str] = []
        self.variables: list[Var] = []
        self.state: dict[str, State] = {}
        self.stores: list[str] = []
        self.helpers: list[str] = []
        self.written: set[str] = set()
        self.scalars: dict[str, tuple[object, ...]] = {}
        self.modes = ["no_grad", "inference", "grad"]
        self.min_n = 1

    def choose(self, options: Any) -> Any:
        """One of these; the first is the simplest."""
        return self._draw(self._st.sampled_from(list(options)))

    def chance(self, percent: int) -> bool:
        """Whether something happens that does so this often."""
        return bool(self._draw(self._st.integers(0, 99)) >= 100 - percent)

    def find(self, test: Callable[[Var], bool]) -> Var | None:
        """A variable that passes, or None."""
        passing = [var for var in reversed(self.variables) if test(var)]
        return self.choose(passing) if passing else None

    def floats(self, *dims: Dims) -> Var | None:
        """A float variable of one of these dims, or of any."""
        return self.find(lambda var: var.dtype in FLOATS and (not dims or var.dims in dims))

    def let(
        self, text: str, dims: Dims, dtype: str, roots: frozenset[str] = frozenset(), writable: bool = True
    ) -> Var:
        """Write `name = text`."""
        var = Var(f"h{len(self.variables)}", dims, dtype, roots, writable)
        self.body.append(f"{var.name} = {text}")
        self.variables.append(var)
        return var

    def hold(self, name: str, kind: str, init: str) -> str:
        """State by name, made on first use; returns how the body calls it."""
        self.state.setdefault(name, State(name, kind, init))
        return f"self.{name}" if self.shape in ("module", "object") else name

    def store(self, name: str, kind: str, init: str) -> str:
        """State that the body binds anew."""
        if name not in self.stores:
            self.stores.append(name)
        return self.hold(name, kind, init)

    def write_into(self, var: Var) -> None:
        """Note that memory shared with this variable is written."""
        self.written |= var.roots


UNARY = [
    "torch.relu({0})",
    "{0} * 2.0",
    "{0} + 1",
    "torch.tanh({0})",
    "torch.sigmoid({0})",
    "-{0}",
    "{0}.abs().sqrt()",
    "torch.exp(-{0}.abs())",
    "{0}.clamp(-1.0, 1.0)",
    "{0}.clone()",
    "{0} ** 2",
    "F.gelu({0})",
    "torch.zeros_like({0})",
    "torch.empty_like({0}).fill_(0.5)",
    "torch.nan_to_num({0})",
    "{0}.round()",
]
BY_ROW = [
    "{0}.softmax(-1)",
    "{0}.cumsum(0)",
    "{0}.sort(0).values",
    "{0}.flip(0)",
    "{0}.roll(1, 0)",
    "{0}.gather(0, {0}.argsort(0))",
    "{0} * torch.arange({0}.shape[0], device={0}.device).view(-1, *[1] * ({0}.dim() - 1))",
]
VIEWS: list[tuple[str, Dims | None, Dims | None]] = [
    ("{0}[0]", None, None),
    ("{0}.detach()", None, ()),
    ("{0}.view_as({0})", None, ()),
    ("{0}[...]", None, ()),
    ("{0}[:, 1]", ROWS, ("n",)),
    ("{0}[:, 1:3]", ROWS, ("n", 2)),
    ("{0}[:, ::2]", ROWS, ("n", 2)),
    ("{0}.t()", ROWS, (WIDTH, "n")),
    ("{0}.t().contiguous().t()", ROWS, ROWS),
    ("{0}.reshape(-1)", ROWS, ("4n",)),
    ("{0}.unbind(1)[2]", ROWS, ("n",)),
    ("{0}.split(2, 1)[1]", ROWS, ("n", 2)),
    ("{0}.unsqueeze(0).transpose(0, 1).squeeze(1)", ROWS, ROWS),
]
BINARY = [
    "{0} + {1}",
    "{0} * {1}",
    "{0} - {1}",
    "torch.maximum({0}, {1})",
    "torch.where({0} > 0, {0}, {1})",
    "torch.stack([{0}, {1}]).sum(0)",
    "torch.cat([{0}.reshape(-1), {1}.reshape(-1)])[: {0}.numel()].reshape({0}.shape)",
]
REDUCTIONS: list[tuple[str, Dims]] = [
    ("{0}.sum()", ()),
    ("{0}.mean(0)", (WIDTH,)),
    ("{0}.amax(-1)", ("n",)),
    ("{0}.sum(-1)", ("n",)),
    ("{0}.max(0).values", (WIDTH,)),
    ("torch.topk({0}, 2, -1).values", ("n", 2)),
    ("{0}.norm()", ()),
]
RANDOM = [
    "torch.rand_like({0})",
    "{0} + torch.randn({0}.shape, device={0}.device)",
    "F.dropout({0}, 0.5)",
    "torch.bernoulli(torch.sigmoid({0}.float()))",
    "torch.empty_like({0}).uniform_()",
]
IN_PLACE = ["{0}.add_(1.0)", "{0}.mul_(0.5)", "{0}.relu_()", "{0}.zero_()", "{0}.clamp_(max=1.0)"]
IN_PLACE_ROWS = ["{0}[0] = 0.5", "{0}[0].add_(1.0)", "{0}[..., ::2].mul_(2.0)", "{0}.copy_({0}.flip(0))"]

PLAIN_VALUES = [
    ("scale", "float", "0.5", "{0} * {1}"),
    ("flag", "flag", "True", "{0} * 2.0 if {1} else {0} - 1.0"),
    ("word", "word", "'a'", "{0} * (2.0 if {1} == 'a' else 3.0)"),
    ("sizes", "pair", "(0.5, 2.0)", "{0} * {1}[1]"),
]
DEEP_VALUES = [
    ("options", "options", "{'scale': 0.5}", "{0} * {1}['scale']"),
    ("config", "config", "Record(0.5)", "{0} * {1}.value"),
]


def elementwise(w: Writer) -> None:
    """One float in, one of the same size out."""
    if var := w.floats():
        w.let(w.choose(UNARY if not var.dims else UNARY + BY_ROW).format(var.name), var.dims, var.dtype)


def view(w: Writer) -> None:
    """Another look at the same memory (or a copy, where the layout asks for one)."""
    if var := w.floats(ROWS, ("n",), (WIDTH,), ("n", 2)):
        rows = [row for row in VIEWS if row[1] is None or row[1] == var.dims]
        text, _, gives = w.choose(rows)
        dims = var.dims[1:] if gives is None else gives or var.dims
        w.let(text.format(var.name), dims, var.dtype, var.roots, var.writable)


def expand(w: Writer) -> None:
    """One row seen many times: nothing may write into it."""
    if var := w.floats((WIDTH,)):
        w.let(f"{var.name}.expand(3, {WIDTH})", (3, WIDTH), var.dtype, var.roots, writable=False)


def combine(w: Writer) -> None:
    """Two floats of one size."""
    if left := w.floats():
        right = w.floats(left.dims)
        assert right is not None
        dtype = max((left.dtype, right.dtype), key=["bfloat16", "float32", "float64"].index)
        w.let(w.choose(BINARY).format(left.name, right.name), left.dims, dtype)


def broadcast(w: Writer) -> None:
    """Rows and one row or one number."""
    rows, small = w.floats(ROWS), w.floats((WIDTH,), ())
    if rows and small:
        w.let(f"{rows.name} {w.choose('*+-')} {small.name}.to({rows.name}.dtype)", ROWS, rows.dtype)


def product(w: Writer) -> None:
    """Matrix products."""
    if var := w.floats(ROWS):
        text, dims = w.choose([("{0} @ {0}.t()", ("n", "n")), ("{0}.t() @ {0}", (WIDTH, WIDTH))])
        w.let(text.format(var.name), dims, var.dtype)


def reduction(w: Writer) -> None:
    """Rows to fewer numbers."""
    if var := w.floats(ROWS):
        text, dims = w.choose(REDUCTIONS)
        w.let(text.format(var.name), dims, var.dtype)


def cast(w: Writer) -> None:
    """Another dtype; the same dtype is the same tensor."""
    if var := w.floats():
        dtype = w.choose(FLOATS)
        w.let(f"{var.name}.to(torch.{dtype})", var.dims, dtype, var.roots if dtype == var.dtype else frozenset())


def indices(w: Writer) -> None:
    """Integers in and out: argmax, embedding, index_select."""
    index = w.find(lambda var: var.dtype == "int64" and var.dims == ("n",))
    if index is None:
        if var := w.floats(ROWS):
            w.let(f"{var.name}.argmax(-1)", ("n",), "int64")
        return
    emb = ("emb", "module", f"nn.Embedding({WIDTH}, {WIDTH})")
    table = ("table", "tensor", f"torch.arange(16.0).view({WIDTH}, {WIDTH})")
    text, held = w.choose([("{1}({0})", emb), ("{1}[{0}]", table), ("{1}.index_select(0, {0})", table)])
    w.let(text.format(index.name, w.hold(*held)), ROWS, "float32")


def masks(w: Writer) -> None:
    """Booleans in and out."""
    var = w.floats(ROWS)
    mask = w.find(lambda var: var.dtype == "bool" and var.dims == ROWS)
    if var and mask:
        text = w.choose(["{0}.masked_fill({1}, 0.0)", "torch.where({1}, {0}, -{0})", "{0} * {1}"])
        w.let(text.format(var.name, mask.name), ROWS, var.dtype)
    elif var:
        w.let(f"{var.name} > 0", ROWS, "bool")


def complexes(w: Writer) -> None:
    """Complex numbers, lazily conjugated views of them, and their parts."""
    var = w.find(lambda var: var.dtype == "complex64")
    if var is None:
        if real := w.floats(ROWS):
            w.let(f"torch.complex({real.name}.float(), {real.name}.float())", ROWS, "complex64")
        return
    text, dtype, shares = w.choose(
        [
            ("{0} * 2", "complex64", False),
            ("{0}.conj()", "complex64", True),
            ("{0}.real", "float32", True),
            ("{0}.conj().imag", "float32", True),
            ("{0}.abs()", "float32", False),
        ]
    )
    roots = var.roots if shares else frozenset()
    w.let(text.format(var.name), var.dims, dtype, roots, writable=not shares or var.writable)


def randomness(w: Writer) -> None:
    """Draws from torch's default generator."""
    if var := w.floats():
        text = w.choose(RANDOM)
        w.let(text.format(var.name), var.dims, "float32" if "bernoulli" in text else var.dtype)


def write_in_place(w: Writer) -> None:
    """Write into an intermediate, or through it into an input or the state."""
    var = w.find(lambda var: var.dtype in FLOATS and var.writable)
    if var is not None:
        w.write_into(var)
        texts = IN_PLACE if var.dims == () else IN_PLACE + IN_PLACE_ROWS
        w.body.append(w.choose(texts).format(var.name))


def layer(w: Writer) -> None:
    """A module that the program holds."""
    if var := w.floats(ROWS):
        name, init = w.choose(
            [
                ("lin", f"nn.Linear({WIDTH}, {WIDTH})"),
                ("drop", "nn.Dropout(0.5)"),
                ("norm", f"nn.BatchNorm1d({WIDTH})"),
                ("layer_norm", f"nn.LayerNorm({WIDTH})"),
                ("net", f"nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Dropout(0.1))"),
                ("rnn", f"nn.GRU({WIDTH}, {WIDTH})"),
            ]
        )
        w.min_n = 2 if name == "norm" else w.min_n
        ref, suffix = w.hold(name, "module", init), "[0]" if name == "rnn" else ""
        w.let(f"{ref}({var.name}.float()){suffix}", ROWS, "float32")


def read_state(w: Writer) -> None:
    """A tensor held outside, as it is or through a container."""
    names = [
        ("buf", f"torch.linspace(0.0, 1.0, {WIDTH})", "{0}", "tensor"),
        ("plain", f"torch.ones({WIDTH})", "{0}", "tensor"),
        ("pieces", f'{{"w": torch.full(({WIDTH},), 0.5)}}', '{0}["w"]', "named"),
        ("pile", f"[torch.full(({WIDTH},), 0.25)]", "{0}[0]", "piled"),
    ]
    name, init, text, kind = w.choose(names)
    w.let(text.format(w.hold(name, kind, init)), (WIDTH,), "float32", frozenset({name}))


def write_state(w: Writer) -> None:
    """Write into a tensor held outside."""
    buf = w.hold("buf", "tensor", f"torch.linspace(0.0, 1.0, {WIDTH})")
    var = w.floats((WIDTH,))
    texts = [f"{buf}.add_(1.0)", f"{buf}.mul_(0.5)"]
    w.body.append(w.choose(texts + ([f"{buf}.copy_({var.name})", f"{buf}.lerp_({var.name}.float(), 0.1)"] if var else [])))


def plain_value(w: Writer) -> None:
    """A plain Python value held outside: number, flag, word; also one level deeper."""
    var = w.floats()
    if var is None:
        return
    name, kind, init, text = w.choose(DEEP_VALUES if w.chance(20) else PLAIN_VALUES)
    w.let(text.format(var.name, w.hold(name, kind, init)), var.dims, var.dtype)


def scalar_argument(w: Writer) -> None:
    """A Python scalar among the arguments, as a number or as a choice."""
    if var := w.floats():
        name, values, text = w.choose(
            [
                ("k", (1, 2), "{0} * k"),
                ("a", (0.5, 1.0, -0.0), "{0} * a"),
                ("how", ("add", "mul"), "{0} + 1.0 if how == 'add' else {0} * 3.0"),
                ("on", (False, True), "torch.relu({0}) if on else {0} * 1.0"),
            ]
        )
        w.scalars.setdefault(name, values)
        w.let(text.format(var.name), var.dims, var.dtype)


def branch(w: Writer) -> None:
    """A host branch on a size or on the training flag."""
    if var := w.floats():
        tests = [f"{w.variables[0].name}.shape[0] > 2", f"{var.name}.dim() == 2"]
        tests += ["self.training"] if w.shape == "module" else []
        left, right = w.choose(UNARY).format(var.name), w.choose(UNARY).format(var.name)
        test, name = w.choose(tests), f"h{len(w.variables)}"
        w.body += [f"if {test}:", f"    {name} = {left}", "else:", f"    {name} = {right}"]
        w.variables.append(Var(name, var.dims, var.dtype))


def block(w: Writer) -> None:
    """Work inside no_grad, inference_mode, enable_grad or autocast."""
    if var := w.floats(ROWS):
        opening = w.choose(
            [
                "torch.no_grad()",
                "torch.enable_grad()",
                f"torch.autocast({var.name}.device.type, torch.bfloat16)",
                "torch.inference_mode()",
            ]
        )
        name, inference = f"h{len(w.variables)}", "inference" in opening
        if inference and "grad" in w.modes:
            w.modes.remove("grad")
        text, dtype = w.choose(UNARY).format(var.name), var.dtype
        if "autocast" in opening:
            lin = w.hold("lin", "module", f"nn.Linear({WIDTH}, {WIDTH})")
            text, dtype = f"{lin}({var.name}.float()).float()", "float32"
        w.body += [f"with {opening}:", f"    {name} = {text}"]
        w.variables.append(Var(name, ROWS, dtype, writable=not inference))


def helper(w: Writer) -> None:
    """A function beside the program that reads a global of its own."""
    if var := w.floats():
        w.helpers = ["FACTOR = 3.0", "def helper(value):", "    return value * FACTOR"]
        w.let(f"helper({var.name})", var.dims, var.dtype)


def remember(w: Writer) -> None:
    """Bind an attribute, cell or global to a result of this call."""
    if var := w.floats():
        w.body.append(f"{w.store('last', 'nothing', 'None')} = {var.name}")


def host_side(w: Writer) -> None:
    """What a graph cannot repeat: counting, appending, rebinding what was read, reading numbers on the host."""
    var = w.floats(ROWS)
    if var is None:
        return
    kind = w.choose(["count", "append", "rebind", "item", "dynamic"])
    if kind == "count":
        name = w.store("steps", "counter", "0")
        w.body.append(f"{name} += 1")
        w.let(f"{var.name} + {name}", ROWS, var.dtype)
    elif kind == "append":
        w.body.append(f"{w.hold('log', 'log', '[]')}.append({var.name}.shape[0])")
    elif kind == "rebind":
        name = w.store("memory", "tensor", f"torch.zeros({WIDTH})")
        w.body.append(f"{name} = {name} * 0.5 + {var.name}.float().sum(0)")
        w.let(f"{name} + 0.0", (WIDTH,), "float32")
    elif kind == "item":
        w.let(f"{var.name} * float({var.name}.sum() > 0)", ROWS, var.dtype)
    else:
        w.let(f"{var.name}[{var.name} > 0].sum()", (), var.dtype)


FAMILIES = 3 * [elementwise, view, combine, layer, read_state, plain_value, write_in_place, scalar_argument]
FAMILIES += [reduction, broadcast, product, cast, indices, masks, complexes, randomness, write_state, branch, block]
FAMILIES += [expand, helper, remember]

TENSORS = [
    Input("", ROWS),
    Input("", (WIDTH,)),
    Input("", ("n",)),
    Input("", ()),
    Input("", ROWS, "bool"),
    Input("", ("n",), "int64", high=WIDTH),
    Input("", ROWS, "float64"),
    Input("", ROWS, "bfloat16"),
    Input("", ROWS, "complex64"),
]
BOXES = {"dict": "['t']", "list": "[0]", "tuple": "[1]", "pair": ".left", "record": ".value"}


def programs(
    *,
    min_statements: int = 2,
    max_statements: int = 10,
    shapes: tuple[str, ...] = ("module", "object", "closure", "global"),
    host_side_percent: int = 10,
) -> SearchStrategy[Program]:
    """Small random `Program`s: `make()` builds the callable with its state; the repr can be pasted into a test.

    Args:
        min_statements, max_statements: about how long.
        shapes: where the state lives: an nn.Module, another object, closure cells, globals.
        host_side_percent: how many contain what no graph can repeat (counting, appending, host reads); expect a
            GraphifyError or eager calls from these.
    """
    need_hypothesis()
    strategy: SearchStrategy[Program] = _composite()((min_statements, max_statements), shapes, host_side_percent)
    return strategy


@functools.cache
def _composite() -> Any:
    return need_hypothesis().composite(_draw_program)


def _draw_program(draw: DrawFn, sizes: tuple[int, int], shapes: tuple[str, ...], host_side_percent: int) -> Program:
    st = need_hypothesis()
    w = Writer(draw, draw(st.sampled_from(shapes)))
    inputs = [_input(w, number) for number in range(w.choose([1, 2, 2, 3]))]
    for _ in range(draw(st.integers(*sizes))):
        w.choose(FAMILIES)(w)
    if w.chance(host_side_percent):
        host_side(w)
    for _ in range(w.choose([0, 1, 2])):
        w.choose(FAMILIES)(w)
    w.body.append(f"return {_result(w)}")
    return _finish(w, inputs)


def _input(w: Writer, number: int) -> Input:
    """A parameter, and the variable that the body finds in it."""
    name = f"x{number}"
    found: Input = Input("", ROWS) if number == 0 else w.choose(TENSORS)
    box = w.choose(BOXES) if w.chance(25) else ""
    optional = number > 0 and not box and found == TENSORS[0] and w.chance(25)
    inside = f"t{number}" if box else name
    if box:
        w.body.append(f"{inside} = {name}{BOXES[box]}")
    if optional:
        w.body.append(f"{name} = x_first * 0.5 if {name} is None else {name}".replace("x_first", w.variables[0].name))
    w.variables.append(Var(inside, found.dims, found.dtype, frozenset({name})))
    return found._replace(name=name, box=box, optional=optional)


def _result(w: Writer) -> str:
    """What the program returns: variables, inputs, state and constants, bare or in containers."""
    size = f"{w.variables[0].name}.shape[0]"
    held = [w.hold(item.name, item.kind, item.init) for item in w.state.values() if item.kind == "tensor"]
    names = [var.name for var in reversed(w.variables)]
    items = [w.choose([*names[:4], *names[:4], *names, *held, "None", size, "'done'"]) for _ in range(4)]
    items[0] = names[0]
    forms = [
        "{0}",
        "({0}, {1})",
        "[{0}, {1}, {2}]",
        "{{'a': {0}, 'b': ({1}, {2})}}",
        "Pair({0}, [{1}])",
        "Record({0}, {{'x': {1}, 'y': {2}}})",
        "({0}, {0}, {1})",
        "({0}, {0}[...], {1})",
        "{0}[...]",
    ]
    return str(w.choose(forms)).format(*items)


def _finish(w: Writer, inputs: list[Input]) -> Program:
    state = list(w.state.values())
    optional = [item for item in inputs if item.optional]
    required = [item for item in inputs if not item.optional]
    signature = [item.name for item in required] + [f"{item.name}=None" for item in optional]
    signature += [f"{name}={values[0]!r}" for name, values in w.scalars.items()]
    bare = [name.removeprefix("self.") for name in w.stores]
    return Program(
        source=render(w.shape, state, ", ".join(signature), w.body, w.helpers, bare),
        inputs=tuple(item._replace(written=item.name in w.written) for item in required + optional),
        scalars=tuple(w.scalars.items()),
        state=tuple(state),
        modes=tuple(w.modes),
        min_n=w.min_n,
    )
