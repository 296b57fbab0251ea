"""Rules between the config and its data sources, before any row is read."""

from collections.abc import Collection
from itertools import chain

from slipstream.config.data import DataConfig
from slipstream.config.schema import Config
from slipstream.data.prompts import check_columns_used, check_there, check_where
from slipstream.data.sources import has_splits
from slipstream.data.teacher_context import check_function
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts
from slipstream.plan.graders import reward_settings
from slipstream.rewards import grading


def sources_by_split(config: Config) -> dict[str, list[str]]:
    """Return the sources of the run's data, by the key in [data] that names their split."""
    evaluated = [*config.data.held_out.values()] if config.eval.every else []
    return {"split": [*config.data.sources.values()], "eval_split": evaluated}


def check_settings(config: Config, facts: Facts) -> None:
    """Check settings of [data] that have no effect on these sources, without reading the sources."""
    given = sources_by_split(config)
    check_columns_used(config.data, *chain(*given.values()))
    for name, sources in given.items():
        check_split(config.data, name, sources)
        for source in sources:
            check_where(source, config.data.where if name == "split" else config.data.eval_where)


def check_split(data: DataConfig, name: str, given: Collection[str]) -> None:
    if data.changed(name) and given and not any(map(has_splits, given)):
        value, all_of_them = getattr(data, name), ", ".join(given)
        raise ConfigError(f"data.{name} = {value!r} does nothing: {all_of_them} has no splits; drop it")


def check_sources(config: Config, facts: Facts) -> None:
    """Raise an error for a source that is not there."""
    for name, given in sources_by_split(config).items():
        for source in given:
            check_there(source, getattr(config.data, name))


def check_functions(config: Config, facts: Facts) -> None:
    """Raise ConfigError if a user function of a reward or of a teacher's context cannot be loaded."""
    grading.needs(config.task.reward, config.task.sandbox, reward_settings(config))
    for name, teacher in config.teachers.items():
        if teacher.context is not None and teacher.own_context:
            check_function(name, teacher.context, graded=bool(config.task.reward))
