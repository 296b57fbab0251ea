"""Load published weights into vLLM, and compare the weights that run with the published ones.

A learner of all weights publishes all weights, which vLLM's weight transfer loads. A learner of adapters publishes the
adapter alone. It replaces the weights of the only adapter in vLLM, which every request uses; so the running requests
continue with it, as they do with whole weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from slipstream.engines.checksums import raw
from slipstream.engines.native.adapters import write_adapter
from slipstream.engines.native.files import empty_model
from slipstream.engines.native.model import load_model, with_adapters
from slipstream.engines.shared_memory import memory_of
from slipstream.engines.vllm import ADAPTER_ID, LORA_RANKS
from slipstream.engines.vllm.core import Core, Settings
from slipstream.engines.weights import combined, export_weights, fingerprinted, is_adapter, published, view_of
from slipstream.errors import ModelError
from slipstream.protocols import Fingerprint, WeightsRef

EXTENSION = "slipstream.engines.vllm.worker.Extension"
SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Folder in shared memory; None, which stands for the default folder of temporary files, if there is none."""


class Loading:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model: PreTrainedModel = empty_model(settings.model)
        """The student with transformers' names; after the start it has shapes only."""
        if settings.lora:
            lm = load_model(settings.model, dtype=settings.dtype, device="cpu", base=True)
            self.model = with_adapters(lm, settings.lora, seed=settings.seed).model
        self.shapes = {name: tuple(tensor.shape) for name, tensor in published(self.model)}
        """Shapes of all weights that a learner exports; tied weights occur once."""
        self.checked = fingerprinted(name for name, _ in self.model.named_parameters())
        self.still: list[dict[str, int]] = []
        """Checksums of the fingerprinted weights that no publish changes, for each worker of vLLM."""
        self.adapter: Any = None
        """Adapter of every request, as a LoRARequest; None if the learner trains all weights."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's engine that loading needs."""
        from vllm.config import WeightTransferConfig

        own = {"worker_extension_cls": EXTENSION, "weight_transfer_config": WeightTransferConfig(backend="slipstream")}
        if lora := self.settings.lora:
            layers = {name.split(".lora_")[0].rpartition(".")[2] for name in self.shapes}
            rank = next(rank for rank in LORA_RANKS if rank >= lora.rank)
            own |= {"enable_lora": True, "lora_target_modules": sorted(layers), "max_lora_rank": rank}
        return own

    async def begin(self, core: Core, **hooks: Any) -> list[dict[str, Any]]:
        """Prepare vLLM's workers, and return their answers; raise ModelError if they cannot check the weights.

        `hooks` says what the workers' sampler returns, as arguments of `Extension.slipstream_ready`.
        """
        lora = self.settings.lora
        scale = lora.alpha / lora.rank if lora else 1.0
        answers = await core.rpc("slipstream_ready", names=self.checked, scale=scale, **hooks)
        for answer in answers:
            if answer["unchecked"]:
                raise ModelError(
                    f"{self.settings.title}: {answer['unchecked']}, so the weights that run cannot be checked; "
                    f"{self.settings.instead}"
                )
        self.still = [{} for _ in answers]
        return answers

    async def load_first(self, core: Core) -> None:
        """Load the first adapter, and compare the base weights in vLLM with those here, which are then freed."""
        if self.settings.lora is None:
            return
        base = {name: weight for name, weight in self.model.named_parameters() if not is_adapter(name)}
        for name in base.keys() & set(self.checked):
            manifest = [(name, self.settings.dtype, list(base[name].shape), 0, base[name].nbytes)]
            with shared_file(raw(base[name].detach())) as path:
                answers = await core.rpc("slipstream_checksums", path=path, manifest=manifest)
            for still, checksums in zip(self.still, answers, strict=True):
                still |= checksums
        first = export_weights(self.model, self.settings.dtype)
        self.model.to("meta")
        await self.load(core, first)

    async def load(self, core: Core, weights: WeightsRef) -> Fingerprint:
        """Load published weights, and return the fingerprint of the weights that run. vLLM must be paused."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        manifest = [(s.name, s.dtype, list(s.shape), s.offset, s.nbytes) for s in weights.manifest]
        with shared_file(weights.body) as path:
            if self.settings.lora:
                await self._load_adapter(core, path, weights)
            else:
                await core.llm.start_weight_update()
                await core.llm.update_weights(WeightTransferUpdateRequest({"path": path, "manifest": manifest}))
                await core.llm.finish_weight_update(weight_version=str(weights.version))
            answers = await core.rpc("slipstream_checksums", path=path, manifest=manifest)
        every = [still | checksums for still, checksums in zip(self.still, answers, strict=True)]
        digests = {combined([checksums[name] for name in self.checked]) for checksums in every}
        return digests.pop() if len(digests) == 1 else "differs from worker to worker"

    async def _load_adapter(self, core: Core, path: str, weights: WeightsRef) -> None:
        from vllm.lora.request import LoRARequest

        flat = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
        state = {spec.name: view_of(spec, flat) for spec in weights.manifest}
        with tempfile.TemporaryDirectory(prefix="slipstream-", dir=SHARED_MEMORY) as folder:
            write_adapter(Path(folder), self.model, state, base=self.settings.model)
            await core.llm.add_lora(LoRARequest("student", ADAPTER_ID, folder, load_inplace=True))
            self.adapter = LoRARequest("student", ADAPTER_ID, folder)
        await core.llm.update_weight_version(str(weights.version))


@contextmanager
def shared_file(body: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield the path of a file with these bytes, which is the learner's shared memory or a copy of other memory."""
    if (memory := memory_of(body)) is not None:
        yield memory.path
        return
    with tempfile.NamedTemporaryFile(prefix="slipstream-", dir=SHARED_MEMORY) as file:
        file.write(body.data)
        file.flush()
        yield file.name
