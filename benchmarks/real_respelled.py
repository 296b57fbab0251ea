"""A real student taught by its own teacher, and by a copy of this teacher with another vocabulary.

    make real
    python benchmarks/real_respelled.py [--student build/real/student] [--updates 24] [--batch 8]

The copy has the same weights. Its token ids are in another order, and its tokenizer lacks the newest merges, so that
some words need more tokens. Both runs learn half from own answers and half from the teacher's. The plain run minimises
the forward KL over the whole vocabulary, the other one `common_topk` with `spelling = "own"`. Then both students are
measured in the student's tokens, with the teacher itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from real_clock import measured
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import load_model
from slipstream.models.resolve import model_path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=Path, default=ROOT / "build/real")
    parser.add_argument("--student", default=str(ROOT / "build/real/student"))
    parser.add_argument("--output", type=Path, default=ROOT / "build/real_respelled")
    parser.add_argument("--merges", type=int, default=5000, help="merges that the copy lacks")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    teacher, copy = model_path(str(args.parts / "teacher.gguf")), args.output / "teacher"
    respell(teacher, args.merges, copy)
    arms = {
        "plain": [teacher, "--loss.kind", "forward_kl", "--loss.cache", "hidden"],
        "re-spelled": [str(copy), "--teachers.main.spelling", "own", "--loss.kind", "common_topk", "--loss.k", "64"],
    }
    saved = [{"arm": "before", "path": args.student}]
    for name, words in arms.items():
        place = args.output / name
        shutil.rmtree(place, ignore_errors=True)
        command = [str(Path(sys.executable).with_name("slipstream")), "train", str(HERE / "real_clock.toml")]
        command += ["--student", args.student, "--teachers.main.model", *words, "--output", str(place)]
        command += ["--data.train", str(args.parts / "train.jsonl"), "--mix.source", "teacher", "--mix.share", "0.5"]
        command += ["--sampler.temperature", "0.7", "--learner.lr", "4e-4", "--learner.decay", "cosine"]
        command += ["--learner.batch_size", str(args.batch), "--updates", str(args.updates), "--checkpoint.every", "0"]
        command += ["--runtime.kind", "inline", "--runtime.threads", "2"]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
        saved.append({"arm": name, "path": str(place / "final")})
    for _ in measured(saved, teacher, args.parts / "held_out.jsonl"):
        pass


def respell(model: str, merges: int, target: Path) -> None:
    """Write the model with its token ids in another order and without its newest merges, and say so."""
    lm, tokenizer = load_model(model, dtype="float32", device="cpu").model, load_tokenizer(model)
    tokenizer.save_pretrained(target)
    file = target / "tokenizer.json"
    saved: dict[str, Any] = json.loads(file.read_text("utf-8"))
    kept, known = saved["model"]["merges"][:-merges], saved["model"]["vocab"]
    made = {one + other for one, other in kept}
    lost = {one + other for one, other in saved["model"]["merges"][-merges:]} - made
    order = np.random.default_rng(0).permutation([number for text, number in known.items() if text not in lost])
    renamed = {int(old): new for new, old in enumerate(order)}
    saved["model"] |= {
        "merges": kept,
        "vocab": {text: renamed[number] for text, number in known.items() if number in renamed},
    }
    for special in saved["added_tokens"]:
        special["id"] = renamed[special["id"]]
    saved["added_tokens"].sort(key=lambda special: special["id"])
    file.write_text(json.dumps(saved), "utf-8")
    weight = lm.get_input_embeddings().weight.detach()[torch.from_numpy(order)]
    lm.set_input_embeddings(nn.Embedding.from_pretrained(weight, freeze=False))
    lm.lm_head = nn.Linear(weight.shape[1], len(weight), bias=False)
    lm.config.vocab_size = len(weight)
    lm.tie_weights()
    for config in (lm.config, lm.generation_config):
        for key in IDS:
            if (old := getattr(config, key, None)) is not None:
                setattr(config, key, renamed[old])
    lm.save_pretrained(target)
    lm.generation_config.save_pretrained(target)
    print(f"{target}: {len(weight):,} of {len(known):,} tokens, in another order")


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
