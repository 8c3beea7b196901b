"""The house plan as a test: floors, the seam for hardware, private torch names, sizes, the public face, import cost.

Each check is a function from sources to complaints, so that it can be shown to fail.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from statistics import quantiles

import pytest

import graphify

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "graphify"


def _named(text: str) -> Mapping[str, tuple[str, ...]]:
    """Rows such as "name: others", which may go on in lines that are indented."""
    rows = (row.partition(":") for row in re.split(r"\n(?=\S)", text.strip()))
    return {name: tuple(others.split()) for name, _, others in rows}


FLOORS = {
    int(floor): modules
    for floor, modules in _named("""
0: errors
1: _ambient _arrivals _auto _axes _binding _code _collection _computed _constants _cuts _detaching _flats
    _following _forms _gate _hooks _illegal _layout _lazy _likeness _mode _nearness _padding _paths _pulled _raw _rules
    _shadows _signature _specification _specs _stand_ins _streams _touched _tree _tree_code buckets stats
2: _bystanders _classes _composite _ends _found _grads _guards _lifted _operators _optimizers _places _pool
    _standing _survey _trial _trust _undo _unnamed _watch _wholes
3: _causes _inputs _left _marks _material _options _repeats _results _saved _whole_step backends
    backends._cuda_capture backends._cuda_copies backends._cuda_driver backends._cuda_loans
    backends._host_reads backends._memory backends._rng backends._tape_record backends._tape_steps
    backends.base backends.cuda backends.eager backends.tape
4: _autograd _backwards _baked _cut_plan _entry _fitted _graph _instances _record _recorded_run _turns
    _verdicts
5: _ahead _alike _entries _exacts _gradients _habits _lessons _life _numbers _plain _proof_runs _proofs
    _recorder _rehearsal _sized _sizes _untried _verify
6: _call_path _check _compiled _controls _decorate _method _module _wrapper
7: __init__ __main__ _demo _demo_models _doctor testing testing._acts testing._changes testing._checks
    testing._compare testing._data testing._grammar testing._leaves testing._matching testing._programs
    testing._sequences testing._stateful testing._statements testing._strategies testing._trainable
    testing._training testing._twins testing._witness testing._worlds testing._writer
""").items()
}
FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules}

ALONG = _named("""
__main__: _demo _doctor
_ahead: _entries _life _rehearsal _sized _sizes
_ambient: _hooks
_arrivals: _pulled
_auto: _axes _specification buckets
_autograd: _backwards _baked _graph _turns
_axes: buckets
_backwards: _baked _graph
_bystanders: _optimizers _places
_check: _method _module
_classes: _places
_code: _computed _following
_composite: _undo
_computed: _raw
_controls: _wrapper
_cut_plan: _graph
_cuts: _forms _padding _rules
_decorate: _method _module _wrapper
_demo: _demo_models
_detaching: _shadows
_entry: _autograd _graph _instances
_exacts: _lessons
_fitted: _cut_plan _graph
_flats: _layout
_forms: _layout _rules
_found: _places
_gate: _ambient _arrivals _pulled
_grads: _guards
_guards: _places _survey
_inputs: backends.base
_instances: _graph
_lazy: _code _shadows
_lessons: _entries _numbers _plain
_life: _entries _habits _lessons _plain _recorder
_lifted: _places _undo
_marks: _material
_method: _controls _wrapper
_module: _compiled _controls _method _wrapper
_operators: _composite _undo
_optimizers: _lifted _places
_padding: _axes _layout _specification
_paths: _code _following
_proof_runs: _exacts _gradients _lessons
_proofs: _exacts _lessons _proof_runs
_pulled: _ambient _layout
_record: _autograd _graph _recorded_run _verdicts
_recorded_run: _autograd _graph _verdicts
_recorder: _entries _habits _lessons _plain _verify
_rehearsal: _recorder
_results: backends.base
_signature: _ambient _constants _specs _tree
_sizes: _alike _exacts _life _proofs _rehearsal _sized _untried
_specification: _axes buckets
_specs: _ambient
_stand_ins: _touched
_standing: _guards _survey
_survey: _classes _found _places _unnamed _wholes
_touched: _code _layout _shadows
_tree: _constants _tree_code
_tree_code: _constants
_trial: _bystanders _survey _undo
_unnamed: _classes
_untried: _life
_verify: _gradients
_watch: _composite _operators _optimizers _undo
_wholes: _places
_wrapper: _call_path
backends: backends.base backends.cuda backends.eager backends.tape
backends._cuda_capture: backends._cuda_driver
backends._cuda_copies: backends._cuda_driver backends.base
backends._cuda_loans: backends._memory backends.base
backends._host_reads: backends.base
backends._memory: backends.base
backends._tape_record: backends._memory backends._rng backends._tape_steps
backends._tape_steps: backends._memory
backends.cuda: backends._cuda_capture backends._cuda_copies backends._cuda_driver backends._cuda_loans
    backends._host_reads backends.base
