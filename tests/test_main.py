"""The command line: `python -m graphify demo | doctor`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from checks import python
from torch import Tensor
from torch.nn import functional as F

from graphify import _demo, _doctor
from graphify.__main__ import main
from graphify._demo_models import Decoder
from graphify.backends import cuda

command = functools.partial(python, "-m", "graphify")

on_cpu = pytest.mark.skipif(cuda.available(), reason="says what happens where there is no CUDA device")
needs_cuda = pytest.mark.skipif(not cuda.available(), reason="no CUDA device")


def rows(text: str, start: str) -> list[list[str]]:
    """The cells of the table lines that begin with `start`."""
    found = [line for line in text.splitlines() if line.startswith(start)]
    return [[cell for cell in line.split("  ") if cell.strip()] for line in found]


@on_cpu
def test_demo_on_a_cpu_shows_equality_and_what_was_captured() -> None:
    """Both nets, under both output policies, equal eager over new inputs; no time is claimed as a speed-up."""
    done = command("demo")

    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("mlp", "decoder"):
        cases = rows(done.stdout, name)
        assert [case[1].strip() for case in cases] == ["fresh", "static"]
        for _, _, calls, warmups, captures, replays, nodes, memory, equal in cases:
            assert (int(calls), int(warmups), int(captures)) == (24, 1, 1)
            assert int(replays) == 22
            assert int(nodes) > 0
            assert memory.strip().endswith("MiB")
            assert equal.strip() == "yes"
    assert "Speed needs a GPU" in done.stdout
    assert "speed-up" not in done.stdout
    assert " us" not in done.stdout


def test_demo_fails_where_one_result_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 0 only if all results equal eager."""
    run = _demo.run
    monkeypatch.setattr(_demo, "timed", lambda case, graphed: (2.0, 1.0))

    def spoilt(case: _demo.Case, outputs: str, backend: str) -> _demo.Result:
        drive = case.drive

        def drift(step: Callable[..., object], calls: int, see: Callable[..., object]) -> None:
            off = 0.0 if step is case.net else 1.0
            drive(step, calls, lambda *tensors: see(*(tensor + off for tensor in tensors)))

        return run(_demo.Case(case.name, case.net, drift), outputs, backend)

    monkeypatch.setattr(_demo, "run", spoilt)

    assert main(["demo"]) == 1


def test_demo_says_when_graphs_are_off() -> None:
    """With GRAPHIFY_DISABLE=1 there is nothing to show, and the demo says so instead of showing plain calls."""
    done = command("demo", GRAPHIFY_DISABLE="1")

    assert done.returncode == 1
    assert "GRAPHIFY_DISABLE is set" in done.stdout


@pytest.mark.parametrize(
    ("times", "verdict"), [((80.0, 10.0), "is reached: 8.0x"), ((40.0, 10.0), "is not reached: 4.0x")]
)
def test_the_table_for_a_gpu_tells_whether_the_target_was_reached(
    times: tuple[float, float], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times, speed-ups and the MLP's target stand in the table; measured times are given here."""
    monkeypatch.setattr(cuda, "facts", lambda: {"device": "a GPU"})
    stats, graphs = _demo_result_parts()
    results = [_demo.Result("mlp", outputs, True, stats, graphs, *times) for outputs in ("fresh", "static")]

    text = "\n".join(_demo.gpu_report(results))

    assert "a GPU" in text
    assert f"{times[0]:.1f} us" in text
    assert f"4.8x over eager, {verdict}" in text


def _demo_result_parts() -> tuple[_demo.Stats, tuple[_demo.GraphRecord, ...]]:
    graphed = _demo.graphify(torch.neg, backend="tape")
    for step in range(3):
        graphed(torch.full((2,), float(step)))
    controls = _demo.handle(graphed)
    return controls.stats(), controls.graphs


@needs_cuda
@pytest.mark.cuda
def test_demo_on_a_gpu_shows_times() -> None:
    """On a GPU the demo measures, and says whether the MLP's target was reached."""
    done = command("demo")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "speed-up" in done.stdout
    assert "4.8x over eager, is " in done.stdout


def test_the_decoder_is_a_decoder() -> None:
    """Step by step with the cache gives what one causal pass over all tokens gives."""
    torch.manual_seed(3)
    decoder = Decoder(layers=2, width=32, heads=2, length=16, vocab=50).eval()
    tokens = torch.randint(50, (3, 10))
    with torch.no_grad():
        cache = decoder.new_cache(batch=3)
        steps = [decoder(tokens[:, at], torch.tensor([at]), cache)[0] for at in range(10)]
        whole = causal_pass(decoder, tokens)

    torch.testing.assert_close(torch.stack(steps, 1), whole)


def causal_pass(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Logits for all positions at once, without a cache."""
    batch, length = tokens.shape
    x = decoder.embed(tokens) + decoder.place(torch.arange(length))
    for block in decoder.blocks:
        qkv = block.qkv(block.attention_norm(x)).view(batch, length, 3, block.heads, -1)
        seen = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)
        x = x + block.out(seen.transpose(1, 2).reshape(batch, length, -1))
        x = x + block.down(F.gelu(block.up(block.mlp_norm(x))))
    logits: Tensor = decoder.head(decoder.norm(x))
    return logits


@on_cpu
def test_doctor_on_a_cpu() -> None:
    """Doctor names versions, says that no GPU is there and what that means, and tries the tape."""
    done = command("doctor")

    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.__version__ in done.stdout
    assert "no CUDA device" in done.stdout
    assert "GRAPHIFY_DISABLE is not set" in done.stdout
    assert "a plain call, since tensors are on the CPU" in done.stdout
    assert "tape: ok, 1 warm-up, 1 capture, 1 replay" in done.stdout


@needs_cuda
@pytest.mark.cuda
def test_doctor_on_a_gpu() -> None:
    """Doctor names the device and tries both the tape and CUDA."""
    done = command("doctor")

    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name() in done.stdout
    assert "tape: ok" in done.stdout
    assert "cuda: ok" in done.stdout


def test_doctor_says_when_graphs_are_off() -> None:
    """With GRAPHIFY_DISABLE=1 doctor shows the switch and does not pretend to have captured anything."""
    done = command("doctor", GRAPHIFY_DISABLE="1")

    assert done.returncode == 0
    assert "GRAPHIFY_DISABLE is '1': every call is a plain call" in done.stdout
    assert "not tried" in done.stdout


def test_doctor_fails_where_a_capture_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend that raises is reported with its error, and the exit code is 1."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no graphs today")

    monkeypatch.delenv("GRAPHIFY_DISABLE", raising=False)
    monkeypatch.setattr(_doctor, "graphify", broken)

    assert main(["doctor"]) == 1
    assert "tape: FAILED with RuntimeError: no graphs today" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["demo", "--fast"]])
def test_a_mistake_shows_the_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown or missing command shows the help and exits with 2."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)

    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err
