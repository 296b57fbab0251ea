"""Extension of vLLM's workers that loads weights, computes checksums and samples draws. For vLLM 0.32.

vLLM imports this file before it loads the model, because `worker_extension_cls` names one of its classes.

**Weights** arrive by an additional backend of vLLM's weight transfer. Every worker maps a file in shared memory and
loads its part by vLLM's loaders. They write into the existing tensors, so CUDA graphs stay valid.

**Draws** are extra tokens sampled at the same position as the emitted token. Draws replace the top log-probs that vLLM
returns; `logprobs = M − 1` requests them. Draws are sampled in the V1 runner's sampler, from its log-probs after
temperature and truncation. Separate random numbers leave the emitted tokens unchanged.

**The sampling support** follows the draws: the most likely ids, of which those with a finite log-prob were not cut.

Shapes: N requests of a step, M draws, K ids of the support and -inf beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from slipstream.engines.draws import draw, uniforms
from slipstream.engines.vllm import ADAPTER_ID
from slipstream.engines.vllm.layers import (
    AdapterHome,
    Home,
    adapter_checksum_of,
    adapter_place_of,
    as_saved,
    checksum_of,
    place_of,
    twin_of,
)
from slipstream.engines.weights import is_adapter, view_of
from slipstream.protocols import TensorSpec

BACKEND = "slipstream"
Spec = tuple[str, str, list[int], int, int]
"""Name, dtype, shape, offset and number of bytes of a tensor."""


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass
class NoInfo(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class File(WeightTransferUpdateInfo):  # type: ignore[misc]
    path: str
    manifest: list[Spec]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under a learner's names, as copy-on-write views of the mapped file."""
        flat = torch.from_numpy(np.memmap(self.path, np.uint8, mode="c"))
        for name, dtype, shape, offset, nbytes in self.manifest:
            yield name, view_of(TensorSpec(name, dtype, tuple(shape), offset, nbytes), flat)


class FileTransfer(WeightTransferEngine[NoInfo, File]):  # type: ignore[misc]
    init_info_cls, update_info_cls = NoInfo, File
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if current_platform.is_cpu():
            for layer in self.model.modules():
                if isinstance(layer, RoutedExperts):
                    # CPU experts are packed only when their kernel is created, so the kernel must be created again
                    layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():
            # buffers are not published, and vLLM would leave them uninitialized in a reloaded layer
            buffers = {name: buffer for name, buffer in layer.named_buffers(recurse=False) if buffer.is_meta}
            if buffers and layer._parameters:
                _, running = get_layerwise_info(layer).kernel_tensors
                layer._buffers.update({name: running[name].clone() for name in buffers})

    def receive_weights(self, update_info: File) -> None:
        names = set(dict(self.model.named_parameters()))
        loaded = set(self.model.load_weights(as_saved(twin_of(self.model_config.model), update_info)))
        constant = {name for name in names if name.rpartition(".")[2] in SKIP_LOAD_TENSORS}
        if missing := sorted((names - loaded | self._untouched()) - constant - self._tied()):
            raise RuntimeError(f"vLLM did not load new weights for {len(missing)} parameters, first {missing[0]}")

    def _untouched(self) -> set[str]:
        """Return names of weights that the layerwise reload did not load; loaders that copy directly bypass it."""
        names = set()
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load() and not info.load_numel:
                names |= {f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False)}
        return names

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if current_platform.is_cpu() and self._tied() and head is not None:
            # a tied head receives no weights, and on CPUs keeps a packed copy of the old ones
            head.quant_method.process_weights_after_loading(head)

    def _tied(self) -> set[str]:
        return {"lm_head.weight"} if self.model_config.hf_text_config.tie_word_embeddings else set()

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class Extension:
    """Mixin of vLLM's worker class with methods for `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    slipstream_places: dict[str, Home | AdapterHome]

    def slipstream_ready(self, names: list[str], hook: bool, draws: int, kept: int, scale: float) -> dict[str, Any]:
        """Install draws if supported; return `hooked`, the runner's name, and why a weight is unchecked ("": none)."""
        runner = self.model_runner
        with set_current_vllm_config(self.vllm_config):
            twin = twin_of(self.vllm_config.model_config.model)
        places = {
            name: adapter_place_of(name, runner, scale)
            if is_adapter(name)
            else place_of(name.replace(".base_layer.", "."), runner.get_model(), twin)
            for name in names
        }
        self.slipstream_places = {name: place for name, place in places.items() if not isinstance(place, str)}
        sampler: Any = getattr(runner, "sampler", None)
        hooked = hook and type(sampler) is Sampler and hasattr(runner, "input_batch") and hasattr(runner, "requests")
        if hooked:
            sampler.gather_logprobs = MoreDraws(runner, draws, kept)
        return {
            "unchecked": next((why for why in places.values() if isinstance(why, str)), ""),
            "hooked": hooked,
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        }

    @torch.no_grad()
    def slipstream_checksums(self, path: str, manifest: list[Spec]) -> dict[str, int]:
        """Return the checksum of each fingerprinted weight that this worker runs; `path` has the expected weights."""
        checksums = {}
        with set_current_vllm_config(self.vllm_config):
            for name, loaded in File(path, manifest):
                match self.slipstream_places.get(name):
                    case Home() as place:
                        checksums[name] = checksum_of(place, loaded)
                    case AdapterHome() as place:
                        slots = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
                        checksums[name] = adapter_checksum_of(place, loaded, slots.index(ADAPTER_ID))
        return checksums


# --- draws -----------------------------------------------------------------------------------------------------------


class MoreDraws:
    """Replacement of `Sampler.gather_logprobs`: the emitted token, draws at the same position, and the support."""

    def __init__(self, runner: Any, draws: int, kept: int) -> None:
        """Return `draws` − 1 draws and the `kept` most likely ids if a request of the step asks for all of them."""
        self.runner, self.draws, self.kept = runner, draws, kept

    def __call__(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        ids_N1 = token_ids[:, None]
        logp_N1 = logprobs.gather(1, ids_N1)
        kept = self.kept if num_logprobs == self.draws - 1 + self.kept else 0
        if draws := num_logprobs - kept:
            seed_N, position_N = self._streams(logprobs.device)
            uniform_NM = uniforms(seed_N, position_N, draws + 1)[:, 1:]
            # an exception here would end the engine, so rows that are not finite become NaN and are reported later
            sound_N1 = logprobs.exp().sum(1, keepdim=True).isfinite()
            ids_NM, logp_NM = draw(logprobs.where(sound_N1, 0.0), uniform_NM)
            ids_N1 = torch.cat([ids_N1, ids_NM], 1)
            logp_N1 = torch.cat([logp_N1, logp_NM.where(sound_N1, torch.nan)], 1)
        if kept:
            best = logprobs.topk(kept, -1)
            ids_N1, logp_N1 = torch.cat([ids_N1, best.indices], 1), torch.cat([logp_N1, best.values], 1)
        return LogprobsTensors(ids_N1.int(), logp_N1, torch.zeros_like(token_ids))

    def _streams(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the seed of every request, and the number of tokens of its response."""
        batch, requests = self.runner.input_batch, self.runner.requests
        n = batch.num_reqs
        seeds = [requests[name].sampling_params.seed or 0 for name in batch.req_ids[:n]]
        positions = batch.num_tokens_no_spec[:n] - batch.num_prompt_tokens[:n]
        return torch.tensor(seeds, device=device), torch.from_numpy(positions.astype(np.int64)).to(device)
