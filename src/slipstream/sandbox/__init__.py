"""Where code that a model wrote is run: `environment.sandbox` says which."""

from __future__ import annotations

from urllib.parse import urlsplit

from slipstream.errors import ConfigError
from slipstream.sandbox.base import Sandbox


def sandbox_of(spec: str) -> Sandbox:
    """ConfigError if it cannot be had here. One that is far away is asked when it is needed."""
    match spec:
        case "bubblewrap":
            from slipstream.sandbox.bubblewrap import Bubblewrap

            return Bubblewrap()
        case "none":
            from slipstream.sandbox.none import Unconfined

            return Unconfined()
    where = urlsplit(spec)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ConfigError(f'environment.sandbox = {spec!r}: write "bubblewrap", "none" or the URL of a server')
    if where.username or where.password or where.query or where.fragment:
        raise ConfigError(
            "environment.sandbox: a URL of scheme, host, port and path only: what is more ends up in logs"
        )
    from slipstream.sandbox.remote import Remote

    return Remote(spec)
