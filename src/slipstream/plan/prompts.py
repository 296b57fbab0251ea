"""Prompts of a run: read, encoded, chosen, routed to teachers, and in the order of training; responses of others."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipstream.config.schedule import Async
from slipstream.config.schema import Config
from slipstream.config.teacher import routed_by
from slipstream.data.given import Limits, answers_of, read_trajectories
from slipstream.data.layouts import told
from slipstream.data.offpolicy import OffPolicy
from slipstream.data.order import Epochs, Mixture, shares_of
from slipstream.data.prompts import Prompts, Row, load_rows
from slipstream.data.selection import FILTER_WORDS, difficulties, fitting, overlap_of, without_copies
from slipstream.data.tokenizers import Tokenizer, Tools, check_fits, check_ids, encode_rows, separates_answers
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.plan.ends import end_ids, template_end
from slipstream.plan.environment import environments_of, tools_of
from slipstream.plan.facts import Facts
from slipstream.plan.graders import reward_settings
from slipstream.plan.lengths import check_budget, sampler_context, teacher_context
from slipstream.plan.rewards import graded_rows, reward_warnings
from slipstream.plan.spelling import respelled_prompts
from slipstream.records import Given, Ints, Prompt
from slipstream.rewards.functions import MODEL_REWARDS, is_own

LEAKED = 0.01
"""Share of held-out prompts in the training data above which their number is a warning; below, it is a note."""


class DataFacts:
    """Prompts of a run, read once, and what they are read with. An error names the row that cannot be used."""

    def __init__(self, config: Config, facts: Facts, say: Callable[[str], None]) -> None:
        self.config, self.facts, self.say = config, facts, say
        self.leaks = list[str]()
        """Warnings about held-out prompts that are training prompts, too."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.facts.student.tokenizer

    @cached_property
    def end_ids(self) -> set[int]:
        """Return the tokens at which the student stops."""
        return end_ids(self.facts.student, self.tokenizer, self.config.sampler.stop)

    @cached_property
    def tools(self) -> dict[str, Tools]:
        """Return the tools of every environment, by its name."""
        every, ends = environments_of(self.config), self.end_ids  # ends are tested without environments, too
        return {name: tools_of(each, self.tokenizer, ends, self.say) for name, each in every.items()}

    @cached_property
    def prompts(self) -> Prompts:
        """Return the training prompts, in their order."""
        config, data = self.config, self.config.data
        rows, names = list[Row](), list[str]()
        for name, source in data.sources.items():
            loaded = load_rows(source, data, split=data.split, limit=data.limit, where=data.where, say=self.say)
            loaded = in_environments(config, loaded, name)
            rows += with_source(loaded, name)
            names += [name] * len(loaded)
        graded_rows(rows, config.task.reward, config.task.sandbox, reward_settings(config))
        for note in notes_on_tools(rows, self.tools):
            self.say(note)
        tokens = encode_rows(rows, self.tokenizer, data, self.tools)
        if isinstance(rows[0].prompt, str) and not data.chat and self.tokenizer.chat_template is not None:
            self.say(
                f"prompts are text, sent to {config.student} unchanged: data.chat = true sends it as a user's message"
            )
        chats = not isinstance(rows[0].prompt, str) or data.chat
        if chats and not separates_answers(rows[0], self.tokenizer, data, self.tools):
            self.say(
                f"warning: the chat template of {config.student} ignores add_generation_prompt: no header separates an "
                "answer from its prompt"
            )
        if data.deduplicate:
            kept = without_copies(rows, tokens, columns=bool(config.every_environment), say=self.say)
            rows, names, tokens = [rows[i] for i in kept], [names[i] for i in kept], [tokens[i] for i in kept]
        chosen = self.fitting(rows, tokens, "data.train")
        rows, names, tokens = [rows[i] for i, _ in chosen], [names[i] for i, _ in chosen], [ids for _, ids in chosen]
        if missing := sorted(data.sources.keys() - {*names}):
            raise DataError(
                f"{data.sources[missing[0]]}: no row is left of it (data.deduplicate, data.too_long): drop it"
            )
        check_used(config, rows)
        if "file" in config.offpolicy_sources or any(teacher.shows for teacher in config.teachers.values()):
            check_ids_differ(rows)
        self.check(rows, tokens)
        longest = max(map(len, tokens)) + config.sampler.max_tokens
        check_budget("learner", config.learner.token_budget, longest)
        teachers = routes(config, rows)
        prompts = Prompts(
            rows,
            tokens,
            seed=config.seed,
            shuffle=data.shuffle,
            teachers=teachers,
            sources=sources_of(config, rows, names, teachers),
            respelled=respelled_prompts(config, self.facts, rows, teachers, self.tools),
            tells=self.keeps_text,
            order=order_of(config, rows, names),
        )
        prompts.use(off_policy(config, prompts, self.tokenizer, self.end_ids, self.facts.student.vocabulary, self.say))
        return prompts

    @cached_property
    def held_out(self) -> dict[str, Sequence[Prompt]]:
        """Return the held-out prompts, by the name of their set; empty if the run does not evaluate."""
        config, data, sets = self.config, self.config.data, dict[str, Sequence[Prompt]]()
        for name in data.held_out if config.eval.every else ():
            rows, sets[name] = self.held_out_set(name)
            tokens = [prompt.tokens for prompt in sets[name]]
            self.check(rows, tokens)
            if not config.every_environment:  # in an environment, rows with equal prompts may still differ
                line, share = overlap_line(name_of_set(name), self.prompts, rows, tokens)
                if line:
                    (self.leaks.append if share > LEAKED else self.say)(line)
        return sets

    def held_out_set(self, name: str) -> tuple[Sequence[Row], list[Prompt]]:
        """Return rows and prompts of one held-out set, in their order, without those that data.too_long drops."""
        config, data, limit = self.config, self.config.data, self.config.eval.of(name, "prompts")
        source, split, where = data.held_out[name], data.eval_split, data.eval_where
        loaded = load_rows(source, data, split=split, limit=limit, where=where, say=self.say)
        loaded = with_source(in_environments(config, loaded, name), name)
        rows = graded_rows(loaded, config.task.reward, config.task.sandbox, reward_settings(config))
        judges = [] if config.task.reward else routes(config, rows, held_out=True)
        tools, tells = self.tools, self.keeps_text
        own: Any = {"teachers": judges, "respelled": respelled_prompts(config, self.facts, rows, judges, tools)}
        every = eval_prompts(rows, self.tokenizer, config, tools=tools, tells=tells, **own)
        fit = self.fitting(rows, [prompt.tokens for prompt in every], name_of_set(name))
        return [rows[place] for place, _ in fit], [replace(every[place], tokens=ids) for place, ids in fit]

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt with a response."""
        lengths = [*map(len, self.prompts.tokens)]  # training prompts are read first
        lengths += [len(prompt.tokens) for of_set in self.held_out.values() for prompt in of_set]
        return max(lengths) + self.config.sampler.max_tokens

    @property
    def warnings(self) -> list[str]:
        task = self.config.task
        if self.config.every_environment:  # rows with equal prompts may still differ
            return []
        compares = [each for each in task.reward if each == "math" or is_own(each)]
        graded = reward_warnings(self.prompts.rows, compares, task.timeout) if compares and not task.sandbox else []
        return [*copy_warnings(self.prompts), *self.leaks, *graded]

    @property
    def keeps_text(self) -> bool:
        """Return whether prompts keep their text or messages, for agents and for graders that read conversations."""
        return self.config.has_agents or not set(MODEL_REWARDS).isdisjoint(self.config.task.reward)

    def fitting(self, rows: Sequence[Row], tokens: Sequence[Ints], what: str) -> list[tuple[int, Ints]]:
        """Return place and tokens of the prompts to use, of which data.too_long may cut or leave out some."""
        config, how, sampler = self.config, self.config.data.too_long, self.config.sampler
        if how == "refuse":
            return list(enumerate(tokens))
        if how != "skip" and (config.data.chat or not isinstance(rows[0].prompt, str)):
            raise ConfigError(
                f'data.too_long = "{how}" is for text prompts, and would cut a part off the chat template: write "skip"'
            )
        teachers = config.teachers
        same = [n for n in self.facts.teachers if teachers[n].context is None and teachers[n].spelling == "same"]
        contexts = [teacher_context(config, self.facts, name) for name in same]
        lengths = (sampler.max_length, *(config.teachers[name].max_length for name in same))
        longest = [each for each in lengths if each is not None]
        limit = min([sampler_context(config, self.facts), *contexts, *longest]) - sampler.max_tokens
        special = list(self.tokenizer.all_special_ids)
        return fitting(rows, tokens, limit=limit, how=how, special=special, what=what, say=self.say)

    def check(self, rows: Sequence[Row] | Sequence[Prompt], tokens: Sequence[Ints]) -> None:
        """Raise DataError for a prompt that with a response exceeds the student's context, or has unknown tokens."""
        student, context = self.config.student, sampler_context(self.config, self.facts)
        contexts, critic = {student: context}, self.facts.critic or self.facts.student
        if self.config.critic is not None and self.config.critic.bootstrap:  # it reads the end of a response, too
            contexts[f"{critic.name}, less one for critic.bootstrap"] = critic.context - 1
        contexts.setdefault(critic.name, critic.context)
        for model, most in contexts.items():
            check_fits(rows, tokens, max_tokens=self.config.sampler.max_tokens, context=most, model=model)
        check_ids(rows, tokens, student, self.facts.student.vocabulary)


