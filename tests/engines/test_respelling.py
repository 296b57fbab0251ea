"""A teacher with another tokenizer: its scores, what a loss makes of them, and what is left out.

The student writes letters. Teachers write blocks of two letters, or merge a and b to one token wherever they can.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.config.losses import GOLD, Cache, CommonTopK, GOLDMerged, LossSpec
from slipstream.data.spelling import Spelling, respell, shared_layout
from slipstream.data.teacher_context import TemplateContext, context_of
from slipstream.engines.http.client import Endpoint
from slipstream.engines.native.model import split
from slipstream.engines.record_files import read_groups, write_groups
from slipstream.engines.respelling import RespellingSampler, RespellingScorer, shared_logps, trained_spans
from slipstream.engines.score_checks import rms_difference
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.metrics import spelling_metrics, trust_metrics
from slipstream.objective.distillation import Distillation, TeacherHead
from slipstream.protocols import Respelling, Sampling
from slipstream.records import (
    ABSENT,
    NOT_DRAWN,
    OPEN,
    TOO_LONG,
    UNPAIRED,
    UNWRITTEN,
    Attempts,
    Handle,
    Prompt,
    Rollout,
    Scored,
    header_of,
    one_turn,
)
from support.engines import http_scorer, native_scorer
from support.fake_endpoint import FakeEndpoint

END = "<end>"
LENGTH = 4


def fast(backend: Tokenizer) -> Any:
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)


def letters(alphabet: str = "ab") -> Any:
    return fast(Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])))


def blocks() -> Any:
    backend = Tokenizer(models.WordLevel({a + b: index for index, (a, b) in enumerate(product("ab", "ab"))}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(".."), behavior="isolated")
    return fast(backend)


def merging() -> Any:
    return fast(Tokenizer(models.BPE({"b": 0, "ab": 1, "a": 2}, [("a", "b")])))


def rollout_of(tokens: list[int], logp: list[float] | None = None, **changes: Any) -> Rollout:
    prompt = Prompt(id="p", number=0, tokens=np.array([0, 1], np.int32), respelled=np.array([2, 0], np.int32))
    logp_N = np.array(logp if logp is not None else [-0.5] * len(tokens), np.float32)
    return one_turn(
        prompt,
        0,
        actions=np.array(tokens, np.int32)[:, None],
        action_logp=logp_N[:, None],
        versions=np.zeros(len(tokens), np.int32),
        finish="eos",
        **changes,
    )


def scored_by(logq_of: Callable[[list[int]], list[float]], rollout: Rollout, student: Any, teacher: Any) -> Scored:
    """Return the record that the scorer makes, for a teacher with these log-probs of a whole spelling."""
    mine, theirs = Spelling(student), Spelling(teacher)
    found = respell(rollout.tokens.tolist(), mine, theirs, {student.eos_token_id: teacher.eos_token_id})
    spans_N = trained_spans(found.student_spans, rollout)
    logq_N = shared_logps(np.array(logq_of(found.tokens.tolist())), found.teacher_spans, spans_N)
    return Scored(
        rollout=rollout, teacher="t", teacher_logp=logq_N, teacher_action_logp=logq_N[:, None], byte_spans=spans_N
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_span_is_shared_equally_and_compared_as_a_whole() -> None:
    """The student writes a b b <end>, the teacher ab b <end>."""
    rollout = rollout_of([0, 1, 1, 2], [-1.0, -2.0, -0.5, -0.25])
    scored = scored_by(lambda ids: [-4.0, -1.0, -0.125], rollout, letters(), merging())
    assert scored.teacher_logp is not None and scored.compared_logp is not None and scored.byte_spans is not None
    assert scored.byte_spans.tolist() == [0, 0, 1, 2]
    assert scored.teacher_logp.tolist() == [-2, -2, -1, -0.125]
    # of the span: −4 − (−2) = −2 for a, −4 − (−1) = −3 for b; others are single tokens
    assert scored.compared_logp[:, 0].tolist() == [-2, -3, -1, -0.125]
    assert (scored.compared_logp[:, 0] - rollout.logp).tolist() == [-1, -1, -0.5, 0.125], "the log-ratio of each span"


def test_left_out_tokens_have_no_ratio() -> None:
    rollout = rollout_of([0, 1, 0, 1], [-1.0, -2.0, -0.5, -0.25])
    scored = scored_by(lambda ids: [-4.0, -1.0], rollout, letters(), merging())
    assert scored.byte_spans is not None and scored.compared_logp is not None
    assert scored.byte_spans.tolist() == [0, 0, OPEN, OPEN], "the response was cut, and its last span is open"
    assert scored.scored_tokens.tolist() == [True, True, False, False]
    assert (scored.compared_logp[:, 0] - rollout.logp).tolist() == [-1, -1, 0, 0]


def test_a_span_of_trained_and_other_tokens_is_left_out() -> None:
    rollout = rollout_of([0, 1, 1, 2])
    mask = np.array([False, True, True, True])
    spans_T = np.array([0, 0, 1, 2], np.int32)
    assert trained_spans(spans_T, rollout).tolist() == [0, 0, 1, 2]
    object.__setattr__(rollout, "loss_mask", mask)
    assert trained_spans(spans_T, rollout).tolist() == [OPEN, 1, 2]


def test_tokens_of_equal_bytes_or_roles_are_shared() -> None:
    """The student has a b c <end>, the teacher b ab a <end> and two more embeddings."""
    layout = shared_layout(Spelling(letters("abc")), Spelling(merging()), {3: 3}, sizes=(5, 6))
    assert layout.tolist() == [2, 0, -1, 3, -1, 1, 4, 5]


# --- the definition, by enumeration -----------------------------------------------------------------------------------


def table(seed: int, choices: int, depth: int) -> dict[tuple[int, ...], Tensor]:
    """Return logits of a choice after each of the sequences of fewer choices."""
    torch.manual_seed(seed)
    states = [state for n in range(depth) for state in product(range(choices), repeat=n)]
    return {state: torch.randn(choices, dtype=torch.float64).requires_grad_() for state in states}


def logps(logits: Mapping[tuple[int, ...], Tensor], ids: tuple[int, ...]) -> Tensor:
    return torch.stack([logits[ids[:n]].log_softmax(-1)[each] for n, each in enumerate(ids)])


def test_the_mean_gradient_is_that_of_the_kl_of_spans() -> None:
    """Blocks end at every second letter, so the mean gradient is exactly Σ p(context) ∇KL(p ‖ q of a block)."""
    student, teacher = letters(), blocks()
    mine, theirs = table(0, 2, LENGTH), table(1, 4, LENGTH // 2)
    estimate = torch.zeros((), dtype=torch.float64)
    for ids in product(range(2), repeat=LENGTH):
        logp_T = logps(mine, ids)
        rollout = rollout_of([*ids, 2], [*logp_T.tolist(), 0.0])
        scored = scored_by(lambda own: [*logps(theirs, tuple(own[:-1])).tolist(), 0.0], rollout, student, teacher)
        logq_N1 = torch.from_numpy(scored.compared_logp)[:LENGTH].double()
        loss_N, _ = mc_reverse_kl(logp_T[:, None], logp_T.detach()[:, None], logq_N1)
        estimate = estimate + logp_T.detach().sum().exp() * loss_N.sum()
    exact = torch.zeros((), dtype=torch.float64)
    for start in range(0, LENGTH, 2):
        for context in product(range(2), repeat=start):
            weight = logps(mine, context).sum().exp().detach() if context else 1.0
            before = tuple(2 * a + b for a, b in zip(context[::2], context[1::2], strict=True))
            logq_X = theirs[before].log_softmax(-1).detach()
            logp_X = torch.stack([logps(mine, (*context, *both))[start:].sum() for both in product(range(2), repeat=2)])
            exact = exact + weight * (logp_X.exp() * (logp_X - logq_X)).sum()
    expected = torch.autograd.grad(exact, list(mine.values()))
    found = torch.autograd.grad(estimate, list(mine.values()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert max(float(each.abs().max()) for each in expected) > 0.05


def test_the_canonical_spelling_is_one_of_several() -> None:
    """The log-prob of the canonical spelling is at most that of the bytes, which sums over all spellings.

    Each ab can be written as one token (0.35) or as two (0.25 · 0.4 = 0.1), so a text with k of them has the share
    (0.35 / 0.45)^k = (7/9)^k. Of the 16 texts of four letters 5 have none, 10 have one, and one has two.
    """
    spelling, p = Spelling(merging()), {b"b": 0.4, b"ab": 0.35, b"a": 0.25}
    shares = []
    for each in product("ab", repeat=LENGTH):
        text = "".join(each).encode()
        canonical = np.prod([p[spelling.bytes_of[index]] for index in spelling.spell(text)[0]])
        ways = [1.0]  # probability of all spellings of the first letters
        for stop in range(1, LENGTH + 1):
            ends = [token for token in p if text[:stop].endswith(token)]
            ways.append(sum(p[token] * ways[stop - len(token)] for token in ends))
        assert canonical <= ways[-1] + 1e-12
        shares.append(canonical / ways[-1])
    assert np.mean(shares) == pytest.approx((5 + 10 * 7 / 9 + (7 / 9) ** 2) / 16), "0.836"


def test_a_beginning_is_spelled_in_another_way_once_more_text_follows() -> None:
    """Only the last span of a beginning can change: where it does, the following letter is merged into it."""
    spelling, changed, cases = Spelling(merging()), 0, 0
    for each in product("ab", repeat=LENGTH):
        text = "".join(each).encode()
        ends = []
        for ids, _ in (spelling.spell(text[:stop]) for stop in range(1, LENGTH + 1)):
            ends.append({len(spelling.joined(ids[: n + 1])) for n in range(len(ids))})
        for before, after in pairwise(ends):
            last = max(before)
            assert before - {last} <= after
            cases, changed = cases + 1, changed + (last not in after)
    assert (changed, cases) == (12, 48), "a b after an a, a quarter of all cases"


# --- the scorer -------------------------------------------------------------------------------------------------------


def scorer(
    limit: int = 64,
    cache: Cache = "sampled",
    template: str | None = None,
    *,
    pair: tuple[Any, Any] | None = None,
    merges: bool = False,
    k: int = 0,
) -> tuple[RespellingScorer, LlamaForCausalLM]:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=4, initializer_range=0.5, **shape)).eval()
    student, teacher = pair or (letters("abc"), merging())
    respelling = Respelling("merging", 4, {student.eos_token_id: teacher.eos_token_id}, limit)
    context = context_of(template, teacher, max_length=limit)
    assert context is None or isinstance(context, TemplateContext)
    engine = native_scorer(split("tiny", copy.deepcopy(lm)), cache=cache, context=context, k=k)
    spellings, loss = (Spelling(student), Spelling(teacher)), LossSpec(cache=cache, formula="", merges=merges, k=k)
    own = RespellingScorer(engine, "t", *spellings, respelling, loss=loss, context=context)
    return own, lm


def group(*tokens: list[int]) -> list[Handle]:
    rollouts = [rollout_of(each) for each in tokens]
    return [Handle(header_of(each), each) for each in rollouts]


def test_scores_are_those_of_a_forward_pass_over_the_teachers_spelling() -> None:
    engine, lm = scorer()
    (handle,) = asyncio.run(engine.score(group([0, 1, 1, 0, 3])))  # a b b a <end>: ab b a <end>
    with torch.no_grad():
        logq_TV = lm(torch.tensor([[2, 0, 1, 0, 2, 3]])).logits[0].log_softmax(-1)
    logq = [float(logq_TV[place, token]) for place, token in zip(range(1, 5), [1, 0, 2, 3], strict=True)]
    np.testing.assert_allclose(handle.body.teacher_logp, [logq[0] / 2, logq[0] / 2, *logq[1:]], rtol=1e-5)
    assert handle.header.left_out == (0, 0, 0, 0) and handle.header.byte_spans == 4
    assert handle.header.gap == pytest.approx(5 * -0.5 - sum(logq), rel=1e-5)
    engine.close()


def test_what_is_left_out_is_counted_by_its_reason() -> None:
    engine, _ = scorer(limit=4)
    handles = asyncio.run(engine.score(group([0, 1, 1, 0, 3], [0, 1, 1, 1], [1, 2, 1, 3], [2])))
    assert [each.header.left_out for each in handles] == [(0, 0, 2, 0), (0, 0, 1, 0), (0, 3, 0, 0), (0, 1, 0, 0)]
    spans = [each.body.byte_spans.tolist() for each in handles]
    assert spans == [[0, 0, 1, TOO_LONG, TOO_LONG], [0, 0, 1, TOO_LONG], [0, *[UNWRITTEN] * 3], [UNWRITTEN]]
    headers = [each.header for each in handles]
    found = spelling_metrics(headers)
    assert found == pytest.approx(
        {"spelling/open": 0, "spelling/unwritten": 4 / 14, "spelling/too_long": 3 / 14}
        | {"spelling/unpaired": 0, "spelling/span_tokens": 7 / 5}
    )
    assert trust_metrics(headers)["teacher/kl"] == pytest.approx(sum(each.gap for each in headers) / 7)
    engine.close()


@pytest.mark.parametrize(
    ("cache", "merges"), [("sampled", False), ("hidden", False), ("hidden", True), ("teacher_topk", False)]
)
def test_a_spelling_without_a_span_scores_nothing(cache: Cache, merges: bool) -> None:
    """The student merges a and b, the teacher writes letters: ab is a b. The last span is open, or its b too long."""
    for limit, ids, left_out in ((64, [1], (1, 0, 0, 0)), (3, [1, 3], (0, 0, 2, 0))):
        engine, _ = scorer(limit, cache, pair=(merging(), letters("abc")), merges=merges, k=2)
        (handle,) = asyncio.run(engine.score(group(ids)))
        record, header = handle.body, handle.header
        assert header.finish == "eos" and header.left_out == left_out and (header.byte_spans, header.gap) == (0, 0)
        assert not record.teacher_logp.any() and not record.scored_tokens.any()
        assert (record.compared_logp[:, 0] == record.rollout.logp).all()
        assert cache != "hidden" or not record.teacher_hidden.any()
        if cache == "teacher_topk":
            assert (record.teacher_ids == ABSENT).all() and (record.teacher_topk_logp == -np.inf).all()
        assert header.floored == 0
        (again,) = asyncio.run(engine.relabel([handle]))
        assert np.isnan(again.body.supervision_kl).all()
        engine.close()


@pytest.mark.parametrize(("template", "limit"), [("{prompt}bb", 5), ("{prompt}{response}", 5), ("{prompt}{best}", 6)])
def test_a_response_is_cut_to_the_room_beside_a_context(template: str, limit: int) -> None:
    """The context is ab b b; or ab and the response again, so that each has half the room; or ab and b b b."""
    engine, _ = scorer(limit, template=template)
    (handle,) = group([0, 1, 1, 0, 3])  # ab b a <end>
    handle = replace(handle, header=replace(handle.header, attempts=Attempts(best="bbb")))
    (found,) = asyncio.run(engine.score([handle]))
    assert found.body.byte_spans.tolist() == [0, 0, 1, TOO_LONG, TOO_LONG] and found.header.left_out == (0, 0, 2, 0)
    engine.close()


def test_scores_of_another_context_are_compared_span_by_span() -> None:
    """The KL of two outcomes, the span's bytes and all others, by plain numbers; equal contexts move nothing."""
    engine, _ = scorer(template="{prompt}{best}")
    (rolled,) = group([0, 1, 1, 0, 1])  # ab b and the open span ab
    first, second = (rolled.with_header(attempts=Attempts(best=best)) for best in ("b", "bba"))
    (before,) = asyncio.run(engine.score([first]))
    (now,) = asyncio.run(engine.relabel([replace(before, header=second.header)]))
    expected = list[float]()
    for places in ([0, 1], [2]):
        q, p = (float(np.exp(each.body.teacher_logp[places].sum())) for each in (before, now))
        expected += [(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))) / len(places)] * len(places)
    np.testing.assert_allclose(now.body.supervision_kl[:3], expected, rtol=1e-4)
    assert min(expected) > 1e-6 and np.isnan(now.body.supervision_kl[3:]).all()
    assert now.header.moved == pytest.approx(np.mean(expected), rel=1e-4) and now.header.aligned == 3 / 5
    (same,) = asyncio.run(engine.relabel([now]))
    assert same.header.moved == 0 and same.body.teacher_logp.tolist() == now.body.teacher_logp.tolist()
    engine.close()


