"""Planning of a run: read facts, test rules between them and the config, and derive the plan from both.

An error names what to write instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.config.schema import Config
from slipstream.data.prompts import Prompts
from slipstream.data.tokenizers import Tokenizer
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.objective.method import Method, method_of
from slipstream.plan.completion import completed, on_gpus, with_lengths, with_shapes
from slipstream.plan.engine_plans import EnginesPlan
from slipstream.plan.engines import engines_of
from slipstream.plan.facts import Facts
from slipstream.plan.gpus import Gpus
from slipstream.plan.known_texts import KnownTexts, TextMaker, prompts_of
from slipstream.plan.lengths import possible_lengths
from slipstream.plan.notes import NOTES, WARNINGS, lines_of, whole_batch_reason
from slipstream.plan.placement import Need, needs, shape_line
from slipstream.plan.prompts import DataFacts
from slipstream.plan.rules import COMPLETED, FAST, WITH_LENGTHS, check, check_endpoints, room_warnings
from slipstream.plan.teachers import CheckedTeachers, check_teachers
from slipstream.processes import RARE_COLLECTIONS, garbage_collection
from slipstream.protocols import Sampling
from slipstream.records import Prompt


@dataclass(frozen=True)
class Plan:
    """All decisions about a run before its start, after the files that its config names were read and checked."""

    config: Config
    """The config, completed with values that depend on files and on installed engines."""
    method: Method
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    prompts: Prompts
    held_out: Mapping[str, Sequence[Prompt]]
    """Held-out prompts, by the name of their set; empty if the run does not evaluate."""
    engines: EnginesPlan
    sampling: Sampling
    notes: tuple[str, ...]
    """Lines to print about decisions that the config leaves open."""
    warnings: tuple[str, ...]
    teachers: CheckedTeachers
    """Lengths, end tokens and chat templates of teachers, with the tests of them in the start checks."""
    known: Mapping[str, KnownTexts] = field(default_factory=dict)
    """Texts that teachers score in the start checks, by teacher; empty in a plan without start checks."""

    @property
    def needs(self) -> list[Need]:
        return needs(self.engines)

    @property
    def whole_batches(self) -> bool:
        """Return whether a periodic schedule learns only when all groups of an update are scored."""
        return bool(whole_batch_reason(self.config, self.method))


@garbage_collection(*RARE_COLLECTIONS)
def plan(config: Config, *, ask: bool = True, gpus: Gpus | None = None) -> Plan:
    """Make the plan of a run; raise an error if the config is invalid or does not fit its files.

    `ask`: send small requests to endpoints, to test that they can serve the run. `gpus`: GPUs of the run on other
    machines; None: the run is for this machine.
    """
    facts, notes = Facts(config, gpus), list[str]()
    config = complete_and_check(config, facts, notes.append)
    data = DataFacts(config, facts, notes.append)
    longest, teachers = data.longest, check_teachers(data)
    config = with_lengths(config, longest, teachers.longest)
    check(WITH_LENGTHS, config, facts)
    if ask:
        check_endpoints(data, longest)
    decisions = decisions_of(config, facts, notes, teachers)
    return Plan(
        config=config,
        method=decisions.method,
        tokenizer=data.tokenizer,
        end_ids=tuple(sorted(data.end_ids)),
        prompts=data.prompts,
        held_out=data.held_out,
        engines=decisions.engines,
        sampling=rollout_sampling(config),
        notes=decisions.notes,
        warnings=(*decisions.warnings, *data.warnings),
        teachers=teachers,
    )


def complete_and_check(config: Config, facts: Facts, say: Callable[[str], object]) -> Config:
    """Return the completed config; raise the error of the first rule that is broken before or after completion."""
    config = on_gpus(config, facts)
    check(FAST, config, facts)
    config = completed(config, facts, say)
    check(COMPLETED, config, facts)
    return config


class Decisions(NamedTuple):
    """Decisions of a plan that need no data."""

    method: Method
    engines: EnginesPlan
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def decisions_of(
    config: Config, facts: Facts, notes: Sequence[str], teachers: CheckedTeachers | None = None
) -> Decisions:
    """Return what follows from a completed config; `notes` are those of its completion."""
    method = method_of(config)
    known = (teachers.one_ends, teachers.respellings) if teachers is not None else ({}, {})
    engines = engines_of(config, method, *known)
    warnings = (*lines_of(WARNINGS, config, facts), *room_warnings(engines, facts))
    return Decisions(method, engines, (*notes, *lines_of(NOTES, config, facts)), warnings)


def check_shapes(config: Config, gpus: Gpus | None = None) -> Decisions:
    """Check the rules that need no more of the models than their config.json; raise the error of the first broken rule.

    `gpus`: devices of the run, whose memory is compared with its needs. None: nothing is compared. Notes begin
    with a line about the shape of each model.
    """
    config, notes = with_shapes(config), list[str]()
    facts = Facts.of_shapes(config, gpus)
    config = complete_and_check(config, facts, notes.append)
    config = with_lengths(config, *possible_lengths(config, facts, notes.append))
    check(WITH_LENGTHS, config, facts)
    decisions = decisions_of(config, facts, notes)
    shapes = [shape_line(model.name, model.text) for model in facts.models]
    return decisions._replace(notes=(*shapes, *decisions.notes))


def fast_checks(config: Config) -> None:
    """Test the rules that need no library, no model and no row of the data."""
    check(FAST, config, Facts(config))


def plan_with_texts(config: Config) -> Plan:
    """Make the plan of a run with start checks; it holds the known texts of every teacher."""
    return with_known_texts(plan(config))


def with_known_texts(made: Plan) -> Plan:
    texts, teachers = dict[str, KnownTexts](), made.config.teachers
    for name, settings in teachers.items():
        prompts = prompts_of(made.prompts, name if len(teachers) > 1 else None)
        maker = TextMaker(settings, made.engines.scorers[name], prompts, made.tokenizer, made.end_ids, made.sampling)
        texts[name] = maker.in_teachers_spelling().make()
    return replace(made, known=texts)


def changed(made: Plan, config: Config) -> Plan:
    """Return the plan for a changed config whose files (models, data) are the same, without reading them again."""
    method = method_of(config)
    one_ends = {name: scorer.one_end for name, scorer in made.engines.scorers.items()}
    respellings = {name: each.respelling for name, each in made.engines.scorers.items() if each.respelling is not None}
    engines, sampling = engines_of(config, method, one_ends, respellings), rollout_sampling(config)
    return replace(made, config=config, method=method, engines=engines, sampling=sampling)
