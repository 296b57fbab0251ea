"""Check before a run that a teacher's scores are log-probs of the tokens that it is sent, on text known to be language.

The texts are right answers of the data, the run's prompts, and the teacher's own words. The student writes none of
them, so the checks hold for a student of any health. Two checks need only scores: a score may change only at and behind
a token that is replaced, and different tokens in one place have probabilities of at most 1 in all. The third check
compares with a forward pass of the same model on this machine, if its weights are here and small enough.

Shapes: N tokens of a text, X log-probs per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.base import HALVES, OWN
from slipstream.data.teacher_context import context_of
from slipstream.pipeline.control import canary
from slipstream.plan.engines import ScorerPlan
from slipstream.plan.placement import host_memory, size
from slipstream.plan.plan import Plan
from slipstream.protocols import Scorer
from slipstream.records import Attempts, Floats, Ints, Rollout, TextScores

if TYPE_CHECKING:
    from slipstream.engines.native.model import LanguageModel

SHORT, LONG, OWN_WORDS = 24, 1024, 24
"""Number of tokens of a short text and of the long text at most, and of the teacher's own words."""
PLACES, OTHERS = 4, 3
"""Number of places of a text whose token is replaced, and number of other tokens in each place."""
LARGEST, SHARE = 4 << 30, 0.25
"""Largest model in bytes of float32 that is loaded for a comparison, also as a share of this machine's memory."""
ROUNDING, COARSEST = 3.0, 0.4
"""Limit of the distance from a forward pass in 16 bits as a multiple of what rounding does in it, and its maximum."""


@dataclass(frozen=True)
class Verdict:
    """Result of the checks of one teacher: `fault` is empty if nothing was found; `sure` if it cannot be honest."""

    detail: str
    fault: str = ""
    sure: bool = True


async def judged(plan: Plan, teacher: str, scorer: Scorer) -> Verdict:
    """Check a teacher by scores of known texts; the first check that fails decides."""
    settings, planned = plan.config.teachers[teacher], plan.engines.scorers[teacher]
    model, why = (None, "it follows the student") if settings.follow is not None else reference_model(planned)
    prompts = canary.prompts_of(plan.prompts, teacher if len(plan.config.teachers) > 1 else None, canary.TEXTS)
    attempts, noise = Attempts() if settings.shows else None, settings.noise_limit
    answers = known_texts(plan, teacher, prompts)
    verdict = Verdict("")
    if settings.own_context or "response" in settings.context_fields:
        verdict = Verdict("its context depends on the response, so no token is replaced")
    else:
        changed = replaced_texts([text for text in answers if len(text.tokens) <= SHORT + 1])
        texts = [text for variants in changed for text in (variants.text, *variants.others)]
        said = await scorer.probe(texts, attempts)
        if causes := [each.cause for each in said if each.cause]:
            return Verdict(causes[0], "such scores cannot be learned from: check its server and its precision")
        verdict = judged_replacements(changed, said, noise)
    if verdict.fault or model is None:
        return verdict if verdict.fault else replace(verdict, detail=f"{verdict.detail}; not compared with a forward "
                                                     f"pass here: {why}")  # fmt: skip
    reference = Reference(plan, planned, model)
    if own := reference.own_words(prompts[0], attempts):
        answers.append(own)
    said = await scorer.probe(answers, attempts)
    return reference.judged(verdict, answers, said, attempts)


# --- texts ------------------------------------------------------------------------------------------------------------


def known_texts(plan: Plan, teacher: str, prompts: Sequence[Any]) -> list[Rollout]:
    """Return a right answer of the data if there is one, a short copy of two prompts, and a long copy of them all."""
    words = np.concatenate([prompt.tokens for prompt in prompts]).astype(np.int32)
    ends, eos, most = plan.end_ids, plan.tokenizer.eos_token_id, plan.sampling.max_tokens
    end, found = np.array([eos if eos in ends else ends[0]], np.int32), list[Rollout]()
    truth = next((prompt for prompt in prompts if isinstance(prompt.ground_truth, str | int | float)), None)
    if truth is not None:
        ids = plan.tokenizer(str(truth.ground_truth), add_special_tokens=False, verbose=False)["input_ids"]
        found.append(text(truth, [*ids[: min(SHORT, most - 1)], *end], plan))
    for prompt, start in zip(prompts[:2], (0, 1), strict=False):
        found.append(text(prompt, np.resize(np.roll(words, -start), min(SHORT, most)), plan))
    if most > SHORT:
        found.append(text(prompts[0], [*np.resize(words, min(LONG, most) - 1), *end], plan))
    return found