backends.eager: backends._host_reads backends._memory backends._rng backends.base
backends.tape: backends._host_reads backends._memory backends._rng backends._tape_record backends._tape_steps
    backends.base
testing: testing._acts testing._changes testing._data testing._grammar testing._matching testing._programs
    testing._sequences testing._strategies testing._training testing._twins testing._worlds
testing._acts: testing._checks testing._data testing._leaves testing._twins
testing._changes: testing._checks testing._data testing._programs
testing._data: testing._checks testing._worlds
testing._grammar: testing._checks testing._programs testing._statements testing._strategies testing._trainable
    testing._writer
testing._leaves: testing._compare testing._twins testing._worlds
testing._matching: __init__ testing._checks testing._compare testing._leaves testing._twins testing._witness
    testing._worlds
testing._programs: testing._checks testing._strategies
testing._sequences: testing._changes testing._checks testing._data testing._programs testing._strategies
    testing._twins testing._worlds
testing._stateful: testing._writer
testing._statements: testing._stateful testing._writer
testing._strategies: testing._checks testing._data
testing._trainable: testing._writer
testing._training: testing._acts testing._changes testing._checks testing._data testing._programs
    testing._sequences testing._strategies testing._twins
testing._twins: testing._checks testing._witness testing._worlds
testing._worlds: testing._checks testing._compare
testing._writer: testing._programs testing._strategies
""")
"""The imports along a floor that are meant."""

Sources = Mapping[str, str]
"""Module name, such as "backends.cuda", to source text."""


def sources() -> dict[str, str]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def imported(module: str, tree: ast.AST, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each graphify module that this one imports, at any depth of nesting."""
    is_package = module == "__init__" or any(name.startswith(module + ".") for name in known)
    home = [] if module == "__init__" else module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "graphify"]
            yield from ((node.lineno, name.partition(".")[2] or "__init__") for name in names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] != "graphify":
                continue
            above = home[: len(home) - node.level + 1] if node.level else []
            stem = (node.module or "") if node.level else (node.module or "").partition(".")[2]
            base = ".".join([*above, *([stem] if stem else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}" if base else alias.name
                yield node.lineno, whole if whole in known else base or "__init__"


def graph_of(texts: Sources, known: Collection[str]) -> dict[str, dict[str, int]]:
    """What each module imports, and on which line."""
    return {
        module: {
            target: line for line, target in imported(module, ast.parse(text), known) if target != module
        }
        for module, text in texts.items()
    }


def floor_faults(
    texts: Sources, floor_of: Mapping[str, int], along: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Modules without a floor, imports that point up, and those along a floor that are not listed."""
    faults = [f"{module}: has no floor" for module in texts if module not in floor_of]
    for module, targets in graph_of(texts, floor_of).items():
        for target, line in targets.items():
            here, there = floor_of.get(module, -1), floor_of.get(target, 99)
            if there > here or (there == here and target not in along.get(module, ())):
                faults.append(f"{module}:{line}: floor {here} imports {target} of floor {there}")
    return faults


def circles(texts: Sources, known: Collection[str]) -> list[str]:
    """Modules that import each other, over whatever way."""
    graph = {module: tuple(targets) for module, targets in graph_of(texts, known).items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def dotted(node: ast.AST, aliases: Mapping[str, str], *, plain: bool = False) -> str | None:
    """The full name that an expression such as `torch._C._x`, or getattr of it unless `plain`, stands for."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base, name = dotted(node.value, aliases, plain=plain), node.attr
    elif not plain and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
        key = node.args[1]
        if node.func.id not in ("getattr", "hasattr") or not isinstance(key, ast.Constant):
            return None
        base, name = dotted(node.args[0], aliases), str(key.value)
    else:
        return None
    return f"{base}.{name}" if base else None


def torch_names(text: str, *, plain: bool = False) -> set[str]:
    """Every torch name that a file uses, or takes for granted where `plain`, written out in full."""
    tree = ast.parse(text)
    aliases, names = {"torch": "torch"}, set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "torch"
        ):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                names.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names.add(alias.name)
                    if alias.asname:
                        aliases[alias.asname] = alias.name
    return names | {name for node in ast.walk(tree) if (name := dotted(node, aliases, plain=plain))}


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def private_names(text: str, *, plain: bool = False) -> set[str]:
    """The private torch names of a file: the longest form of each."""
    private = {name for name in torch_names(text, plain=plain) if any(map(is_private, name.split(".")))}
    return {name for name in private if not any(other.startswith(name + ".") for other in private)}


def cuda_faults(texts: Sources) -> list[str]:
    faults = []
    for module, text in texts.items():
        home, _, name = module.rpartition(".")
        if home == "backends" and "cuda" in name:
            continue
        named = {name for name in torch_names(text) if name.startswith(("torch.cuda", "torch._C._cuda"))}
        named |= {"torch.cuda"} if "torch.cuda" in text else set()
        faults += [f"{module}: names {name}" for name in sorted(named)]
    return faults


PUBLIC_IN_ALL_BUT_NAME = re.compile(
    r"torch\.utils\._python_dispatch\.TorchDispatchMode"  # how torch documents that a mode is written
    r"|torch\._foreach_\w+"  # documented as "Foreach Operations", named so while they are in beta
)


NO_PUBLIC_WAY = {
    "keeping out of what torch does around an operator": (
        "torch._C.DisableTorchFunction",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._DisableAutocast",
        "torch._C._DisableTorchDispatch",
    ),
    "calling a composite operator as the dispatcher does": (
        "torch._C.DispatchKey",
        "torch._C._RestorePythonTLSSnapshot",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "torch._C._dispatch_tls_is_dispatch_key_excluded",
        "torch._C._dispatch_tls_set_dispatch_key_excluded",
        "torch._ops.OpOverload",
    ),
    "asking autograd where it is": (
        "torch._C._autograd._get_sequence_nr",
        "torch._C._autograd._unsafe_set_version_counter",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch.autograd.forward_ad._current_level",
    ),
    "asking for modes": (
        "torch.overrides._get_current_function_mode_stack",
        "torch.utils._device.DeviceContext",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type",
    ),
    "storages that own nothing, and who holds one": (
        "torch._C._construct_storage_from_data_pointer",
        "torch._C._set_storage_data_ptr_access_error_msg",
        "torch._C._storage_Use_Count",
    ),
    "mending what a broken capture leaves, before torch 2.14": (
        "torch._C._cuda_endAllocateToPool",
        "torch._C._cuda_releasePool",
    ),
    "operators and code objects": (
        "torch._fused_sgd_",
        "torch._neg_view",
        "torch.nn.modules.batchnorm._BatchNorm.forward.__code__",
        "torch.ops._c10d_functional.wait_tensor",
    ),
}
"""The private names that the library takes for granted, by what they are for; any other is asked for first."""


def granted_faults(texts: Sources, known: Collection[str]) -> list[str]:
    """Private names that are used without a question and are not listed, and listed ones that nobody uses."""
    used = set().union(*(private_names(text, plain=True) for text in texts.values()))
    spaces = {"torch._C", "torch._C._functorch", "torch._C._dynamo.eval_frame"}  # what getattr asks
    used = {name for name in used - spaces if not PUBLIC_IN_ALL_BUT_NAME.fullmatch(name)}
    return sorted(used ^ set(known))


def private_faults(texts: Sources) -> list[str]:
    where = defaultdict(list)
    for module, text in texts.items():
        for name in private_names(text):
            if not PUBLIC_IN_ALL_BUT_NAME.fullmatch(name):
                where[name].append(module)
    return [f"{name}: in {', '.join(modules)}" for name, modules in sorted(where.items()) if len(modules) > 1]


def function_lengths(text: str) -> Iterator[tuple[str, int]]:
    """Lines of each function, its decorators and docstring left out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.name, lines


def length_faults(texts: Sources, *, longest: int = 50, p90: int = 25) -> list[str]:
    lengths = [
        (f"{module}.{name}", n) for module, text in texts.items() for name, n in function_lengths(text)
    ]
    faults = [f"{name}: {lines} lines" for name, lines in lengths if lines > longest]
    tenth = quantiles([lines for _, lines in lengths], n=10)[-1] if len(lengths) > 1 else 0
    return faults + ([f"p90 of all functions: {tenth:.0f} lines"] if tenth > p90 else [])


def held_raises(node: ast.AST, caught: frozenset[str] = frozenset()) -> Iterator[str]:
    """What is raised out of a variable or a container, a handler's own variable left out: that goes away in time."""
    for child in ast.iter_child_nodes(node):
        known = caught
        if isinstance(child, ast.ExceptHandler) and child.name:
            known = caught | {child.name}
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            known = frozenset()
        elif isinstance(child, ast.Raise) and child.exc is not None:
            name = child.exc.id if isinstance(child.exc, ast.Name) else ""
            kept = isinstance(child.exc, ast.Attribute | ast.Subscript) or name[:1].islower()
            if kept and name not in known:
                yield f"{child.lineno}: {ast.unparse(child)}"
        yield from held_raises(child, known)


def raise_faults(texts: Sources) -> list[str]:
    return [f"{module}:{fault}" for module, text in texts.items() for fault in held_raises(ast.parse(text))]


def class_faults(texts: Sources) -> list[str]:
    """Generic named tuples, at which Python 3.10 raises when it imports the file."""
    classes = [
        (m, c) for m, text in texts.items() for c in ast.walk(ast.parse(text)) if isinstance(c, ast.ClassDef)
    ]
    found = [(m, c.name, " ".join(map(ast.unparse, c.bases))) for m, c in classes]
    return [f"{m}.{name}" for m, name, bases in found if "NamedTuple" in bases and "Generic[" in bases]


# Character classes keep these patterns from finding themselves.
FOREIGN = {
    "an absolute local path": r"(?<![\w.:/])/(?:wor[k]|roo[t]|hom[e]|User[s]|mn[t]|tm[p]|op[t])/\w",
    "talk about who wrote it": r"(?i)\b(?:[a]gents?|[L]LMs?|[c]haracters? assistant|[C]laude|[C]hatGPT|[C]opilot)\b",
    "talk about how it was written": r"(?i)(?<!scope=\")\b[s]essions?\b",
}


def foreign_words(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FOREIGN.items()
        if re.search(pattern, line)
    ]


def project_paths() -> list[str]:
    """What git tracks or would track; without git, everything that has no hidden or built part."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if listed.returncode == 0:
            return sorted(filter(None, listed.stdout.split("\0")))
    built = re.compile(r"(^|/)(\.(?!ci/|gitignore)[^/]*|__pycache__|build|dist|[^/]*\.egg-info)(/|$)")
    paths = (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*")))
    return [path for path in paths if not built.search(path)]


def project_files() -> Iterator[tuple[str, str]]:
    """Every text file of the project with its text."""
    for name in project_paths():
        path = ROOT / name
        if path.is_file():
            yield name, path.read_text(encoding="utf-8", errors="replace")


IMPORT_PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import {module}
seconds = time.process_time() - start
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
heavy = [name for name in ("torch._dynamo", "torch._inductor") if name in set(sys.modules) - before]
print(json.dumps([seconds, torch.cuda.is_initialized(), sorted(new), heavy]))
"""


def import_faults(module: str, *, limit: float = 0.2, tries: int = 3) -> list[str]:
    """What importing a module costs beyond torch: seconds of CPU (best of a few), CUDA, heavy modules."""
    runs = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(tries):
        command = [sys.executable, "-c", IMPORT_PROBE.format(module=module)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
        runs.append(json.loads(done.stdout))
    seconds, initialised, new, heavy = min(runs)
    faults = [f"takes {seconds:.3f} s"] if seconds >= limit else []
    faults += ["initialises CUDA"] if initialised else []
    return faults + [f"imports {name}" for name in (*heavy, "hypothesis", "numpy") if name in {*heavy, *new}]


def public_names() -> set[str]:
    """What `dir` shows a user: no private names, no submodules."""
    return {
        name
        for name, value in vars(graphify).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }


def test_every_module_has_a_floor_and_imports_point_down() -> None:
    """A module imports only from floors below its own, or along it where that is listed."""
    assert floor_faults(sources(), FLOOR_OF, ALONG) == []


def test_the_plan_is_not_wider_than_the_house() -> None:
    """Each module and each permission in the plan is used, and no way of imports leads back."""
    texts = sources()
    graph = graph_of(texts, FLOOR_OF)

    assert set(FLOOR_OF) == set(texts)
    assert [(m, t) for m, allowed in ALONG.items() for t in allowed if t not in graph[m]] == []
    assert circles(texts, FLOOR_OF) == []


def test_the_plan_lists_no_module_twice() -> None:
    """A module lives on one floor."""
    assert sum(map(len, FLOORS.values())) == len(FLOOR_OF)


def test_only_the_cuda_backend_names_torch_cuda() -> None:
    """Nothing above the seam names the CUDA API, not even in a message."""
    assert cuda_faults(sources()) == []


def test_each_private_torch_name_lives_in_one_file() -> None:
    """When torch renames something private, one file changes."""
    assert private_faults(sources()) == []


def test_private_torch_names_are_asked_for() -> None:
    """A torch without one of its private names costs speed or a feature; those that have no public way are listed."""
    assert granted_faults(sources(), list(itertools.chain(*NO_PUBLIC_WAY.values()))) == []


def test_no_frame_holds_what_it_raises() -> None:
    """An error and a frame that holds it are a cycle, in which all that a run made would stay: `errors.again`."""
    assert raise_faults(sources()) == []


def test_the_oldest_python_can_make_every_class() -> None:
    """Python 3.10 has no generic named tuples."""
    assert class_faults(sources()) == []


def test_functions_are_short() -> None:
    """No function is over 50 lines, and nine of ten have at most 25."""
    assert length_faults(sources()) == []


def test_all_is_sorted_and_is_what_is_public() -> None:
    """`__all__` is the public face, in the order in which it is read."""
    assert graphify.__all__ == sorted(graphify.__all__)
    assert set(graphify.__all__) == public_names()


def test_every_module_says_what_it_offers() -> None:
    """Each module but the command line has an `__all__` of names it defines."""
    for name, text in sources().items():
        if name in ("__main__", "backends"):
            continue
        assert re.search(r"^__all__ = ", text, re.MULTILINE), name


def test_importing_costs_little() -> None:
    """`import graphify` initialises no CUDA, brings in nothing heavy and takes under 0.2 s beyond torch."""
    assert import_faults("graphify") == []


def test_files_speak_of_the_library_only() -> None:
    """No file holds a path of somebody's computer or a word about how it was written."""
    files = dict(project_files())

    assert {"README.md", "pyproject.toml", ".ci/run", "graphify/errors.py"} <= set(files)
    assert [fault for name, text in files.items() for fault in foreign_words(name, text)] == []


def test_version_is_the_installed_one() -> None:
    """`graphify.__version__` is looked up when asked for."""
    metadata = pytest.importorskip("importlib.metadata")
    try:
        expected = metadata.version("graphify")
    except metadata.PackageNotFoundError:
        pytest.skip("graphify runs from its source here, not installed")

    assert graphify.__version__ == expected
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        graphify.nothing  # type: ignore[attr-defined]


SMALL_HOUSE = {
    "errors": 0,
    "_low": 1,
    "_side": 1,
    "backends": 2,
    "backends.cuda": 2,
    "_high": 3,
    "__init__": 4,
}


class TestTheChecksCanFail:
    """Each check finds a planted fault and passes its repaired twin."""

    @pytest.mark.parametrize(
        ("module", "text"),
        [
            ("_low", "from ._high import x"),
            ("_low", "from . import _high"),
            ("_low", "import graphify._high"),
            ("_low", "from graphify._high import x"),
            ("_low", "from graphify import graphify"),
            ("_low", "def f():\n    from ._high import x"),
            ("_low", "from ._side import x"),
            ("_low", "from ._unknown import x"),
            ("backends.cuda", "from .._high import x"),
            ("_new", "x = 1"),
        ],
    )
    def test_floors(self, module: str, text: str) -> None:
        """An import that points up, sideways or to nowhere is found in each of its spellings."""
        assert floor_faults({module: text}, SMALL_HOUSE, {}) != []

    @pytest.mark.parametrize(
        ("module", "text"),
        [
            ("_high", "from ._low import x\nfrom .backends import cuda"),
            ("_low", "from ._side import x"),
            ("backends.cuda", "from ..errors import x\nfrom .._low import y"),
            ("__init__", "from ._high import x"),
            ("_low", "import torch\nfrom torch import _C"),
        ],
    )
    def test_floors_let_good_ones_pass(self, module: str, text: str) -> None:
        """Imports that point down, or along a floor by permission, are no fault."""
        assert floor_faults({module: text}, SMALL_HOUSE, {"_low": ("_side",)}) == []

    def test_circles(self) -> None:
        """Two modules that import each other are found."""
        texts = {"_low": "from ._side import x", "_side": "def f():\n    from . import _low"}
        assert circles(texts, SMALL_HOUSE) != []
        assert circles({**texts, "_side": "x = 1"}, SMALL_HOUSE) == []

    @pytest.mark.parametrize(
        "text",
        [
            "import torch\ntorch.cuda.synchronize()",
            "from torch import cuda",
            "import torch.cuda as c",
            "from torch.cuda import Stream",
            "import torch as t\nt.cuda.Stream()",
            "import torch\ngetattr(torch, 'cuda')",
            "import torch\ntorch._C._cuda_getDevice()",
            "# torch.cuda is named here",
        ],
    )
    def test_cuda(self, text: str) -> None:
        """Each way of naming the CUDA API is found, except in the backend that may."""
        assert cuda_faults({"_low": text, "backends.cuda": text, "backends._cuda_nodes": text}) != []
        assert cuda_faults({"backends.cuda": text, "backends._cuda_nodes": text}) == []

    def test_cuda_lets_tensor_methods_pass(self) -> None:
        """`torch.version.cuda` and `x.is_cuda` are facts, not the API."""
        assert cuda_faults({"_low": "import torch\nprint(torch.version.cuda, x.is_cuda)"}) == []

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("import torch\ntorch._C._x()", "from torch._C import _x"),
            ("import torch\ntorch._C._x()", "import torch as t\ngetattr(t._C, '_x', None)"),
            ("from torch.utils import _pytree", "import torch\ntorch.utils._pytree"),
        ],
    )
    def test_private(self, one: str, other: str) -> None:
        """The same private name in two files is found, however it is spelled."""
        assert private_faults({"a": one, "b": other}) != []

    def test_private_lets_different_names_pass(self) -> None:
        """Two files may use different private names, and any public ones."""
        texts = {"a": "import torch\ntorch._C._x(torch.add)", "b": "import torch\ntorch._C._y(torch.add)"}
        assert private_faults(texts) == []

    def test_granted(self) -> None:
        """A private name that is used unasked is found, and one that is listed for nothing."""
        text = "import torch\ntorch._C._x()\ngetattr(torch._C, '_y', None)"
        assert granted_faults({"a": text}, []) == ["torch._C._x"]
        assert granted_faults({"a": text}, ["torch._C._x"]) == []
        assert granted_faults({"a": text}, ["torch._C._x", "torch._C._z"]) == ["torch._C._z"]

    def test_lengths(self) -> None:
        """A long function is found, and many middling ones; a long docstring is no fault."""
        long = "def f():\n" + "    x = 1\n" * 51
        middling = "".join(f"def f{n}():\n" + "    x = 1\n" * 30 for n in range(20))
        told = 'def f():\n    """' + "text\n" * 90 + '    """\n    return 1\n'

        assert length_faults({"a": long}) == ["a.f: 52 lines"]
        assert length_faults({"a": middling}) == ["p90 of all functions: 31 lines"]
        assert length_faults({"a": told}) == []

    @pytest.mark.parametrize(
        ("raised", "found"),
        [
            ("e = E()\n    raise e", True),
            ("raise self.error", True),
            ("raise errors[0]", True),
            ("try: f()\n    except E as e: raise e", False),
            ("raise", False),
            ("raise E", False),
            ("raise again(e)", False),
        ],
    )
    def test_raises(self, raised: str, found: bool) -> None:
        """What stays in a variable or is kept is found."""
        assert bool(raise_faults({"a": f"def f():\n    {raised}"})) == found

    def test_classes(self) -> None:
        """A generic named tuple is found; either alone is not."""
        assert class_faults({"a": "class K(NamedTuple, Generic[R]): ..."}) == ["a.K"]
        assert class_faults({"a": "class K(NamedTuple): ...\nclass L(Generic[R]): ..."}) == []

    def test_words(self) -> None:
        """A local path and such words are found; a fixture's scope and relative paths are not."""
        slash, word = "/", "sess" + "ion"
        assert foreign_words("a", f"see {slash}home{slash}me") != []
        assert foreign_words("a", f"written in this {word}") != []
        assert foreign_words("a", "by an " + "age" + "nt") != []
        assert foreign_words("a", f'scope="{word}", see docs/work/x and https://x.org/home/y') == []

    def test_imports(self) -> None:
        """A module that is heavy or slow to import is found."""
        assert "imports torch._dynamo" in import_faults("torch._dynamo", tries=1)
        assert any(
            fault.startswith("takes") for fault in import_faults("email.mime.text", limit=0.0, tries=1)
        )
