"""Models that continue what they read, and those that only seem to: refused before the first token."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DogeConfig,
    FalconConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaModel,
    Mamba2Config,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from slipstream.engines.native.model import LanguageModel, split
from slipstream.engines.native.rows import use_rows
from slipstream.engines.native.sampling import kv
from slipstream.engines.native.sampling.decoding import Decoder, Read, prove
from slipstream.errors import ModelError
from slipstream.protocols import Sampling
from support.engines import native_sampler
from support.tiny_models import EOS, SHAPE, VOCAB, make_model, make_prompts, wrap
from zoo import families


def model_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


LFM2 = lambda: Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])  # noqa: E731
JAMBA = lambda: JambaConfig(  # noqa: E731
    **SHAPE, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2
)

UNABLE: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "alibi of its own": (
        lambda: BloomConfig(vocab_size=VOCAB, hidden_size=32, n_head=4, initializer_range=0.25),
        "its attention cannot be replaced",
    ),
    "attention of its own": (
        lambda: FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "its attention cannot be replaced",
    ),
    "mask of its own": (lambda: DogeConfig(**SHAPE), "DogeAttention passes its own mask, which is not supported"),
    "window that it keeps to itself": (
        lambda: RecurrentGemmaConfig(
            **SHAPE | {"num_hidden_layers": 3}, lru_width=32, attention_window_size=6, logits_soft_cap=30.0
        ),
        r"prompts that are read together differ by \d+\.\d\d% from each alone",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNABLE)
def test_a_model_that_would_forget_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    config, reason = UNABLE[name]
    model = model_of(config(), dtype)
    reason = reason if dtype == torch.float32 else ".*"
    with pytest.raises(
        ModelError, match=rf"tiny: the native sampler cannot generate with \w+: {reason}: write sampler"
    ):
        native_sampler(split("tiny", model), slots=4, stop_ids={EOS})


CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


class CacheByNewName(LlamaModel):
    """Takes its cache as newer versions of transformers do."""

    def forward(self, input_ids: Any = None, cache: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs | {CACHE_ARGUMENT: cache, "position_ids": position_ids})


class CacheIgnored(LlamaModel):
    """Takes a cache and does not use it."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


class CacheUnknown(LlamaModel):
    """Takes its cache by a name that no version of transformers has."""

    def forward(self, input_ids: Any = None, remembered: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs | {CACHE_ARGUMENT: remembered})


def llama_with(backbone: type[LlamaModel]) -> LanguageModel:
    model = model_of(LlamaConfig(**SHAPE))
    model.model.__class__ = backbone
    return split("tiny", model)


def test_a_cache_is_passed_by_the_name_that_the_model_takes() -> None:
    prove(llama_with(CacheByNewName))


