"""`slipstream estimators`: all losses, corrections and advantages, or the details of one."""

from argparse import Namespace

from rich.table import Table
from rich.text import Text

from slipstream.console import Screen
from slipstream.errors import ConfigError


def run(args: Namespace) -> None:
    from slipstream.estimators.catalogue import TITLES, catalogue, find

    screen = Screen()
    if args.name is not None:
        try:
            entries = find(args.name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for entry in entries:
            details = Table.grid(padding=(0, 2))
            for title, text in zip(TITLES, entry, strict=True):
                details.add_row(f"{title}:", Text(text))
            screen.print(details)
        return
    for family, entries in catalogue().items():
        table = Table("name", "scope", "what it is", "when to use it", title=family, title_justify="left")
        for entry in entries:
            table.add_row(*map(Text, (entry.name, entry.scope, entry.what, entry.use_when)))
        screen.print(table)
    screen.print("slipstream estimators NAME prints all details of one")
