"""The end tokens of student and teachers: which there are, and whether a teacher ends answers where the student stops.

A student that stops at another token than its teacher loses its answers: the teacher finds the student's end token
unlikely, so training removes it, and the student does not stop at the teacher's end token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.data.prompts import Prompts
from slipstream.data.tokenizers import Tokenizer, stop_ids
from slipstream.engines.native.config import generation_of
from slipstream.environments.chat.turn_boundaries import ASKED, Refused, Template
from slipstream.errors import ModelError
from slipstream.protocols import Sampling
from slipstream.records import Handle, Ints, Prompt, header_of, lineage, one_turn

MARK = "4f1d0c"
"""An assistant's text that no chat template changes."""
ANSWERS = 8
"""Answers of the data after which a teacher is asked for its end token."""


@dataclass(frozen=True)
class EndProbe:
    """What one teacher is asked before a run: which end token does it expect after right answers of the data?"""

    answers: tuple[tuple[Prompt, Ints], ...]
    """Prompts, each with the tokens of its right answer."""
    stops: Mapping[int, str]
    """The tokens at which the student stops: id and text."""
    others: Mapping[int, str]
    """End tokens that the teacher, or the chat template, names and at which the student does not stop."""

    def ended(self, end: int, sampling: Sampling, *, teacher: str) -> list[Handle]:
        """Return every answer with this end token, which alone is marked as trained: a teacher scores no other token.

        The student's log-prob is written as 0, so the header's `gap` is the teacher's log-prob, negated.
        """
        ids, best = np.full((1, sampling.draws), end, np.int32), np.arange(sampling.best)[None]
        if end >= sampling.best > 0:
            best[0, 0] = end
        zero: dict[str, Any] = {"action_logp": 0.0 * ids, "versions": 0 * ids[:, 0]}
        if sampling.best:
            zero |= {"best_ids": best, "best_logp": 0.0 * best}
        lasts = [one_turn(prompt, 0, actions=ids, finish="eos", **zero) for prompt, _ in self.answers]
        told = [lineage(p, 0, [said, end], finish="eos") for (p, said), end in zip(self.answers, lasts, strict=True)]
        return [Handle(header_of(rollout, teacher=teacher), rollout) for rollout in told]


def end_probes(
    stops: set[int], ends: Mapping[str, set[int]], tokenizer: Tokenizer, prompts: Prompts, *, max_tokens: int
) -> dict[str, EndProbe]:
    """Return what each teacher is asked, by its name. `stops` are the student's end tokens, `ends` those of teachers.

    A teacher that names no other end token than the student is not asked, nor one whose prompts have no right answers
    of fewer than `max_tokens` tokens.
    """
    found = {}
    for name, its in ends.items():
        if not (others := its - stops):
            continue
        answers = []
        for index, (row, teacher) in enumerate(zip(prompts.rows, prompts.teachers, strict=True)):
            if teacher != name or not isinstance(row.ground_truth, str | int | float):
                continue
            ids = tokenizer(str(row.ground_truth), add_special_tokens=False, verbose=False)["input_ids"]
            if 0 < len(ids) < max_tokens:
                answers.append((prompts.row(index), np.array(ids, np.int32)))
            if len(answers) == ANSWERS:
                break
        if answers:
            found[name] = EndProbe(tuple(answers), texts(tokenizer, stops), texts(tokenizer, others))
    return found


def template_end(tokenizer: Tokenizer, args: Mapping[str, Any]) -> int | None:
    """Return the first added token that the chat template writes after an assistant's text; None if there is none."""
    if tokenizer.chat_template is None:
        return None
    try:
        text = Template(tokenizer, re.compile(""), (), args).render(
            [ASKED, {"role": "assistant", "content": MARK}], False
        )
    except Refused:
        return None
    if MARK not in text:
        return None
    ids = tokenizer(text.rpartition(MARK)[2], add_special_tokens=False, verbose=False)["input_ids"]
    return next((index for index in ids if index in tokenizer.added_tokens_decoder), None)


def check_same_end(
    where: str, *, names: tuple[str, str], tokenizers: tuple[Tokenizer, Tokenizer], template: int | None
) -> tuple[set[int], set[int]]:
    """Raise ModelError if the token with which the teacher ends answers is none of those at which the student stops;
    return the student's end tokens, and all that the teacher and the template name.

    `template` is the token with which the chat template ends the turns of the prompts, None if prompts are plain text.
    A teacher that names that token as one of its ends is taken to answer with it; any other ends with the `eos_token`
    of its tokenizer.
    """
    (student, teacher), (ours, theirs) = names, tokenizers
    stops = stop_ids(ours, generation_of(student))
    try:
        ends = stop_ids(theirs, generation_of(teacher))
    except ModelError:  # of an endpoint's model there may be no more than a tokenizer here
        ends = set[int]() if theirs.eos_token_id is None else {theirs.eos_token_id}
    end = template if template in ends else theirs.eos_token_id
    if end is None or end in stops:
        return stops, ends if template is None else ends | {template}
    its, own = named(texts(theirs, {end})), named(texts(ours, stops))
    raise ModelError(
        f"{where}: {teacher} ends an answer with {its}, {student} stops only at {own}: it would unlearn to end its "
        f"answers; {what_to_write(its, own)}"
    )


def texts(tokenizer: Tokenizer, ids: Collection[int]) -> dict[int, str]:
    return {index: tokenizer.convert_ids_to_tokens(index) for index in sorted(ids)}


def named(ends: Mapping[int, str]) -> str:
    return " or ".join(f"{text!r} (id {index})" for index, text in ends.items())


def what_to_write(end: str, stops: str) -> str:
    return (
        f"write a student that stops at {end}, or a teacher that ends with {stops}: an instruct model beside an "
        "instruct model, a base model beside a base model"
    )