def with_source(rows: Sequence[Row], name: str) -> list[Row]:
    """Return rows with the name of their source in the data as data_source, unless they have one of their own."""
    return [replace(row, data_source=name) if name and row.data_source == "default" else row for row in rows]


def name_of_set(name: str) -> str:
    return f"data.eval.{name}" if name else "data.eval"


def in_environments(config: Config, rows: list[Row], source: str) -> list[Row]:
    """Return the rows of a source with their environments: by their column `environment`, or else by the source."""
    if not (known := config.environments):
        return rows
    for row in rows:
        name = row.meta.get("environment")
        if name is None and source not in known:
            raise ConfigError(
                f"{row.place}: has no column 'environment', which names its environment ({', '.join(known)}): add it, "
                "or give its source this name in data.train or data.eval"
            )
        if name is not None and str(name) not in known:
            hint = did_you_mean(str(name), known)
            raise ConfigError(f"{row.place}: its column environment names {str(name)!r}, which is no section; {hint}")
    return [replace(row, environment=str(row.meta.get("environment") or source)) for row in rows]


def check_used(config: Config, rows: Sequence[Row]) -> None:
    if unused := sorted(config.environments.keys() - {row.environment for row in rows}):
        raise ConfigError(
            f"environments.{unused[0]}: no prompt uses it, or data.too_long leaves them all out: write its name in "
            "the column 'environment' of rows, or as that of a source in data.train, or drop it"
        )


