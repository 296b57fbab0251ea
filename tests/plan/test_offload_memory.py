"""Memory in the host's own space by the plan, and the longest sequence that fits a device."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config.file import parse
from slipstream.config.learner import LearnerConfig
from slipstream.errors import ConfigError
from slipstream.objective.columns import OLD
from slipstream.plan.gpus import Gpus
from slipstream.plan.placement import GIB, Need, needs
from slipstream.plan.plan import check_shapes
from support.engines import native_learner
from support.tiny_models import make_model, wrap

STUDENT = "shapes:Qwen/Qwen3-4B"
PARAMETERS, LARGEST, WIDTH, LAYERS = 4_022_468_096, 151_936 * 2560, 2560, 36
TREE: dict[str, Any] = {
    "student": STUDENT,
    "teachers": {"main": {"model": STUDENT, "token_budget": 40_000}},
    "sampler": {"max_length": 8192, "max_tokens": 4096, "slots": 4},
    "schedule": {"kind": "async", "tau": 3},
}


def found(learner: dict[str, Any], gpus: str = "4x300", **changes: Any) -> dict[str, Need]:
    made = check_shapes(parse(TREE | changes | {"learner": learner}), Gpus.parse([gpus]))
    return {need.name: need for need in needs(made.engines, gpu=True)}


def test_what_is_offloaded_counts_in_host_memory() -> None:
    """One rank of two: 2 moments of 4 bytes; of the largest weight on the device; 36 inputs of 4 bytes per token."""
    here = found({"ranks": 2, "checkpointing": True})["learner-1"]
    there = found({"ranks": 2, "checkpointing": True, "offload": ["optimizer", "activations"]})["learner-1"]
    assert here.parts["moments"] == PARAMETERS * 2 * 4 / 2 and not here.kept
    assert there.parts["moments"] == LARGEST * 2 * 4 / 2 and there.host["moments"] == here.parts["moments"]
    inputs = 16384 * LAYERS * WIDTH * 4
    assert here.parts["~activations"] - there.parts["~activations"] == inputs == there.host["~activations"]
    assert str(there).endswith(" of host memory") and " (moments 15.0 GiB, ~activations 5.6 GiB)" in str(there)
    assert not str(here).endswith(" of host memory")


def test_rounded_weights_stay_in_memory_until_the_backward_pass() -> None:
    """A layer has q and o of 2560 · 4096 weights, k and v of 2560 · 1024, and three matrices of 2560 · 9728."""
    layer = 2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728
    eight = {"max_length": 8192, "max_tokens": 4096, "slots": 4, "quantisation": "int8"}
    for settings, expected in (
        ({"quantised": True}, LAYERS * layer * 4),
        ({"quantised": True, "compute_dtype": "bfloat16", "ranks": 2}, LAYERS * layer * 2),
        ({"quantised": True, "checkpointing": True}, layer * 4),
        ({}, 0),
    ):
        needed = found(settings, sampler=eight)
        assert needed["learner-1" if "ranks" in settings else "learner"].parts["rounded weights"] == expected


def test_copies_of_a_teacher_that_follows_count_in_host_memory() -> None:
    """Versions in flight: 3 // 2 + 2 in the scorer; one copy and one version fewer in the learner, all in float32."""
    follows = {"model": "self", "context": "{last}{prompt}", "follow": {"copy_every": 2}, "relabel": "stale"}
    own = found({}, teachers={"me": follows | {"max_length": 9000}}, freshness={})
    assert own["teacher me"].kept == (3 // 2 + 2) * PARAMETERS * 4
    assert own["learner"].host["versions before"] == (1 + 3 // 2 + 1) * PARAMETERS * 4
    assert "host memory" not in str(found({})["teacher main"])


def test_the_old_policy_counts_as_often_as_its_weights_are_in_memory() -> None:
    """A pass under the old policy's weights needs them, and a copy of the learner's own: two, beside the model."""
    policy = {"old": "previous", "advantage": "grpo"}
    rewarded = {
        "task": {"reward": "math"},
        "policy": policy,
        "loss": {"weight": 0},
        "teachers": {},
        "sampler": TREE["sampler"] | {"group": 4},
    }
    made = check_shapes(parse(TREE | rewarded), Gpus.parse(["4x300"]))
    assert needs(made.engines, gpu=True)[0].parts["versions before"] == 2 * PARAMETERS * 4
    lm = wrap(make_model("llama"))
    before = copies_of(lm.head.weight)
    learner = native_learner(lm, method=made.method, config=LearnerConfig(), updates=1)
    with learner.weights.snapshots.under(OLD):
        assert copies_of(lm.head.weight) - before == 2
    learner.close()


def test_a_critics_own_model_counts_with_what_it_is_trained_with() -> None:
    """Two ranks: 2 bytes of each weight and gradient, 4 of the moments; its output head is stored and not trained."""
    rewarded: Any = {
        "task": {"reward": "math"},
        "policy": {"advantage": "gae"},
        "loss": {"weight": 0},
        "teachers": {},
    }
    here = {"ranks": 2, "checkpointing": True}
    alone = found(here, **rewarded, critic={"warmup": 1})["learner-1"].parts
    model = {"model": "shapes:Qwen/Qwen3-8B", "dtype": "bfloat16"}
    both, parameters = found(here, **rewarded, critic=model)["learner-1"].parts, 8_190_735_360
    trained = parameters - 151_936 * 4096
    assert both["critic's weights"] == parameters * 2 / 2
    assert both["critic's gradients"] == trained * 2 / 2 and both["critic's moments"] == trained * 2 * 2 / 2
    assert both["value head"] == 12 * 4097 and alone["value head"] == 12 * 2561
    assert all(both[name] == alone[name] for name in ("weights", "gradients", "moments", "logits"))
    wide = found(here, **rewarded, critic=model | {"dtype": "float32"})["learner-1"].parts
    assert wide["~activations"] > both["~activations"] == alone["~activations"], "they make their passes in turn"
    adapters = found(here, **rewarded, critic=model | {"lora": {"rank": 16}})["learner-1"].parts
    # q, o, k and v, gate, up and down: inputs and outputs of each
    rows = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288)
    assert adapters["critic's moments"] == 36 * 16 * rows * 2 * 2 / 2
    away = found(here | {"offload": ["optimizer"]}, **rewarded, critic=model)["learner-1"]
    assert away.host["moments"] == alone["moments"] + both["critic's moments"]


def copies_of(weight: Tensor) -> int:
    """Return how many tensors in memory have the values of this weight."""
    gc.collect()
    alike = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.shape == weight.shape]
    return len({each.data_ptr() for each in alike if torch.equal(each, weight)})


