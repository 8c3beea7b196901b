"""Statements that only programs to be trained have: weights of all homes, tied ones, custom gradients, hooks."""

from __future__ import annotations

from ._writer import ROWS, WIDTH, Writer

__all__ = ["TRAINABLE", "step", "weight"]

SQUARE = f"torch.linspace(-1.0, 1.0, {WIDTH * WIDTH}).view({WIDTH}, {WIDTH})"
ROW = f"torch.linspace(0.5, 1.5, {WIDTH})"
WEIGHTS = [
    ("weight", "weight", f"nn.Parameter({SQUARE})", "{0} @ {1}"),
    ("weight", "weight", f"nn.Parameter({SQUARE})", "F.linear({0}, {1}).relu()"),
    ("weight", "weight", f"nn.Parameter({SQUARE})", "({0} @ {1}) @ {1}.t()"),
    ("gain", "weight", f"nn.Parameter({ROW})", "{0} * {1}"),
    ("gain", "weight", f"nn.Parameter({ROW})", f"F.layer_norm({{0}}, ({WIDTH},), {{1}})"),
    ("leaf", "leaf", f"{ROW}.requires_grad_()", "{0} + {1}"),
    ("leaf", "leaf", f"{ROW}.requires_grad_()", "torch.sigmoid({0} * {1})"),
    ("parts", "parts", f"{{'w': nn.Parameter({ROW})}}", "{0} * {1}['w']"),
]
TIED = [
    "def tied():",
    f"    net = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH}))",
    "    net[1].weight = net[0].weight",
    "    return net",
]
CUBE = [
    "class Cube(torch.autograd.Function):",
    "    @staticmethod",
    "    def forward(ctx, value):",
    "        ctx.save_for_backward(value)",
    "        return value ** 3",
    "    @staticmethod",
    "    def backward(ctx, gradient):",
    "        (value,) = ctx.saved_tensors",
    "        return gradient * 3.0 * value ** 2",
]
STRAIGHT = [
    "class Straight(torch.autograd.Function):",
    "    @staticmethod",
    "    def forward(ctx, value, other):",
    "        ctx.set_materialize_grads(False)",
    "        mask = value > other",
    "        ctx.mark_non_differentiable(mask)",
    "        return value.round(), mask",
    "    @staticmethod",
    "    def backward(ctx, gradient, _):",
    "        return gradient, None",
]
STOPPED = ["{0}.detach() * {0}", "{0} + ({0}.round() - {0}).detach()", "{0} * {0}.detach().sum()"]


def weight(w: Writer) -> None:
    """A leaf that requires gradients: an attribute, in a cell, a global, in a dictionary."""
    if var := w.floats(ROWS):
        name, kind, init, text = w.choose(WEIGHTS)
        w.let(text.format(f"{var.name}.float()", w.hold(name, kind, init)), ROWS, "float32")


def derived(w: Writer) -> None:
    """A tensor held outside that was made from a weight, by an operation that saves nothing: gradients go on to it."""
    if var := w.floats(ROWS):
        base = w.hold("leaf", "leaf", f"{ROW}.requires_grad_()")
        held = w.hold("derived", "derived", f"{base} + 1.0")
        w.let(f"{var.name}.float() * {held} + {base}", ROWS, "float32")


def tied(w: Writer) -> None:
    """Two layers with one weight; also one of them alone."""
    if var := w.floats(ROWS):
        w.help(TIED)
        name = w.hold("net2", "module", "tied()")
        w.let(w.choose(["{1}({0})", "{1}[0]({0})"]).format(f"{var.name}.float()", name), ROWS, "float32")


def custom_gradient(w: Writer) -> None:
    """A custom autograd.Function, with what it saves and with results that have no gradient."""
    if var := w.floats():
        lines, text = w.choose([(CUBE, "Cube.apply({0})"), (STRAIGHT, "Straight.apply({0}, {0} * 0.5)[0]")])
        w.help(lines)
        w.let(text.format(var.name), var.dims, var.dtype)


def stopped(w: Writer) -> None:
    """Gradients stop at `detach`."""
    if var := w.floats():
        w.let(w.choose(STOPPED).format(var.name), var.dims, var.dtype)


def tensor_hook(w: Writer) -> None:
    """A hook on an intermediate, which is made anew at each call."""
    if var := w.floats():
        hooked = w.let(f"{var.name} * 1.0", var.dims, var.dtype)
        w.body += [
            f"if {hooked.name}.requires_grad:",
            f"    {hooked.name}.register_hook(lambda gradient: gradient * 2.0)",
        ]


TRAINABLE = 4 * [weight] + 2 * [tied] + [derived, custom_gradient, stopped, tensor_hook]


STEPS = [
    [
        "with torch.no_grad():",
        "    for parameter in [{0}]:",
        "        if parameter.grad is not None:",
        "            parameter.sub_(parameter.grad.clamp(-1.0, 1.0) * 0.1)",
    ],
    ["torch.nn.utils.clip_grad_norm_([{0}], 1.0)", "{1}.step()"],
    ["{1}.step()"],
]
OPTIMIZERS = [
    "torch.optim.SGD([{0}], lr=0.1)",
    "torch.optim.SGD([{0}], lr=0.1, momentum=0.9, nesterov=True)",
    "torch.optim.SGD([{0}], lr=0.1, weight_decay=0.01, foreach=False)",
]
ZEROED = [
    [],
    ["for parameter in [{0}]:", "    parameter.grad = None"],
    [
        "for parameter in [{0}]:",
        "    if parameter.grad is not None:",
        "        parameter.grad.zero_()",
    ],
]


def step(w: Writer) -> str:
    """A loss, its backward, and a step that moves the weights; returns how the body calls what it gives back."""
    parts = [var.name for var in w.variables if var.dtype in ("float32", "float64")][-2:]
    terms = [f"{name}.double().square().mean()" for name in parts]
    w.body.append(f"loss = {' + '.join(terms)}")
    weights = ", ".join(filter(None, map(w.weights_of, w.state.values())))
    lines = w.choose(STEPS)
    after = w.choose(ZEROED)
    first = w.chance(30)
    opt = ""
    if any("{1}" in line for line in lines):
        opt = w.hold("opt", "optimizer", w.choose(OPTIMIZERS).format(weights))
    written = [*after * first, "loss.backward()", *lines, *after * (not first)]
    w.body.append("if loss.requires_grad:")
    w.body += [f"    {line.format(weights, opt)}" for line in written]
    return f"loss.detach(), {parts[-1]}.detach() * 1.0" if w.chance(50) else "loss.detach()"
