"""Speculative sampling: the tokens, draws and log-probs of plain sampling, at every limit and across publishes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Lfm2Config, PreTrainedModel

from slipstream.config.file import parse
from slipstream.config.sampler import SpeculationConfig
from slipstream.engines.draws import process
from slipstream.engines.native.sampling.requests import (
    ACCEPTANCE_MEMORY,
    DRAFT_INTERVAL,
    Acceptance,
    Draft,
    Lookup,
    emitted_draws,
)
from slipstream.engines.weights import export_weights
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts
from slipstream.plan.rules.models import check_speculation
from slipstream.protocols import Mode, Sampling
from slipstream.records import Group, Prompt, Rollout
from support.metric_runs import native
from support.tiny_experts import make_mixture
from support.tiny_models import CONFIGS, EOS, SHAPE, VOCAB, ByHand, make_model, make_prompts, wrap

EAGER = SpeculationConfig(lookup=1, tokens=4, least=0.0)


# --- what is proposed, and what is kept --------------------------------------------------------------------------


def test_the_tokens_after_the_latest_earlier_occurrence_are_proposed() -> None:
    lookup = Lookup(2)
    lookup.extend([7, 8, 1, 2, 7, 8, 3, 4])
    assert lookup.propose(3) == []
    lookup.extend([7, 8])  # last seen before the 3
    assert [lookup.propose(count) for count in (1, 3)] == [[3], [3, 4, 7]]
    lookup.extend([3])
    assert lookup.propose(2) == [4, 7]
    assert lookup.propose(0) == []


def test_a_proposal_that_reaches_its_own_start_repeats() -> None:
    lookup = Lookup(1)
    lookup.extend([5, 6, 5])
    assert lookup.propose(5) == [6, 5, 6, 5, 6]


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4), st.integers(1, 6))
def test_proposals_equal_a_search_through_all_tokens(tokens: list[int], n: int, count: int) -> None:
    """The written-out search: the latest start of the last n tokens before their own."""
    lookup = Lookup(n)
    lookup.extend(tokens)
    starts = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:]]
    expected = list[int]()
    if starts:
        for i in range(starts[-1] + n, starts[-1] + n + count):
            expected.append((tokens + expected)[i])
    assert lookup.propose(count) == expected


def test_draws_are_kept_up_to_the_first_that_was_not_proposed() -> None:
    drafts = [Draft(2, 9, [5, 6]), Draft(0, 4, [1, 2, 3])]
    #         slots 0 1 2; after 5, 6; after 1, 2, 3
    tokens = [1, 8, 5, 7, 0, 2, 3, 4]
    assert emitted_draws(tokens, 3, drafts, ()) == [[0, 5, 6, 7], [1], [2, 3]]
    assert emitted_draws(tokens, 3, drafts, {2}) == [[0, 5], [1], [2, 3]], "nothing follows a stop token"
    assert emitted_draws([9, *tokens[1:]], 3, drafts, ()) == [[0], [1], [2, 3]]


def test_few_steps_have_proposals_while_few_of_them_are_accepted() -> None:
    acceptance = Acceptance(0.3)
    assert acceptance.pays()
    acceptance.add(4 * ACCEPTANCE_MEMORY, 0)  # the share falls from 1 to 1/5
    assert [acceptance.pays() for _ in range(2 * DRAFT_INTERVAL)].count(True) == 2
    acceptance.add(ACCEPTANCE_MEMORY, ACCEPTANCE_MEMORY)  # and rises to 3/5
    assert acceptance.share == pytest.approx(0.6)
    assert all(acceptance.pays() for _ in range(3))
    assert acceptance.take() == (5 * ACCEPTANCE_MEMORY, ACCEPTANCE_MEMORY)
    assert acceptance.take() == (0, 0)


# --- against plain sampling ---------------------------------------------------------------------------------------


def drawn(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    asked: Sequence[Sampling],
    speculation: SpeculationConfig | None = EAGER,
    *,
    begun: Sequence[Group] = (),
    slots: int = 8,
    stops: Sequence[int] = (EOS,),
    **options: Any,
) -> tuple[list[Rollout], tuple[int, int]]:
    """All responses, and the numbers of proposed and accepted tokens."""

    async def main() -> list[Rollout]:
        calls = [
            asyncio.create_task(sampler.generate(prompt, sampling, begun[i] if begun else ()))
            for i, (prompt, sampling) in enumerate(zip(prompts, asked, strict=True))
        ]
        return [handle.body for group in await sampler.finish(*calls) for handle in group]

    sampler = ByHand(wrap(model), slots=slots, stop_ids=set(stops), speculation=speculation, **options)
    try:
        return asyncio.run(main()), (sampler.drafting.acceptance.take() if sampler.drafting is not None else (0, 0))
    finally:
        sampler.close()


FIELDS = ("tokens", "actions", "versions", "best_ids", "replaced", "router", "prompt_router")


def assert_same(found: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    """Every record is the same, and log-probs to rounding, as one pass has several tokens of a row."""
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt.id, one.index, one.finish) == (other.prompt.id, other.index, other.finish)
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        np.testing.assert_allclose(one.action_logp, other.action_logp, rtol=0, atol=1e-11)
        assert (one.kept is None) == (other.kept is None)
        if one.kept is not None and other.kept is not None:
            np.testing.assert_array_equal(one.kept.ids, other.kept.ids)
            np.testing.assert_array_equal(one.kept.sizes, other.kept.sizes)
        if one.best_logp is not None and other.best_logp is not None:
            np.testing.assert_allclose(one.best_logp, other.best_logp, rtol=0, atol=1e-11)


def assert_log_probs(rollout: Rollout, models: Sequence[PreTrainedModel], sampling: Sampling) -> None:
    """All draws' log-probs equal a full forward under the weights of their version."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    for version in np.unique(rollout.versions):
        with torch.no_grad():
            logits = models[version](ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1]
        expected = process(logits, sampling).gather(1, torch.from_numpy(rollout.actions).long()).numpy()
        at = rollout.versions == version
        np.testing.assert_allclose(rollout.action_logp[at], expected[at], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_record_is_that_of_plain_sampling(name: str) -> None:
    """Ragged prompts, groups, draws, best ids, supports, temperatures and greedy answers in fewer slots than rows."""
    model, prompts = make_model(name, dtype=torch.float64), make_prompts(9)
    asked = [
        Sampling(
            max_tokens=12 + 4 * i,
            group=1 + i % 3,
            draws=1 + i % 4,
            best=2 if i % 3 == 0 else 0,
            temperature=(0.5, 1.0, 0.0)[i % 3],
            top_p=0.9 if i % 2 else 1.0,
            keep_mask=bool(i % 2),
        )
        for i in range(9)
    ]
    plain, nothing = drawn(model, prompts, asked, None, slots=5)
    found, (proposed, accepted) = drawn(model, prompts, asked, slots=5)
    assert nothing == (0, 0) and proposed > accepted > 40
    assert_same(found, plain)
    for rollout in found:
        assert_log_probs(rollout, [model], asked[rollout.prompt.number])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 5),
    speculation=st.builds(
        SpeculationConfig, lookup=st.integers(1, 3), tokens=st.integers(1, 7), least=st.sampled_from([0.0, 0.3])
    ),
    limit=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=6),
    slots=st.integers(3, 9),
)
def test_limits_and_stop_tokens_inside_of_a_proposal(
    seed: int, speculation: SpeculationConfig, limit: int, temperature: float, stops: set[int], slots: int
) -> None:
    asked = [Sampling(max_tokens=max(1, limit - i), group=1 + i % 3, temperature=temperature) for i in range(5)]
    prompts = make_prompts(5, longest=20, seed=seed)
    runs = [
        drawn(MODEL, prompts, asked, each, slots=slots, stops=sorted(stops) or [EOS])[0] for each in (None, speculation)
    ]
    assert_same(runs[1], runs[0])