def test_a_clamp_of_log_probs_leaves_tokens_that_the_teacher_lacks_without_probability() -> None:
    """The student has a b c <end>, the teacher b ab a <end>; without the c's −∞ both would share it, at e⁻²."""
    engine, lm = scorer(cache="hidden")
    (handle,) = asyncio.run(engine.score(group([0, 1, 1, 0, 3])))
    layout = torch.from_numpy(shared_layout(engine.student, engine.teacher, engine.respelling.roles, sizes=(4, 4)))
    assert layout.tolist() == [2, 0, -1, 3, 1]
    heads = {("t", handle.body.teacher_version): TeacherHead(split("tiny", lm).head, layout_X=layout)}
    loss = GOLD(log_prob_min_clamp=-2.0, rest=0.0)
    _, on_rows = Distillation(loss, heads)([handle.body], [], torch.zeros(5, dtype=torch.int64), torch.float64)
    logp_NV = torch.tensor([[-9.0, -9.0, 0.0, -9.0]], dtype=torch.float64).expand(5, 4)
    found_N, _ = on_rows(logp_NV, slice(0, 5))
    with torch.no_grad():
        logq_NW = lm.lm_head(torch.from_numpy(handle.body.teacher_hidden)).double().log_softmax(-1).clamp(min=-2.0)
    logq_NV = logq_NW[:, [2, 0, 3]]
    p, logp, q = np.exp(-2.0), -2.0, logq_NV.exp()
    logm = (0.5 * q + 0.5 * p).log()
    torch.testing.assert_close(
        found_N, (0.5 * q * (logq_NV - logm) + 0.5 * p * (logp - logm)).sum(-1), rtol=1e-5, atol=0
    )
    engine.close()


