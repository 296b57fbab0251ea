"""Copies of a workspace: into a sandbox and back, and for its judge. Links that leave the workspace are dropped."""

import asyncio
import base64
import binascii
import io
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from slipstream import processes
from slipstream.agents import snapshot
from slipstream.agents.snapshot import within
from slipstream.errors import SandboxError
from slipstream.sandbox.base import Limits, Ran, Session
from slipstream.sandbox.limits import finish

PUT = ("/bin/tar", "-xomf", "-", "--no-overwrite-dir")
TAKE = ("/bin/sh", "-c", "tar --ignore-failed-read -cf - . 2>/dev/null | base64 -w0")


async def put(session: Session, directory: Path, limits: Limits) -> None:
    """Copy a directory into a new sandbox; raise TimeoutError after `limits.seconds`, and SandboxError for faults.

    The directory must be trusted: `snapshot` makes a trusted copy of a directory that an agent has changed.
    """
    with tempfile.NamedTemporaryFile(prefix="slipstream-", suffix=".tar") as archive:
        ran = await run_beside(["/bin/tar", "-C", str(directory), "-cf", archive.name, "."], limits.seconds)
        if ran.status == "ok":
            ran = await session.run(PUT, stdin=Path(archive.name), limits=limits)
    if ran.status == "timeout":
        raise TimeoutError(f"{directory} cannot be copied into the sandbox in {limits.seconds:g} s")
    if ran.status != "ok" or ran.err:
        raise SandboxError(f"{directory} cannot be copied into the sandbox: {failure_text(ran)}")


async def snapshot_of(workspace: Path, copy: Path, *, size: int, entries: int, seconds: float) -> str:
    """Copy an agent's workspace to a new directory, and delete all files beside the workspace.

    Return an empty string, or the reason why the workspace cannot be copied: by the agent's fault, or out of time.
    """
    copy.mkdir()
    argv = [sys.executable, "-I", "-S", str(snapshot.__file__), str(workspace), str(copy), str(size), str(entries)]
    ran = await run_beside(argv, seconds)
    if ran.status == "timeout":
        return f"its copy takes more than {seconds:g} s"
    if ran.code not in (0, snapshot.EXIT_REFUSED):
        raise SandboxError(f"the agent's workspace cannot be copied: {failure_text(ran)}")
    return ran.err if ran.code else ""


async def run_beside(argv: Sequence[str], seconds: float) -> Ran:
    """Run a trusted program outside of all sandboxes, and kill it after its time."""
    since = asyncio.get_running_loop().time()
    process = await processes.start_program(argv)
    return await finish(process, Limits(seconds), since, lambda pid: None)


async def take(session: Session, directory: Path, limits: Limits) -> str:
    """Replace the directory's contents by the sandbox's files; return the reason of a failure, or "" on success."""
    ran = await session.run(TAKE, limits=replace(limits, output=2 * limits.disk))
    if ran.status != "ok":
        return f"the sandbox's files cannot be read: {failure_text(ran)}"
    fresh = directory.with_name(f"{directory.name}.new")
    try:
        fresh.mkdir()
        unpack(base64.b64decode(ran.out, validate=True), fresh)
        empty(directory)
        for each in fresh.iterdir():
            each.rename(directory / each.name)
    except (tarfile.TarError, binascii.Error, OSError) as error:
        return f"the sandbox's files cannot be stored: {error}"
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # it may not exist
    return ""


def failure_text(ran: Ran) -> str:
    return " ".join(ran.err.split())[:200] or (ran.status if ran.code is None else f"exit status {ran.code}")


def empty(directory: Path) -> None:
    for each in directory.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def unpack(archive: bytes, into: Path) -> None:
    """Unpack files, directories, and links that stay within `into`; skip devices, pipes and other links."""
    links = list[tuple[Path, str]]()  # created last, so that no file is written through a link
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            name, first = PurePosixPath(member.name), PurePosixPath(member.linkname)
            if name.is_absolute() or ".." in name.parts:
                continue
            place = into / name
            if member.isdir():
                place.mkdir(parents=True, exist_ok=True)
            elif member.isreg() and (content := tar.extractfile(member)) is not None:
                write(place, content.read(), executable=bool(member.mode & 0o100))
            elif member.islnk() and ".." not in first.parts and not first.is_absolute() and (into / first).is_file():
                write(place, (into / first).read_bytes(), executable=bool(member.mode & 0o100))
            elif member.issym() and within(name.parts, member.linkname):
                links.append((place, member.linkname))
    for place, target in links:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)


def write(place: Path, content: bytes, *, executable: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    place.chmod(0o755 if executable else 0o644)