def check_ids_differ(rows: Sequence[Row]) -> None:
    """Raise DataError if two prompts have one id, by which attempts and trajectories of a file are found."""
    known: dict[str, Row] = {}
    for row in rows:
        other = known.setdefault(row.id, row)
        if other.prompt != row.prompt:
            raise DataError(
                f"{row.place}: id {row.id!r} is that of {other.place}, too, and attempts or trajectories belong to an "
                "id: rename one, or leave the ids out"
            )


def order_of(config: Config, rows: Sequence[Row], names: Sequence[str]) -> Mixture:
    """Return the order of the training prompts; `names` are the sources of the rows."""
    data, orders = config.data, list[Epochs]()
    column, epochs = data.curriculum.column, data.curriculum.epochs
    hard = difficulties(rows, column) if column is not None else []
    for name in data.sources:
        own = [place for place, each in enumerate(names) if each == name]
        easy_first: Any = {"difficulty": [hard[place] for place in own], "curriculum_epochs": epochs} if hard else {}
        orders.append(Epochs(own, seed=config.seed, shuffle=data.shuffle, name=name, **easy_first))
    weights = [data.weights.get(name, float(len(order.rows))) for name, order in zip(data.sources, orders, strict=True)]
    return Mixture(orders, shares_of(weights, data.weights_temperature))


