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
from typing import Any

import numpy as np

from slipstream.config.base import HALVES
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts
from slipstream.data.teacher_context import context_of
from slipstream.data.tokenizers import Tokenizer, load_tokenizer
from slipstream.pipeline.control import canary
from slipstream.plan.engine_plans import ScorerPlan
from slipstream.plan.lengths import in_teachers_tokens
from slipstream.plan.placement import host_memory, size
from slipstream.protocols import Sampling, Scorer
from slipstream.records import Attempts, Floats, Ints, Prompt, Rollout, TextScores

SHORT, LONG, OWN_WORDS = 24, 1024, 24
"""Number of tokens of a short text and of the long text at most, and of the teacher's own words."""
PLACES, OTHERS = 4, 3
"""Number of places of a text whose token is replaced, and number of other tokens in each place."""
SAME = 1e-5
"""Largest mean change of log-probs that counts as none."""
LARGEST, SHARE = 4 << 30, 0.25
"""Largest model in bytes of float32 that is loaded for a comparison, also as a share of this machine's memory."""
ROUNDING, FINEST, COARSEST = 3.0, 0.03, 0.3
"""Limit of the distance from a forward pass in 16 bits as a multiple of what rounding does in it, and its bounds.

Two honest engines round differently: on three texts of SmolLM2 one distance was 0.6 to 1.7 times the other.
"""


@dataclass(frozen=True)
class Verdict:
    """Result of the checks of one teacher: `fault` is empty if nothing was found; `sure` if it cannot be honest."""

    detail: str
    fault: str = ""
    sure: bool = True


@dataclass(frozen=True)
class KnownTexts:
    """Texts that a teacher scores before a run, and what a forward pass of its model gives for them."""

    texts: tuple[Rollout, ...]
    expected: canary.Reference | None
    """Log-probs of the forward pass, [N, X] for each text; None if there was no pass."""
    limit: float
    """Largest distance from the forward pass that is accepted."""
    origin: str
    """Model of the forward pass, or the reason why there was none."""


async def judged(known: KnownTexts, settings: TeacherConfig, scorer: Scorer) -> Verdict:
    """Check a teacher by its scores of known texts; the first check that fails decides."""
    attempts = Attempts() if settings.shows else None
    if settings.own_context or "response" in settings.context_fields:
        verdict = Verdict("its context depends on the response, so no token is replaced")
    else:
        changed = replaced_texts([text for text in known.texts if len(text.tokens) <= SHORT + 1])
        texts = [text for each in changed for text in (each.text, *each.others)]
        said = await scorer.probe(texts, attempts)
        if causes := [each.cause for each in said if each.cause]:
            return Verdict(causes[0], "such scores cannot be learned from: check its server and its precision")
        verdict = judged_replacements(changed, said, settings.noise_limit)
    if known.expected is None:
        return replace(verdict, detail=f"{verdict.detail}; not compared with a forward pass here: {known.origin}")
    if verdict.fault and verdict.sure:
        return verdict
    found = canary.difference(known.texts, known.expected, await scorer.probe(known.texts, attempts))
    detail = f"log-probs of {len(known.texts)} known texts are {found.apart:.2g} away from a forward pass of "
    detail += f"{known.origin} here (root mean square, limit {known.limit:.2g})"
    if found.apart <= known.limit:
        return replace(verdict, detail=f"{verdict.detail}; {detail}")
    detail += f": {found.said}".replace(" had ", " should have ").replace(", now ", ", and has ")
    return Verdict(detail, "another model, other weights or another prompt: check what is served there")


# --- texts ------------------------------------------------------------------------------------------------------------


def prompts_of(prompts: Prompts, teacher: str | None) -> list[Prompt]:
    """Return the prompts of the known texts of a teacher; None: of the only teacher."""
    return canary.prompts_of(prompts, teacher, canary.CANARY_TEXTS)


