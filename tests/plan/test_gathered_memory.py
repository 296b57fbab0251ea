"""Memory of a learner's rank besides its shards, of compressed caches, and of records, worked out by hand."""

import sys
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.errors import ConfigError
from slipstream.objective.method import method_of
from slipstream.plan.engines import engines_of
from slipstream.plan.gpus import Gpus
from slipstream.plan.placement import Need, hidden_states, host_memory, needs, shape_of, size
from slipstream.plan.plan import check_shapes
from slipstream.plan.rules.memory import check_room

STUDENT, TEACHER = "shapes:Qwen/Qwen3-8B", "shapes:Qwen/Qwen3-4B"
PARAMETERS, LAYERS = 8_190_735_360, 36
EMBEDDING = 151_936 * 4096
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288 + 2 * 4096 + 2 * 128
"""q and o, k and v, the three matrices of the perceptron, two norms, and the norms of q and k."""
OUTSIDE = 2 * EMBEDDING + 4096
TREE: dict[str, Any] = {
    "student": STUDENT,
    "teachers": {"main": {"model": TEACHER, "dtype": "bfloat16"}},
    "sampler": {"max_length": 8192, "max_tokens": 4096, "slots": 4},
}


def learner(gpus: str = "8x640", changes: dict[str, Any] | None = None, **settings: Any) -> Need:
    made = check_shapes(parse(TREE | (changes or {}) | {"learner": settings}), Gpus.parse([gpus]))
    return needs(made.engines, gpu=True)[0]


def test_a_rank_holds_two_layers_and_all_outside_the_layers_whole() -> None:
    assert OUTSIDE + LAYERS * LAYER == PARAMETERS
    parts = learner(ranks=3).parts
    assert parts["weights"] == pytest.approx(PARAMETERS * 4 / 3)
    assert parts["gathered weights"] == 4 * (OUTSIDE + 2 * LAYER)
    assert parts["whole gradients"] == 4 * (EMBEDDING + 2 * LAYER)  # of the head, of a layer, and the layer's copy
    assert learner().parts["gathered weights"] == 0
    assert learner().parts["whole gradients"] == 4 * EMBEDDING  # of the head, beside the sum of all micro-batches


def test_at_the_end_of_the_backward_pass_only_what_is_outside_the_layers_is_whole() -> None:
    """The gradients outside the layers and their copy are more than those of a layer where activations are small."""
    small = learner(ranks=2, checkpointing=True, token_budget=9000, offload=("activations",)).parts
    activated = 9000 * 4 * (6 * 4096 + 3 * 4096 + 4 * 1024 + 4 * 12_288 + 2 * (4096 + 1024))  # of one layer
    assert small["~activations"] == activated
    assert small["whole gradients"] == 2 * 4 * OUTSIDE - 2 * 4 * LAYER - activated


def test_adapters_have_small_gradients_and_the_frozen_model_is_gathered_all_the_same() -> None:
    """Rank 8 of every matrix of a layer: inputs and outputs of q and o, k and v, and of the perceptron's three."""
    adapter = 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288))
    parts = learner(ranks=2, lora={"rank": 8}).parts
    assert parts["gathered weights"] == 4 * (OUTSIDE + 2 * LAYER)
    assert parts["whole gradients"] == 2 * 4 * adapter


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, 0),
        ({"compute_dtype": "bfloat16"}, LAYERS),
        ({"compute_dtype": "bfloat16", "ranks": 2}, LAYERS),
        ({"compute_dtype": "bfloat16", "checkpointing": True}, LAYERS),  # autocast keeps them until the pass ends
        ({"compute_dtype": "bfloat16", "checkpointing": True, "ranks": 2}, 1),
        ({"compute_dtype": "bfloat16", "checkpointing": True, "lora": {"rank": 8}}, 1),  # it keeps no frozen weights
    ],
)
def test_a_lower_precision_makes_copies_of_weights(settings: dict[str, Any], layers: int) -> None:
    assert learner(**settings).parts["weights in 16 bits"] == layers * LAYER * 2


