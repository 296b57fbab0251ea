"""Chat templates of student and teachers: does a teacher know prompts in the student's template?

A teacher that never saw the student's template scores responses to prompts that are noise to it. Before the first
update the teacher scores prompts in the student's template and the same messages in its own form.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.prompts import Row
from slipstream.data.tokenizers import Tokenizer, Tools, rendered
from slipstream.errors import DataError
from slipstream.pipeline.control.canary import text_of
from slipstream.protocols import Sampling
from slipstream.records import Floats, Ints, Prompt, Rollout, TextScores

PROMPTS = 8
"""Maximum number of prompts of each teacher that are compared."""
FAR = 1.0
"""Mean log-prob per token by which the student's form is below the teacher's own, in nats, from which on a teacher does
not know the template. It is a factor of e in perplexity."""


@dataclass(frozen=True)
class TemplateProbe:
    """Test of one teacher before a run: prompts in the student's template and in the teacher's own form."""

    prompts: tuple[tuple[Prompt, Ints], ...]
    """Pairs of a prompt, in the student's template, and the tokens of the same messages in the teacher's own form."""
    own: str
    """Description of the teacher's own form."""

    def texts(self, sampling: Sampling) -> list[Rollout]:
        """Return both forms of every prompt; their tokens after the first are scored."""
        forms = [(prompt, tokens) for prompt, own in self.prompts for tokens in (prompt.tokens, own)]
        return [
            text_of(replace(prompt, tokens=tokens[:1]), i, tokens[1:], sampling)
            for i, (prompt, tokens) in enumerate(forms)
        ]


def template_probe(
    tokenizer: Tokenizer,
    prompts: Iterable[tuple[Row, Prompt]],
    data: DataConfig,
    tools: Mapping[str, Tools],
    *,
    more: int,
) -> TemplateProbe | None:
    """Return the probe of a teacher with this tokenizer; None if it writes the prompts as the student does.

    If the tokenizer has no chat template, the teacher's own form is the plain text of the messages. `more` is the
    number of tokens by which the teacher's form may be longer than the student's. Prompts with longer forms are left
    out, because they might not fit the teacher's context.
    """
    found, plain = [], tokenizer.chat_template is None
    for row, prompt in islice(prompts, PROMPTS):
        try:
            text = "\n\n".join(contents(row, data)) if plain else rendered(row, tokenizer, data, tools)
        except DataError:  # the teacher's template refuses these messages
            continue
        own = np.array(tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"], np.int32)
        if 1 < len(own) <= len(prompt.tokens) + more and len(prompt.tokens) > 1:
            found.append((prompt, own))
    if all(np.array_equal(prompt.tokens, own) for prompt, own in found):
        return None
    return TemplateProbe(tuple(found), "plain text" if plain else "its own template")


def contents(row: Row, data: DataConfig) -> list[str]:
    messages = [row.prompt] if isinstance(row.prompt, str) else [str(each["content"]) for each in row.prompt]
    return [*([] if data.system_prompt is None else [data.system_prompt]), *messages]


def mean_logps(answers: Sequence[TextScores]) -> tuple[float, float]:
    """Return the mean log-prob per token of all texts in the student's template, and in the teacher's own form."""

    def mean(scores: Sequence[Floats]) -> float:
        return float(np.concatenate([each[:, 0] for each in scores]).mean())

    pairs = zip(answers[::2], answers[1::2], strict=True)
    both = [(one.logps, other.logps) for one, other in pairs if not one.cause and not other.cause]
    return (mean([one for one, _ in both]), mean([other for _, other in both])) if both else (0.0, 0.0)