def test_hidden_states_belong_to_spans_of_one_token_each() -> None:
    engine, lm = scorer(cache="hidden")
    handles = asyncio.run(engine.score(group([0, 1, 1, 0, 3], [2])))  # ab b a <end>, and nothing
    record = handles[0].body
    assert record.byte_spans.tolist() == [UNPAIRED, UNPAIRED, 1, 2, 3] and handles[0].header.left_out == (0, 0, 0, 2)
    assert record.scored_tokens.tolist() == [False, False, True, True, True]
    with torch.no_grad():
        found = lm(torch.tensor([[2, 0, 1, 0, 2, 3]]), output_hidden_states=True)
    hidden_TD, logq_TV = found.hidden_states[-1][0], found.logits[0].log_softmax(-1)
    np.testing.assert_allclose(record.teacher_hidden[2:], hidden_TD[2:5].numpy(), atol=1e-5)
    logq = [float(logq_TV[place, token]) for place, token in zip(range(1, 5), [1, 0, 2, 3], strict=True)]
    assert handles[0].header.gap == pytest.approx(5 * -0.5 - sum(logq), rel=1e-5), "the KL counts all spans"
    assert handles[0].header.compared_tokens == 5
    assert not record.teacher_hidden[:2].any() and not handles[1].body.teacher_hidden.any()
    assert handles[1].body.scored_tokens.tolist() == [False]
    engine.close()


