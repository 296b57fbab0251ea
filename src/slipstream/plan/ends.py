"""End tokens of student and teachers, and checks that the student stops at the token with which teachers end.

If the student stops at another token than the teacher, training makes answers endless. The teacher gives the student's
end token a low probability, so training removes it. The student does not stop at the teacher's end token.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.data.prompts import Prompts
from slipstream.data.tokenizers import Tokenizer, stop_ids
from slipstream.environments.chat.turn_boundaries import QUESTION, Refused, Template
from slipstream.errors import ConfigError, ModelError
from slipstream.plan.facts import ModelFacts
from slipstream.protocols import OneEnd, Sampling
from slipstream.records import Handle, Ints, Prompt, header_of, lineage, one_turn

PROBE_TEXT = "4f1d0c"
"""Text of an assistant's message; no chat template changes this text."""
ANSWERS = 8
"""Maximum number of right answers from the data after which a teacher scores end tokens."""


def end_ids(student: ModelFacts, tokenizer: Tokenizer, stop: Sequence[int | str] = ()) -> set[int]:
    """Return the tokens at which the student stops; raise ModelError if it cannot generate any of them."""
    ends = stop_ids(tokenizer, student.generation, stop)
    if min(ends) >= student.vocabulary:
        raise ModelError(
            f"{student.name}: its end token {min(ends)} is beyond its {student.vocabulary} embeddings, so that no "
            "answer could end: use the tokenizer that it was trained with"
        )
    return ends


@dataclass(frozen=True)
class EndProbe:
    """Test of one teacher before a run: which end token does it expect after right answers from the data?"""

    answers: tuple[tuple[Prompt, Ints], ...]
    """Pairs of a prompt and the tokens of its right answer."""
    stops: Mapping[int, str]
    """Tokens at which the student stops: their text, by id."""
    others: Mapping[int, str]
    """End tokens of teacher or template at which the student does not stop: their text, by id."""

    def ended(self, end: int, sampling: Sampling, *, teacher: str) -> list[Handle]:
        """Return every answer followed by this end token. Only the end token is marked as trained, and so scored.

        The student's log-prob is set to 0, so that the header's `gap` (student minus teacher) is minus the teacher's.
        """
        ids, best = np.full((1, sampling.draws), end, np.int32), np.arange(sampling.best)[None]
        if end >= sampling.best > 0:
            best[0, 0] = end
        zero: dict[str, Any] = {"action_logp": 0.0 * ids, "versions": 0 * ids[:, 0]}
        if sampling.best:
            zero |= {"best_ids": best, "best_logp": 0.0 * best}
        found = []
        for prompt, answer in self.answers:
            last = one_turn(prompt, 0, actions=ids, finish="eos", **zero)
            rollout = lineage(prompt, 0, [answer, last], finish="eos")
            found.append(Handle(header_of(rollout, teacher=teacher), rollout))
        return found


def end_probes(
    stops: set[int], ends: Mapping[str, set[int]], tokenizer: Tokenizer, prompts: Prompts, *, max_tokens: int
) -> dict[str, EndProbe]:
    """Return the probe of each teacher, by name. `stops`: end tokens of the student. `ends`: end tokens by teacher.

    A teacher gets no probe if the student stops at all its end tokens, or if no right answer fits into `max_tokens`.
    """
    found = {}
    for name, teacher_ends in ends.items():
        if not (others := teacher_ends - stops):
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
    """Return the id of the first added token that the chat template writes after an assistant's text, or None."""
    if tokenizer.chat_template is None:
        return None
    messages = [QUESTION, {"role": "assistant", "content": PROBE_TEXT}]
    try:
        text = Template(tokenizer, re.compile(""), (), args).render(messages, False)
    except Refused:
        return None
    if PROBE_TEXT not in text:
        return None
    ids = tokenizer(text.rpartition(PROBE_TEXT)[2], add_special_tokens=False, verbose=False)["input_ids"]
    return next((index for index in ids if index in tokenizer.added_tokens_decoder), None)


def end_tokens(
    where: str, student: ModelFacts, teacher: ModelFacts, *, stops: set[int], template: int | None, mapped: bool
) -> tuple[set[int], OneEnd | None]:
    """Return the end tokens of teacher and template, and their mapping to the student's if they are `mapped`.

    Raise ModelError if the student does not stop at the token with which the teacher ends answers, unless `mapped`.
    `stops`: tokens at which the student stops. `template`: the token with which the chat template ends turns; None if
    prompts are plain text.
    """
    ours, theirs = student.tokenizer, teacher.tokenizer
    try:
        ends = stop_ids(theirs, teacher.generation)
    except ModelError:  # of a model behind an endpoint, only the tokenizer may be on this machine
        ends = set[int]() if theirs.eos_token_id is None else {theirs.eos_token_id}
    every = ends if template is None else ends | {template}
    if mapped:
        possible = sorted(each for each in stops if each < student.vocabulary)
        token = next((each for each in (template, ours.eos_token_id) if each in possible), possible[0])
        mapping = OneEnd(token, tuple(sorted(each for each in stops | every if each < teacher.vocabulary)))
        if mapping.ends == (token,):
            raise ConfigError(f'{where}.ends = "map" does nothing: {teacher.name} ends as {student.name} does; drop it')
        return every, mapping
    end = template if template in ends else theirs.eos_token_id
    if end is None or end in stops:
        return every, None
    teacher_end, student_ends = names_of_ends(texts(theirs, [end])), names_of_ends(texts(ours, stops))
    raise ModelError(
        f"{where}: {teacher.name} ends an answer with {teacher_end}, {student.name} stops only at {student_ends}: "
        f"training would teach it not to stop; {end_advice(where, theirs.convert_ids_to_tokens(end))}"
    )


def texts(tokenizer: Tokenizer, ids: Collection[int]) -> dict[int, str]:
    return {index: tokenizer.convert_ids_to_tokens(index) for index in sorted(ids)}


def names_of_ends(ends: Mapping[int, str]) -> str:
    return " or ".join(f"{text!r} (id {index})" for index, text in ends.items())


def end_advice(where: str, end: str) -> str:
    return (
        f"write sampler.stop = [{json.dumps(end, ensure_ascii=False)}], so that the student stops there, too, or "
        f'{where}.ends = "map", so that the teacher teaches the student\'s end token'
    )
