"""Rules about tasks of lm-evaluation-harness."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.plan.facts import Facts


def check_suite(config: Config, facts: Facts) -> None:
    """Raise ConfigError if a task of eval.suite is unknown."""
    if (suite := config.eval.suite) is not None:
        task_manager(suite.tasks, suite.path, "eval.suite.tasks", "eval.suite.path")


def task_manager(names: Sequence[str], path: str | None, setting: str, path_setting: str) -> Any:
    """Return the TaskManager that has the named tasks; raise ConfigError for an unknown one."""
    if path is not None and not Path(path).is_dir():
        raise ConfigError(f"{path_setting}: there is no directory {path}")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=path)
    for name in names:
        if not manager.match_tasks([name]):
            near = get_close_matches(name, manager.all_tasks, n=1)  # there are thousands, too many to list
            hint = f"did you mean {near[0]!r}?" if near else "`lm-eval ls` lists all"
            raise ConfigError(f"{setting}: lm-evaluation-harness has no task {name!r}; {hint}")
    return manager
