"""Native engines on a pretended GPU (pretend_gpu.py) do what they do on the CPU: no tensor is on the wrong device.

Triton's kernels and compiled FlexAttention are replaced by plain formulas; `make gpu` is for those.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.config.freshness import FreshnessConfig
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import M2PO, ForwardKL, ReverseKL, ReverseKLMC, ReverseKLTopK
from slipstream.engines.checksums import BLOCK_WORDS
from slipstream.engines.native import attention, rows
from slipstream.engines.native.learning.step import make_optimizer
from slipstream.engines.native.model import LanguageModel, split
from slipstream.engines.native.over_devices import layers_of, spread
from slipstream.engines.native.sampling import kv
from slipstream.engines.weights import export_weights, fingerprint, is_fingerprinted
from slipstream.estimators import logprobs
from slipstream.estimators.logprobs import tiles
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.protocols import Sampling
from slipstream.records import Batch, Handle, Prompt, total
from support.engines import native_learner, native_sampler, native_scorer
from support.pretended_gpu import CUDA, OnGpu, pretend_gpu
from support.slow_cases import with_slow
from support.tiny_models import make_model


def flex(query_RHLD: Tensor, key_RJLD: Tensor, value_RJLD: Tensor, **options: Any) -> Any:
    """Return the result of `flex_attention` by its definition."""
    heads, length = query_RHLD.shape[1:3]
    at = torch.arange(length, device=query_RHLD.device)
    row = torch.arange(len(query_RHLD), device=query_RHLD.device)[:, None, None, None]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key_RJLD, value_RJLD))
    score = query_RHLD @ key.transpose(2, 3) * (options["scale"] or query_RHLD.shape[-1] ** -0.5)
    if options["score_mod"] is not None:
        score = options["score_mod"](score, row, 0, at[:, None], at)
    seen = options["block_mask"].mask_mod(row, row, at[:, None], at)
    score = score.masked_fill(~seen, -torch.inf)
    out = score.softmax(-1) @ value
    return (out, SimpleNamespace(lse=score.logsumexp(-1))) if "return_aux" in options else out


def as_on_gpus(*args: Any, **options: Any) -> Tensor:
    """Return the result of SDPA with a GPU's strides: the heads of a token lie beside each other."""
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(*args, **options)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, kv):
        monkeypatch.setattr(module, "scaled_dot_product_attention", as_on_gpus)
    monkeypatch.setattr(logprobs, "backend", lambda like: tiles)
    monkeypatch.setattr(rows, "_compiled", lambda **mode: flex)
    monkeypatch.setattr(rows, "LEAST_HEAD", 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def using(device: torch.device) -> AbstractContextManager[None]:
    return pretend_gpu() if device == CUDA else nullcontext()


class Here(Executor):
    """Runs at once, in this thread: the pretended GPU is seen in no other."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


def lm_on(device: torch.device, *, seed: int = 0) -> LanguageModel:
    model = make_model(seed=seed).to(device)
    model.tie_weights()  # new parameters on the pretended GPU are nobody's yet
    return split("tiny", model)


CPU = torch.device("cpu")


def prompts(vocabulary: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(id=str(n), number=n, tokens=rng.integers(2, vocabulary, 3 + 2 * n), seed=n) for n in range(4)]


def sampled(device: torch.device) -> list[Handle]:
    """Ragged answers, with new weights when the first ones have ended."""

    async def work() -> list[list[Handle]]:
        lm, later = lm_on(device), lm_on(device, seed=1)
        sampler = native_sampler(lm, slots=4, stop_ids={1})
        sampler.thread = Here()  # type: ignore[assignment]
        some = Sampling(max_tokens=9, group=2, draws=5, best=3, temperature=0.9)
        first = await asyncio.gather(*[sampler.generate(prompt, some) for prompt in prompts(lm.vocab_size)])
        weights = export_weights(later.model, "float32", version=1)
        loaded = await sampler.publish(weights, "keep")
        assert loaded.fingerprint == fingerprint(later.model, "float32", exported=weights)
        return [*first, await sampler.generate(prompts(lm.vocab_size)[0], Sampling(max_tokens=5, top_p=0.9, top_k=7))]

    with using(device):
        return [handle for group in asyncio.run(work()) for handle in group]


def test_the_sampler_draws_the_same(gpu: None) -> None:
    for ours, expected in zip(sampled(CUDA), sampled(CPU), strict=True):
        np.testing.assert_array_equal(ours.body.actions, expected.body.actions)
        np.testing.assert_array_equal(ours.body.versions, expected.body.versions)
        np.testing.assert_allclose(ours.body.action_logp, expected.body.action_logp, atol=1e-6)


class ToHost(TorchDispatchMode):
    """Counts the bytes that come from the pretended GPU."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], OnGpu) and not isinstance(out, OnGpu):
            self.size += out.nbytes
        return out


def test_of_loaded_weights_only_sums_come_to_the_host() -> None:
    lm = lm_on(CPU)
    expected = fingerprint(lm.model, "bfloat16")
    with using(CUDA):
        lm.model.to(CUDA)
        with ToHost() as counted:
            assert fingerprint(lm.model, "bfloat16") == expected
    weights = sum(2 * weight.numel() for name, weight in lm.model.named_parameters() if is_fingerprinted(name))
    blocks = sum(
        -(-2 * weight.numel() // (8 * BLOCK_WORDS))
        for name, weight in lm.model.named_parameters()
        if is_fingerprinted(name)
    )
    assert counted.size == 16 * blocks < weights


def scored(device: torch.device, handles: list[Handle], cache: Any) -> list[Handle]:
    with using(device):
        return native_scorer(lm_on(device, seed=2), cache=cache, k=4)._score(handles)


@pytest.mark.parametrize("cache", ["sampled", "student_topk", "teacher_topk", "hidden"])
def test_the_scorer_says_the_same(gpu: None, cache: str) -> None:
    handles = sampled(CPU)[:8]
    for ours, expected in zip(scored(CUDA, handles, cache), scored(CPU, handles, cache), strict=True):
        assert ours.header.finish != "error"
        np.testing.assert_allclose(ours.body.teacher_logp, expected.body.teacher_logp, atol=1e-5)


METHODS = {
    "draws": (Method(loss=ReverseKLMC(m=5), temperature=0.9), "sampled", {}),
    "m2po": (Method(loss=M2PO(m=5), temperature=0.9), "sampled", {"exact_drift": True}),
    "the policy's best": (Method(loss=ReverseKLTopK(k=3), temperature=0.9), "student_topk", {}),
    "the teacher's best": (Method(loss=ForwardKL(k=4), temperature=0.9), "teacher_topk", {}),
    "exact": (Method(loss=ReverseKL(), temperature=0.9), "hidden", {"checkpointing": True}),
    "offloaded": (
        Method(loss=ReverseKLMC(m=5), temperature=0.9),
        "sampled",
        {"checkpointing": True, "offload": ("optimizer", "activations")},
    ),
    "unpacked": (Method(loss=ReverseKLMC(m=5), temperature=0.9), "sampled", {"packing": False}),
    "freshness": (
        Method(loss=ReverseKLMC(m=5), temperature=0.9, freshness=FreshnessConfig(weight="freshness", anchor=0.1)),
        "sampled",
        {},
    ),
}


def learned(device: torch.device, name: str, handles: list[Handle]) -> list[Any]:
    method, cache, options = METHODS[name]
    scores = scored(CPU, handles, cache)

    async def work() -> list[Any]:
        heads = {"teacher": TeacherHead(lm_on(device, seed=2).head)} if cache == "hidden" else None
        config = LearnerConfig(lr=1e-3, **options)
        learner = native_learner(lm_on(device), method=method, config=config, updates=2, teacher_heads=heads)
        learner.thread = Here()  # type: ignore[assignment]
        found = []
        for update in (1, 2):
            batch = Batch(tuple([handle] for handle in scores), update)
            counts = total(await learner.prepare(batch))
            await learner.accumulate(batch, counts)
            found.append(await learner.step())
        weights, said = await learner.export()
        moments = [state["exp_avg"].device for state in learner.steps.optimizer.state.values()]
        assert moments and set(moments) == {CPU if name == "offloaded" else device}
        return [*found, weights.body, said]

    with using(device):
        return asyncio.run(work())


@pytest.mark.parametrize("name", with_slow(METHODS, quick=list(METHODS)[::3]))
def test_the_learner_learns_the_same(gpu: None, name: str) -> None:
    handles = sampled(CPU)[:8]
    *ours, weights, _ = learned(CUDA, name, handles)
    *expected, others, _ = learned(CPU, name, handles)
    for found, wanted in zip(ours, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-4), key
    np.testing.assert_allclose(weights.view(np.float32), others.view(np.float32), atol=1e-4)


def test_adamw_is_fused_on_every_device(gpu: None) -> None:
    for device in (CUDA, CPU):
        with using(device):
            parameters = list(torch.nn.Linear(2, 3).to(device).parameters())
            assert make_optimizer(parameters, LearnerConfig()).defaults["fused"]


def split_over(devices: list[torch.device], name: str, seed: int) -> LanguageModel:
    model = make_model(name, seed=seed)
    spread(name, model, devices)
    model.tie_weights()
    return split(name, model)


@pytest.mark.parametrize(
    "name", with_slow(["qwen3", "llama", "phi", "mistral-window", "gemma3-window"], quick=["qwen3", "gemma3-window"])
)
@pytest.mark.parametrize("cache", ["sampled", "teacher_topk", "hidden"])
def test_a_teacher_whose_layers_are_on_two_devices_says_the_same(gpu: None, name: str, cache: Any) -> None:
    """The first layer is on the GPU, where the head is, and the second on the CPU: all values have to move."""
    handles = sampled(CPU)[:8]
    expected = native_scorer(split(name, make_model(name, seed=2)), cache=cache, k=4)._score(handles)
    with using(CUDA):
        lm = split_over([CUDA, CPU], name, seed=2)
        first, second = layers_of(lm.model)
        assert {parameter.device for parameter in first.parameters()} == {CUDA}
        assert {parameter.device for parameter in second.parameters()} == {CPU}
        assert lm.device == CUDA and lm.model.get_input_embeddings().weight.device == CUDA
        found = native_scorer(lm, cache=cache, k=4)._score(handles)
    for one, other in zip(found, expected, strict=True):
        assert one.header.finish != "error"
        np.testing.assert_allclose(one.body.teacher_logp, other.body.teacher_logp, atol=1e-5)
    with pretend_gpu(), pytest.raises(RuntimeError, match="same device"):  # with nothing that moves values
        whole = make_model(name).to(CUDA)
        layers_of(whole)[1].to(CPU)
        whole(torch.ones(1, 3, dtype=torch.int64, device=CUDA))


def test_what_is_pretended_refuses_what_a_gpu_refuses() -> None:
    with pretend_gpu():
        there = torch.ones(3, device=CUDA)
        assert isinstance(there, OnGpu) and there.is_cuda and there.device == CUDA
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert (there + torch.tensor(1.0)).cpu().numpy().tolist() == [2.0, 2.0, 2.0]
