"""Lengths of sequences: what the data need, what models and token budgets allow, and `max_length` if it is not set."""

from collections.abc import Callable
from dataclasses import replace

from slipstream.config.engines import ENGINES
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.data.teacher_context import TemplateContext
from slipstream.data.tokenizers import Tokenizer, check_fits
from slipstream.errors import ConfigError
from slipstream.plan.engines import GENERATED
from slipstream.plan.facts import Facts
from slipstream.records import Ints, Prompt

RESPELLED_ROOM = 2
"""Number of tokens of a teacher with another tokenizer for which there is room, for each token of the student."""


def sampler_context(config: Config, facts: Facts) -> int:
    """Return the longest sequence, in tokens, that the sampler accepts."""
    longest = facts.student.context
    return min(longest, int(config.sampler.engine_args.get("max_model_len", longest)))


def teacher_context(config: Config, facts: Facts, name: str) -> int:
    """Return the longest sequence, in tokens, that a teacher can score here."""
    longest, teacher = facts.teachers[name].context, config.teachers[name]
    if teacher.engine != "vllm":
        return longest
    return min(longest, int(teacher.engine_args.get("max_model_len", longest))) - GENERATED


def prompts_seen_by(config: Config, name: str, tokenizer: Tokenizer, prompts: Prompts) -> list[tuple[Row, Ints]]:
    """Return pairs of row and prompt tokens that a teacher sees; parts of its context made from responses are empty."""
    template = config.teachers[name].context
    context = None if template is None else TemplateContext(template, tokenizer)
    own = [index for index, teacher in enumerate(prompts.teachers) if teacher == name]
    seen = [in_teachers_tokens(prompts.row(each)) for each in own]
    read = [prompt.tokens if context is None else context.before(prompt) for prompt in seen]
    return [(prompts.rows[each], tokens) for each, tokens in zip(own, read, strict=True)]


def in_teachers_tokens(prompt: Prompt) -> Prompt:
    return prompt if prompt.respelled is None else replace(prompt, tokens=prompt.respelled, respelled=None)


def longest_answer(config: Config, teacher: TeacherConfig) -> int:
    """Return the largest number of tokens that a teacher sees besides its prompt: responses, scored or in context.

    A teacher with another tokenizer has room for twice as many of its tokens; what exceeds it is left out.
    """
    held = teacher.context_fields & {"response", "best", "last"}
    return config.sampler.max_tokens * (1 + len(held)) * (RESPELLED_ROOM if teacher.spelling == "own" else 1)


def longest_of(config: Config, facts: Facts, name: str, tokenizer: Tokenizer, prompts: Prompts) -> int:
    """Return the longest sequence that a teacher scores here; raise an error if its model cannot score all of them."""
    teacher = config.teachers[name]
    model, context = facts.teachers[name].name, teacher_context(config, facts, name)
    if teacher.own_context:  # of unknown length, so that the config has to set `max_length`
        longest = teacher.max_length or 0
    else:
        seen, max_tokens = prompts_seen_by(config, name, tokenizer, prompts), longest_answer(config, teacher)
        rows, tokens = [row for row, _ in seen], [tokens for _, tokens in seen]
        least = max_tokens // RESPELLED_ROOM if teacher.spelling == "own" else max_tokens
        check_fits(rows, tokens, max_tokens=least, context=context, model=model)
        longest = min(max(map(len, tokens)) + max_tokens, context)
    if ENGINES[teacher.engine].packs:
        check_budget(f"teachers.{name}", teacher.token_budget, longest)
    return longest


def possible_lengths(config: Config, facts: Facts, say: Callable[[str], object]) -> tuple[int, dict[str, int]]:
    """Return the longest sequence of the sampler and of each local teacher, as far as it is known without data.

    Raise an error if the longest sequence that the config allows does not fit a model or a token budget.
    """
    drawn = config.sampler.max_tokens + 1  # a prompt has at least one token
    longest = config.sampler.max_length or drawn
    if config.sampler.max_length is None:
        say(f"sequences count as {drawn} tokens, one of them of a prompt: sampler.max_length counts more")
    check_context("sampler", config.student, longest, sampler_context(config, facts))
    if facts.critic is not None:
        check_context("critic", facts.critic.name, longest, facts.critic.context)
    check_budget("learner", config.learner.token_budget, longest)
    scored = dict[str, int]()
    for name, model in facts.teachers.items():
        where, teacher = f"teachers.{name}", config.teachers[name]
        ours, theirs = facts.student.vocabulary, model.vocabulary
        if ours != theirs:
            say(f"{where}: {model.name} has {theirs} embeddings, the student {ours}; tokens are not compared")
        scored[name] = longest
        if teacher.context is not None:  # its template has an unknown length
            scored[name] = (teacher.max_length or 0) if teacher.own_context else longest_answer(config, teacher) + 1
        check_context(where, model.name, scored[name], teacher_context(config, facts, name))
        if ENGINES[teacher.engine].packs:
            check_budget(where, teacher.token_budget, scored[name])
    return drawn, scored


def check_context(where: str, model: str, longest: int, context: int) -> None:
    if longest > context:
        raise ConfigError(
            f"{where}: sequences of {longest} tokens exceed the context of {context} of {model}: lower "
            "sampler.max_tokens, or sampler.max_length"
        )


def check_budget(section: str, budget: int, longest: int) -> None:
    if budget < longest:
        raise ConfigError(
            f"{section}.token_budget = {budget} is less than the longest sequence of {longest} tokens: "
            f"write {section}.token_budget = {longest} or more, or a smaller sampler.max_tokens"
        )