@pytest.mark.parametrize(
    ("backbone", "reason"),
    [
        (CacheIgnored, "its forward pass does not use the cache that it is given as `past_key_values`"),
        (CacheUnknown, "its forward pass takes no cache by any of the names cache, past_key_values, cache_params"),
    ],
)
def test_a_model_that_does_not_use_its_cache_is_refused_with_this_reason(
    backbone: type[LlamaModel], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        prove(llama_with(backbone))


class Forgetful(kv.Layer):
    """Keeps what a prefill brings, and nothing of what comes after."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().update(key_states, value_states)
        step = self.slots.step
        rows = sum(len(block.at_NQ) for block in step.blocks if block.going)
        self.keys = self.keys.clone()
        self.keys[step.slot_W[:rows], :, step.at_W[:rows]] = 0
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_proof_sees_a_cache_that_forgets(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = split("tiny", make_model(dtype=dtype))
    prove(lm)
    monkeypatch.setattr(kv, "Layer", Forgetful)
    with pytest.raises(ModelError, match="a token that continues a sequence differs by"):
        prove(lm)


class Distracted(kv.Layer):
    """Loses the states of its slots once, at the thirtieth token that continues a sequence."""

    steps = 0

    def begin(self, step: Any) -> None:
        if step.goes_on:
            self.steps += 1
            if self.steps == 30:
                for state in self.states.values():
                    state.zero_()
        super().begin(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [LFM2, JAMBA], ids=["convolutions", "state spaces"])
def test_the_proof_sees_a_state_that_goes_wrong_late(
    config: Callable[[], PreTrainedConfig], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = split("tiny", model_of(config(), dtype))
    prove(lm)
    monkeypatch.setattr(kv, "Layer", Distracted)
    with pytest.raises(ModelError, match="after 30 single tokens its recurrent layers differ by .* rounding exp"):
        prove(lm)


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        (lambda: families.config_of("nemotron_h"), "0.001 … inf"),
        (lambda: families.config_of("zamba2"), "0.001 … inf"),
        (lambda: Mamba2Config(**families.config_of("mamba2").to_dict() | {"time_step_limit": (0.0, 60.0)}), "0 … 60"),
    ],
    ids=["nemotron_h", "zamba2", "mamba2"],
)
def test_a_limit_of_time_steps_is_refused_although_no_weight_of_the_start_reaches_it(
    config: Callable[[], PreTrainedConfig], limits: str
) -> None:
    """A publish may move time steps past it, where HF's cached step drops the limit: wrong by 1e-4 to 1e-2."""
    with pytest.raises(ModelError, match=f"its time steps are limited to {limits} in a whole pass, and not in single"):
        prove(split("tiny", model_of(config())))


def test_llama4_with_chunks_longer_than_the_probes_is_accepted() -> None:
    config = families.config_of("llama4_text")
    config.attention_chunk_size = 40
    lm = split("tiny", model_of(config))
    prove(lm)
    use_rows(lm)


def test_minimax_m3_with_sparse_layers_is_refused_where_its_index_would_be_lost() -> None:
    """Its layers select blocks of keys by an index, which slots do not store and packed rows would mix."""
    sparse = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 8, "index_n_heads": 2}
    config = type(families.config_of("minimax_m3_vl_text"))(
        **families.config_of("minimax_m3_vl_text").to_dict() | sparse
    )
    lm = split("tiny", model_of(config))
    with pytest.raises(ModelError, match="cannot generate with MiniMaxM3VLForCausalLM: .*update_index"):
        prove(lm)
    with pytest.raises(
        ModelError, match="passes block_indices to its attention, which is not supported: write learner"
    ):
        use_rows(lm)
    use_rows(lm, packed=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "zaya", "mamba2"])
def test_rounding_that_recurrent_layers_enlarge_is_no_fault(name: str, dtype: torch.dtype) -> None:
    """The first model's error of a token reaches 2e-4 in float32, and a router turns at one position."""
    prove(split("tiny", families.make(name, dtype=torch.float64).to(dtype)))


@pytest.mark.parametrize("config", [LFM2, JAMBA], ids=["convolutions", "state spaces"])
def test_recurrent_states_are_exact_whatever_the_lengths(config: Callable[[], PreTrainedConfig]) -> None:
    """Groups of several lengths in fewer slots than rows, so that states are spread, moved and begun anew."""
    model, prompts = model_of(config(), torch.float64), make_prompts(9)
    model.set_experts_implementation("eager")
    sampling = Sampling(max_tokens=12, group=2, draws=2)

    async def work() -> list[Any]:
        sampler = native_sampler(wrap(model), slots=5, stop_ids={EOS})
        assert sampler.decoder.slots.recurrent
        groups = await asyncio.gather(*[sampler.generate(prompt, sampling) for prompt in prompts])
        sampler.close()
        return [handle.body for group in groups for handle in group]

    for rollout in asyncio.run(work()):
        ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, len(rollout.prompt.tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(rollout.actions).long())
        np.testing.assert_allclose(rollout.action_logp, expected.numpy(), atol=1e-5)


def test_a_recurrent_prefill_passes_rows_of_one_length_together() -> None:
    lm = wrap(model_of(LFM2()))
    prove(lm)
    decoder, passes = Decoder(lm, 8), []
    lm.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ids = torch.randint(2, VOCAB, (6, 9))
    decoder.step(ids, (), [Read((i,), 0, length) for i, length in enumerate([3, 3, 5, 9, 9, 9])])
    assert passes == [(2, 3), (1, 5), (3, 9)]


@torch.no_grad()
def test_direct_layers_equal_the_modules_bit_for_bit() -> None:
    lm = split("tiny", make_model())
    prove(lm)
    ids = torch.arange(2, 26).view(2, 12) % lm.vocab_size
    direct, modules = Decoder(lm, 2), Decoder(lm, 2)
    assert direct.direct is not None
    modules.direct = None
    reads = [Read((0,), 0, 4), Read((1,), 0, 7)]
    assert torch.equal(direct.step(ids, (), reads), modules.step(ids, (), reads))
    for at in ([4, 7], [5, 8], [6, 9]):
        assert torch.equal(direct.step(ids, at), modules.step(ids, at))