MODEL = make_model(dtype=torch.float64)


def test_two_tokens_after_a_proposal_have_the_law_of_the_model() -> None:
    """8,000 responses of three tokens, whose 27 continuations are enumerated; a token is proposed after the first.

    The chi-square statistic with 26 degrees of freedom exceeds 54.05 once in a thousand. The number of accepted tokens
    is binomial, and 4 standard deviations are at most 4·√(8,000/4) = 179.
    """
    sampling, n = Sampling(max_tokens=3, group=400, top_k=3, temperature=1.5), 8000
    tokens = np.random.default_rng(40).integers(2, VOCAB, 40).astype(np.int32)
    prompts = [Prompt(id="p", number=i, tokens=tokens, seed=1000 + i) for i in range(n // sampling.group)]
    rollouts, (_, accepted) = drawn(MODEL, prompts, [sampling] * len(prompts), slots=400, stops=())

    def law(after: Sequence[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = MODEL(torch.tensor([[*tokens.tolist(), *after]])).logits[:, -1]
        p_V = process(logits, sampling)[0].exp()
        return {token: float(p_V[token]) for token in p_V.nonzero()[:, 0].tolist()}

    expected, likely = dict[tuple[int, ...], float](), 0.0
    for a, p in law([]).items():
        lookup = Lookup(1)
        lookup.extend([*tokens.tolist(), a])
        likely += p * sum(law([a]).get(token, 0.0) for token in lookup.propose(1))
        expected |= {(a, b, c): n * p * q * r for b, q in law([a]).items() for c, r in law([a, b]).items()}
    counts = dict.fromkeys(expected, 0)
    for rollout in rollouts:
        counts[tuple(rollout.tokens.tolist())] += 1
    assert len(expected) == 27 and min(expected.values()) > 50
    assert sum((counts[each] - m) ** 2 / m for each, m in expected.items()) < 54.05
    assert 0.4 < likely < 0.6 and abs(accepted - n * likely) < 179


def test_a_teacher_beside_the_sampler_replaces_the_same_tokens() -> None:
    prompts, asked = make_prompts(5), [Sampling(max_tokens=25, group=2, draws=2, teacher_replaces=4)] * 4
    teacher = make_model(seed=3, dtype=torch.float64)
    asked.append(replace(asked[0], teacher_replaces=0))
    runs = [drawn(MODEL, prompts, asked, each, teacher=wrap(teacher)) for each in (None, EAGER)]
    assert runs[1][1][1] > 5
    assert any(rollout.replaced is not None and rollout.replaced.any() for rollout in runs[1][0])
    assert_same(runs[1][0], runs[0][0])


def test_recorded_experts_are_those_of_the_emitted_tokens() -> None:
    model, prompts = make_mixture("mixtral"), make_prompts(5)
    asked = [Sampling(max_tokens=25, group=2, router=True, temperature=0.5)] * 5
    runs = [drawn(model, prompts, asked, each, router=True) for each in (None, EAGER)]
    assert runs[1][1][1] > 5
    assert_same(runs[1][0], runs[0][0])


@pytest.mark.parametrize("mode", ["keep", "drain", "restart"])
def test_versions_and_log_probs_are_exact_across_a_publish(mode: Mode) -> None:
    """New weights after every number of steps, while rows are inside of what they repeat."""
    models = [make_model(seed=seed, dtype=torch.float64) for seed in range(2)]
    weights = [export_weights(model, "float64", version=v) for v, model in enumerate(models)]
    sampling = Sampling(max_tokens=20, group=2, draws=2, temperature=0.5)
    sampler = ByHand(wrap(models[0]), slots=8, stop_ids=set(), speculation=EAGER)

    async def work(steps: int) -> tuple[list[Rollout], int, int]:
        await sampler.finish(asyncio.create_task(sampler.publish(weights[0], "restart")))
        running = [asyncio.create_task(sampler.generate(prompt, sampling)) for prompt in make_prompts(4)]
        await sampler.step(steps)
        loading = asyncio.create_task(sampler.publish(weights[1], mode))
        groups = await sampler.finish(*running)
        loaded = await loading
        return [handle.body for group in groups for handle in group], loaded.drafted, loaded.accepted

    versions, counts = list[list[int]](), list[tuple[int, int]]()
    for steps in range(1, 10, 2):
        rollouts, *count = asyncio.run(work(steps))
        counts.append((count[0], count[1]))
        versions += [np.bincount(rollout.versions, minlength=2).tolist() for rollout in rollouts]
        for rollout in rollouts:
            assert len(rollout.tokens) == 20 and (np.diff(rollout.versions) >= 0).all()
            assert_log_probs(rollout, models, sampling)
    sampler.close()
    assert counts[-1][0] > counts[-1][1] > 0
    mixed = {"keep": True, "drain": False, "restart": False}[mode]
    assert any(0 < old < 20 for old, _ in versions) == mixed
    if mixed:
        assert len({old for old, _ in versions}) > 5, "rows are at different tokens"


def test_a_response_that_goes_on_after_a_release_is_the_same_response() -> None:
    asked, prompts = [Sampling(max_tokens=30, group=2, temperature=0.5)] * 3, make_prompts(3)
    whole, _ = drawn(MODEL, prompts, asked, None)

    async def first() -> list[Group]:
        calls = [asyncio.create_task(sampler.generate(*each)) for each in zip(prompts, asked, strict=True)]
        await sampler.step(5)
        leaving = asyncio.create_task(sampler.release())
        groups = await sampler.finish(*calls)
        await leaving
        return groups

    sampler = ByHand(wrap(MODEL), slots=8, stop_ids={EOS}, speculation=EAGER)
    begun = asyncio.run(first())
    sampler.close()
    lengths = {len(handle.body.tokens) for group in begun for handle in group}
    assert len(lengths) > 1, "some rows had several tokens in a step"
    rest, (_, accepted) = drawn(MODEL, prompts, asked, begun=begun)
    assert accepted > 5
    assert_same(rest, whole)


@pytest.mark.parametrize("park", [False, True])
def test_the_next_turn_goes_on_from_what_several_accepted_tokens_left(park: bool) -> None:
    """The first turn ends inside of a proposal, or after it, and its keys and values stay in the cache if parked."""
    sampling, (prompt,) = Sampling(max_tokens=14, temperature=0.4, park=park), make_prompts(1)

    async def turns(speculation: SpeculationConfig | None) -> list[Rollout]:
        sampler = ByHand(wrap(MODEL), slots=4, stop_ids=set(), speculation=speculation)
        found, tokens = list[Rollout](), prompt.tokens
        for _ in range(4):
            asked = replace(prompt, tokens=tokens, offset=14 * len(found))
            ((handle,),) = await sampler.finish(asyncio.create_task(sampler.generate(asked, sampling)))
            found.append(handle.body)
            tokens = np.concatenate([tokens, handle.body.tokens, prompt.tokens])
        assert (sampler.drafting is None) == (speculation is None)
        assert sampler.drafting is None or sampler.drafting.acceptance.take()[1] > 5
        sampler.close()
        return found

    assert_same(*[asyncio.run(turns(each)) for each in (EAGER, None)])


# --- runs and configs ---------------------------------------------------------------------------------------------


def test_a_run_learns_the_same_from_rollouts_with_proposals(tmp_path: Path) -> None:
    """The loss of every update to rounding; and the metrics tell how many tokens were proposed."""
    sampler = {"max_tokens": 20, "temperature": 0.5}
    lines = {
        spec: native({"sampler": sampler | ({"speculation": EAGER.model_dump()} if spec else {})}, tmp_path / str(spec))
        for spec in (False, True)
    }
    for plain, speculative in zip(lines[False], lines[True], strict=True):
        assert speculative["loss"] == pytest.approx(plain["loss"], rel=1e-3)
        assert speculative["tokens"] == plain["tokens"]
        assert "sampler/accepted" not in plain
    told = [line for line in lines[True] if "sampler/accepted" in line]
    assert told and all(line["sampler/drafted"] > 0 and 0 <= line["sampler/accepted"] <= 1 for line in told)


def test_a_student_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path)
    config = parse({"student": str(tmp_path), "teachers": {"main": {"model": "builtin:teacher"}}})
    check_speculation(config, Facts(config))
    on = config.model_copy(update={"sampler": config.sampler.model_copy(update={"speculation": EAGER})})
    with pytest.raises(ConfigError) as refused:
        check_speculation(on, Facts(on))
    assert str(refused.value) == (
        f"sampler.speculation: {tmp_path} has recurrent layers, whose states cannot forget a proposed token that is "
        "not accepted: drop it"
    )


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (
            {"max_tokens": 2, "speculation": {}},
            "sampler.speculation proposes tokens between the first and the last of a response, and "
            "sampler.max_tokens = 2 leaves none: drop it",
        ),
        (
            {"engine": "vllm", "speculation": {}},
            "sampler.speculation: vLLM speculates in its own way, and its log-probs are not proven: write "
            'sampler.engine = "native", or drop it',
        ),
        (
            {"engine": "vllm", "engine_args": {"speculative_config": {"method": "ngram"}}},
            "sampler.engine_args.speculative_config cannot be set: on a CPU vLLM returns wrong log-probs with it, and "
            'on GPUs they are not proven; drop it, or write sampler.engine = "native" with [sampler.speculation]',
        ),
    ],
    ids=["nothing to propose", "in vLLM", "by an argument of vLLM"],
)
def test_settings_under_which_it_does_nothing_or_harm_are_refused(sampler: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}, "sampler": sampler})
    assert str(refused.value) == f"config: {why}"
