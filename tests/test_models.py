"""Real models with random weights: graphed calls equal eager bit for bit, and they are replays, not fallbacks.

On the tape the configurations are small; on CUDA they are the usual ones. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from checks import counts
from conftest import needs_cuda
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from graphify import CaptureError, graphify, handle

CALLS = 10
DTYPES = [torch.float32, torch.bfloat16]
# Model libraries deprecate, and warn about versions, as they please.
pytestmark = pytest.mark.filterwarnings("default")
Inputs = Callable[[int], tuple[Any, ...]]


@pytest.fixture(params=["tape", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def full(device: torch.device) -> bool:
    """Whether the model has its usual size."""
    return device.type == "cuda"


@pytest.fixture(autouse=True)
def same_kernels_each_time() -> Iterator[None]:
    """Eager equals eager bit for bit only if cuDNN does not try out which kernel is fastest."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    yield
    cudnn.benchmark, cudnn.deterministic = before


def package(name: str) -> Any:
    """A model library; skips where it is missing or does not fit the torch at hand."""
    pytest.importorskip(name)
    try:
        return importlib.import_module(name)
    except RuntimeError as error:  # torchvision's operators were built for another torch
        pytest.skip(f"{name} does not import beside torch {torch.__version__}: {error}")


def identical(eager: Any, graphed: Any) -> None:
    """Fail unless structure, types, dtypes, strides and every bit are the same."""
    left, structure = tree_flatten(eager)
    right, other = tree_flatten(graphed)
    assert type(eager) is type(graphed)
    assert structure == other
    for a, b in zip(left, right, strict=True):
        if isinstance(a, Tensor):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert torch.equal(a, b), f"differs by {(a.double() - b.double()).abs().max().item()}"
        else:
            assert a is b or a == b


@torch.no_grad()
def follows_eager(
    model: nn.Module, inputs: Inputs, backend: str, calls: int = CALLS, seed: int = 7
) -> nn.Module:
    """Call an eager twin and a graphed twin with new inputs each time, from one seed; compare results and state."""
    eager = copy.deepcopy(model)
    graphed = graphify(model, backend=backend)
    batches = [inputs(i) for i in range(calls)]
    torch.manual_seed(seed)
    want = [eager(*batch) for batch in batches]
    torch.manual_seed(seed)
    got = [graphed(*batch) for batch in batches]
    for right, mine in zip(want, got, strict=True):
        identical(right, mine)
    assert not all(torch.equal(tree_flatten(want[0])[0][0], tree_flatten(w)[0][0]) for w in want[1:])
    identical(dict(eager.state_dict()), dict(graphed.state_dict()))
    assert counts(graphed) == (1, 1, calls - 2, 0, 0)
    return graphed


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Inputs:
    return lambda i: (torch.randn(*shape, device=device).to(dtype),)


# -- torchvision, timm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_resnet50(
    backend: str, device: torch.device, full: bool, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    """ResNet-50 in eval, fp32 and bf16, contiguous and channels_last."""
    resnet = package("torchvision").models.resnet
    net = (
        resnet.resnet50(weights=None)
        if full
        else resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], width_per_group=16)
    )
    net = net.eval().to(device, dtype, memory_format=layout)
    side, batch = (224, 8) if full else (32, 2)

    def images(i: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, 3, side, side, device=device).to(dtype).to(memory_format=layout),)

    follows_eager(net, images, backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vit_small(backend: str, device: torch.device, full: bool, dtype: torch.dtype) -> None:
    """Timm's ViT-S in eval."""
    package("torchvision")
    small = {} if full else {"img_size": 32, "depth": 2}
    net = package("timm").create_model("vit_small_patch16_224", pretrained=False, **small)
    side = 224 if full else 32
    follows_eager(net.eval().to(device, dtype), normal(4, 3, side, side, device=device, dtype=dtype), backend)


# -- torch's own


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm(
    backend: str, device: torch.device, full: bool, dtype: torch.dtype, bidirectional: bool
) -> None:
    """A two-layer LSTM: output, and both states."""
    size = 256 if full else 8
    net = nn.LSTM(size, 2 * size, num_layers=2, bidirectional=bidirectional).eval().to(device, dtype)
    follows_eager(net, normal(6, 3, size, device=device, dtype=dtype), backend)


def test_lstm_that_carries_its_state(backend: str, device: torch.device) -> None:
    """The states of one call are the arguments of the next; the twin's numbers never part."""
    net = nn.LSTM(8, 16).eval().to(device)
    graphed = graphify(copy.deepcopy(net), backend=backend)
    states = [(torch.zeros(1, 3, 16, device=device), torch.zeros(1, 3, 16, device=device))] * 2
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(1, 3, 8, device=device)
            (want, states[0]), (got, states[1]) = net(x, states[0]), graphed(x, states[1])
            identical((want, states[0]), (got, states[1]))
    assert counts(graphed) == (1, 1, CALLS - 2, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fast", [True, False])
def test_transformer_encoder(
    backend: str, device: torch.device, full: bool, dtype: torch.dtype, fast: bool
) -> None:
    """nn.TransformerEncoder in eval, on its fused path and on its plain one."""
    width = 512 if full else 16
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(device, dtype)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        follows_eager(net, normal(2, 7, width, device=device, dtype=dtype), backend)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_dropout_in_train_mode(backend: str, device: torch.device, full: bool) -> None:
    """Ten dropout masks of one seed are eager's, and so is the generator's state after them."""
    width = 512 if full else 16
    net = nn.Sequential(
        nn.Linear(width, width),
        nn.Dropout(0.3),
        nn.GELU(),
        nn.TransformerEncoderLayer(width, 4, width, dropout=0.2),
    )
    net = net.train().to(device)
    follows_eager(net, normal(3, 5, width, device=device), backend, seed=13)
    after = torch.rand(3, device=device)
    torch.manual_seed(13)
    with torch.no_grad():
        for _ in range(CALLS):
            net(torch.zeros(3, 5, width, device=device))
    assert torch.equal(after, torch.rand(3, device=device))


def test_batch_norm_in_train_mode(backend: str, device: torch.device, full: bool) -> None:
    """Running statistics and the batch count move once per call, as in eager."""
    width = 32 if full else 4
    net = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.2))
    side = 64 if full else 8
    graphed = follows_eager(net.train().to(device), normal(4, 3, side, side, device=device), backend)
    assert int(graphed.state_dict()["1.num_batches_tracked"]) == CALLS


