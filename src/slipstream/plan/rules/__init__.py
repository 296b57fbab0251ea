"""Rules between the config and facts. Each raises an error that says what clashes, and what to write instead.

Every rule names the facts that it needs. `train`, `--check`, `--shapes`, `eval`, `gateway` and `doctor` run the same
table. Rules whose facts are not there are left out.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from slipstream.config.schema import Config
from slipstream.plan.engines import endpoint_of
from slipstream.plan.facts import Facts
from slipstream.plan.rules import data, machine, models, vllm
from slipstream.plan.rules.endpoints import check_endpoints as check_endpoints
from slipstream.plan.rules.memory import room_warnings as room_warnings
from slipstream.plan.rules.suite import check_suite


class Rule(NamedTuple):
    check: Callable[[Config, Facts], object]
    needs: str = "shapes"
    """Kinds of facts beside the config, of those in `facts.KINDS`, separated by blanks."""


def check_keys(config: Config, facts: Facts) -> None:
    """Raise ConfigError if the environment has no key for an endpoint."""
    for name in config.teachers:
        endpoint_of(config, name)


FAST = (
    Rule(models.check_adapter_engines),
    Rule(machine.check_packages, "packages"),
    Rule(machine.check_runtime, "machine"),
    Rule(machine.check_processes, "machine"),
    Rule(machine.check_in_flight, "machine"),
    Rule(vllm.check_folder, "machine"),
    Rule(models.check_models),
    Rule(models.check_reward_model),
    Rule(data.check_settings, "training"),
    Rule(data.check_functions, "files"),
    Rule(check_keys, "machine"),
    Rule(data.check_sources, "training files"),
)
"""Rules of the config as the user wrote it; no library is imported for them."""
COMPLETED = (
    Rule(machine.check_device, "machine"),
    Rule(vllm.check_server_sampling),
    Rule(vllm.check_vllm_sampler, "training"),
    Rule(vllm.check_vllm_teachers),
    Rule(models.check_contexts),
    Rule(models.check_heads),
    Rule(models.check_weights, "weights"),
    Rule(models.check_base_precision, "weights"),
    Rule(models.check_adapters),
    Rule(models.check_vocabulary),
    Rule(models.check_quantisation),
    Rule(models.check_router),
    Rule(models.check_speculation),
    Rule(models.check_dropout),
    Rule(models.check_embeddings),
    Rule(models.check_layers),
    Rule(check_suite, "training files"),
    Rule(models.check_critic, "training files"),
)
"""Rules of the completed config."""
WITH_LENGTHS = (Rule(models.check_selection, "training"),)
"""Rules that need the lengths of sequences, too."""
EVALUATION = (Rule(vllm.check_vllm_evaluation),)
"""Rules of the config of an evaluation, beside FAST and COMPLETED."""


def check(rules: Collection[Rule], config: Config, facts: Facts) -> None:
    """Run all rules whose facts are there; raise the error of the first broken one."""
    for rule in rules:
        if facts.kinds.issuperset(rule.needs.split()):
            rule.check(config, facts)
