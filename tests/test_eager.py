"""The eager backend: the function itself is the recording."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphify.backends.eager import EagerBackend
from graphify.errors import CaptureError, GraphifyError

CPU = torch.device("cpu")
eager = EagerBackend()


def test_python_runs_once_for_record_and_first_replay() -> None:
    """The recorded run is real and stands for the first replay; later replays run Python again."""
    runs, x = [], torch.ones(3)
    recording, out = eager.record(lambda: (runs.append(1), x * 2)[1], None, ())
    assert out.tolist() == [2, 2, 2]
    recording.replay()
    assert runs == [1]
    x.fill_(4)
    recording.replay()
    assert runs == [1, 1]
    assert out.tolist() == [8, 8, 8]


def test_a_run_that_was_undone_runs_again() -> None:
    """Whoever undoes the recorded run says so, and the first replay is a run."""
    x = torch.ones(3)
    recording, _ = eager.record(lambda: x.add_(1), None, ())
    x.fill_(1)
    recording.ran = False
    recording.replay()

    assert x.tolist() == [2, 2, 2]


def test_results_in_containers() -> None:
    """Results of any structure are refilled leaf by leaf; what the run was given stays what it is."""
    x, y = torch.ones(3), torch.zeros(3)

    def run() -> dict[str, object]:
        return {
            "same": x,
            "view": x[1:],
            "made": [x + 1, None],
            "repeated": (x[0] * 2).expand(4),
            "outside": y,
        }

    recording, out = eager.record(run, None, ())
    recording.replay()
    x.copy_(torch.tensor([5.0, 6.0, 7.0]))
    recording.replay()

    assert out["same"] is x
    assert [t.tolist() for t in (out["view"], out["made"][0], out["repeated"])] == [
        [6, 7],
        [6, 7, 8],
        [10] * 4,
    ]
    assert y.tolist() == [0, 0, 0]


def test_a_replay_leaves_no_version_and_no_history() -> None:
    """Refilling a result is no in-place change that autograd would see."""
    x = torch.ones(3, requires_grad=True)
    recording, out = eager.record(lambda: x * 2, None, ())
    recording.replay()
    version, history = out._version, out.grad_fn
    recording.replay()

    assert out._version == version
    assert out.grad_fn is history


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda x: x[:2] * 1, r"\(2,\) torch.float32 where the recorded one made \(3,\)"),
        (lambda x: x.double(), r"torch.float64 where"),
        (lambda x: (x * 1, x * 2), "2 tensors, the recorded one 1"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_results_of_another_kind(then: object, message: str) -> None:
    """A run that makes other results than the recorded one is loud."""
    x, steps = torch.ones(3), [lambda x: x * 1, then]
    recording, _ = eager.record(lambda: steps[0](x), None, ())  # type: ignore[operator]
    recording.replay()
    steps.pop(0)
    with pytest.raises(GraphifyError, match=message):
        recording.replay()


def test_the_users_error_at_a_replay() -> None:
    """A run that fails later fails as it does in eager."""
    x, error = torch.ones(3), ValueError("mine")
    fails = [False]

    def run() -> Tensor:
        if fails[0]:
            raise error
        return x * 2

    recording, _ = eager.record(run, None, ())
    recording.replay()
    fails[0] = True
    with pytest.raises(ValueError, match="mine") as caught:
        recording.replay()
    assert caught.value is error


def test_a_capture_inside_a_capture() -> None:
    """One thread records one run at a time, as on a device."""
    with pytest.raises(CaptureError, match="capture inside a capture"):
        eager.record(lambda: eager.record(lambda: None, None, ()), None, ())
    assert not eager.busy()


def test_tensors_decide_the_device() -> None:
    """Any device will do; the CPU is the last choice."""
    meta = torch.ones(2, device="meta")
    assert eager.device_of([torch.ones(2), meta]) == meta.device
    assert eager.device_of([]) == CPU