def test_batch_norm_without_momentum(backend: str, device: torch.device) -> None:
    """Torch reads the count of batches on the host then: refused, at the line that called the module."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)).train().to(device)
    graphed = graphify(net, backend=backend)
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match=r"read on the host[\s\S]*where: .*test_models\.py:\d+"),
    ):
        graphed(torch.randn(3, 4, device=device))


# -- Hugging Face encoders


def bert(
    device: torch.device, full: bool, attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> nn.Module:
    hf = package("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.BertConfig(vocab_size=128, attn_implementation=attention, **({} if full else small))
    net: nn.Module = hf.BertModel(config).eval().to(device, dtype)
    return net


def padding(device: torch.device, i: int) -> Tensor:
    """A mask with another padding at each call; never without any."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[i % 2, 4 + i % 7 :] = 0
    return mask.to(device)


def sentences(device: torch.device) -> Tensor:
    return torch.randint(128, (2, 12)).to(device)


@torch.no_grad()
def encodes_as_eager(
    net: nn.Module, backend: str, calls: Sequence[dict[str, Any]], replays: int = CALLS - 2
) -> None:
    graphed = graphify(net, backend=backend)
    want = [net(**call) for call in calls]
    got = [graphed(**call) for call in calls]
    for right, mine in zip(want, got, strict=True):
        identical(right, mine)
        assert list(right.keys()) == list(mine.keys())
        assert mine.last_hidden_state is mine["last_hidden_state"]
    assert counts(graphed) == (1, 1, replays, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert(backend: str, device: torch.device, full: bool, attention: str, dtype: torch.dtype) -> None:
    """A BERT without padding: a ModelOutput of the same type, items and attributes in step."""
    if backend == "cuda":
        pytest.skip("Hugging Face takes another mask, and another kernel, while a stream is captured")
    net = bert(device, full, attention, dtype)
    encodes_as_eager(net, backend, [{"input_ids": sentences(device)} for _ in range(CALLS)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_with_a_ready_mask(backend: str, device: torch.device, full: bool, attention: str) -> None:
    """A mask that is already (batch, 1, query, key) needs no look at its values: other paddings, one graph."""
    net = bert(device, full, attention)
    calls = []
    for i in range(CALLS):
        keep = padding(device, i)[:, None, None, :].expand(2, 1, 12, 12).bool()
        added = torch.zeros(keep.shape, device=device).masked_fill(~keep, torch.finfo(torch.float32).min)
        calls.append(
            {"input_ids": sentences(device), "attention_mask": keep if attention == "sdpa" else added}
        )
    encodes_as_eager(net, backend, calls)


def test_bert_with_hidden_states(backend: str, device: torch.device, full: bool) -> None:
    """Hidden states and attentions: tuples of tensors inside the ModelOutput, collected by hooks."""
    if backend == "cuda":
        pytest.skip("Hugging Face makes its mask from a Python number, which a stream capture refuses")
    net = bert(device, full, "eager")
    asked = {"output_hidden_states": True, "output_attentions": True}
    encodes_as_eager(net, backend, [{"input_ids": sentences(device), **asked} for _ in range(CALLS)])


def test_bert_whose_mask_is_read_on_the_host() -> None:
    """Without a stream capture, Hugging Face looks whether a mask masks anything: refused, at that very line."""
    device = torch.device("cpu")
    net = bert(device, full=False)
    call = {"input_ids": sentences(device), "attention_mask": padding(device, 0)}
    with torch.no_grad():
        strict = graphify(net, backend="tape")
        strict(**call)  # the capture decides: it may ask whether it is one
        with pytest.raises(
            CaptureError, match=r"read on the host[\s\S]*masking_utils\.py:\d+:.*padding_mask\.all"
        ):
            strict(**call)
        graphed = graphify(net, backend="tape", fallback="eager")
        for i in range(CALLS):
            call = {"input_ids": sentences(device), "attention_mask": padding(device, i)}
            identical(net(**call), graphed(**call))
    assert handle(graphed).stats().reasons == {"uncapturable": CALLS - 1}


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_bert_with_padding(dtype: torch.dtype) -> None:
    """Hugging Face asks whether the stream is capturing and does not look at the mask then: captured, equal."""
    device = torch.device("cuda")
    net = bert(device, True, "sdpa", dtype)
    calls = [{"input_ids": sentences(device), "attention_mask": padding(device, i)} for i in range(CALLS)]
    encodes_as_eager(net, "cuda", calls)


# -- Hugging Face decoders


def llama(device: torch.device, full: bool, **changes: Any) -> Any:
    hf = package("transformers")
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
    }
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = sizes if full else small
    heads = {"num_key_value_heads": shape["num_attention_heads"] // 2, "vocab_size": 256}
    config = hf.LlamaConfig(**shape, **heads, max_position_embeddings=128, **changes)
    return hf.LlamaForCausalLM(config).eval().to(device, torch.bfloat16 if full else torch.float32)


def static_cache(net: Any, length: int = 64) -> Any:
    return package("transformers").StaticCache(config=net.config, max_cache_len=length)


Step = Callable[[Tensor, Any, Tensor], Tensor]


@torch.no_grad()
def decode(step: Step, net: Any, cache: Any, batch: int, steps: int) -> list[Tensor]:
    """A prefill by the plain model, then greedy steps, one token at a time; the logits of each step."""
    prompt = torch.arange(5 * batch, device=net.device).view(batch, 5) % 256
    token = net(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    logits = []
    for i in range(steps):
        position = torch.full((batch, 1), 5 + i, device=net.device)
        logits.append(step(token, cache, position))
        token = logits[-1].argmax(-1)
    return logits


def stepper(model: Any) -> Step:
    """One decode step of a model, with the cache as an argument; the result carries that very cache."""

    def step(token: Tensor, cache: Any, position: Tensor) -> Tensor:
        out = model(input_ids=token, past_key_values=cache, position_ids=position, use_cache=True)
        assert out.past_key_values is cache
        assert type(out).__name__ == "CausalLMOutputWithPast"
        logits: Tensor = out.logits
        return logits

    return step


def same_cache(left: Any, right: Any) -> None:
    for a, b in zip(left.layers, right.layers, strict=True):
        identical((a.keys, a.values, a.cumulative_length), (b.keys, b.values, b.cumulative_length))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_llama_with_a_static_cache(
    backend: str, device: torch.device, full: bool, batch: int, outputs: Any
) -> None:
    """32 greedy steps with the cache as an argument: logits bit-equal to an eager twin's, and so is the cache."""
    net = llama(device, full)

    step = stepper(net)
    graphed = graphify(step, backend=backend, outputs=outputs)
    caches = [static_cache(net), static_cache(net)]
    want = decode(step, net, caches[0], batch, 32)
    keep = (lambda *args: graphed(*args).clone()) if outputs == "static" else graphed
    got = decode(keep, net, caches[1], batch, 32)
    identical(want, got)
    same_cache(*caches)
    assert counts(graphed) == (1, 1, 30, 0, 0)
    assert [record.unguarded for record in graphed.graphs] == [()]


def test_llama_as_a_twin(backend: str, device: torch.device, full: bool) -> None:
    """The whole model graphed: a ModelOutput whose `past_key_values` is the caller's own cache."""
    net = llama(device, full)
    graphed = graphify(net, backend=backend)

    caches = [static_cache(net), static_cache(net)]
    identical(decode(stepper(net), net, caches[0], 2, 8), decode(stepper(graphed), net, caches[1], 2, 8))
    same_cache(*caches)
    assert counts(graphed) == (1, 1, 6, 0, 0)


def test_llama_with_two_caches(backend: str, device: torch.device, full: bool) -> None:
    """Each cache has its own graph; a cache that is reset and used again is the same cache."""
    net = llama(device, full)

    step = stepper(net)
    graphed = graphify(step, backend=backend)
    mine, twins = [static_cache(net) for _ in range(2)], [static_cache(net) for _ in range(2)]
    for _ in range(3):
        for cache, twin in zip(mine, twins, strict=True):
            identical(decode(step, net, twin, 2, 4), decode(graphed, net, cache, 2, 4))
            same_cache(cache, twin)
            cache.reset(), twin.reset()
    assert counts(graphed) == (2, 2, 20, 0, 0)
    del mine[0], cache
    assert len(graphed.graphs) == 1  # a cache's graphs die with it


def test_llama_captured_ahead_of_time(backend: str, device: torch.device, full: bool) -> None:
    """After the prefill a step can be captured without trace; then every step is a replay."""
    net = llama(device, full)

    step = stepper(net)
    graphed = graphify(step, backend=backend)

    def first_captures(token: Tensor, cache: Any, position: Tensor) -> Tensor:
        if not graphed.graphs:
            graphed.capture(token, cache, position)
        return graphed(token, cache, position)

    caches = [static_cache(net), static_cache(net)]
    identical(decode(step, net, caches[0], 2, 8), decode(first_captures, net, caches[1], 2, 8))
    same_cache(*caches)
    assert counts(graphed) == (0, 0, 8, 0, 0)


@torch.no_grad()
@pytest.mark.xfail(
    strict=True, reason="a refusal learned ahead of time outlives the rehearsal, whose warm-up was undone"
)
def test_llama_captured_before_its_cache_exists(backend: str, device: torch.device, full: bool) -> None:
    """A cache makes its buffers in its first run: refused ahead of time, and live calls go on as if never asked."""
    net = llama(device, full)

    def step(token: Tensor, cache: Any) -> Tensor:
        logits: Tensor = net(input_ids=token, past_key_values=cache, use_cache=True).logits
        return logits

    graphed = graphify(step, backend=backend)
    mine, twin = static_cache(net), static_cache(net)
    token = torch.zeros(2, 1, dtype=torch.long, device=device)
    with pytest.raises(CaptureError, match="layers"):
        graphed.capture(token, mine)
    for _ in range(4):
        identical(step(token, twin), graphed(token, mine))
    assert counts(graphed) == (1, 1, 2, 0, 0)


class _Decoders:
    """Caches that a graph cannot hold, and the attribute that says so."""

    @staticmethod
    def growing(device: torch.device) -> tuple[Any, Callable[[], Any], str]:
        hf, net = package("transformers"), llama(device, full=False)
        return net, lambda: hf.DynamicCache(config=net.config), r"layers\[0\]\.keys"

    @staticmethod
    def sliding(device: torch.device) -> tuple[Any, Callable[[], Any], str]:
        hf = package("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = hf.MistralConfig(**sizes, num_key_value_heads=2, vocab_size=256, sliding_window=8)
        net = hf.MistralForCausalLM(config).eval().to(device)
        return net, lambda: static_cache(net, 32), r"layers\[0\]\.cumulative_length_int"


@pytest.mark.parametrize("kind", [_Decoders.growing, _Decoders.sliding])
def test_caches_that_count_in_python(
    backend: str, device: torch.device, kind: Callable[[torch.device], tuple[Any, Callable[[], Any], str]]
) -> None:
    """A growing cache, or one with a Python counter, is refused by name; with a fallback it equals eager."""
    net, make, name = kind(device)

    step = stepper(net)
    with pytest.raises(CaptureError, match=rf"`cache\.{name}`"):
        decode(graphify(step, backend=backend), net, make(), 2, 12)
    graphed = graphify(step, backend=backend, fallback="eager")
    with pytest.warns(UserWarning, match=name):
        got = decode(graphed, net, make(), 2, 12)
    identical(decode(step, net, make(), 2, 12), got)
    assert handle(graphed).stats().errors == 0


@pytest.mark.xfail(
    strict=True, reason="each new count is a new signature, so every second call pays a failed capture"
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_refused_counter_is_not_tried_again_and_again(backend: str, device: torch.device) -> None:
    """A count that is read and re-bound was refused once: its next values are no new signatures to be tried."""
    net, make, _ = _Decoders.sliding(device)

    step = graphify(stepper(net), backend=backend, fallback="eager")
    decode(step, net, make(), 2, 16)
    assert step.stats().eager >= 12
