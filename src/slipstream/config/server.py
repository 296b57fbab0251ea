"""Settings of a rollout server: an HTTP server of vLLM or SGLang that generates the rollouts, `[sampler.server]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from slipstream.config.base import Section, Url, Variable


class ServerConfig(Section):
    url: Url
    """Root URL of the server, for example http://rollouts:8000, without /v1."""
    api: Literal["vllm", "sglang"] = "vllm"
    """HTTP interface of the server."""
    folder: str
    """Directory for published weights, which the server can read under the same path. It holds at most two versions."""
    api_key_env: Variable | None = None
    """Name of the environment variable that holds the server's key. None sends no key."""
    timeout: float = Field(600.0, gt=0)
    """Time limit in seconds of one request: a response, or the load of new weights."""

    @field_validator("url")
    @classmethod
    def _check_root(cls, url: str) -> str:
        if url.endswith("/v1"):
            raise ValueError("is the root of the server: write http://HOST:PORT, without /v1")
        return url

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        if not folder.startswith("/"):
            raise ValueError(f"{folder!r}: the server starts in another directory: write an absolute path")
        return folder
