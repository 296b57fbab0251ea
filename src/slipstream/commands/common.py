"""Parts that several commands share."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError, printable

if TYPE_CHECKING:
    from slipstream.plan.gpus import Gpus


def note(text: str) -> None:
    print(printable(text), file=sys.stderr)


def gpus_of(args: Namespace) -> Gpus | None:
    """Return the GPUs that --gpus names; raise ConfigError if --shapes or --gpus stand without --check."""
    from slipstream.plan.gpus import Gpus

    if (args.shapes or args.gpus) and not args.check:
        raise ConfigError("--shapes and --gpus are for the check of a config: write --check beside them")
    return Gpus.parse(args.gpus) if args.gpus else None
