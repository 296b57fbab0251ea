"""Sandboxes for code that a model wrote; `environment.sandbox` and `task.sandbox` select one."""

from urllib.parse import urlsplit

from slipstream.errors import ConfigError
from slipstream.sandbox.base import Sandbox


def sandbox_of(spec: str, setting: str = "environment.sandbox") -> Sandbox:
    """Return the sandbox that a name or a server's URL selects; raise ConfigError if it cannot be used here.

    `setting` is the name of the setting that holds `spec`, for error messages.
    """
    match spec:
        case "bubblewrap":
            from slipstream.sandbox.bubblewrap import Bubblewrap

            return Bubblewrap(setting)
        case "none":
            from slipstream.sandbox.none import Unconfined

            return Unconfined()
    where = urlsplit(spec)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ConfigError(f'{setting} = {spec!r}: write "bubblewrap", "none" or the URL of a server')
    if where.username or where.password or where.query or where.fragment:
        raise ConfigError(
            f"{setting}: write a URL of scheme, host, port and path only: other parts would appear in logs"
        )
    from slipstream.sandbox.remote import Remote

    return Remote(spec)
