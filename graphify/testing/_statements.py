"""The statements of random programs, in families; each draws what it writes, or writes nothing where nothing fits."""

from __future__ import annotations

from ._stateful import helper, layer, plain_value, read_state, remember, write_cache, write_state
from ._writer import FLOATS, ROWS, WIDTH, Dims, Var, Writer

__all__ = ["FAMILIES", "host_side"]

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
    "{0} * {0}.shape[0]",
    "{0} * torch.arange({0}.shape[0], device={0}.device).view(-1, *[1] * ({0}.dim() - 1))",
]
"""For what has rows."""
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
"""Text; the dims it takes, None for any; the dims it gives, None for all but the first, () for the same."""
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
"""Text, and the dims it gives."""
RANDOM = [
    "torch.rand_like({0})",
    "{0} + torch.randn({0}.shape, device={0}.device)",
    "F.dropout({0}, 0.5)",
    "torch.bernoulli(torch.sigmoid({0}.float()))",
    "torch.empty_like({0}).uniform_()",
]
IN_PLACE = [
    "{0}.add_(1.0)",
    "{0}.mul_(0.5)",
    "{0}.relu_()",
    "{0}.zero_()",
    "{0}.clamp_(max=1.0)",
    "{0}.unsqueeze_(0).squeeze_(0)",
]
IN_PLACE_ROWS = ["{0}[0] = 0.5", "{0}[0].add_(1.0)", "{0}[..., ::2].mul_(2.0)", "{0}.copy_({0}.flip(0))"]


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
        w.let(
            f"{var.name}.to(torch.{dtype})", var.dims, dtype, var.roots if dtype == var.dtype else frozenset()
        )


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
        if w.chance(10):
            generator = w.hold(
                "generator", "generator", "torch.Generator(torch.get_default_device()).manual_seed(3)"
            )
            text = f"torch.rand({{0}}.shape, generator={generator}, dtype={{0}}.dtype, device={{0}}.device)"
        w.let(text.format(var.name), var.dims, "float32" if "bernoulli" in text else var.dtype)


def write_in_place(w: Writer) -> None:
    """Write into an intermediate, or through it into an input or the state."""
    var = w.find(lambda var: var.dtype in FLOATS and var.writable)
    if var is not None:
        w.write_into(var)
        texts = IN_PLACE if var.dims == () else IN_PLACE + IN_PLACE_ROWS
        w.body.append(w.choose(texts).format(var.name))


def write_out(w: Writer) -> None:
    """Write through `out=`, which autograd does not take."""
    into = w.find(lambda var: var.dtype in FLOATS and var.writable)
    source = into and w.floats(into.dims)
    if into and source:
        w.write_into(into)
        w.forbid("grad")
        w.body.append(f"torch.mul({source.name}.to({into.name}.dtype), 2.0, out={into.name})")


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
        openings = [
            "torch.no_grad()",
            "torch.enable_grad()",
            f"torch.autocast({var.name}.device.type, torch.bfloat16)",
            "torch.inference_mode()",
        ]
        opening = w.choose(openings[:3] if w.trained else openings)
        name, inference = f"h{len(w.variables)}", "inference" in opening
        if inference:
            w.forbid("grad")
        text, dtype = w.choose(UNARY).format(var.name), var.dtype
        if "autocast" in opening:
            lin = w.hold("lin", "module", f"nn.Linear({WIDTH}, {WIDTH})")
            text, dtype = f"{lin}({var.name}.float()).float()", "float32"
        w.body += [f"with {opening}:", f"    {name} = {text}"]
        w.variables.append(Var(name, ROWS, dtype, writable=not inference))


def refuse(w: Writer) -> None:
    """The program's own exception, before anything has happened."""
    if "refused" not in w.scalars and w.chance(30):
        w.scalars["refused"] = (False, False, False, True)
        w.body[:0] = ["if refused:", "    raise ValueError('refused')"]


def host_side(w: Writer) -> None:
    """What a graph cannot repeat: counting, appending, rebinding what was read, reading numbers on the host."""
    var = w.floats(ROWS)
    if var is None:
        return
    kind = w.choose(["count", "append", "rebind", "item", "dynamic", "metadata"])
    if kind == "count":
        name = w.store("steps", "counter", "0")
        w.body.append(f"{name} += 1")
        w.let(f"{var.name} + {name}", ROWS, var.dtype)
    elif kind == "append":
        w.body.append(f"{w.hold('log', 'log', '[]')}.append({var.name}.shape[0])")
    elif kind == "rebind":
        name = w.store("memory", "tensor", f"torch.zeros({WIDTH})")
        value = f"{var.name}.detach()" if w.trained else var.name
        w.body.append(f"{name} = {name} * 0.5 + {value}.float().sum(0)")
        w.let(f"{name} + 0.0", (WIDTH,), "float32")
    elif kind == "item":
        w.let(f"{var.name} * float({var.name}.sum() > 0)", ROWS, var.dtype)
    elif kind == "metadata":
        w.body.append(f"{var.name}.unsqueeze_(0)")
        w.variables = [other for other in w.variables if other is not var and not other.roots & var.roots]
        w.let(f"{var.name} * 2.0", (1, *ROWS), var.dtype)
    else:
        w.let(f"{var.name}[{var.name} > 0].sum()", (), var.dtype)


FAMILIES = 3 * [elementwise, view, combine, layer, read_state, plain_value, write_in_place, scalar_argument]
FAMILIES += [
    reduction,
    broadcast,
    product,
    cast,
    indices,
    masks,
    complexes,
    randomness,
    write_state,
    branch,
    block,
]
FAMILIES += [expand, helper, remember, write_out, write_cache, refuse]
"""What programs are drawn from; what stands here three times comes three times as often."""
