"""`slipstream push`: upload the student of a finished run to the hub, with its card, config, metrics and report."""

import re
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from slipstream.commands.common import note
from slipstream.errors import ConfigError, RunDirError, first_line, printable
from slipstream.models.adapters import base_of, is_adapter
from slipstream.models.model_card import LOADING_HEADING, loading
from slipstream.plan.placement import size
from slipstream.run_dir.atomic_files import damage
from slipstream.run_dir.reading import RunDir

BESIDE = ("config.toml", "metrics.jsonl")
"""Files of a run that are uploaded to the directory `run`."""
CARD = "README.md"


def run(args: Namespace) -> None:
    check_name(args.to)
    with tempfile.TemporaryDirectory() as made:
        files = files_of(args.directory, Path(made), args.to)
        for name, path in files.items():
            print(printable(f"{size(path.stat().st_size):>12}  {name}"))
        kind = "public" if args.public else "private"
        if args.dry_run:
            print(f"dry run: these {len(files)} files would be sent to the {kind} repository {args.to}")
            return
        print(f"done: {upload(args.to, files, private=not args.public)}")


def check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if "/" not in repository:
        raise ConfigError(f"--to {repository}: write OWNER/NAME, by which the card loads the student")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--to {repository}: {first_line(error)}") from None


def files_of(directory: Path, made: Path, repository: str) -> dict[str, Path]:
    """Return the files to upload by their names in the repository; write the run's report and the card to `made`."""
    from slipstream.commands.report import report as write_report

    if directory.name == "final" and (directory.parent / BESIDE[0]).is_file():
        directory = directory.parent
    final = directory / "final"
    if not (final / "config.json").is_file():
        raise RunDirError(f"{directory} has no finished student: final is written when the run ends")
    if wrong := damage(final, edited=CARD):
        raise RunDirError(f"{final} is damaged: {wrong}")
    if is_adapter(str(final / "adapter")) and Path(base := base_of(str(final / "adapter"))).is_absolute():
        note(f"note: final/adapter names a directory of this machine as its base ({base}): name one that others have")
    model = {str(path.relative_to(final)): path for path in sorted(final.rglob("*")) if path.is_file()}
    if CARD in model:
        model[CARD] = made / CARD
        model[CARD].write_text(card_of(directory, repository), "utf-8")
    write_report([directory], made / "report.html")
    beside = {f"run/{name}": directory / name for name in BESIDE if (directory / name).is_file()}
    return model | beside | {"run/report.html": made / "report.html"}


def card_of(run: Path, repository: str) -> str:
    """Return the model card of a run, with commands that load the student from the hub in place of its own."""
    config = RunDir(run).config.model_dump(mode="json")
    text = (run / "final" / CARD).read_text("utf-8", errors="replace")
    before, heading, after = text.partition(f"{LOADING_HEADING}\n")
    if not heading:
        note(f"note: {CARD} has no section {LOADING_HEADING!r}: it is sent as it is")
        return text
    rest = re.search(r"^## ", after, re.MULTILINE)
    own = loading(config, run / "final", repository)
    return f"{before}{heading}\n{own}\n" + (f"\n{after[rest.start() :]}" if rest else "")


def upload(repository: str, files: Mapping[str, Path], *, private: bool) -> str:
    """Send files in one commit to a repository, which is created if it is missing; return its address."""
    from httpx2 import HTTPError
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    hub = HfApi()
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.create_commit(repository, operations, commit_message="Student trained by Slipstream")
    except HFValidationError as error:
        raise ConfigError(f"--to {repository}: {first_line(error)}") from None
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(f"the hub did not take {repository}: {first_line(error)}") from None
    return str(address)