@pytest.mark.parametrize("merging_student", [False, True])
def test_merged_spans_are_compared_as_golds_definition_says(merging_student: bool) -> None:
    """P(y) is that of the first token, times those of the later tokens that were written; here by plain loops.

    The response is a b b a <end>: a student of letters needs five tokens and the teacher four (ab b a <end>), or vice
    versa. Shared are a, b and <end>.
    """
    pair = (merging(), letters("abc")) if merging_student else (letters("abc"), merging())
    mine, theirs = ([1, 0, 2, 3], [0, 1, 1, 0, 3]) if merging_student else ([0, 1, 1, 0, 3], [1, 0, 2, 3])
    spans = [([0], [0, 1]), ([1], [2]), ([2], [3]), ([3], [4])]
    spans = spans if merging_student else [(theirs, mine) for mine, theirs in spans]
    engine, lm = scorer(cache="hidden", pair=pair, merges=True)
    (handle,) = asyncio.run(engine.score(group(mine)))
    layout = torch.from_numpy(shared_layout(engine.student, engine.teacher, engine.respelling.roles, sizes=(4, 4)))
    heads = {("t", 0): TeacherHead(split("tiny", lm).head, layout_X=layout)}
    loss = GOLDMerged(rest=0.7, beta=0.3)
    tokens_N = torch.tensor(mine)
    _, on_rows = Distillation(loss, heads)([handle.body], [], tokens_N, torch.float64)
    p_NV = torch.randn(len(mine), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    found_N, _ = on_rows(p_NV.log(), slice(0, len(mine)))
    with torch.no_grad():
        q_QV = lm(torch.tensor([[2, 0, *theirs]])).logits[0, 1:].double().softmax(-1)
    shared = [(2, 0), (0, 1), (3, 3)] if merging_student else [(0, 2), (1, 0), (3, 3)]
    for ours, others in spans:
        p_V = p_NV[ours[0]] * float(np.exp(-0.5)) ** (len(ours) - 1)  # the sampler recorded −0.5 for each token
        q_V = q_QV[others[0]] * np.prod([float(q_QV[place, theirs[place]]) for place in others[1:]])
        expected = 0.0
        for a, b in shared:
            p, q = float(p_V[a]), float(q_V[b])
            m = 0.3 * q + 0.7 * p
            expected += 0.3 * q * np.log(q / m) + 0.7 * p * np.log(p / m)
        rest = [
            sorted((float(x) for n, x in enumerate(x_V) if n not in used), reverse=True)
            for x_V, used in ((p_V, {a for a, _ in shared}), (q_V, {b for _, b in shared}))
        ]
        expected += 0.7 * sum(abs(a - b) for a, b in zip(*rest, strict=True))
        assert float(found_N[ours[0]]) == pytest.approx(expected, rel=1e-4)
    later = [place for ours, _ in spans for place in ours[1:]]
    assert np.flatnonzero(handle.body.byte_spans == UNPAIRED).tolist() == later
    assert spelling_metrics([handle.header])["spelling/span_tokens"] == len(mine) / 4, "later tokens are in spans"
    assert handle.header.left_out == (0, 0, 0, 0) and handle.header.compared_tokens == len(mine)
    engine.close()


def test_the_gap_of_merged_spans_is_that_of_whole_spans_at_their_first_tokens() -> None:
    """A span of three tokens: −0.5 − 0.125 − 0.125 + 6 = 5.25. One token: −1 + 1.5. The last token is left out."""
    rollout = rollout_of([0, 1, 1, 2, 0], [-0.5, -0.125, -0.125, -1.0, -0.25])
    logq_N = np.array([-2, -2, -2, -1.5, 0], np.float32)
    later_N2 = np.array([[-0.25, -4], *[[0, 0]] * 4], np.float32)
    spans_N = np.array([0, UNPAIRED, UNPAIRED, 1, OPEN], np.int32)
    scored = Scored(rollout=rollout, teacher="t", teacher_logp=logq_N, byte_spans=spans_N, later_logp=later_N2)
    assert scored.compared_logp is not None
    assert (rollout.logp - scored.compared_logp[:, 0]).tolist() == [5.25, 0, 0, 0.5, 0]
    alone = replace(scored, later_logp=None)
    assert alone.compared_logp is not None
    assert (rollout.logp - alone.compared_logp[:, 0]).tolist() == [1.5, 0, 0, 0.5, 0], "unmerged spans stay left out"


def test_the_k_most_likely_shared_tokens_are_compared_and_all_others_are_one_bucket() -> None:
    """The student has a b c <end>, the teacher b ab a <end>: with k = 2 of the three that both have, by plain loops."""
    engine, lm = scorer(cache="hidden")
    (handle,) = asyncio.run(engine.score(group([0, 1, 1, 0, 3])))
    layout = torch.from_numpy(shared_layout(engine.student, engine.teacher, engine.respelling.roles, sizes=(4, 4)))
    heads = {("t", 0): TeacherHead(split("tiny", lm).head, layout_X=layout)}
    p_NV = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    with torch.no_grad():
        q_QV = lm(torch.tensor([[2, 0, 1, 0, 2, 3]])).logits[0, 1:].double().softmax(-1)
    for k, beta in ((2, 0.0), (2, 1.0), (9, 0.0)):  # of k = 9 there are three
        loss = CommonTopK(k=k, beta=beta)
        _, on_rows = Distillation(loss, heads)([handle.body], [], torch.zeros(5, dtype=torch.int64), torch.float64)
        found_N, _ = on_rows(p_NV.log(), slice(0, 5))
        for place, theirs in ((2, 1), (3, 2), (4, 3)):  # ab has no single token of the student
            pairs = [(float(q_QV[theirs, b]), float(p_NV[place, a])) for a, b in ((0, 2), (1, 0), (3, 3))]
            pairs = sorted(pairs, reverse=True)[:k]
            pairs.append((1 - sum(q for q, _ in pairs), 1 - sum(p for _, p in pairs)))
            forward = sum(q * np.log(q / p) for q, p in pairs)
            reverse = sum(p * np.log(p / q) for q, p in pairs)
            assert float(found_N[place]) == pytest.approx(reverse if beta else forward, rel=1e-4)
    engine.close()


@pytest.mark.parametrize(("k", "beta"), [(2, 0.0), (2, 1.0), (4, 0.5)])
def test_the_teachers_top_k_without_what_the_student_lacks_is_compared_and_all_else_is_one_bucket(
    k: int, beta: float
) -> None:
    """The student has a b c <end>, the teacher b ab a <end>: ab is one of the bucket, by plain loops."""
    engine, lm = scorer(cache="teacher_topk", k=k)
    (handle,) = asyncio.run(engine.score(group([0, 1, 1, 0, 3])))
    record, ours = handle.body, {0: 1, 2: 0, 3: 3}
    p_NV = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    loss = CommonTopK(cache="teacher_topk", k=k, beta=beta)
    ids_NM, on_rows = Distillation(loss)([record], [], torch.tensor([0, 1, 1, 0, 3]), torch.float64)
    assert ids_NM is not None
    logp_NM = p_NV.log().gather(1, ids_NM).requires_grad_()
    found_N, metrics = on_rows(logp_NM, slice(0, 5))
    found_N.sum().backward()
    with torch.no_grad():
        q_QV = lm(torch.tensor([[2, 0, 1, 0, 2, 3]])).logits[0, 1:].double().softmax(-1)
    assert record.teacher_ids[:2].tolist() == [[ABSENT] * k] * 2, "ab has no single token of the student"
    for place, theirs in ((2, 1), (3, 2), (4, 3)):
        best = q_QV[theirs].topk(k).indices.tolist()
        assert record.teacher_ids[place].tolist() == [ours.get(each, ABSENT) for each in best]
        pairs = [(float(q_QV[theirs, each]), float(p_NV[place, ours[each]])) for each in best if each in ours]
        q_all, p_all = (sum(each) for each in zip(*pairs, strict=True))
        assert float(metrics["teacher_mass"][place]) == pytest.approx(q_all, rel=1e-4)
        assert float(metrics["student_mass"][place]) == pytest.approx(p_all, rel=1e-4)
        pairs.append((1 - q_all, 1 - p_all))
        mixed = [(q, p, beta * q + (1 - beta) * p) for q, p in pairs]
        expected = {
            0.0: sum(q * np.log(q / p) for q, p in pairs),
            1.0: sum(p * np.log(p / q) for q, p in pairs),
            0.5: sum(beta * q * np.log(q / m) + (1 - beta) * p * np.log(p / m) for q, p, m in mixed),
        }
        assert found_N[place].item() == pytest.approx(expected[beta], rel=1e-4)
    assert logp_NM.grad is not None and logp_NM.grad.isfinite().all()
    engine.close()


def test_of_several_tokens_with_the_same_bytes_one_is_shared() -> None:
    """The student writes a as its byte (2) and as the token a (0), which is the one that the teacher's a stands for."""
    student = fast(Tokenizer(models.BPE({"a": 0, "b": 1, "<0x61>": 2}, [])))
    student.backend_tokenizer.decoder = decoders.ByteFallback()
    engine, _ = scorer(cache="teacher_topk", k=4, pair=(student, merging()))
    (handle,) = asyncio.run(engine.score(group([1, 2, 0, 3])))
    ids = [set(row.tolist()) for row in handle.body.teacher_ids]
    assert ids == [{0, 1, 3, ABSENT}] * 4
    engine.close()


def test_of_several_tokens_of_the_teacher_only_the_written_one_is_the_emitted_one() -> None:
    """The teacher has two tokens for a blank, and writes the second one; the first one is that which both share."""
    backend = Tokenizer(models.BPE({" ": 0, "▁": 1, "b": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    teacher = fast(backend)
    teacher.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    engine, _ = scorer(cache="teacher_topk", k=4, pair=(letters(" b"), teacher))
    (handle,) = asyncio.run(engine.score(group([0, 1, 2])))
    assert sorted(handle.body.teacher_ids[0].tolist()) == [ABSENT, ABSENT, 1, 2]
    assert sorted(handle.body.teacher_ids[1].tolist()) == [ABSENT, 0, 1, 2]
    engine.close()


def test_a_token_without_a_text_is_one_that_the_student_lacks() -> None:
    """The teacher has four tokens with a text, and one embedding more."""
    engine, _ = scorer(cache="teacher_topk", k=4)
    engine.shared_W = engine.shared_W[:3]
    (handle,) = asyncio.run(engine.score(group([0, 1, 1, 0, 3])))
    assert sorted(handle.body.teacher_ids[2].tolist()) == [ABSENT, ABSENT, 0, 1]
    engine.close()


def test_a_second_scoring_is_compared_without_the_tokens_that_the_student_lacks() -> None:
    """With other ranks, the token that the student lacks stands where another one stood, and is not compared."""
    engine, _ = scorer(cache="teacher_topk", k=4)
    (handle,) = asyncio.run(engine.score(group([0, 1, 1, 0, 3])))
    first = handle.body
    again = replace(
        first,
        teacher_ids=np.roll(first.teacher_ids, 1, 1),
        teacher_topk_logp=np.roll(first.teacher_topk_logp, 1, 1),
    )
    assert rms_difference(first, first) == 0
    rows = zip(first.teacher_topk_logp[2:].tolist(), again.teacher_topk_logp[2:].tolist(), strict=True)
    gaps = [b - a for one, two in rows for a, b in zip(one, two, strict=True) if -np.inf not in (a, b)]
    assert len(gaps) == 3 * 2, "two of four ranks of the three tokens that are compared"
    emitted = 5  # with the same log-probs
    assert rms_difference(first, again) == pytest.approx(np.sqrt(sum(x**2 for x in gaps) / (6 + emitted)), rel=1e-5)
    engine.close()


def test_a_clamp_of_log_probs_changes_no_token_that_the_student_lacks() -> None:
    """The student lacks one of k = 4 tokens: the loss is that of the other three and a bucket."""
    engine, _ = scorer(cache="teacher_topk", k=4)
    (handle,) = asyncio.run(engine.score(group([0, 1, 1, 0, 3])))
    assert handle.header.floored == 0
    p_NV = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    losses = []
    for clamp in (None, -30.0):
        loss = CommonTopK(cache="teacher_topk", k=4, log_prob_min_clamp=clamp)
        ids_NM, on_rows = Distillation(loss)([handle.body], [], torch.tensor([0, 1, 1, 0, 3]), torch.float64)
        assert ids_NM is not None
        losses.append(on_rows(p_NV.log().gather(1, ids_NM), slice(0, 5))[0])
    assert torch.equal(*losses)
    loss = CommonTopK(cache="teacher_topk", k=4, log_prob_min_clamp=-1.0)
    ids_NM, on_rows = Distillation(loss)([handle.body], [], torch.tensor([0, 1, 1, 0, 3]), torch.float64)
    assert ids_NM is not None
    found_N, metrics = on_rows(p_NV.log().gather(1, ids_NM), slice(0, 5))
    q_NK = torch.from_numpy(handle.body.teacher_topk_logp).double()
    p_NK = p_NV.log().gather(1, torch.from_numpy(handle.body.teacher_ids).long().clamp(min=0))
    for place in (2, 3, 4):
        has = q_NK[place] > -torch.inf
        q, p = (x[place][has].clamp(min=-1.0) for x in (q_NK, p_NK))
        expected = (q.exp() * (q - p)).sum()
        rest_q, rest_p = (max(1 - float(x.exp().sum()), torch.finfo(torch.float64).tiny) for x in (q, p))
        expected += rest_q * np.log(rest_q / rest_p)
        assert float(found_N[place]) == pytest.approx(float(expected), rel=1e-6)
    assert metrics["supported"].tolist() == [1.0] * 5
    engine.close()


def test_a_scored_response_survives_a_checkpoint(tmp_path: Path) -> None:
    engine, _ = scorer()
    texts = group([0, 1, 1, 0, 3], [0, 1, 0, 1])
    scored = asyncio.run(engine.score(texts))
    write_groups(tmp_path, [texts, scored])
    rolled, found = read_groups(tmp_path)
    assert [each.header for each in found] == [each.header for each in scored]
    for one, other in zip(found, scored, strict=True):
        np.testing.assert_array_equal(one.body.byte_spans, other.body.byte_spans)
        np.testing.assert_array_equal(one.body.compared_logp, other.body.compared_logp)
    again = asyncio.run(engine.score(rolled))
    assert [each.header.gap for each in again] == [each.header.gap for each in scored], "prompts stay respelled"
    engine.close()


def test_texts_in_the_teachers_tokens_reach_its_engine_unchanged() -> None:
    engine, _ = scorer()
    (handle,) = group([1, 0, 2])
    own = replace(handle.body, prompt=replace(handle.body.prompt, respelled=None))
    (said,) = asyncio.run(engine.probe([own]))
    (direct,) = asyncio.run(engine.engine.probe([own]))
    np.testing.assert_array_equal(said.logps, direct.logps)
    engine.close()


@pytest.mark.parametrize("k", [0, 3])
def test_an_endpoint_gives_the_same_scores(k: int) -> None:
    native, lm = scorer(cache="teacher_topk" if k else "sampled", k=k)

    def scores(tokens: Sequence[int]) -> Any:
        with torch.no_grad():
            logq_TV = lm(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
        return np.concatenate([np.zeros((1, 4)), logq_TV[:-1].numpy()])

    with FakeEndpoint(scores) as fake:
        endpoint = Endpoint(teacher="t", url=fake.url, model=fake.name, key=None, concurrency=2, timeout=30.0)
        spellings, loss = (native.student, native.teacher), native.losses[False]
        remote = RespellingScorer(http_scorer(endpoint, k=k), "t", *spellings, native.respelling, loss=loss)
        texts = group([0, 1, 1, 0, 3], [0, 1, 0, 1], [1, 2, 1, 3], [2])
        found, expected = asyncio.run(remote.score(texts)), asyncio.run(native.score(texts))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.body.teacher_logp, other.body.teacher_logp, atol=1e-5)
            assert one.body.byte_spans.tolist() == other.body.byte_spans.tolist()
            assert one.header.left_out == other.header.left_out
            if k:
                np.testing.assert_array_equal(one.body.teacher_ids, other.body.teacher_ids)
                np.testing.assert_allclose(one.body.teacher_topk_logp, other.body.teacher_topk_logp, atol=1e-5)
        assert len(fake.requests) == 3, "nothing of the last response can be written, so that nothing is sent"
    remote.close()
    native.close()


# --- the sampler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drawn", "finish", "given", "ends"),
    [
        ([1, 0, 2, 3], "eos", [0, 1, 1, 0, 3], "eos"),  # ab b a <end>
        ([1, 1, 1, 2, 3], "eos", [0, 1, 0, 1, 0, 1], "length"),  # longer than six letters
        ([1, 0], "length", [0, 1, 1], "length"),
        ([3], "eos", [3], "eos"),
    ],
)
def test_answers_of_a_teacher_are_spelled_in_the_students_tokens(
    drawn: list[int], finish: Any, given: list[int], ends: str
) -> None:
    """The student has a b c <end>, the teacher b ab a <end>."""
    student, teacher = letters("abc"), merging()

    async def draw(prompt: Prompt, sampling: Sampling, begun: Any = ()) -> list[Handle]:
        assert prompt.tokens.tolist() == [2, 0] and prompt.respelled is None
        answer = replace(rollout_of(drawn), prompt=prompt, finish=finish)
        return [Handle(header_of(answer), answer)]

    respelling = Respelling("merging", 4, {student.eos_token_id: teacher.eos_token_id}, 64)
    sampler = RespellingSampler(draw, "t", Spelling(student), Spelling(teacher), respelling)
    asked = replace(rollout_of([0]).prompt, source="teacher", supervised=True)
    (found,) = asyncio.run(sampler.generate(asked, Sampling(max_tokens=6)))
    assert found.body.tokens.tolist() == given and found.header.finish == ends
    assert found.body.prompt.tokens.tolist() == [0, 1] and found.body.versions.tolist() == [NOT_DRAWN] * len(given)


def test_an_answer_that_the_student_cannot_write_fails_and_a_released_one_waits() -> None:
    student, teacher = letters("b"), merging()
    answers = [replace(rollout_of([2, 3]), finish="eos"), replace(rollout_of([0]), finish="released")]
    respelling = Respelling("merging", 4, {student.eos_token_id: teacher.eos_token_id}, 64)
    for answer, finish in zip(answers, ("error", "released"), strict=True):

        async def draw(prompt: Prompt, sampling: Sampling, begun: Any = (), answer: Rollout = answer) -> list[Handle]:
            return [Handle(header_of(answer), answer)]

        sampler = RespellingSampler(draw, "t", Spelling(student), Spelling(teacher), respelling)
        (found,) = asyncio.run(sampler.generate(answer.prompt, Sampling(max_tokens=6)))
        assert found.header.finish == finish