def test_a_sequence_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    """On 80 GiB: 60 hold 16 bytes per parameter (4 + 4 + 8), 1.4 the head's gradient, tied to the largest weight, and
    half a GiB the logits.

    Each layer stores of each token inputs and outputs of its norms, also of those of queries (4096) and keys (1024);
    two inputs of products; queries, the output of attention and its copy; keys, values and their copies; and four
    values for each of the perceptron's units (9728).
    """
    stored = 4 * (4 * WIDTH + 2 * (4096 + 1024)) + 4 * (2 * WIDTH + 3 * 4096 + 4 * 1024 + 4 * 9728)
    left, per_token = 80 * GIB - 16 * PARAMETERS - 4 * LARGEST - 4 * 2**27, stored * LAYERS
    assert left // per_token == 1669
    with pytest.raises(ConfigError) as refused:
        found({}, "2x80")
    assert str(refused.value) == (
        "learner: a sequence may have 8,192 tokens, and about 1,669 fit its device, because 61.9 GiB of 80.0 GiB hold "
        "weights and states; a sequence is not split over ranks: write learner.checkpointing = true, learner.offload = "
        '["optimizer"], learner.lora, a smaller sampler.max_tokens or more learner.ranks'
    )
    assert found({"checkpointing": True}, "2x80")["learner"].total < 80 * GIB
    long, recomputed = (
        {"max_length": 40_000, "max_tokens": 4096, "slots": 4},
        {"checkpointing": True, "token_budget": 40_000},
    )
    assert left // (per_token / LAYERS + 4 * WIDTH * LAYERS) == 28_093
    with pytest.raises(ConfigError, match=r'about 28,093 fit .* write learner.offload = \["activations"\], learner'):
        found(recomputed, "2x80", sampler=long)
    found(recomputed | {"offload": ["activations"]}, "2x80", sampler=long)
