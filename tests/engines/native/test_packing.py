"""Packed rows: the plan in integers, and that a sample's answer does not depend on what lies beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DogeConfig,
    Lfm2Config,
    MambaConfig,
    PhimoeConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from slipstream.engines.native import rows as rows_module
from slipstream.engines.native.attention import Reach
from slipstream.engines.native.learning.student import recompute_activations
from slipstream.engines.native.model import LanguageModel, split
from slipstream.engines.native.packing import Item, MicroBatch, best_fit, cost, pack, spread
from slipstream.engines.native.rows import Rows, attend, by_flex, placeholder, reading, use_rows
from slipstream.errors import ModelError
from slipstream.records import Handle, Rollout, header_of
from support.engines import native_scorer
from support.tiny_models import CONFIGS, SHAPE, VOCAB, make_model, random_rollouts, wrap

CPU = torch.device("cpu")
GROUPS = [(7, [20, 1, 9]), (1, [5, 3]), (19, [2]), (3, [13, 13, 1, 8]), (12, [6, 11])]
"""Prompt and responses: shorter and longer than the windows of the tiny models, which are 6."""
MODES: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "packed": {"shared_prompt": False},
    "shared": {},
}


def make_rollouts(groups: Sequence[tuple[int, Sequence[int]]] = GROUPS) -> list[Rollout]:
    """The groups take turns."""
    return sorted(random_rollouts(groups), key=lambda rollout: rollout.index)


# --- the plan ---------------------------------------------------------------------------------------------------------

some_groups = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(1, 80), min_size=1, max_size=6)), min_size=1, max_size=12
)


@given(some_groups, st.integers(20, 500), st.sampled_from(list(MODES)))
def test_every_sample_is_computed_once_within_the_budget(
    groups: list[tuple[int, list[int]]], budget: int, mode: str
) -> None:
    rollouts = make_rollouts(groups)
    batches = pack(rollouts, budget=budget, hidden=32, **MODES[mode])
    assert sorted(i for batch in batches for i in batch.members) == list(range(len(rollouts)))
    assert all(batch.rows for batch in batches)
    for batch in batches:
        assert batch.computed <= budget or len(batch.rows) == len(batch.rows[0]) == 1
        assert batch.real <= batch.computed == len(batch.rows) * batch.length
        for item in (item for row in batch.rows for item in row):
            assert {rollouts[i].prompt.number for i in item.members} == {rollouts[item.members[0]].prompt.number}
            assert item.prompt == len(rollouts[item.members[0]].prompt.tokens)
            assert item.responses == tuple(len(rollouts[i].tokens) for i in item.members)
            assert item.tokens <= budget or len(item.members) == 1
    again = pack(rollouts, budget=budget, hidden=32, **MODES[mode])
    assert again == batches


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 120))
def test_no_two_bins_would_fit_into_one(sizes: list[int], capacity: int) -> None:
    bins = [sum(sizes[i] for i in held) for held in best_fit(sizes, capacity)]
    assert all(filled <= capacity for filled in bins)
    assert all(one + other > capacity for one, other in combinations(bins, 2))


@given(st.lists(st.integers(2, 400), min_size=8, max_size=60), st.integers(400, 4000))
def test_micro_batches_cost_about_the_same(lengths: list[int], budget: int) -> None:
    """One costs more than another by at most its last row, unless the other has no room for a row."""
    batches = spread([row_of(tokens) for tokens in lengths], budget=budget, hidden=16)
    costs = [[cost(sum(item.tokens for item in row), 16) for row in batch.rows] for batch in batches]
    for one, other in permutations(range(len(batches)), 2):
        full = (len(costs[other]) + 1) * batches[other].length > budget
        assert full or sum(costs[one][:-1]) <= sum(costs[other])


def test_a_shared_prompt_is_computed_once_unless_its_responses_are_too_many() -> None:
    rollouts = make_rollouts([(10, [5, 5, 5, 5, 5]), (4, [3])])
    (whole,) = pack(rollouts, budget=100, hidden=32)
    assert whole.rows == ((Item(10, (5,) * 5, (0, 2, 3, 4, 5)), Item(4, (3,), (1,))),)
    assert (whole.real, whole.computed, whole.length) == (42, 42, 42)
    cut = pack(rollouts, budget=21, hidden=32)
    items = [item for batch in cut for row in batch.rows for item in row]
    assert sorted((item.prompt, item.responses) for item in items) == [
        (4, (3,)),
        (10, (5,)),
        (10, (5, 5)),
        (10, (5, 5)),
    ]


def row_of(tokens: int) -> tuple[Item, ...]:
    return (Item(1, (tokens - 1,), (0,)),)


def test_long_rows_cost_more_than_their_tokens() -> None:
    """At this width, one row of 1000 tokens weighs as much as 56 of 100, of which there are 30."""
    assert cost(1000, 16) == pytest.approx(1000 + 1000**2 / 96)
    long, short = spread([*[row_of(100)] * 30, row_of(1000)], budget=3999, hidden=16)
    assert (long.real, short.real) == (1000, 3000)
    wide = spread([*[row_of(100)] * 30, row_of(200)], budget=3000, hidden=10**6)
    assert [batch.real for batch in wide] == [1600, 1600]


def test_rows_are_long_where_filling_them_matters_more_than_attention() -> None:
    """Seven items of 460 tokens: one row of all, three of at most 200, or seven of at most 100."""
    rollouts = make_rollouts([(1, [59])] * 6 + [(1, [99])])
    (wide,), (medium,), (narrow,) = (pack(rollouts, budget=10_000, hidden=hidden) for hidden in (1024, 100, 16))
    assert (wide.length, wide.computed) == (460, 460)
    assert (medium.length, medium.computed) == (180, 540)
    assert (narrow.length, narrow.computed) == (100, 700)


@given(st.lists(st.integers(2, 100), min_size=1, max_size=40), st.integers(100, 300))
def test_rows_of_any_order_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = spread([row_of(tokens) for tokens in lengths], budget, 16)
    assert sorted(sum(i.tokens for i in row) for batch in batches for row in batch.rows) == sorted(lengths)
    assert all(batch.computed <= budget for batch in batches)


def test_a_branch_that_begins_with_other_tokens_shares_no_prompt() -> None:
    rollouts = make_rollouts([(4, [3, 3, 3])])
    prompt = rollouts[1].prompt
    rollouts[1] = replace(rollouts[1], prompt=replace(prompt, tokens=prompt.tokens[:3]))
    (batch,) = pack(rollouts, budget=100, hidden=32)
    items = [item for row in batch.rows for item in row]
    assert {(item.prompt, item.members) for item in items} == {(4, (0, 2)), (3, (1,))}


def test_rows_begin_every_response_anew_after_its_prompt() -> None:
    rollouts = make_rollouts([(3, [2, 3]), (1, [2])])
    (batch,) = pack(rollouts, budget=100, hidden=32)
    assert batch.members == [0, 2, 1]
    rows = Rows(rollouts, MicroBatch((*batch.rows, ())), CPU)
    expected = [rollouts[0].prompt.tokens, rollouts[0].tokens, rollouts[2].tokens]
    assert rows.ids_RL[0].tolist() == [*np.concatenate(expected), *rollouts[1].prompt.tokens, *rollouts[1].tokens]
    assert rows.position_RL[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]
    assert rows.branch_RL[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 0, 1, 1]
    assert rows.tree_RL[0].tolist() == [0] * 8 + [1] * 3
    assert len(set(rows.tree_RL[1].tolist())) == 11, "every pad is alone"
    assert rows.predict_N.tolist() == [2, 3, 2, 5, 6, 8, 9]


# --- the same answers -------------------------------------------------------------------------------------------------


def hidden_and_gradients(
    lm: LanguageModel, rollouts: Sequence[Rollout], batches: Sequence[MicroBatch]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Hidden states sample by sample, and the gradients of a random function of them."""
    lm.model.zero_grad()
    found: dict[int, Tensor] = {}
    for batch in batches:
        hidden_NH = Rows(rollouts, batch, lm.device).hidden(lm.backbone)
        parts = torch.split(hidden_NH, [len(rollouts[i].tokens) for i in batch.members])
        loss = hidden_NH.new_zeros(())
        for i, hidden_TH in zip(batch.members, parts, strict=True):
            weight_TH = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(i))
            loss = loss + (hidden_TH * weight_TH.to(hidden_TH)).sum()
            found[i] = hidden_TH.detach()
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in lm.backbone.named_parameters() if p.grad is not None}
    return [found[i] for i in sorted(found)], gradients


