"""Tiny models of many families as students in vLLM: what runs is the model, and what is published; or a line says no.

An engine for each of them, which takes it some twenty seconds.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    CodeGenConfig,
    DeepseekV3Config,
    FalconH1Config,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
)

from slipstream.cli import main
from slipstream.engines.vllm.core import Settings
from slipstream.engines.vllm.sampler import VllmSampler
from slipstream.engines.weights import export_weights, fingerprint
from slipstream.errors import ConfigError, EngineError, SlipstreamError
from slipstream.protocols import Sampling, WeightsRef
from slipstream.records import Rollout
from support.engines import vllm_sampler
from support.tiny_models import EOS, SHAPE, make_prompts
from support.vllm_calls import assert_exact, generate, grown, replaced

# heads are as wide as vLLM's attention on CPUs has them at least
WIDE = SHAPE | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
WIDE |= {"initializer_range": 0.15}
PLAIN = {name: value for name, value in WIDE.items() if name not in ("head_dim", "num_key_value_heads")}
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "n_ctx": 128, "initializer_range": 0.15}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, Callable[[], Any]] = {
    # experts that a CPU fills up to a multiple of 32
    "qwen3-moe": lambda: Qwen3MoeConfig(**WIDE, **EXPERTS, num_experts=4),
    # experts under other names in checkpoints
    "mixtral": lambda: MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    # inputs before outputs, a tied head, names of its own
    "gpt2": lambda: GPT2Config(**{**PLAIN, **OLD}),
    # biases, through transformers' own code
    "starcoder2": lambda: Starcoder2Config(**{**WIDE, "head_dim": None}, use_bias=True),
    # buffers beside weights
    "apertus": lambda: ApertusConfig(**WIDE, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    # multi-head latent attention, and experts chosen with a bias that is a buffer
    "deepseek-v3": lambda: DeepseekV3Config(
        **PLAIN, **LATENT, **EXPERTS, n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1
    ),
    # short convolutions
    "lfm2": lambda: Lfm2Config(
        **PLAIN, num_key_value_heads=1, layer_types=["conv", "full_attention"], block_dim=64, conv_dim=64
    ),
    # recurrent states beside attention
    "falcon-h1": lambda: FalconH1Config(
        **WIDE, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1
    ),
}
ROUNDED = {"apertus": 1e-2}
"""Values that vLLM always computes in bfloat16: the slopes of an activation."""
LONG = Sampling(max_tokens=90, group=2, draws=3)


def make(config: Any, seed: int) -> PreTrainedModel:
    """All of it random: what begins as zero or one would hide that it is lost."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.unique().numel() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def start(config: Any, path: Path, *, dtype: str = "float32", seed: int = 0) -> VllmSampler:
    make(config, seed).save_pretrained(path)
    return vllm_sampler(Settings(str(path), dtype, 8), stop_ids={EOS}, draws=LONG.draws)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_is_the_model_and_what_is_published_runs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [make(FAMILIES[family](), seed) for seed in range(2)]
    weights = [export_weights(model, "float32", version=v) for v, model in enumerate(models)]
    expected = [fingerprint(model, "float32") for model in models]
    atol = ROUNDED.get(family, 5e-5)
    sampler = start(FAMILIES[family](), tmp_path)
    try:
        for rollout in generate(sampler, make_prompts(4), LONG):
            assert_exact(models, rollout, LONG, atol=atol)
        assert expected[1] == asyncio.run(sampler.publish(weights[1], "keep")).fingerprint
        for rollout in generate(sampler, make_prompts(4), LONG):
            assert set(rollout.versions) == {1}
            assert_exact(models, rollout, LONG, atol=atol)
        assert expected[0] == asyncio.run(sampler.publish(weights[0], "keep")).fingerprint
        publish_into(sampler, models, weights[1], atol=atol)

        last = [spec for spec in weights[1].manifest if spec.name in sampler.loading.checked and ".1." in spec.name]
        assert last
        for number, spec in enumerate(last):  # one number of one of them is not what was sent
            wrong = weights[1].body.copy()
            wrong[spec.offset + spec.nbytes // 2 + 3] ^= 1
            with replaced(sampler, monkeypatch, replace(weights[1], body=wrong), tmp_path):
                found = asyncio.run(sampler.publish(replace(weights[1], version=2 + number), "keep")).fingerprint
            assert found != expected[1], spec.name
        assert expected[1] == asyncio.run(sampler.publish(weights[1], "keep")).fingerprint
    finally:
        sampler.close()


def publish_into(sampler: VllmSampler, models: list[PreTrainedModel], weights: WeightsRef, *, atol: float) -> None:
    """In the middle of responses, which go on under the new weights."""
    sampler.stop_ids = []

    async def work() -> list[Rollout]:
        running = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in make_prompts(6)]
        await grown(sampler, 20)
        await sampler.publish(weights, "keep")
        return [handle.body for group in await asyncio.gather(*running) for handle in group]

    rollouts = asyncio.run(work())
    assert any(set(rollout.versions) == {0, 1} for rollout in rollouts)
    for rollout in rollouts:
        assert_exact(models, rollout, LONG, atol=atol)


REFUSED: dict[str, tuple[Callable[[], Any], type[SlipstreamError], str]] = {
    "unknown": (
        lambda: CodeGenConfig(**{**PLAIN, **OLD}, rotary_dim=16),
        ConfigError,
        r"vLLM refuses .* \(codegen\): Model architectures \['CodeGenForCausalLM'\] are not supported for now; "
        r"write sampler.engine = 'native'",
    ),
    "another-dtype": (
        lambda: Qwen3NextConfig(**WIDE, **EXPERTS, **RECURRENT, num_experts=4, shared_expert_intermediate_size=32),
        EngineError,
        r"vLLM cannot run .* \(qwen3_next\) here: AssertionError: CPU GDN attention requires BF16 "
        r"\(full output: .*\); write sampler.engine = 'native'",
    ),
    "another-shape": (
        lambda: DeepseekV3Config(**PLAIN, **{**LATENT, "kv_lora_rank": 32}, first_k_dense_replace=2),
        EngineError,
        r"vLLM cannot run .* \(deepseek_v3\) here: ValueError: Head dimension 96 is not supported by MLA "
        r"\(full output: .*\); write sampler.engine = 'native'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_cannot_run_is_one_line(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, kind, message = REFUSED[name]
    with pytest.raises(kind, match=f"^{message}$"):
        start(config(), tmp_path)
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err


def test_a_family_that_takes_no_new_weights_is_told_by_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, file = tmp_path / "student", tmp_path / "run.toml"
    GptOssConfig(**WIDE, num_local_experts=4).save_pretrained(student)
    file.write_text(
        f"""student = "{student}"
updates = 1
[sampler]
engine = "vllm"
[teachers.main]
model = "builtin:teacher"
"""
    )
    assert main(["config", str(file), "--check"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{student} (gpt_oss): vLLM cannot update its weights while it runs; write sampler.engine = 'nat" in said
