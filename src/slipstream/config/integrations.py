"""Names of data and environments of other packages: PREFIX:NAME in data.train, data.eval and environment.use."""

from importlib.util import find_spec
from typing import NamedTuple


class Integration(NamedTuple):
    package: str
    """Module that must be installed; empty if none is needed."""
    rows: str = ""
    """Generator of rows, as module:function, which gets name, split and count; empty if it is no data source."""
    environment: str = ""
    """Function that returns the `Kind` of an environment, as module:function; empty if it is no environment."""
    agent: str = ""
    """Module that plays an episode as the agent of a gateway, instead of `environment`; empty if there is none."""
    has_splits: bool = True
    """True if rows of the splits train and eval differ."""
    extra: str = ""
    """Name of the extra that installs the package, if it is not that of the prefix."""


GAME_MODULE = "slipstream.environments.games:"
INTEGRATIONS = {
    "reasoning_gym": Integration("reasoning_gym", rows="slipstream.data.reasoning_gym:rows"),
    "textarena": Integration("textarena", GAME_MODULE + "textarena_rows", GAME_MODULE + "kind_of"),
    "gymnasium": Integration("gymnasium", GAME_MODULE + "gymnasium_rows", GAME_MODULE + "kind_of"),
    "openenv": Integration("websockets", GAME_MODULE + "openenv_rows", GAME_MODULE + "kind_of"),
    "verifiers": Integration(
        "verifiers", "slipstream.agents.verifiers:rows", agent="slipstream.agents.verifiers", has_splits=False
    ),
    "tasks": Integration(
        "", "slipstream.environments.tasks:rows", "slipstream.environments.tasks:kind_of", has_splits=False
    ),
    "mcp": Integration("mcp", environment="slipstream.environments.mcp:kind_of"),
    "mcp_shared": Integration("mcp", environment="slipstream.environments.mcp:kind_of", extra="mcp"),
}
"""Integrations by the prefix of their names."""


def integration_of(spec: str) -> Integration | None:
    """Return the integration of `prefix:name`, or None for every other text."""
    prefix, colon, _ = spec.partition(":")
    return INTEGRATIONS.get(prefix) if colon else None


def makes_rows(source: str) -> bool:
    integration = integration_of(source)
    return integration is not None and bool(integration.rows)


def fault_of(spec: str) -> str:
    """Return the reason why a name with the prefix of an integration cannot be used here; empty if it can."""
    prefix, _, name = spec.partition(":")
    integration = INTEGRATIONS[prefix]
    if not name.strip():
        return f"names nothing: write {prefix}:NAME"
    if integration.package and find_spec(integration.package) is None:
        package, extra = integration.package.replace("_", "-"), (integration.extra or prefix).replace("_", "-")
        return f"needs {package}: pip install 'slipstream[{extra}]'"
    return ""
