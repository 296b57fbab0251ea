"""vLLM's sampler on the real engine, against full forward passes: the laws of the native one. One engine for the file.

`make test-vllm` runs this in an environment of its own; without vLLM it is not collected.
"""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from slipstream.engines.vllm.core import Settings
from slipstream.engines.vllm.sampler import VllmSampler, support_of
from slipstream.engines.weights import export_weights, fingerprint
from slipstream.errors import ConfigError, EngineError, ModelError, NonFiniteError, WorkerDied
from slipstream.protocols import Mode, Sampling
from slipstream.records import Handle, Rollout, unfinished
from support.engines import vllm_sampler
from support.tiny_models import EOS, SHAPE, VOCAB, make_model, make_prompts
from support.toy_episodes import World
from support.vllm_calls import assert_exact, full_forward, generate, grown, replaced

DRAWS, CONTEXT = 8, SHAPE["max_position_embeddings"]
LONG = Sampling(max_tokens=100, group=2, draws=3)


def make(seed: int) -> PreTrainedModel:
    """The tiny Qwen3 with heads as wide as vLLM's attention on CPUs has them at least."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 32}, tie_word_embeddings=True)).eval()


MODELS = [make(seed) for seed in range(3)]
WEIGHTS = [export_weights(model, "float32", version=v) for v, model in enumerate(MODELS)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    path = tmp_path_factory.mktemp("tiny")
    MODELS[0].save_pretrained(path)
    sampler = vllm_sampler(Settings(str(path), "float32", 16), stop_ids={EOS}, draws=DRAWS)
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.fixture
def sampler(engine: VllmSampler) -> VllmSampler:
    """With the weights of the first model, as version 0, and the usual end of a response."""
    engine.stop_ids = [EOS]
    asyncio.run(engine.publish(WEIGHTS[0], "keep"))
    return engine


KEPT = [
    Sampling(max_tokens=40, group=2, draws=3, keep_mask=True, top_k=5),
    Sampling(max_tokens=40, group=2, draws=3, keep_mask=True, top_k=5, top_p=0.7, temperature=0.9),
    Sampling(max_tokens=40, group=2, draws=3, keep_mask=True, top_k=5, top_p=0.9, min_p=0.05, temperature=1.5),
]


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    path = tmp_path_factory.mktemp("tiny")
    MODELS[0].save_pretrained(path)
    sampler = vllm_sampler(Settings(str(path), "float32", 16), stop_ids={EOS}, draws=3, top_k=5)
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.mark.parametrize("sampling", KEPT, ids=str)
def test_the_sampling_support_is_that_of_a_full_forward(keeping: VllmSampler, sampling: Sampling) -> None:
    """Beside requests without it, whose draws stay exact; and the support is what the log-probs are normalised over."""
    whole = Sampling(max_tokens=40, group=2, draws=3)
    prompts = make_prompts(6)
    found = generate(keeping, prompts, *[sampling if i % 2 else whole for i in range(6)])
    sizes = set[int]()
    for i, rollout in enumerate(found):
        own = sampling if i // 2 % 2 else whole
        assert_exact(MODELS[:1], rollout, own)
        assert (rollout.kept is None) == (own is whole)
        if rollout.kept is not None:
            expected = [row.isfinite().nonzero()[:, 0].tolist() for row in full_forward(MODELS[0], rollout, own)]
            assert [row.tolist() for row in rollout.kept.rows()] == expected
            sizes |= {len(row) for row in expected}
    assert max(sizes) <= 5
    assert len(sizes) > 1 or sampling.top_p == 1


def test_speculation_is_refused_because_its_log_probs_are_wrong(tmp_path: Path) -> None:
    """Once they are right, this fails, and `config/engines.py` need not refuse the argument any longer."""
    MODELS[0].save_pretrained(tmp_path)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    settings = Settings(str(tmp_path), "float32", 16, {"speculative_config": ngram, "enforce_eager": True})
    sampler, sampling = vllm_sampler(settings, stop_ids={EOS}), Sampling(max_tokens=60, group=4)
    try:
        with pytest.raises((NonFiniteError, AssertionError)):
            for rollout in generate(sampler, make_prompts(6), sampling):
                assert_exact(MODELS[:1], rollout, sampling)
    finally:
        sampler.close()


def test_a_request_with_another_support_than_at_the_start_is_refused(keeping: VllmSampler) -> None:
    with pytest.raises(EngineError, match=r"^Sampling.keep_mask needs 3 draws and top_k = 5, as at the start$"):
        generate(keeping, make_prompts(1), replace(KEPT[0], top_k=6))


def test_ids_that_were_not_returned_are_never_left_out_in_silence() -> None:
    prompt, ids = make_prompts(1)[0], np.array([[4, 2, 7], [1, 3, 5]], np.int32)
    inside = np.array([[True, True, False], [True, False, False]])
    found = support_of(prompt, ids, inside, VOCAB)
    assert [row.tolist() for row in found.rows()] == [[2, 4], [1]]
    inside[1] = True
    assert support_of(prompt, ids, inside, 3).sizes.tolist() == [2, 3], "the whole vocabulary was returned"
    with pytest.raises(
        EngineError, match=r"^prompt p0: more than 64 ids have the log-prob of the last of sampler.top_k"
    ):
        support_of(prompt, ids, inside, VOCAB)


def test_an_engine_process_that_hangs_behind_a_live_host_is_found_and_killed(tmp_path: Path) -> None:
    MODELS[0].save_pretrained(tmp_path)
    sampler = vllm_sampler(Settings(str(tmp_path), "float32", 4, heartbeat=3.0), stop_ids={0}, draws=1)
    (process,) = sampler.core.llm.engine_core.resources.engine_manager.processes

    async def main() -> None:
        calls = [asyncio.create_task(sampler.generate(prompt, Sampling(max_tokens=100))) for prompt in make_prompts(3)]
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGSTOP)
        for found in await asyncio.gather(*calls, return_exceptions=True):
            assert type(found) is WorkerDied
            assert str(found) == "vLLM's engine process has ended: it has not answered for 3 s (runtime.heartbeat)"

    try:
        asyncio.run(main())
        assert not process.is_alive()
    finally:
        sampler.close()


# --- what is drawn ---------------------------------------------------------------------------------------------------


def test_logp_equals_a_full_forward_whatever_is_asked_for(sampler: VllmSampler) -> None:
    prompts = make_prompts(12)
    samplings = [
        Sampling(
            max_tokens=5 + 3 * i,
            group=1 + i % 3,
            draws=1 + i % 4,
            temperature=0.7 if i % 2 else 1.0,
            top_p=0.9 if i % 3 == 0 else 1.0,
            top_k=5 if i % 4 == 1 else 0,
            min_p=0.05 if i % 5 == 2 else 0.0,
        )
        for i in range(12)
    ]
    rollouts = generate(sampler, prompts, *samplings)
    assert len(rollouts) == sum(sampling.group for sampling in samplings)
    for rollout in rollouts:
        sampling = samplings[rollout.prompt.number]
        assert rollout.actions.shape == (len(rollout.tokens), sampling.draws)
        assert set(rollout.versions) == {0}
        assert_exact(MODELS, rollout, sampling)
    assert {rollout.finish for rollout in rollouts} == {"eos", "length"}
    for rollout in rollouts:
        assert (rollout.finish == "eos") == (rollout.tokens[-1] == EOS) and EOS not in rollout.tokens[:-1]
        assert rollout.finish == "eos" or len(rollout.tokens) == samplings[rollout.prompt.number].max_tokens


@pytest.mark.parametrize(
    "truncation", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_p": 0.7}, {"top_k": 4}, {"min_p": 0.1}]
)
def test_all_draws_have_the_probabilities_of_the_model(sampler: VllmSampler, truncation: dict[str, Any]) -> None:
    """Emitted tokens and the others apart, against the exact distribution; and none knows of another."""
    prompt, sampling = make_prompts(1)[0], Sampling(max_tokens=1, group=600, draws=DRAWS, **truncation)
    rollouts = generate(sampler, [prompt], sampling)
    p_V = full_forward(MODELS[0], rollouts[0], sampling).exp()[0].double().numpy()
    p_V /= p_V.sum()
    actions_NM = np.concatenate([rollout.actions for rollout in rollouts])
    assert (p_V[actions_NM] > 0).all(), "nothing is drawn that was cut"
    assert_fits(actions_NM[:, 0], p_V)
    assert_fits(actions_NM[:, 1:].ravel(), p_V)
    same = (p_V**2).sum()
    for column in range(1, DRAWS):
        for other in range(column):
            hits = (actions_NM[:, column] == actions_NM[:, other]).mean()
            assert abs(hits - same) < 5 * np.sqrt(same * (1 - same) / 600)


def assert_fits(drawn_N: np.ndarray[Any, Any], p_V: np.ndarray[Any, Any]) -> None:
    n, counts = len(drawn_N), np.bincount(drawn_N, minlength=VOCAB)
    common = p_V * n >= 5
    chi2 = ((counts - n * p_V) ** 2 / (n * p_V + 1e-300))[common].sum()
    assert chi2 < common.sum() + 4 * np.sqrt(2 * common.sum())


def test_tokens_depend_on_nothing_but_their_seed(sampler: VllmSampler) -> None:
    """Not on neighbours, not on the number of draws; and the first draws are the same, however many there are."""
    prompts, sampling = make_prompts(12), Sampling(max_tokens=20, group=2)
    crowd = generate(sampler, prompts, sampling)
    for rollout in crowd[::5]:
        for draws in (1, 4, DRAWS):
            group = generate(sampler, [rollout.prompt], replace(sampling, draws=draws))
            assert group[rollout.index].tokens.tolist() == rollout.tokens.tolist()
    few, many = (generate(sampler, prompts[:3], replace(sampling, draws=draws)) for draws in (4, DRAWS))
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions[:, :4])


def test_members_of_a_group_differ_and_keep_their_order(sampler: VllmSampler) -> None:
    group = generate(sampler, make_prompts(1), Sampling(max_tokens=20, group=24))
    assert [rollout.index for rollout in group] == list(range(24)), "more than run at a time"
    assert len({tuple(rollout.tokens) for rollout in group}) > 20


def test_greedy_follows_the_most_likely_token(sampler: VllmSampler) -> None:
    greedy = Sampling(max_tokens=10, temperature=0, draws=2)
    for rollout in generate(sampler, make_prompts(4), greedy, greedy, LONG, LONG)[:2]:
        best = full_forward(MODELS[0], rollout, Sampling(max_tokens=1)).argmax(-1)
        assert rollout.tokens.tolist() == best.tolist()
        assert (rollout.action_logp == 0).all() and (rollout.actions == rollout.tokens[:, None]).all()


def test_a_response_as_long_as_the_context(sampler: VllmSampler) -> None:
    sampler.stop_ids = []
    prompt = make_prompts(1)[0]
    (rollout,) = generate(sampler, [prompt], Sampling(max_tokens=CONTEXT - len(prompt.tokens)))
    assert len(rollout.tokens) == CONTEXT - len(prompt.tokens) and rollout.finish == "length"
    assert_exact(MODELS, rollout, Sampling(max_tokens=1))


def test_a_response_of_several_calls_keeps_its_index_and_is_the_same_each_time(sampler: VllmSampler) -> None:
    """Each call draws from a stream of its own: of its member, from where it begins. Parking it changes nothing."""
    (prompt,) = make_prompts(1)
    sampler.stop_ids = []
    sampling = Sampling(max_tokens=24, draws=3)
    group = generate(sampler, [prompt], replace(sampling, group=3))
    found = dict[tuple[int, int], list[int]]()
    for first in range(3):
        for offset in (0, 5):
            tokens = np.concatenate([prompt.tokens, group[first].tokens[:offset]])
            asked = replace(prompt, tokens=tokens, offset=offset, first=first)
            one, again = (generate(sampler, [asked], replace(sampling, park=park))[0] for park in (False, True))
            assert one.index == again.index == first and one.tokens.tolist() == again.tokens.tolist()
            assert_exact(MODELS, one, sampling)
            found[first, offset] = one.tokens.tolist()
        assert found[first, 0] == group[first].tokens.tolist(), "alone, or with its group"
    assert len(set(map(tuple, found.values()))) == len(found)
    shifted = replace(prompt, offset=5)
    assert generate(sampler, [shifted], sampling)[0].tokens.tolist() != found[0, 0], "not the same numbers again"


# --- publishing ------------------------------------------------------------------------------------------------------


def test_episodes_are_what_full_passes_over_them_say_whenever_weights_change(sampler: VllmSampler) -> None:
    episodes, asked = World(turns=3).sampler(sampler, eos=EOS), replace(LONG, max_tokens=40, group=3)

    async def work() -> list[Handle]:
        calls = [asyncio.create_task(episodes.generate(prompt, asked)) for prompt in make_prompts(3)]
        await grown(sampler, 2)
        await episodes.publish(WEIGHTS[1], "keep")
        return [handle for call in calls for handle in await call]

    found = asyncio.run(work())
    assert {version for handle in found for version, _ in handle.header.versions} == {0, 1}
    for handle in found:
        assert handle.header.finish == "eos" and handle.header.outcome["turns"] == 3
        assert_exact(MODELS, handle.body, asked)


def publish_into(
    sampler: VllmSampler, versions: Sequence[int], mode: Mode, *, tokens: int = 20, prompts: int = 8
) -> tuple[list[Rollout], list[Rollout], int]:
    """Requests, then weights whenever one has so many tokens more; the same without weights; how much was thrown."""
    sampler.stop_ids = []
    asked = make_prompts(prompts)
    untouched = generate(sampler, asked, LONG)

    async def work() -> tuple[list[Rollout], int]:
        running = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in asked]
        thrown = 0
        for number, version in enumerate(versions, 1):
            await grown(sampler, number * tokens)
            loaded = await sampler.publish(WEIGHTS[version], mode)
            assert loaded.fingerprint == fingerprint(MODELS[version], "float32")
            assert loaded.wait > 0 and loaded.load > 0
            thrown += loaded.thrown
        return [handle.body for group in await asyncio.gather(*running) for handle in group], thrown

    rollouts, thrown = asyncio.run(work())
    for rollout in rollouts:
        assert_exact(MODELS, rollout, LONG)
    return rollouts, untouched, thrown


@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_keep_goes_on_under_the_new_weights_at_one_token(sampler: VllmSampler, tokens: int) -> None:
    """Every token has the version that drew it: its log-probs are those of that version's weights and no other's."""
    rollouts, untouched, thrown = publish_into(sampler, [1, 2], "keep", tokens=tokens)
    assert thrown == 0
    changed = 0
    for rollout, before in zip(rollouts, untouched, strict=True):
        assert (np.diff(rollout.versions) >= 0).all() and len(rollout.tokens) == LONG.max_tokens
        kept = int((rollout.versions == 0).sum())
        np.testing.assert_array_equal(rollout.tokens[:kept], before.tokens[:kept])
        changed += len(set(rollout.versions)) > 1
    assert changed >= 8, "the publishes came in the middle"


def test_drain_finishes_what_runs_under_the_old_weights(sampler: VllmSampler) -> None:
    rollouts, untouched, thrown = publish_into(sampler, [1], "drain", prompts=16)
    assert thrown == 0 and {tuple(set(rollout.versions)) for rollout in rollouts} == {(0,), (1,)}
    for rollout, before in zip(rollouts, untouched, strict=True):
        if set(rollout.versions) == {0}:
            np.testing.assert_array_equal(rollout.tokens, before.tokens)


def test_restart_gives_what_a_new_sampler_with_the_new_weights_gives(sampler: VllmSampler) -> None:
    rollouts, untouched, thrown = publish_into(sampler, [1], "restart", prompts=16)
    fresh = generate(sampler, make_prompts(16), LONG)
    again = 0
    for rollout, before, expected in zip(rollouts, untouched, fresh, strict=True):
        old = set(rollout.versions) == {0}
        assert old or set(rollout.versions) == {1}
        again += not old
        np.testing.assert_array_equal(rollout.tokens, (before if old else expected).tokens)
    assert again > 0 and 0 < thrown < again * LONG.max_tokens


def test_what_runs_has_the_fingerprint_of_what_was_learned_and_a_load_that_was_skipped_has_not(
    sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for version in (1, 2, 0):
        loaded = asyncio.run(sampler.publish(WEIGHTS[version], "keep"))
        assert loaded.fingerprint == fingerprint(MODELS[version], "float32")
    # negative zeros, which come back as zeros where weights are packed
    odd = make(0)
    with torch.no_grad():
        odd.model.layers[0].mlp.down_proj.weight[0, 0] = -0.0
    loaded = asyncio.run(sampler.publish(export_weights(odd, "float32", version=3), "keep"))
    assert loaded.fingerprint == fingerprint(odd, "float32")

    # one tensor of the last layer stays what it was
    stale = WEIGHTS[1].body.copy()
    (spec,) = [s for s in WEIGHTS[1].manifest if s.name == "model.layers.1.mlp.down_proj.weight"]
    at = slice(spec.offset, spec.offset + spec.nbytes)
    stale[at] = WEIGHTS[0].body[at]
    with replaced(sampler, monkeypatch, replace(WEIGHTS[1], body=stale), tmp_path):
        loaded = asyncio.run(sampler.publish(replace(WEIGHTS[1], version=4), "keep"))
    assert loaded.fingerprint != fingerprint(MODELS[1], "float32")
    assert asyncio.run(sampler.publish(replace(WEIGHTS[1], version=5), "keep")).fingerprint == fingerprint(
        MODELS[1], "float32"
    )


def test_the_tied_head_and_the_embeddings_are_new_too(sampler: VllmSampler) -> None:
    """Fingerprints are of projections only: here nothing else changes but what they do not see."""
    other = make(0)
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(MODELS[1].model.embed_tokens.weight)
        other.model.norm.weight.mul_(1.3)
        other.model.layers[1].self_attn.q_norm.weight.mul_(0.7)
    asyncio.run(sampler.publish(export_weights(other, "float32"), "keep"))
    sampling = Sampling(max_tokens=12, draws=4)
    for rollout in generate(sampler, make_prompts(6), sampling):
        expected = full_forward(other, rollout, sampling).gather(1, torch.from_numpy(rollout.actions).long())
        np.testing.assert_allclose(rollout.action_logp, expected.numpy(), rtol=0, atol=5e-5)


def test_publishes_take_turns(sampler: VllmSampler) -> None:
    async def work() -> list[str]:
        running = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in make_prompts(4)]
        modes: list[Mode] = ["drain", "keep", "restart", "keep"]
        publishes = [sampler.publish(WEIGHTS[v % 3], mode) for v, mode in enumerate(modes, 1)]
        loaded = await asyncio.gather(*publishes)
        await asyncio.gather(*running)
        return [one.fingerprint for one in loaded]

    assert asyncio.run(work()) == [fingerprint(MODELS[v % 3], "float32") for v in (1, 2, 3, 4)]


def test_a_publish_whose_caller_is_gone_holds_nothing_up(sampler: VllmSampler) -> None:
    sampler.stop_ids = []

    async def work() -> list[Rollout]:
        running = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in make_prompts(4)]
        await grown(sampler, 3)
        draining = asyncio.create_task(sampler.publish(WEIGHTS[1], "drain"))
        await asyncio.sleep(0.02)
        draining.cancel()
        later = await sampler.generate(make_prompts(5)[4], LONG)
        return [handle.body for group in [*await asyncio.gather(*running), later] for handle in group]

    for rollout in asyncio.run(asyncio.wait_for(work(), 60)):
        assert_exact(MODELS, rollout, LONG)


# --- handing over ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_what_is_handed_over_goes_on_where_it_stands(sampler: VllmSampler, tokens: int) -> None:
    """Old tokens stay as they are, with their versions; new ones are of the weights that draw them, and their own."""
    sampler.stop_ids = []
    prompts = make_prompts(4)

    async def work() -> tuple[list[list[Handle]], list[list[Handle]]]:
        running = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in prompts]
        await asyncio.sleep(0)
        if tokens:
            await grown(sampler, tokens)
        await sampler.release([prompt.number for prompt in prompts[1:]])
        begun = await asyncio.gather(*running[1:])
        assert [unfinished(group) for group in begun] == [True] * 3 and not running[0].done()
        await sampler.publish(WEIGHTS[1], "keep")
        calls = [sampler.generate(prompt, LONG, group) for prompt, group in zip(prompts[1:], begun, strict=True)]
        found = await asyncio.gather(*calls)
        again = await sampler.generate(prompts[1], LONG, found[0])
        assert [handle.body for handle in again] == [handle.body for handle in found[0]]
        await running[0]
        return begun, found

    begun, found = asyncio.run(asyncio.wait_for(work(), 60))
    assert not sampler.open and not sampler.core.llm.get_num_unfinished_requests()
    drawn = list[int]()
    for before, after in zip(begun, found, strict=True):
        assert len(after) == LONG.group and not unfinished(after)
        parts = {handle.header.index: handle.body for handle in before}
        for handle in after:
            rollout, part = handle.body, parts.get(handle.header.index)
            assert len(rollout.tokens) == LONG.max_tokens and rollout.finish == "length"
            at = len(part.tokens) if part else 0
            assert rollout.versions.tolist() == [0] * at + [1] * (LONG.max_tokens - at)
            drawn.append(at)
            if part:
                np.testing.assert_array_equal(rollout.actions[:at], part.actions)
                np.testing.assert_array_equal(rollout.action_logp[:at], part.action_logp)
                assert rollout.tokens[at : 2 * at].tolist() != part.tokens.tolist() or at < 3, (
                    "random numbers of its own"
                )
            assert_exact(MODELS, rollout, LONG)
    assert max(drawn) >= tokens - 1


# --- failures --------------------------------------------------------------------------------------------------------


def test_cancelling_a_call_aborts_its_requests(sampler: VllmSampler) -> None:
    sampler.stop_ids = []

    async def work() -> None:
        crowd = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in make_prompts(40)]
        await grown(sampler, 3)
        for call in crowd:
            call.cancel()
        await asyncio.wait(crowd)
        assert all(call.cancelled() for call in crowd)
        until = time.monotonic() + 10
        while sampler.core.llm.get_num_unfinished_requests() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert not sampler.core.llm.get_num_unfinished_requests() and not sampler.open
        await sampler.generate(make_prompts(1)[0], LONG)

    asyncio.run(work())


def test_what_cannot_be_served_is_refused_and_the_engine_lives_on(sampler: VllmSampler) -> None:
    prompt = make_prompts(1)[0]
    refused: list[tuple[Coroutine[Any, Any, object], type[Exception], str]] = [
        (sampler.generate(prompt, Sampling(max_tokens=CONTEXT)), ModelError, "prompt p0 .* context of 128"),
        (sampler.generate(prompt, Sampling(max_tokens=3, draws=DRAWS + 1)), EngineError, "9 draws .* started for 8"),
        (sampler.generate(prompt, Sampling(max_tokens=3, temperature=1e-3)), EngineError, "at least 0.01"),
        (
            sampler.publish(export_weights(make_model("llama"), "float32", version=1), "keep"),
            ModelError,
            "weights do not fit the model",
        ),
    ]
    for call, kind, message in refused:
        with pytest.raises(kind, match=message):
            asyncio.run(asyncio.wait_for(call, 20))
    assert len(generate(sampler, [prompt], Sampling(max_tokens=3))) == 1


def test_a_student_that_has_diverged_is_told_as_such(sampler: VllmSampler) -> None:
    broken = make(0)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    asyncio.run(sampler.publish(export_weights(broken, "float32", version=1), "keep"))
    for draws in (1, DRAWS):
        with pytest.raises(NonFiniteError, match="has training diverged"):
            generate(sampler, make_prompts(2), Sampling(max_tokens=3, draws=draws))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"gpu_memory_utilisation": 0.5}, "not an argument of vLLM's engine; did you mean 'gpu_memory_utilization'"),
        ({"max_model_len": 10_000}, "vLLM refuses .*10000"),
    ],
)
def test_arguments_that_are_wrong(engine: VllmSampler, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm_sampler(Settings(engine.settings.model, "float32", 4, args), stop_ids={EOS})


def test_weights_that_come_in_halves_are_the_end(
    sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last test: nothing is drawn any more, and whoever waits is told why."""
    sampler.stop_ids = []
    half = replace(WEIGHTS[1], manifest=WEIGHTS[1].manifest[:-2])

    async def work() -> list[object]:
        running = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in make_prompts(4)]
        await grown(sampler, 3)
        with replaced(sampler, monkeypatch, half, tmp_path):
            failed = (await asyncio.gather(sampler.publish(WEIGHTS[1], "keep"), return_exceptions=True))[0]
        after = sampler.generate(make_prompts(1)[0], LONG)
        return [failed, *await asyncio.gather(*running, after, return_exceptions=True)]

    failures = asyncio.run(asyncio.wait_for(work(), 60))
    assert len(failures) == 6 and all(isinstance(failure, EngineError) for failure in failures)
    assert "could not load version 1" in str(failures[0])