def off_policy(
    config: Config,
    prompts: Prompts,
    tokenizer: Tokenizer,
    stops: set[int],
    vocabulary: int,
    say: Callable[[str], object],
) -> OffPolicy | None:
    """Return the responses that the student does not draw; None if it draws all."""
    sft, mix, groups, longest = config.sft, config.mix, config.new_groups, config.sampler.max_tokens
    if sft is None and mix is None:
        return None
    rows, answers = prompts.rows, list[Given]()
    limits = Limits(vocabulary=vocabulary, longest=longest, stops=stops)
    lessons, trajectories = dict[int, Sequence[Given]](), dict[int, Sequence[Given]]()
    if "data" in config.offpolicy_sources:
        plain = isinstance(rows[0].prompt, str) and not config.data.chat
        template = None if plain else template_end(tokenizer, config.data.template_args)
        end = next(token for token in (template, tokenizer.eos_token_id, *sorted(stops)) if token in stops)
        answers = answers_of(rows, tokenizer, end=end, limits=limits)
        if cut := sum(answer.finish == "length" for answer in answers):
            say(f"{cut} of {len(answers)} answers are longer than sampler.max_tokens, and are cut there")
    if sft is not None and sft.cache is not None and Path(sft.cache).exists() and not Path(sft.cache).is_dir():
        raise ConfigError(f"sft.cache: {sft.cache} is a file, and rollouts are stored in a directory: name another")
    if sft is not None and sft.path is not None:
        lessons = read_trajectories(sft.path, rows, limits, least=1, drawn=False)
    if mix is not None and mix.path is not None:
        least, drawn = (config.sampler.group, True) if mix.prefix is None else (1, False)
        trajectories = read_trajectories(mix.path, rows, limits, least=least, drawn=drawn)
    return OffPolicy(
        seed=config.seed,
        supervised=sft.source if sft is not None else "",
        first=config.supervised_updates * groups,
        mix=mix,
        groups=groups,
        updates=config.updates - config.supervised_updates,
        group=config.sampler.group,
        answers=answers,
        trajectories=trajectories,
        lessons=lessons,
    )


def overlap_line(what: str, prompts: Prompts, rows: Sequence[Row], tokens: Sequence[Ints]) -> tuple[str, float]:
    """Return a line about the held-out rows that are in the training data, and their share; empty if none is."""
    equal, similar = overlap_of(prompts.rows, prompts.tokens, rows, tokens)
    both = sorted((equal | similar).items())
    if not both:
        return "", 0.0
    theirs, ours = rows[both[0][0]].place, prompts.rows[both[0][1]].place
    return (
        f"{what}: {len(both)} of {len(rows)} held-out prompts are in data.train too, {len(equal)} equal and "
        f"{len(similar)} with {FILTER_WORDS} words in a row in common, as {theirs} and {ours}: accuracy on them "
        "measures memorization",
        len(both) / len(rows),
    )


def copy_warnings(prompts: Prompts) -> list[str]:
    """Return a warning if most training prompts are copies."""
    hashes = [hash(tokens.tobytes()) for tokens in prompts.tokens]
    times = Counter(hashes)
    most, copies = times.most_common(1)[0]
    if copies == 1 or len(times) > len(hashes) / 2:
        return []
    place = prompts.rows[hashes.index(most)].place
    return [
        f"data.train: {len(hashes)} rows have {len(times)} different prompts; that of {place} occurs {copies} times"
    ]


