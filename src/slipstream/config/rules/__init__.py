"""Rules between sections of the config: each is a function that yields what clashes and what to write instead.

A rule needs nothing but the config. Rules that need models, data or the machine are in `plan/rules`.
"""

from itertools import chain

from slipstream.config.rules import estimators, evaluation, objective, offpolicy, reuse, workers
from slipstream.config.sections import Sections

SECTION_RULES = (
    workers.batches,
    reuse.reuse,
    objective.objective,
    workers.learner,
    objective.guards,
    offpolicy.offpolicy,
    offpolicy.teacher_replaces,
    workers.features,
    workers.server,
    workers.sampling,
    workers.environment,
    workers.clock,
    workers.time_share,
    workers.limits,
    evaluation.evaluation,
    evaluation.unused,
    estimators.correction,
    estimators.policy,
    estimators.truncation,
    estimators.snapshots,
)
"""All rules, in the order in which they are tested."""


def first_clash(config: Sections) -> str | None:
    """Return the message of the first clash; None if the sections fit together."""
    return next(chain.from_iterable(rule(config) for rule in SECTION_RULES), None)
