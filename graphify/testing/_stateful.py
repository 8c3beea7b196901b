"""Statements that use what the program holds: layers, tensors and plain values outside of the call."""

from __future__ import annotations

from ._writer import ROWS, WIDTH, Writer

__all__ = ["helper", "layer", "plain_value", "read_state", "remember", "write_cache", "write_state"]

CACHE_WRITES = [
    "{0}.index_copy_(0, {1}, {2}.float())",
    "{0}[{1}] = {2}.float()",
    "{0}.index_add_(0, {1}, {2}.float())",
]
PLAIN_VALUES = [
    ("scale", "float", "0.5", "{0} * {1}"),
    ("flag", "flag", "True", "{0} * 2.0 if {1} else {0} - 1.0"),
    ("word", "word", "'a'", "{0} * (2.0 if {1} == 'a' else 3.0)"),
    ("sizes", "pair", "(0.5, 2.0)", "{0} * {1}[1]"),
]
"""Name, kind and first value of what is held, and a text about a variable and that."""
DEEP_VALUES = [
    ("options", "options", "{'scale': 0.5}", "{0} * {1}['scale']"),
    ("config", "config", "Record(0.5)", "{0} * {1}.value"),
]


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
        if name == "norm":
            w.min_n = 2  # in training it refuses a single row
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
    texts = [f"{buf}.add_(1.0)", f"{buf}.mul_(0.5)"]
    if var := w.floats((WIDTH,)):
        kept = w.kept(var)
        texts += [f"{buf}.copy_({kept})", f"{buf}.lerp_({kept}.float(), 0.1)"]
    w.body.append(w.choose(texts))


def write_cache(w: Writer) -> None:
    """Rows into a table at positions, as a cache is filled."""
    rows = w.floats(ROWS)
    index = w.find(lambda var: var.dtype == "int64" and var.dims == ("n",))
    if rows and index:
        table = w.hold("table", "tensor", f"torch.arange(16.0).view({WIDTH}, {WIDTH})")
        w.body.append(w.choose(CACHE_WRITES).format(table, index.name, w.kept(rows)))
        w.let(f"{table}[:2]", (2, WIDTH), "float32", frozenset({"table"}))


def plain_value(w: Writer) -> None:
    """A plain Python value held outside: number, flag, word; also one level deeper."""
    var = w.floats()
    if var is None:
        return
    name, kind, init, text = w.choose(DEEP_VALUES if w.chance(20) else PLAIN_VALUES)
    w.let(text.format(var.name, w.hold(name, kind, init)), var.dims, var.dtype)


def helper(w: Writer) -> None:
    """A function beside the program that reads a global of its own."""
    if var := w.floats():
        w.help(["FACTOR = 3.0", "def helper(value):", "    return value * FACTOR"])
        w.let(f"helper({var.name})", var.dims, var.dtype)


def remember(w: Writer) -> None:
    """Bind an attribute, cell or global to a result of this call."""
    if var := w.floats():
        w.body.append(f"{w.store('last', 'nothing', 'None')} = {w.kept(var)}")
