"""Proofs that engines make about their model at the start, made once for each architecture: for many tiny engines."""

from typing import Any

import pytest

from slipstream.engines.native import files, model, scorer
from slipstream.engines.native.files import check_complete
from slipstream.engines.native.learning import student
from slipstream.engines.native.model import find_head
from slipstream.engines.native.rows import use_rows
from slipstream.engines.native.sampling import kv, sampler
from slipstream.engines.native.sampling.decoding import prove
from slipstream.estimators.logprobs.tiles import Head


def prove_once(patch: pytest.MonkeyPatch) -> None:
    """Let engines start without the proofs that a model of the same config, class and precision has passed before."""
    heads: dict[str, tuple[float, float | None]] = {}
    attentions: dict[str, str] = {}
    proven: set[str] = set()
    decodes: set[str] = set()
    complete: set[str] = set()
    prove_dropout = student._prove

    def find_head_once(name: str, lm: Any, backbone: Any) -> Head:
        if (key := _key(lm)) not in heads:
            head = find_head(name, lm, backbone)
            heads[key] = (head.scale, head.cap)
        return Head(lm.get_output_embeddings(), *heads[key])

    def use_rows_once(lm: Any, *, packed: bool = True, field: str = "learner.packing") -> None:
        key = f"{packed} {_key(lm.model)}"
        if key in attentions:
            lm.model.set_attn_implementation(attentions[key])
        else:
            use_rows(lm, packed=packed, field=field)
            attentions[key] = lm.model.config._attn_implementation

    def prove_dropout_once(lm: Any, *, dropout: bool, packed: bool) -> None:
        checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in lm.model.modules())
        key = f"{dropout} {packed} {checkpointing} {_key(lm.model)}"
        if key not in proven:
            prove_dropout(lm, dropout=dropout, packed=packed)
            proven.add(key)

    def prove_decoding_once(lm: Any) -> None:
        if (key := _key(lm.model)) in decodes:
            lm.model.set_attn_implementation(kv.SLOTS_ATTENTION)
        else:
            prove(lm)
            decodes.add(key)

    def check_complete_once(name: str) -> None:
        if name not in complete:
            check_complete(name)
        if name.startswith("builtin:"):  # no test changes these files
            complete.add(name)

    patch.setattr(files, "check_complete", check_complete_once)
    patch.setattr(sampler, "prove", prove_decoding_once)
    patch.setattr(model, "find_head", find_head_once)
    patch.setattr(scorer, "use_rows", use_rows_once)
    patch.setattr(student, "use_rows", use_rows_once)
    patch.setattr(student, "_prove", prove_dropout_once)


def _key(lm: Any) -> str:
    config = {name: value for name, value in lm.config.to_dict().items() if not name.startswith("_")}
    return f"{type(lm).__name__} {lm.dtype} {config}"
