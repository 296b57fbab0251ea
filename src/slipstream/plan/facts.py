"""Facts from outside of the config: models, this machine, installed packages. Reading them decides nothing.

Each fact is read once, at its first use, so a fact that no rule needs costs nothing.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slipstream.config.learner import LoraConfig
from slipstream.config.schema import Config
from slipstream.data.tokenizers import Tokenizer, load_tokenizer
from slipstream.engines.native.config import context_length, experts_of, fully_attended, generation_of, load_config
from slipstream.engines.vllm import VERSION
from slipstream.engines.vllm.core import version
from slipstream.models.adapters import Adapter, adapter_of, is_adapter
from slipstream.plan.gpus import Gpus
from slipstream.plan.placement import adapted, host_memory
from slipstream.run_dir.writing import installed_version

if TYPE_CHECKING:
    from torch import nn

KINDS = frozenset({"shapes", "training", "packages", "machine", "files", "weights"})
"""Kinds of facts: config.json of models, what training reads and publishes, installed packages, this machine, other
files, files of weights."""

ROWS, SECONDS = 512, 0.2
"""Rows of the measured product, and minimum time for which each format is measured."""


class ModelFacts:
    """Facts about one model that its files tell without its weights."""

    def __init__(self, name: str) -> None:
        self.name, self.is_adapter = name, is_adapter(name)

    @cached_property
    def config(self) -> Any:
        return load_config(self.name)

    @cached_property
    def text(self) -> Any:
        """Return the part of the config that describes the language model."""
        return self.config.get_text_config()

    @property
    def vocabulary(self) -> int:
        """Return the number of embeddings."""
        return int(self.text.vocab_size)

    @property
    def context(self) -> int:
        return context_length(self.config)

    @property
    def experts(self) -> int:
        """Return the number of experts among which routers choose; 0 for a model without experts."""
        return experts_of(self.config)

    @property
    def attended(self) -> int | None:
        """Return the longest sequence of which a sparse attention selects every key; None if it selects none."""
        return fully_attended(self.config)

    @cached_property
    def generation(self) -> Any:
        return generation_of(self.name)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.name)

    @cached_property
    def adapter(self) -> Adapter | None:
        return adapter_of(self.name)

    @cached_property
    def linear(self) -> dict[str, nn.Linear]:
        """Return all linear layers beside the head, by name."""
        return adapted(self.name, LoraConfig())

    @property
    def is_recurrent(self) -> bool:
        """Return True if a layer keeps a state, which cannot forget a token."""
        from slipstream.engines.native.model import is_recurrent  # slow import

        return is_recurrent(self.config)


class Facts:
    """All facts that a plan is made from."""

    def __init__(
        self,
        config: Config,
        gpus: Gpus | None = None,
        *,
        kinds: frozenset[str] = KINDS,
        vllm: str | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        local = {name: config.model_of(teacher) for name, teacher in config.teachers.items() if not teacher.base_url}
        critic = None if config.critic is None else config.critic.model
        models = {model: ModelFacts(model) for model in (config.student, *local.values(), critic) if model is not None}
        self.student = models[config.student]
        self.critic = None if critic is None else models[critic]
        """Model of its own that the critic has; None: it has none."""
        self.teachers = {name: models[model] for name, model in local.items()}
        """Models of teachers without an endpoint, by the teacher's name."""
        self.tokenizers = self.teachers | {
            name: ModelFacts(teacher.tokenizer or teacher.model)
            for name, teacher in config.teachers.items()
            if name not in local
        }
        """Models whose tokenizers the teachers have, by the teacher's name."""
        self.models = tuple(models.values())
        """All models that run here, the student first."""
        self.gpus = gpus
        """GPUs of the run on other machines; None: the run is for this machine."""
        self.kinds = kinds
        """Kinds of facts that may be read."""
        self.options = options
        """Options of a command that stand for settings, by the setting's key; error messages name them."""
        self.vllm = version() if vllm is None else vllm
        """Version of vLLM; empty if it is not installed."""
        self.vllm_for_gpus = version("vllm") if vllm is None else vllm
        """The same, without the build for CPUs."""

    @classmethod
    def of_shapes(cls, config: Config, gpus: Gpus | None) -> Facts:
        """Return facts for which no more of the models is read than their config.json."""
        return cls(config, gpus, kinds=frozenset({"shapes", "training"}), vllm=VERSION)

    @cached_property
    def memory(self) -> int:
        """Return the bytes of memory of this machine."""
        return host_memory()

    @cached_property
    def cpus(self) -> int:
        return os.cpu_count() or 1

    @cached_property
    def open_files(self) -> int | None:
        """Return the largest number of open files of a process; None: unlimited."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return None if limit == resource.RLIM_INFINITY else limit

    @cached_property
    def gpus_here(self) -> int:
        from torch import cuda

        return cuda.device_count() if cuda.is_available() else 0

    def name_of(self, key: str) -> str:
        """Return a key as the user writes it: as an option of a command, or as it is in the config."""
        return self.options.get(key, key)

    def has(self, package: str) -> bool:
        """Return True if a Python package is installed here."""
        return find_spec(package) is not None

    def speed_of_bfloat16(self, inputs: int, outputs: int) -> float:
        """Return how many times as fast as float32 this processor multiplies by a weight of this size in bfloat16."""
        return speed_of_bfloat16(inputs, outputs)

    def versions(self, libraries: Iterable[str]) -> dict[str, str]:
        """Return the version of each of these libraries that is installed here."""
        return {library: version for library in libraries if (version := installed_version(library))}


@cache
def speed_of_bfloat16(inputs: int, outputs: int) -> float:
    """Return how many times as fast as float32 this processor multiplies by a weight of this size in bfloat16.

    Formats of a run never depend on this measurement, so that a resumed or repeated run computes the same.
    """
    import torch

    from slipstream.estimators.products import linear

    seconds = list[float]()
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(ROWS, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
        linear(x, weight)  # the first product of a shape compiles its kernel
        begun, best = time.process_time(), float("inf")
        while time.process_time() - begun < SECONDS:
            before = time.process_time()
            linear(x, weight)
            best = min(best, time.process_time() - before)
        seconds.append(best)
    return seconds[0] / seconds[1]
