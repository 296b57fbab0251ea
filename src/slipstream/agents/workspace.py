"""Copies of a workspace into a sandbox and back; links that leave the workspace are dropped."""

from __future__ import annotations

import base64
import binascii
import io
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from slipstream.errors import SandboxError
from slipstream.sandbox.base import Limits, Ran, Session

PUT = ("/bin/sh", "-c", "base64 -d | tar -xof -")
TAKE = ("/bin/sh", "-c", "tar --ignore-failed-read -cf - . 2>/dev/null | base64 -w0")


async def put(session: Session, directory: Path, limits: Limits) -> None:
    """Copy a directory into a new sandbox; raise SandboxError if this fails, which no model's program can cause."""
    ran = await session.run(PUT, stdin=packed(directory), limits=limits)
    if ran.status != "ok" or ran.err:
        raise SandboxError(f"{directory} cannot be copied into the sandbox: {why(ran)}")


async def take(session: Session, directory: Path, limits: Limits) -> str:
    """Replace the directory's contents by the sandbox's files; return the reason of a failure, or "" on success."""
    ran = await session.run(TAKE, limits=replace(limits, output=2 * limits.disk))
    if ran.status != "ok":
        return f"the sandbox's files cannot be read: {why(ran)}"
    fresh = directory.with_name(f"{directory.name}.new")
    try:
        fresh.mkdir()
        unpack(base64.b64decode(ran.out, validate=True), fresh)
        emptied(directory)
        for each in fresh.iterdir():
            each.rename(directory / each.name)
    except (tarfile.TarError, binascii.Error, OSError) as error:
        return f"the sandbox's files cannot be stored: {error}"
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # it may not exist
    return ""


def why(ran: Ran) -> str:
    return " ".join(ran.err.split())[:200] or (ran.status if ran.code is None else f"exit status {ran.code}")


def emptied(directory: Path) -> None:
    for each in directory.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def packed(directory: Path) -> str:
    """Return the directory as a tar archive in base64, because a sandbox accepts only text as input."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for each in sorted(directory.iterdir()):
            tar.add(each, each.name)
    return base64.b64encode(archive.getvalue()).decode()


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


def within(link: Sequence[str], target: str) -> bool:
    """Return true if a link is relative, goes up at most to the top of the workspace, and then only down."""
    parts = PurePosixPath(target).parts
    up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and up < len(link) and ".." not in parts[up:]