def alone(lm: LanguageModel, rollouts: Sequence[Rollout]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each sample in a pass of its own, with the attention that the model came with."""
    batches = pack(rollouts, budget=1, hidden=32, packing=False)
    assert len(batches) == len(rollouts)
    return hidden_and_gradients(lm, rollouts, batches)


def without_rounding(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with norms in its own precision: HF's round to float32, in float64 too."""

    def norm(module: Any, x: Tensor) -> Tensor:
        scale = 1 + module.weight if "Gemma" in type(module).__name__ else module.weight
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        return scale * x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()

    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = MethodType(norm, module)
    return model


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def errors(model: PreTrainedModel, mode: str, rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return the errors of hidden states and of gradients, each relative to the largest entry of its tensor."""
    lm = wrap(model)
    expected, expected_gradients = alone(lm, rollouts)
    if mode != "padded":
        use_rows(lm)
    batches = pack(rollouts, budget=250, hidden=32, **MODES[mode])
    found, gradients = hidden_and_gradients(lm, rollouts, batches)
    assert gradients.keys() == expected_gradients.keys() and len(gradients) > 10
    hidden = max(largest_error(f, e) for f, e in zip(found, expected, strict=True))
    return hidden, max(largest_error(gradients[name], expected_gradients[name]) for name in gradients)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block", [16, 128])
def test_neighbours_change_neither_hidden_states_nor_gradients(
    name: str, mode: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "QUERY_BLOCK", block)
    exact = without_rounding(make_model(name, dtype=torch.float64))
    assert max(errors(exact, mode, make_rollouts())) < 1e-13
    assert max(errors(make_model(name), mode, make_rollouts())) < 3e-6
    unrejected = make_model(name, dtype=torch.float64)
    assert max(errors(unrejected, mode, make_rollouts())) < (1e-13 if name == "phi" else 1e-6)


@settings(max_examples=10)
@given(some_groups, st.sampled_from(["mistral-window", "gemma3-window"]), st.sampled_from(["packed", "shared"]))
def test_any_groups_are_computed_as_if_alone(groups: list[tuple[int, list[int]]], name: str, mode: str) -> None:
    assert errors(without_rounding(make_model(name, dtype=torch.float64)), mode, make_rollouts(groups))[0] < 1e-12


@pytest.mark.parametrize("mode", ["packed", "shared"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3-window"])
def test_checkpointed_layers_give_the_same_gradients(name: str, mode: str) -> None:
    rollouts, lm = make_rollouts(), wrap(make_model(name))
    lm.model.train()  # HF checkpoints layers in training only
    use_rows(lm)
    assert lm.model.training
    batches = pack(rollouts, budget=10_000, hidden=32, **MODES[mode])
    _, expected = hidden_and_gradients(lm, rollouts, batches)
    recompute_activations(lm.model)
    _, found = hidden_and_gradients(lm, rollouts, batches)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", CONFIGS)
def test_under_autocast_rows_differ_no_more_than_precision_does(name: str) -> None:
    rollouts, lm, packed = make_rollouts(), wrap(make_model(name)), wrap(make_model(name))
    use_rows(packed)
    exact, _ = alone(lm, rollouts)
    batches = pack(rollouts, budget=10_000, hidden=32)
    with torch.autocast("cpu", torch.bfloat16):
        lower, lower_gradients = alone(lm, rollouts)
        found, gradients = hidden_and_gradients(packed, rollouts, batches)
    assert gradients.keys() == lower_gradients.keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    usual = torch.cat(lower) - torch.cat(exact)
    assert 0 < (torch.cat(found) - torch.cat(exact)).norm() < 1.5 * usual.norm()


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (6, None), (None, 8)])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_the_blocks_see(
    window: int | None, chunk: int | None, softcap: float | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "QUERY_BLOCK", 16)
    rollouts = make_rollouts()
    (batch,) = pack(rollouts, budget=10_000, hidden=32)
    rows = Rows(rollouts, batch, CPU)
    torch.manual_seed(0)
    query = torch.randn(len(batch.rows), 4, batch.length, 8)
    key, value = torch.randn(2, len(batch.rows), 2, batch.length, 8)
    reach, sink_H = Reach(window, chunk), torch.randn(4) if sinks else None
    layer = torch.nn.Module()
    layer.layer_idx, layer.config = 0, SimpleNamespace(layer_types=["full_attention"])
    if chunk:
        layer.config = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=chunk)
    with reading(rows):
        blocks, _ = attend(
            layer, query, key, value, None, scaling=0.3, sliding_window=window, softcap=softcap, s_aux=sink_H
        )
    flex = by_flex(query, key, value, rows, reach, 0.3, softcap, sink_H)
    torch.testing.assert_close(blocks, flex)


# --- compiled FlexAttention: dynamo's graphs, without the compiler behind them ----------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Count the graphs of attention that is compiled; they run as plain operations."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(rows_module, "is_compiled", lambda tensor: True)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
    torch._dynamo.reset()
    rows_module._compiled.cache_clear()
    yield counter
    torch._dynamo.reset()
    rows_module._compiled.cache_clear()


def compiled_attention(
    lengths: Sequence[int],
    budget: int,
    reach: Reach,
    dtype: torch.dtype,
    *,
    learns: bool,
    again: bool = False,
    cap: float | None = None,
) -> set[tuple[int, int]]:
    """Attend over packed rows of these responses; return rows and length of each micro-batch.

    `again`: keys and values are one tensor, for which dynamo makes another graph.
    """
    rollouts = [placeholder(np.arange(3), np.arange(length), number=i) for i, length in enumerate(lengths)]
    shapes = set()
    for batch in pack(rollouts, budget=budget, hidden=32):
        rows, shape = Rows(rollouts, batch, CPU), (len(batch.rows), batch.length)
        query, key = (torch.randn(shape[0], heads, shape[1], 8, dtype=dtype).requires_grad_(learns) for heads in (4, 2))
        value = key if again else key.detach().clone().requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            by_flex(query, key, value, rows, reach, 0.3, cap, None)
        shapes.add(shape)
    return shapes


PACKINGS = [
    ((20, 30, 14), 64),
    ((150, 130, 40), 64),
    ((20, 31, 17), 80),
    ((300, 300), 700),
    ((200, 200, 200), 700),
    ((60,) * 9, 150),
]


def test_every_mode_of_attention_needs_one_graph(graphs: CompileCounter) -> None:
    counts = []
    for reach, dtype, learns, cap in [
        (Reach(), torch.float32, False, None),
        (Reach(), torch.float32, True, None),
        (Reach(), torch.bfloat16, True, None),
        (Reach(6), torch.float32, True, None),
        (Reach(), torch.float32, True, 5.0),
    ]:
        shapes, before = set[tuple[int, int]](), graphs.frame_count
        for lengths, budget in PACKINGS:
            shapes |= compiled_attention(lengths, budget, reach, dtype, learns=learns, cap=cap)
        assert {(rows > 1, length > 128) for rows, length in shapes} == {(a, b) for a in (0, 1) for b in (0, 1)}
        counts.append(graphs.frame_count - before)
    modes = 4  # one row or several, one tile or several
    assert counts == [modes] * 5


def test_attention_that_needs_too_many_graphs_is_an_error_and_never_runs_uncompiled(graphs: CompileCounter) -> None:
    compiled_attention([20], 64, Reach(6), torch.float32, learns=False)
    line = (
        r"FlexAttention needs more than 1 compiled graphs in one mode \(reach Reach\(window=6, chunk=None\), .*"
        r"one_row True, one_tile True\): run with TORCH_LOGS=recompiles, and report its output"
    )
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(ModelError, match=line):
        compiled_attention([30], 64, Reach(6), torch.float32, learns=False, again=True)


@pytest.mark.parametrize("reach", [Reach(), Reach(6), Reach(140), Reach(None, 8)])
def test_a_mask_of_tiles_is_the_one_that_torch_makes(reach: Reach) -> None:
    rollouts = [placeholder(np.arange(3), np.arange(n), number=i) for i, n in enumerate((500, 260, 20, 30, 100))]
    for batch in pack(rollouts, budget=600, hidden=32):
        rows = Rows(rollouts, batch, CPU)
        count, length = len(batch.rows), batch.length
        expected = create_block_mask(rows.sees(reach), count, None, length, length, device="cpu")
        ours = rows.block_mask(reach)
        assert ours.shape == expected.shape
        for found, wanted in zip(ours.as_tuple(), expected.as_tuple(), strict=True):
            if isinstance(wanted, torch.Tensor):
                assert torch.equal(found, wanted)


# --- models that cannot -----------------------------------------------------------------------------------------------

UNABLE = {
    "recurrent": (lambda: MambaConfig(**SHAPE), "its recurrent layers would carry one sequence into the next"),
    "convolution": (
        lambda: Lfm2Config(**SHAPE, full_attn_idxs=[1]),
        "its recurrent layers would carry one sequence into the next",
    ),
    "own mask": (lambda: DogeConfig(**SHAPE), "DogeAttention passes its own mask, which is not supported"),
    "hybrid": (
        lambda: RecurrentGemmaConfig(**SHAPE | {"num_hidden_layers": 3}, lru_width=32, logits_soft_cap=1e9),
        # older versions of transformers do not call its layers recurrent; the check of packed rows then finds them
        r"(a sequence among others differs by \d+.\d+% from the same sequence alone|its recurrent layers would .*)",
    ),
    "alibi": (lambda: BloomConfig(vocab_size=VOCAB, hidden_size=32, n_head=4), "its attention cannot be replaced"),
    "window untold": (
        lambda: PhimoeConfig(**SHAPE, sliding_window=4096, num_local_experts=2),
        "it does not pass its sliding window to the attention",
    ),
}


@pytest.mark.parametrize("name", UNABLE)
def test_a_model_that_cannot_is_refused_with_the_reason(name: str) -> None:
    torch.manual_seed(0)
    config, reason = UNABLE[name]
    lm = split("tiny", AutoModelForCausalLM.from_config(config()).eval())
    with pytest.raises(ModelError, match=rf"tiny: \w+ForCausalLM cannot take packed rows: {reason}: write x.y = false"):
        use_rows(lm, field="x.y")
    with pytest.raises(ModelError, match=r"write teachers.main.packing = false"):
        native_scorer(lm, name="main")


def test_a_model_that_cannot_pack_is_scored_in_padded_rows() -> None:
    torch.manual_seed(0)
    rollouts = make_rollouts()
    lm = split("tiny", AutoModelForCausalLM.from_config(MambaConfig(**SHAPE)).eval())
    scorer = native_scorer(lm, packing=False)
    found = scorer._score([Handle(header_of(rollout), rollout) for rollout in rollouts])
    for rollout, handle in zip(rollouts, found, strict=True):
        ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]))
        logits = lm.model(ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[len(rollout.prompt.tokens) :, None])[:, 0]
        np.testing.assert_allclose(handle.body.teacher_logp, expected.detach(), atol=1e-5)
    scorer.close()


def test_packed_rows_are_for_models_that_know_them() -> None:
    rollouts = make_rollouts()
    (batch,) = pack(rollouts, budget=10_000, hidden=32)
    with pytest.raises(AssertionError, match="use_rows"):
        Rows(rollouts, batch, CPU).hidden(wrap(make_model()).backbone)
