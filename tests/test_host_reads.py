"""Host reads of CPU tensors that no dispatcher sees are heard, on the listening thread only."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphify.backends._host_reads import listen

READS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "tolist": ("Tensor.tolist", lambda x: x.tolist()),
    "cpu": ("Tensor.cpu", lambda x: x.cpu()),
    "to": ("Tensor.to", lambda x: x.to("cpu")),
    "to, by keyword": ("Tensor.to", lambda x: x.to(device="cpu:0")),
    "numpy": ("Tensor.numpy", lambda x: x.numpy()),
    "array": ("Tensor.__array__", lambda x: pytest.importorskip("numpy").asarray(x)),
    "dlpack": ("Tensor.__dlpack__", lambda x: torch.from_dlpack(x)),
    "repr": ("Tensor.__repr__", repr),
    "str": ("Tensor.__repr__", str),
    "format": ("Tensor.__format__", lambda x: f"{x}"),
    "format of one element": ("Tensor.__format__", lambda x: f"{x[0]:.3f}"),
    "deepcopy": ("Tensor.__deepcopy__", copy.deepcopy),
    "pickle": ("Tensor.__reduce_ex__", pickle.dumps),
    "save": ("Tensor.__reduce_ex__", lambda x: torch.save(x, io.BytesIO())),
    "save of a parameter": ("Tensor.__reduce_ex__", lambda x: torch.save(nn.Parameter(x), io.BytesIO())),
    "apply_": ("Tensor.apply_", lambda x: x.apply_(lambda n: n)),
    "a parameter's repr": ("Tensor.__repr__", lambda x: repr(nn.Parameter(x))),
}

QUIET: dict[str, Callable[[Tensor], object]] = {
    "to a dtype": lambda x: x.to(torch.float64),
    "to another's device": lambda x: x.to(x.device),
    "to another tensor": lambda x: x.to(x),
    "shape": lambda x: (len(x), x.shape, x.device, x.data_ptr()),
    "arithmetic": lambda x: x + 1,
    "a copy that shares": lambda x: x.detach(),
}

METHODS = ["__array__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__"]
METHODS += ["apply_", "cpu", "map_", "numpy", "to", "tolist"]


def own_methods() -> dict[str, Any]:
    return {name: vars(Tensor).get(name) for name in METHODS}


@pytest.mark.parametrize("read", READS)
def test_is_reported_once_and_done(read: str) -> None:
    """Each read is reported by name, once, and gives what it always gives."""
    if read == "numpy":
        pytest.importorskip("numpy")
    name, act = READS[read]
    x, heard = torch.ones(2), list[str]()
    expected = act(x)
    with listen(heard.append):
        found = act(x)

    assert heard == [name]
    assert type(found) is type(expected)


@pytest.mark.parametrize("act", QUIET)
def test_is_no_read(act: str) -> None:
    """What a device does without its host is not reported."""
    heard: list[str] = []
    with listen(heard.append):
        QUIET[act](torch.ones(2))
    assert heard == []


def test_methods_are_back_afterwards() -> None:
    """The methods are torch's own again, also after an error and after nesting."""
    before = own_methods()
    with listen(lambda name: None), listen(lambda name: None):
        assert own_methods() != before
    assert own_methods() == before
    with pytest.raises(ValueError, match="mine"), listen(lambda name: None):
        raise ValueError("mine")
    assert own_methods() == before


def test_a_report_that_raises_stops_the_read() -> None:
    """The error of a report comes out of the read, and later reads work."""

    def refuse(name: str) -> None:
        raise RuntimeError(name)

    x = torch.ones(2)
    with listen(refuse):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"Tensor\.tolist"):
                x.tolist()
    assert x.tolist() == [1, 1]


def test_nested_listeners_all_hear() -> None:
    """The inner listener hears first, then the outer; each stops hearing when it leaves."""
    heard: list[str] = []
    x = torch.ones(1)
    with listen(lambda name: heard.append("outer")):
        with listen(lambda name: heard.append("inner")):
            x.tolist()
        x.tolist()
    x.tolist()

    assert heard == ["inner", "outer", "outer"]


def test_other_threads_are_not_heard() -> None:
    """A listener hears its own thread, and two threads may listen at once and leave in any order."""
    x, heard = torch.ones(1), {"first": 0, "second": 0}
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    before = own_methods()

    def hear(who: str) -> Callable[[str], None]:
        def report(name: str) -> None:
            heard[who] += 1

        return report

    def second() -> None:
        first_in.wait(10)
        x.tolist()
        with listen(hear("second")):
            second_in.set()
            first_out.wait(10)
            x.tolist()

    worker = threading.Thread(target=second)
    worker.start()
    with listen(hear("first")):
        first_in.set()
        second_in.wait(10)
        x.tolist()
    first_out.set()
    x.tolist()
    worker.join()

    assert heard == {"first": 1, "second": 1}
    assert own_methods() == before


def test_somebody_elses_patch_survives() -> None:
    """A method that others patch meanwhile stays theirs, and works."""
    calls: list[str] = []
    x = torch.ones(1)
    try:
        with listen(calls.append):
            ours = Tensor.tolist
            Tensor.tolist = lambda self: (calls.append("theirs"), ours(self))[1]  # type: ignore[method-assign]
        assert x.tolist() == [1]
        assert calls == ["theirs"]
        with listen(calls.append):
            x.tolist()
        assert calls == ["theirs", "Tensor.tolist", "theirs"]
    finally:
        del Tensor.tolist


def test_fast_paths_stay_on() -> None:
    """Nothing that listens makes torch take a tensor for an overridden one."""
    with listen(lambda name: None):
        assert not torch.overrides.has_torch_function((torch.ones(1),))


def test_dynamo_still_traces_patched_methods() -> None:
    """A function that calls a patched method compiles whole while somebody listens."""
    function = torch.compile(lambda t: t.to(torch.float64) + 1, backend="eager", fullgraph=True)
    with listen(lambda name: None):
        assert function(torch.ones(2)).tolist() == [2, 2]
    torch._dynamo.reset()
