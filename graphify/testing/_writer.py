"""The writer of random programs: typed variables, and the books kept while statements are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ._programs import State
from ._strategies import need_hypothesis

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

__all__ = ["FLOATS", "ROWS", "WIDTH", "Dims", "Var", "Writer"]

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

    def __init__(self, draw: DrawFn, shape: str, *, trained: bool = False) -> None:
        self._st = need_hypothesis()
        self._draw = draw
        self.shape, self.trained, self.history = shape, trained, 10
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

    def help(self, lines: list[str]) -> None:
        """Write something beside the program, once."""
        if lines[0] not in self.helpers:
            self.helpers += lines

    def kept(self, var: Var) -> str:
        """How to write down what stays after the call: of programs that are trained, few keep its history."""
        return var.name if not self.trained or self.chance(self.history) else f"{var.name}.detach()"

    def weights_of(self, item: State) -> str:
        """What of this state an optimizer moves."""
        name = f"self.{item.name}" if self.shape in ("module", "object") else item.name
        texts = {"module": f"*{name}.parameters()", "parts": f"{name}['w']", "weight": name, "leaf": name}
        return texts.get(item.kind, "")

    def forbid(self, mode: str) -> None:
        """Note that the program does not run in this mode."""
        self.modes = [allowed for allowed in self.modes if allowed != mode]

    def write_into(self, var: Var) -> None:
        """Note that memory shared with this variable is written."""
        self.written |= var.roots
