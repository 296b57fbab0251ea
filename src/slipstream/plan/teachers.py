"""Teachers in a plan: checks that each knows the student's tokens, end tokens and template, and fits its sequences."""

from typing import NamedTuple

from slipstream.data.tokenizers import check_same_vocabulary
from slipstream.plan.ends import EndProbe, end_probes, end_tokens, template_end
from slipstream.plan.facts import ModelFacts
from slipstream.plan.lengths import longest_answer, longest_of, prompts_seen_by
from slipstream.plan.prompts import DataFacts
from slipstream.plan.spelling import model_with_tokenizer, respelling_of
from slipstream.plan.templates import TemplateProbe, template_probe
from slipstream.protocols import OneEnd, Respelling


class CheckedTeachers(NamedTuple):
    longest: dict[str, int]
    """Longest sequence of every teacher that runs here."""
    ends: dict[str, EndProbe]
    """Tests of end tokens in the start checks; teachers that need no test are absent."""
    one_ends: dict[str, OneEnd | None]
    templates: dict[str, TemplateProbe]
    """Tests of chat templates in the start checks; teachers that need no test are absent."""
    respellings: dict[str, Respelling]
    """Spelling of responses for each teacher with another tokenizer."""


def check_teachers(data: DataFacts) -> CheckedTeachers:
    """Check vocabulary, end tokens and context length of teachers, and that token budgets fit the longest sequence."""
    config, prompts, rows = data.config, data.prompts, data.prompts.rows
    ends, checked = dict[str, set[int]](), CheckedTeachers({}, {}, {}, {}, {})
    plain = isinstance(rows[0].prompt, str) and not config.data.chat
    template = None if plain else template_end(data.tokenizer, config.data.template_args)
    for name, teacher in config.teachers.items():
        if teacher.spelling == "own":
            respell_for(data, name, checked)
            continue
        model, mapped = teacher_model(data, name), teacher.ends == "map"
        every, checked.one_ends[name] = end_tokens(
            f"teachers.{name}", data.facts.student, model, stops=data.end_ids, template=template, mapped=mapped
        )
        if teacher.context is None:
            ends[name] = every
            own = ((row, prompts.row(i)) for i, row in enumerate(rows) if prompts.teachers[i] == name)
            more = config.sampler.max_tokens
            if not plain and (probe := template_probe(model.tokenizer, own, config.data, data.tools, more=more)):
                checked.templates[name] = probe
        if teacher.base_url is None:
            checked.longest[name] = longest_of(config, data.facts, name, data.tokenizer, prompts)
    probes = end_probes(data.end_ids, ends, data.tokenizer, prompts, max_tokens=config.sampler.max_tokens)
    return checked._replace(ends=probes)


def teacher_model(data: DataFacts, name: str) -> ModelFacts:
    """Return the model whose tokenizer a teacher has; raise ModelError if its token ids differ from the student's."""
    model = model_with_tokenizer(data.config, data.facts, name)
    check_same_vocabulary(data.tokenizer, model.tokenizer, names=(data.config.student, model.name))
    return model


def respell_for(data: DataFacts, name: str, checked: CheckedTeachers) -> None:
    """Add to `checked` how responses are spelled for a teacher with another tokenizer, and its longest sequence."""
    config, facts, prompts = data.config, data.facts, data.prompts
    teacher, tokenizer = config.teachers[name], facts.tokenizers[name].tokenizer
    if teacher.base_url is None:
        checked.longest[name] = longest_of(config, facts, name, tokenizer, prompts)
        limit = max(checked.longest[name], teacher.max_length or 0)
    else:
        seen = prompts_seen_by(config, name, tokenizer, prompts)
        limit = max(len(tokens) for _, tokens in seen) + longest_answer(config, teacher)
    rows = [row for row, each in zip(prompts.rows, prompts.teachers, strict=True) if each == name]
    checked.respellings[name] = respelling_of(
        config, facts, name, rows, stops=data.end_ids, limit=limit, tools=data.tools
    )
