"""Fixtures that sweep the backends, hypothesis profiles, and a check that no test leaves torch changed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

try:
    import hypothesis
except ImportError:  # tests of properties are skipped where they are; the rest runs
    collect_ignore = [
        *("strategies.py", "test_properties.py", "test_properties_buckets.py", "test_properties_training.py")
    ]
else:
    common = {
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    }
    hypothesis.settings.register_profile("default", max_examples=500, derandomize=True, **common)
    hypothesis.settings.register_profile("quick", max_examples=50, derandomize=True, **common)
    # For long runs by hand, in one process or split over several, each with a seed of its own. Whatever a profile
    # does not name it takes from the current one, where seeds count for nothing.
    examples = int(os.environ.get("DEEP_EXAMPLES", "20000"))
    hypothesis.settings.register_profile(
        "deep", max_examples=examples, derandomize=False, database=None, **common
    )
    profile = os.environ.get("HYPOTHESIS_PROFILE", "default")
    hypothesis.settings.load_profile(profile)

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        """How many programs ran, and what became of their calls: that is what a deep run is for."""
        from strategies import tallies

        for test, tally in tallies.items() if profile == "deep" else ():
            terminalreporter.write_line(f"{test}: {tally}")


# The tensors of the tests are tiny: more threads only cost time.
torch.set_num_threads(1)

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"
)
BACKENDS = ["tape", "eager", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn: a test that takes it is a promise of all of them."""
    name: str = request.param
    return name


@pytest.fixture
def device(backend: str) -> torch.device:
    """Where tensors for the backend live."""
    return torch.device("cuda" if backend == "cuda" else "cpu")


def _global_state() -> dict[str, object]:
    state: dict[str, object] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch keys": f"{torch._C._dispatch_tls_local_include_set()}, not {torch._C._dispatch_tls_local_exclude_set()}",
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_initialized():
        state["autocast on CUDA"] = torch.is_autocast_enabled("cuda")
        state["current device"] = torch.cuda.current_device()
        state["current stream"] = torch.cuda.current_stream()
    return state


@pytest.fixture(autouse=True)
def same_torch_afterwards() -> Iterator[None]:
    """Every test starts from one seed and leaves torch's global state as it was."""
    random.seed(0)
    torch.manual_seed(0)
    before = _global_state()
    yield
    after = _global_state()
    changed = [
        f"{name}: {value} before, {after[name]} after"
        for name, value in before.items()
        if after[name] != value
    ]
    assert not changed, "the test changed torch's global state: " + "; ".join(changed)