@dataclass(frozen=True)
class TextMaker:
    """Makes the known texts of one teacher."""

    settings: TeacherConfig
    scorer: ScorerPlan
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    """End tokens of the student."""
    sampling: Sampling

    def in_teachers_spelling(self) -> TextMaker:
        """Return a maker of texts in the teacher's own tokens, if it has a tokenizer of its own."""
        if (respelling := self.scorer.respelling) is None:
            return self
        return replace(
            self,
            prompts=[in_teachers_tokens(prompt) for prompt in self.prompts],
            tokenizer=load_tokenizer(respelling.tokenizer),
            ends=tuple(sorted({*respelling.roles.values()})),
        )

    def make(self) -> KnownTexts:
        """Return the texts, and the log-probs of a forward pass if the teacher's weights are here."""
        name, why = self._reference()
        if name is None:
            return KnownTexts(tuple(self.texts()), None, 0.0, why)
        reference = Reference(self, name)
        texts = [*self.texts(), *reference.own_words()]
        return KnownTexts(tuple(texts), *reference.logps_and_limit(texts), name)

    def texts(self) -> list[Rollout]:
        """Return a right answer if the data has one, short copies of two prompts, and a long copy of all of them."""
        words = np.concatenate([prompt.tokens for prompt in self.prompts]).astype(np.int32)
        eos, most, found = self.tokenizer.eos_token_id, self.sampling.max_tokens, list[Rollout]()
        end = eos if eos in self.ends else self.ends[0]
        truth = next((prompt for prompt in self.prompts if isinstance(prompt.ground_truth, str | int | float)), None)
        if truth is not None:
            ids = self.tokenizer(str(truth.ground_truth), add_special_tokens=False, verbose=False)["input_ids"]
            found.append(self.text(truth, [*ids[: min(SHORT, most - 1)], end]))
        for start, prompt in enumerate(self.prompts[:2]):
            found.append(self.text(prompt, np.resize(np.roll(words, -start), min(SHORT, most))))
        if most > SHORT:
            found.append(self.text(self.prompts[0], [*np.resize(words, min(LONG, most) - 1), end]))
        return found

    def text(self, prompt: Prompt, tokens: Iterable[Any]) -> Rollout:
        return canary.text_of(prompt, 0, np.array([*tokens], np.int32), self.sampling)

    def _reference(self) -> tuple[str | None, str]:
        """Return the teacher's model if its weights are here and small enough; else None, and the reason."""
        from slipstream.engines.native.files import headers_in, weights_of

        name = self.scorer.here or getattr(self.scorer.runs, "model", "")
        if self.settings.follow is not None:
            return None, "it follows the student"
        if self.settings.own_context:
            return None, "a function writes its context"
        if not self.scorer.here and not Path(name).is_dir():
            return None, f"{name} is no directory of this machine"
        shapes = [shape for file in weights_of(name) for shape, _ in headers_in(name, file).values()]
        needed, most = 4 * sum(map(prod, shapes)), min(LARGEST, SHARE * host_memory())
        if not needed:
            return None, "its weights are not here"
        return (name, "") if needed <= most else (None, f"it has {size(needed)} in float32, the limit is {size(most)}")


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
    if max(before, at, behind) < SAME:
        return Verdict(detail, "it gives the same score to every token: its scores are not of these tokens")
    if behind > noise and at < behind / 10:
        return Verdict(detail, "the rows are shifted by one token: row t must be about token t, given all before it")
    if before > noise and before > at / 2:
        fix = "its scores are not of these tokens: rows are shifted by one token, in another order, or noise"
        return Verdict(detail, fix)
    if max(at, behind) <= noise:  # a model that was never trained hardly knows one token from another
        return Verdict(detail, "it hardly knows one token from another: was it trained?", sure=False)
    if max(sums) > exp(noise):
        detail = f"{OTHERS + 1} different tokens in one place have probabilities that add up to {max(sums):.2f}"
        return Verdict(detail, "these are no log-probs: scaled, shifted or of the opposite sign")
    return Verdict(detail)


# --- a forward pass ---------------------------------------------------------------------------------------------------


class Reference:
    """A forward pass of the teacher's model on this machine's CPU, apart from the engine that is checked."""

    def __init__(self, maker: TextMaker, name: str) -> None:
        from slipstream.engines.native.model import load_model

        self.maker, self.scorer = maker, maker.scorer
        self.context = context_of(self.scorer.context, maker.tokenizer)
        self.attempts = Attempts() if maker.settings.shows else None
        self.lm = load_model(name, dtype="float32", device="cpu")

    def seen(self, text: Rollout) -> Ints:
        return text.prompt.tokens if self.context is None else self.context(text, self.attempts)

    def own_words(self) -> list[Rollout]:
        """Return the teacher's most likely answer to a prompt, up to OWN_WORDS tokens; nothing if it is empty."""
        import torch

        prompt, ends = self.maker.prompts[0], list(self.maker.ends)
        most = min(OWN_WORDS, self.maker.sampling.max_tokens)
        ids = torch.tensor([self.seen(self.maker.text(prompt, prompt.tokens[:1])).tolist()])
        how: dict[str, Any] = {
            "max_new_tokens": most,
            "do_sample": False,
            "eos_token_id": ends,
            "pad_token_id": ends[0],
        }
        with torch.inference_mode():
            drawn = self.lm.model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        tokens_N = drawn[0, ids.shape[1] :].numpy()
        tokens_N = tokens_N[tokens_N < self.scorer.vocabulary]
        return [self.maker.text(prompt, tokens_N)] if len(tokens_N) else []

    def logps_and_limit(self, texts: Sequence[Rollout]) -> tuple[canary.Reference, float]:
        """Return log-probs of the texts in float32, and the distance that the teacher's number format explains."""
        import torch

        expected: canary.Reference = [self.logps(each) for each in texts]
        dtype = getattr(self.scorer.runs, "dtype", "bfloat16")  # that of an endpoint is unknown
        if dtype not in HALVES:
            return expected, canary.EXACT_LIMIT
        self.lm.model.to(getattr(torch, dtype))
        rounded = [TextScores(self.logps(each)) for each in texts]
        change = canary.difference(texts, expected, rounded).apart
        return expected, min(max(FINEST, ROUNDING * change), COARSEST)

    def logps(self, text: Rollout) -> Floats:
        """Return log-probs [N, X] in the order of a probe: of the emitted tokens, and of those that the loss needs."""
        import torch

        from slipstream.estimators.logprobs.sampling_support import all_read_as_one

        seen, spec = self.seen(text), self.scorer.spec
        with torch.inference_mode():
            logits_TV = self.lm.model(torch.tensor([[*seen.tolist(), *text.tokens.tolist()]])).logits[0].float()
            logp_NV = (logits_TV[len(seen) - 1 : -1] / self.scorer.temperature).log_softmax(-1)
            if self.scorer.one_end is not None:
                logp_NV = all_read_as_one(logp_NV, **self.scorer.one_end._asdict())
        asked = [text.tokens[:, None]]
        if spec.cache == "sampled":
            asked.append(text.actions)
        elif text.best_ids is not None and spec.cache == "student_topk":
            asked.append(text.best_ids)
        logp_NX = logp_NV.gather(1, torch.from_numpy(np.concatenate(asked, 1).astype(np.int64)))
        if spec.cache == "teacher_topk":
            best_NK = logp_NV[:, : self.scorer.vocabulary].topk(spec.k).values
            logp_NX = torch.cat([logp_NX, best_NK], 1)
        found: Floats = logp_NX.double().numpy()
        return found
