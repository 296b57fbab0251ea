"""Check that bubblewrap works here. If it does not, its tests are skipped, and the last lines of a run say so."""

import asyncio

from slipstream.errors import SlipstreamError
from slipstream.sandbox import sandbox_of


def why_not() -> str:
    try:
        ran = asyncio.run(sandbox_of("bubblewrap").run(["true"]))
    except SlipstreamError as error:
        return f"NO SANDBOX IS TESTED HERE: {error}"
    return "" if ran.status == "ok" else f"NO SANDBOX IS TESTED HERE: {ran}"


NO_BUBBLEWRAP = why_not()
