"""CUDA graphs: `torch.cuda.CUDAGraph` behind the seam, with one capture lock."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._collection import uncollected
from .._layout import with_bits
from ..errors import InputError
from ._cuda_capture import capture, own_workspaces, stream_of
from ._cuda_copies import replay_between_copies, replay_with_copies
from ._cuda_driver import count_nodes
from ._cuda_loans import CudaLoan, unowned
from ._host_reads import listen
from .base import Copy, Replay, Report

__all__ = ["CudaBackend", "CudaRecording", "available", "facts", "synchronize"]

T = TypeVar("T")

_WAITED = "called a synchronizing CUDA operation"

# Process-wide: the driver lets one thread capture while others work, but two captures at once, or a live
# warm-up of another thread on a capturing stream, break each other.
_capturing = threading.RLock()


def available() -> bool:
    """Whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def synchronize() -> None:
    """Wait until the current device has finished all work."""
    torch.cuda.synchronize()


def facts() -> dict[str, str]:
    """The devices and versions that decide what a capture does."""
    found = {"CUDA runtime": str(torch.version.cuda)}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**20:.0f} MiB"
    return found


class CudaPool:
    """A graph memory pool, and the stream on which it was last replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index
        self.handle = torch.cuda.graph_pool_handle()
        self.last_stream: torch.cuda.Stream | None = None
        self.last_raw: int | None = None
        self.placeholder: torch.cuda.CUDAGraph | None = None

    def hold(self) -> None:
        """Keep the pool alive with an empty graph: a pool whose last graph died cannot be used again."""
        if self.placeholder is None:
            graph = torch.cuda.CUDAGraph()
            capture(graph, _nothing, self)
            self.placeholder = graph

    def renew(self) -> None:
        """Begin a pool anew; graphs in the one before keep it for themselves."""
        self.handle, self.placeholder = torch.cuda.graph_pool_handle(), None


class CudaRecording:
    """A captured CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: int, size: int) -> None:
        self.graph: torch.cuda.CUDAGraph | None = graph
        self.nodes = nodes
        self.bytes = size
        self.ran, self.stream = False, torch.cuda.current_stream()
        self.replay: Callable[[], None] = graph.replay if nodes else _nothing
        self._instantiated = False

    def instantiate(self) -> None:
        """Make it ready to launch, once."""
        assert self.graph is not None
        if not self._instantiated:
            self.graph.instantiate()
            self._instantiated = True

    def close(self) -> None:
        """Free the graph; closing twice is harmless."""
        self.graph, self.replay = None, _closed


def _take_nothing(sources: Sequence[Tensor]) -> None:
    """A call without tensors and device work has nothing to stage."""


def _nothing() -> None:
    """A run without device work has nothing to replay."""


def _closed() -> None:
    raise RuntimeError("this recording was closed")