def text(prompt: Any, tokens: Iterable[Any], plan: Plan) -> Rollout:
    return canary.text_of(prompt, 0, np.array([*tokens], np.int32), plan.sampling)


@dataclass(frozen=True)
class Replaced:
    """A text, and copies of it in which other tokens stand in one place each."""

    text: Rollout
    places: tuple[int, ...]
    others: tuple[Rollout, ...]
    """For each place its copies."""


def replaced_texts(texts: Sequence[Rollout]) -> list[Replaced]:
    """Return copies of each text whose token is replaced by other tokens of the texts, in places inside the text."""
    known = np.unique(np.concatenate([each.tokens for each in texts]))
    found = []
    for each in texts:
        inner = np.arange(1, len(each.tokens) - 1)
        places = [int(place) for place in inner[:: max(1, len(inner) // PLACES)][:PLACES]]
        copies, chosen = list[Rollout](), list[int]()
        for place in places:
            other = known[known != each.tokens[place]]
            for token in other[:: max(1, len(other) // OTHERS)][:OTHERS]:
                tokens_N = each.tokens.copy()
                tokens_N[place] = token
                actions_NM = np.stack([np.roll(tokens_N, m) for m in range(each.actions.shape[1])], 1)
                copies.append(replace(each, tokens=tokens_N, actions=actions_NM))
                chosen.append(place)
        found.append(Replaced(each, tuple(chosen), tuple(copies)))
    return found


def judged_replacements(changed: Sequence[Replaced], said: Sequence[TextScores], noise: float) -> Verdict:
    """Return the verdict on scores of texts and of their copies with a replaced token."""
    answers = iter(said)
    gaps, sums = list[tuple[float, float, float]](), list[float]()
    for each in changed:
        was_N = next(answers).logps[:, 0]
        now = [next(answers).logps[:, 0] for _ in each.others]
        for place, now_N in zip(each.places, now, strict=True):
            gap_N = np.abs(now_N - was_N)
            gaps.append((float(gap_N[:place].max()), float(gap_N[place]), float(gap_N[place + 1 :].max())))
        for place in dict.fromkeys(each.places):
            same = [exp(now_N[place]) for at, now_N in zip(each.places, now, strict=True) if at == place]
            sums.append(exp(was_N[place]) + sum(same))
    if not gaps:
        return Verdict("answers of up to two tokens are too short to replace one", "so it is not checked", sure=False)
    before, at, behind = (float(np.mean(column)) for column in zip(*gaps, strict=True))
    detail = f"a replaced token changes scores by {before:.2g} before it, {at:.2g} at it and {behind:.2g} behind it"
    if max(sums) > exp(noise):
        detail = f"{OTHERS + 1} different tokens in one place have probabilities that add up to {max(sums):.2f}"
        return Verdict(detail, "these are no log-probs: scaled, shifted or of the opposite sign")
    if before > noise and before > at / 2:
        fix = "its scores are not of these tokens: rows are shifted by one token, in another order, or noise"
        return Verdict(detail, fix)
    if behind > noise and at < behind / 10:
        return Verdict(detail, "the rows are shifted by one token: row t must be about token t, given all before it")
    if max(at, behind) <= noise:
        # a model that was never trained hardly knows one token from another
        fix = "it gives the same score to every token: its scores are not of these tokens"
        return Verdict(detail, fix, sure=max(before, at, behind) < 1e-5)
    return Verdict(detail)


# --- a forward pass ---------------------------------------------------------------------------------------------------


def reference_model(planned: ScorerPlan) -> tuple[str | None, str]:
    """Return the model of a teacher whose weights are here; else None, and the reason."""
    from slipstream.engines.native.files import shapes_in, weights_of

    name = planned.here or getattr(planned.runs, "model", "")
    if not planned.here and not Path(name).is_dir():
        return None, f"{name} is no directory of this machine"
    if planned.context is not None and OWN.fullmatch(planned.context):
        return None, "a function writes its context"
    shapes = [shape for file in weights_of(name) for shape in shapes_in(name, file).values()]
    needed, most = 4 * sum(map(prod, shapes)), min(LARGEST, SHARE * host_memory())
    return (name, "") if 0 < needed <= most else (None, f"it has {size(needed)} in float32, the limit is {size(most)}")


class Reference:
    """A forward pass of the teacher's model on this machine's CPU, apart from the engine that is checked."""

    def __init__(self, plan: Plan, planned: ScorerPlan, name: str) -> None:
        from slipstream.engines.native.model import load_model

        self.plan, self.planned, self.name = plan, planned, name
        self.context = context_of(planned.context, plan.tokenizer)
        self.dtype = getattr(planned.runs, "dtype", "bfloat16")  # that of an endpoint is unknown
        self.lm: LanguageModel = load_model(name, dtype="float32", device="cpu")

    def seen(self, text: Rollout, attempts: Attempts | None) -> Ints:
        return text.prompt.tokens if self.context is None else self.context(text, attempts)

    def own_words(self, prompt: Any, attempts: Attempts | None) -> Rollout | None:
        """Return the most likely answer to a prompt, up to OWN_WORDS tokens; None if it is empty."""
        import torch
        from transformers import GenerationConfig

        most, ends = min(OWN_WORDS, self.plan.sampling.max_tokens), list(self.plan.end_ids)
        ids = torch.tensor([self.seen(text(prompt, prompt.tokens[:1], self.plan), attempts).tolist()])
        how = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
        with torch.inference_mode():
            drawn = self.lm.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
        tokens_N = drawn[0, ids.shape[1] :].numpy()
        known = tokens_N[tokens_N < self.planned.vocabulary]
        return text(prompt, known, self.plan) if len(known) else None

    def logps(self, text: Rollout, attempts: Attempts | None) -> Floats:
        """Return log-probs [N, X] in the order of a probe: of the emitted tokens, and of those that the loss needs."""
        import torch

        from slipstream.estimators.logprobs.one_end import all_read_as_one

        seen, spec = self.seen(text, attempts), self.planned.spec
        with torch.inference_mode():
            logits_TV = self.lm.model(torch.tensor([[*seen.tolist(), *text.tokens.tolist()]])).logits[0].float()
            logp_NV = (logits_TV[len(seen) - 1 : -1] / self.planned.temperature).log_softmax(-1)
            if self.planned.one_end is not None:
                logp_NV = all_read_as_one(logp_NV, **self.planned.one_end._asdict())
        columns = [logp_NV.gather(1, torch.tensor(text.tokens, dtype=torch.int64)[:, None])]
        if spec.cache == "sampled":
            columns.append(logp_NV.gather(1, torch.tensor(text.actions, dtype=torch.int64)))
        elif spec.cache == "student_topk":
            columns.append(logp_NV.gather(1, torch.tensor(text.best_ids, dtype=torch.int64)))
        elif spec.cache == "teacher_topk":
            columns.append(logp_NV[:, : self.planned.vocabulary].topk(spec.k).values)
        found: Floats = torch.cat(columns, 1).double().numpy()
        return found

    def judged(
        self, verdict: Verdict, texts: Sequence[Rollout], said: Sequence[TextScores], attempts: Attempts | None
    ) -> Verdict:
        """Return the verdict on a teacher's scores of these texts, compared with the forward pass."""
        import torch

        expected: canary.Reference = [self.logps(each, attempts) for each in texts]
        limit = canary.EXACT
        if self.dtype in HALVES:
            self.lm.model.to(getattr(torch, self.dtype))
            rounded = [TextScores(self.logps(each, attempts)) for each in texts]
            change = canary.difference(texts, expected, rounded).apart
            limit = min(max(canary.ROUNDED, ROUNDING * change), COARSEST)
        found = canary.difference(texts, expected, said)
        detail = f"log-probs of {len(texts)} known texts are {found.apart:.2g} away from a forward pass of {self.name} "
        detail += f"here (root mean square, limit {limit:.2g})"
        if found.apart <= limit:
            return Verdict(f"{verdict.detail}; {detail}", verdict.fault, verdict.sure)
        detail += f": {found.said}".replace(" had ", " should have ").replace(", now ", ", and has ")
        return Verdict(detail, "another model, other weights or another prompt: check what is served there")