def test_hidden_states_need_the_teachers_head_at_every_rank_and_the_records_host_memory() -> None:
    changes = {"loss": {"kind": "forward_kl", "cache": "hidden"}, "schedule": {"kind": "async", "tau": 4}}
    assert learner(changes=changes, ranks=2).parts["teachers' heads"] == 151_936 * 2560 * 2
    assert learner(ranks=2).parts["teachers' heads"] == 0
    tree = TREE | changes | {"learner": {"batch_size": 64}}
    made = check_shapes(parse(tree), Gpus.parse(["8x640"]))
    assert hidden_states(made.engines) == 5 * 64 * 4096 * 2560 * 2  # batches in flight, samples, tokens, width, bytes
    made = check_shapes(parse(tree | {"loss": {"kind": "reverse_kl_mc"}}), Gpus.parse(["8x640"]))
    assert hidden_states(made.engines) == 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"loss": {"kind": "forward_kl", "cache": "hidden"}},
            "the hidden states of an update of 1099511627776 samples need up to 6,291,456.0 GiB, and there are "
            '{} of host memory: write loss.cache = "teacher_topk", or lower learner.batch_size or sampler.max_tokens',
        ),
        ({"loss": {"kind": "reverse_kl"}}, 'write loss.kind = "reverse_kl_mc", or lower'),
        (
            {"loss": {"kind": "forward_kl"}, "sft": {"updates": 1, "loss": {"kind": "reverse_kl"}}},
            'write sft.loss.kind = "forward_kl", or lower',
        ),
        (
            {"loss": {"m": 1}, "sft": {"updates": 1, "loss": {"kind": "gold"}}},
            'write sft.loss.kind = "cross_entropy", or lower',
        ),
        ({"loss": {"kind": "forward_kl"}}, ""),
    ],
)
def test_an_update_whose_hidden_states_exceed_this_machine_is_refused(changes: dict[str, Any], line: str) -> None:
    """2^40 samples of 32 tokens with 96 numbers of 2 bytes: 96 · 2^46 bytes."""
    settings = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}}
    tree = settings | {"sampler": {"max_tokens": 32}, "learner": {"batch_size": 2**40}} | changes
    config = parse(tree)
    made = engines_of(config, method_of(config))
    if not line:
        check_room(made)
        return
    with pytest.raises(ConfigError) as refused:
        check_room(made)
    assert line.format(size(host_memory())) in str(refused.value)


REFUSAL = """
import resource, sys
from slipstream.config.file import parse
from slipstream.plan.facts import Facts
from slipstream.plan.rules.machine import check_in_flight

tree = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}, "sampler": {"group": 1}}
config = parse(tree | {"learner": {"batch_size": 400}, "schedule": {"kind": "async", "tau": 4}})
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
check_in_flight(config, Facts(config))
"""


@pytest.mark.parametrize("limit", [4000, 3999])
def test_more_groups_in_flight_than_files_may_be_open_are_refused(limit: int) -> None:
    """Two files for each of 5 · 400 groups."""
    ended = run([sys.executable, "-c", REFUSAL, str(limit)], stderr=PIPE, text=True, check=False)
    line = (
        "slipstream.errors.ConfigError: learner.batch_size = 400 and the schedule have 2000 groups in flight, which "
        "need 4000 open files; the limit is 3999 (ulimit -Hn): lower it"
    )
    assert ended.stderr.splitlines()[-1:] == ([line] if limit < 4000 else [])


def test_the_check_prints_the_host_memory_of_hidden_states(capsys: pytest.CaptureFixture[str]) -> None:
    """Five batches of 256 samples of 16,384 tokens, each with 4,096 numbers of 2 bytes: 160 GiB."""
    config = Path(__file__).parents[2] / "configs" / "qwen3_4b_8gpu.toml"
    assert main(["config", str(config), "--check", "--shapes", "--gpus", "8x80"]) == 0
    assert "# samples in flight have up to 160.0 GiB of hidden states in host memory: " in capsys.readouterr().out


def test_a_vllm_sampler_that_does_not_fit_is_told_to_split() -> None:
    """A tenth of 80 GiB is less than the weights."""
    sampler = TREE["sampler"] | {"engine": "vllm", "engine_args": {"gpu_memory_utilization": 0.1}}
    learner = {"lora": {"rank": 8}, "checkpointing": True}
    with pytest.raises(ConfigError) as refused:
        check_shapes(parse(TREE | {"sampler": sampler, "learner": learner}), Gpus.parse(["8x80"]))
    assert str(refused.value).startswith("sampler: a GPU, 32.8 GiB (weights 30.5 GiB, ")
    assert str(refused.value).endswith(
        "and its device has 8.0 GiB: split it over devices (sampler.engine_args.tensor_parallel_size), lower "
        "sampler.max_tokens, or use a smaller student"
    )


MLA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


SPARSE = {"index_topk": 2, "index_head_dim": 6, "index_n_heads": 2}


@pytest.mark.parametrize(
    ("kind", "indexers"), [("deepseek_v3", 0), ("minicpm3", 0), ("deepseek_v32", 3), ("glm_moe_dsa", 2)]
)
def test_a_cache_of_latent_attention_is_counted_as_it_is_stored(kind: str, indexers: int, tmp_path: Path) -> None:
    """Each layer stores one compressed vector (12) and one rotated part (4) for all heads.

    A layer of sparse attention stores a key (6) of its indexer, unless it uses the choices of an earlier layer.
    """
    shared = {"indexer_types": ["full", "full", "shared"]} if indexers == 2 else {}
    config = AutoConfig.for_model(kind, **MLA, **(SPARSE if indexers else {}), **shared)
    config.save_pretrained(tmp_path)
    cache, tokens = DynamicCache(config=config), torch.ones(1, 5, dtype=torch.long)
    AutoModelForCausalLM.from_config(config).eval()(input_ids=tokens, past_key_values=cache, use_cache=True)
    keys = [getattr(layer, "indexer_keys", None) for layer in cache.layers]
    stored = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    stored += sum(each.numel() for each in keys if each is not None)
    assert stored == 5 * (3 * (12 + 4) + indexers * 6)
    assert shape_of(str(tmp_path)).cache == 3 * (12 + 4) + indexers * 6