def routes(config: Config, rows: Sequence[Row], *, held_out: bool = False) -> list[str]:
    """Return the name of the teacher of every row; names are empty if the run has no teacher.

    `held_out`: teachers may have none of these rows.
    """
    if len(config.teachers) <= 1:
        return [next(iter(config.teachers), "")] * len(rows)
    column, by_key = config.data.teacher_key, routed_by(config.teachers)
    keys = [row.data_source if column == "data_source" else row.meta.get(column) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        if key is None:
            raise DataError(
                f"{row.place}: has no {column!r} (data.teacher_key), which names the teacher of each prompt"
            )
        if str(key) not in by_key:
            raise ConfigError(
                f"{row.place}: no teacher has key = {str(key)!r}, its {column} (data.teacher_key): add [teachers.NAME] "
                f"with this key; {did_you_mean(str(key), by_key)}"
            )
    known = {str(key) for key in keys}
    for key, name in by_key.items():
        if key not in known and not held_out:
            raise ConfigError(
                f"teachers.{name}: no prompt has {column} = {key!r} (data.teacher_key), its key: write another "
                f"teachers.{name}.key, or drop it; prompts have {', '.join(sorted(known))}"
            )
    return [by_key[str(key)] for key in keys]


def notes_on_tools(rows: Sequence[Row], tools: Mapping[str, Tools]) -> Iterator[str]:
    """Yield a warning about the first row of each environment with a tool that the environment does not name."""
    for name, offered in tools.items():
        known = names_in(offered or ())
        for row in rows if known else ():
            if row.environment == name and (strange := names_in(row.tools or ()) - known):
                yield (
                    f"warning: {row.place}: the column 'tools' replaces the tools of the environment in the prompt, "
                    f"and names {min(strange)!r}; the environment has {', '.join(sorted(known))}"
                )
                break


def names_in(tools: Iterable[dict[str, Any]]) -> set[str]:
    """Return the names in these JSON schemas, with or without the level `function`."""
    inner = (tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools)
    return {str(each.get("name")) for each in inner}


def sources_of(config: Config, rows: Sequence[Row], names: Sequence[str], teachers: Sequence[str]) -> list[str]:
    """Return every row's mixture component: teacher, source (`names`, if several), and value of `schedule.mixture`.

    Updates keep the share of every component.
    """
    if len(config.data.sources) > 1:
        teachers = [f"{teacher} {name}" for teacher, name in zip(teachers, names, strict=True)]
    column = config.schedule.mixture if isinstance(config.schedule, Async) else None
    if column is None:
        return list(teachers)
    setting, name = f"schedule.mixture = {column!r}", "schedule.mixture"
    values = [
        str(row.data_source if column == "data_source" else told(row.place, row.meta, column, name)) for row in rows
    ]
    if len(set(values)) == 1:
        raise ConfigError(f"{setting} does nothing: every row has {values[0]!r} there; drop it")
    if len(set(values)) == len(values) > config.new_groups:
        raise ConfigError(
            f"{setting}: every row has a different value there: name a column with few values, or write "
            'schedule.order = "submission"'
        )
    return [f"{teacher} {value}" for teacher, value in zip(teachers, values, strict=True)]


def eval_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    config: Config,
    *,
    tools: Mapping[str, Tools] = MappingProxyType({}),
    tells: bool = False,
    teachers: Sequence[str] = (),
    respelled: Sequence[Ints | None] = (),
) -> list[Prompt]:
    """Return the prompts in the order of the rows. `tells`: prompts keep their text or messages, which agents need.

    `teachers` are the names of the rows' teachers, if they score answers, and `respelled` the prompts in their tokens.
    """
    tokens = encode_rows(rows, tokenizer, config.data, tools)
    own: Any = {"teachers": teachers, "respelled": respelled}
    prompts = Prompts(rows, tokens, seed=config.seed, shuffle=False, tells=tells, **own)
    return [prompts.at(number) for number in range(len(rows))]