class CudaBackend:
    """Records runs as CUDA graphs."""

    name = "cuda"
    device_type = "cuda"
    nodes_have_streams = True
    records_aside = True
    runs_live = False

    def __init__(self) -> None:
        # Before CUDA is initialised nobody captures, and asking would initialise it.
        self._started = False

    def device_of(self, tensors: Iterable[Tensor]) -> torch.device | None:
        """The one CUDA device among the tensors; the current one when there are no tensors at all."""
        tensors = list(tensors)
        if not torch.cuda.is_available():
            return None
        devices = {t.device for t in tensors if t.is_cuda}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise InputError(
                f"tensors on {names} in one call: one graph lives on one device; move them first"
            )
        if devices:
            return devices.pop()
        return None if tensors else torch.device("cuda", torch.cuda.current_device())

    def busy(self) -> bool:
        """Whether the current stream is being captured by somebody else."""
        if not self._started and _initialized():
            self._started = True
            if not _is_capturing():
                _settle_attention()
            vars(self)["busy"] = _is_capturing  # asked at each call
        return self._started and _is_capturing()

    @contextmanager
    def scope(
        self, device: torch.device, *, aside: bool = True, stream: torch.cuda.Stream | None = None
    ) -> Iterator[None]:
        """This thread's capture stream, or the given one, joined with the caller's both ways."""
        with _capturing, torch.cuda.device(device):
            if not aside:
                yield
                return
            # Even where another stream is given: the first call gets this thread ready to capture.
            caller, own = torch.cuda.current_stream(), stream_of(device)
            side = stream or own
            side.wait_stream(caller)
            with torch.cuda.stream(side):
                try:
                    yield
                finally:
                    caller.wait_stream(side)

    def pool(self, device: torch.device) -> CudaPool:
        """A new private memory pool."""
        return CudaPool(device)

    def record(
        self, run: Callable[[], T], pool: CudaPool, generators: Sequence[torch.Generator]
    ) -> tuple[CudaRecording, T]:
        """Capture `run` on the scope's stream."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in generators:
            if generator.device.type == "cuda" and generator is not _default(generator.device):
                graph.register_generator_state(generator)
        before = _reserved(pool.device)
        with uncollected(), own_workspaces():
            pool.hold()
            result = capture(graph, run, pool)
        nodes = count_nodes(graph)
        # Not `memory_snapshot(pool.handle)`: each call takes a reference from the pool's number, and some hundred
        # captures later the process dies (https://github.com/pytorch/pytorch/pull/196366).
        grown = max(0, _reserved(pool.device) - before)
        return CudaRecording(graph, 1 if nodes is None else nodes, grown), result

    def listen(self, report: Report) -> AbstractContextManager[None]:
        """Printing switches dispatch modes off; every other host read of a CUDA tensor passes the dispatcher."""
        return listen(report, "cuda", ("__repr__", "__format__", "__reduce_ex__"))

    @contextmanager
    def waits(self, report: Report) -> Iterator[None]:
        """Report what torch's debug mode for synchronisation warns of."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            show: Callable[..., None] = warnings.showwarning

            def hear(message: Any, *rest: Any, **more: Any) -> None:
                if _WAITED in str(message):
                    report(str(message))
                elif "debug mode" not in str(message):
                    show(message, *rest, **more)

            warnings.showwarning = hear
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Mark warm-up results as used on the caller's stream."""
        for tensor in tensors:
            if tensor.is_cuda and tensor.layout is torch.strided:
                # Without lazy conj and neg bits: with one set, torch's `record_stream` damages the host's heap.
                plain = with_bits(tensor.detach(), tensor)
                plain.record_stream(torch.cuda.current_stream(tensor.device))

    def order(self, pool: CudaPool) -> None:
        """Queue this stream's work behind the pool's last replay when that ran on another stream."""
        raw = _raw_stream(pool.index)
        if raw != pool.last_raw:
            current = torch.cuda.current_stream(pool.device)
            if pool.last_stream is not None:
                current.wait_stream(pool.last_stream)
            pool.last_stream, pool.last_raw = current, raw

    def replayer(
        self,
        recording: CudaRecording,
        copies: Sequence[Copy],
        results: Sequence[Tensor],
        *,
        shared: bool = False,
    ) -> Replay:
        """Copies as nodes of the graph where that is cheaper and nobody else replays it, else as kernels around it."""
        assert recording.graph is not None
        if shared:
            recording.instantiate()
            return replay_between_copies(recording.graph, copies, results)
        if not (recording.nodes or copies or results):
            return Replay(_take_nothing, tuple)
        return replay_with_copies(recording.graph, copies, results)

    def let_go(self, tensors: Sequence[Tensor], pool: CudaPool) -> list[Tensor]:
        """Tensors on the same addresses, which keep the pool but not the blocks in it."""
        storages: dict[int, torch.UntypedStorage] = {}
        return [unowned(tensor, pool.placeholder, storages) for tensor in tensors]

    def lend(self, tensor: Tensor) -> CudaLoan:
        """An alias with a storage of its own, which raises once closed."""
        return CudaLoan(tensor)

    def rng_state(self, generators: Sequence[torch.Generator]) -> list[tuple[torch.Generator, Tensor]]:
        """The states of every device's default generator and of these."""
        every = {id(g): g for g in (*torch.cuda.default_generators, *generators) if g.device.type == "cuda"}
        return [(g, g.get_state()) for g in every.values()]

    def set_rng_state(self, state: list[tuple[torch.Generator, Tensor]]) -> None:
        """Put the states back."""
        for generator, saved in state:
            generator.set_state(saved)

    def reclaim(self) -> None:
        """Give cached memory that nobody uses back to the device."""
        torch.cuda.empty_cache()

    def is_oom(self, error: BaseException) -> bool:
        """Whether the device's memory ran out."""
        return isinstance(error, torch.cuda.OutOfMemoryError)

    def is_capture_error(self, error: BaseException) -> bool:
        """Whether the driver or torch refused something because a capture was under way."""
        text = str(error).lower()
        return isinstance(error, RuntimeError) and ("captur" in text or "cudagraph" in text)


def _settle_attention() -> None:
    """Let torch put its kernels of attention in order, which it does at the first question and which keys hold."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is not None:
        with torch.no_grad():
            x = torch.zeros(1, 1, 8, 8, device="cuda", dtype=torch.float16)
            choose(x, x, x)


def _reserved(device: torch.device) -> int:
    """`torch.cuda.memory_reserved` without what that makes of all other figures."""
    found: int = torch.cuda.memory.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["current"]
    return found


def _default(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0]


_initialized: Callable[[], bool] = torch.cuda.is_initialized
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
