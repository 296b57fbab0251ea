"""A real student taught by its own teacher, and by a copy of this teacher with another vocabulary.

    make build/real/teacher.gguf build/real/train.jsonl
    python tools/leave_out_layers.py build/real/teacher.gguf build/six --layers 9 12 15 18 21 24
    python benchmarks/real_respelled.py --student build/six [--updates 24] [--batch 8] [--only plain]

The copy has the same weights. Its token ids are in another order, and its tokenizer lacks the last 5,000 merges of its
list, the rarest ones, so that some words need more tokens. All runs learn half from own answers and half from the
teacher's. The losses differ as little as they can: the forward KL over the whole vocabulary for the teacher itself, and
for the copy `common_topk` (the forward KL on the 64 most likely shared tokens, with one bucket for all others). A third
run takes these from the teacher's own 64 most likely tokens, as it would with vLLM or an endpoint. Then the students
are measured in their own tokens, with the teacher itself. The results are lines of JSON in `--output`.
"""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=Path, default=ROOT / "build/real")
    parser.add_argument("--student", required=True)
    parser.add_argument("--output", type=Path, default=ROOT / "build/real_respelled")
    parser.add_argument("--merges", type=int, default=5000, help="number of merges that the copy lacks")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="+", help="names of the runs to make, as the results show them")
    args = parser.parse_args()
    teacher, copy = model_path(str(args.parts / "teacher.gguf")), args.output / "teacher"
    write_copy(teacher, args.merges, copy)
    other = [str(copy), "--teachers.main.spelling", "own", "--loss.kind", "common_topk", "--loss.k", "64"]
    arms = {
        "plain": [teacher, "--loss.kind", "forward_kl", "--loss.cache", "hidden"],
        "re-spelled": other,
        "re-spelled, teacher_topk": [*other, "--loss.cache", "teacher_topk"],
    }
    arms = {name: arms[name] for name in args.only or arms}
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
    lines = list(measured(saved, teacher, args.parts / "held_out.jsonl"))
    (args.output / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def write_copy(model: str, merges: int, target: Path) -> None:
    """Write the model with its token ids in another order and without its last merges; print its size."""
    lm, tokenizer = load_model(model, dtype="float32", device="cpu").model, load_tokenizer(model)
    if not lm.config.tie_word_embeddings:
        raise SystemExit(f"{model}: its head has weights of its own, which this benchmark does not reorder")
    tokenizer.save_pretrained(target)
    file = target / "tokenizer.json"
    saved: dict[str, Any] = json.loads(file.read_text("utf-8"))
    ids, every = saved["model"]["vocab"], saved["model"]["merges"]
    kept = every[: len(every) - merges]
    lost = {one + other for one, other in every[len(kept) :]} - {one + other for one, other in kept}
    order = np.random.default_rng(0).permutation([number for text, number in ids.items() if text not in lost])
    new_ids = {int(old): new for new, old in enumerate(order)}
    vocabulary = {text: new_ids[number] for text, number in ids.items() if number in new_ids}
    saved["model"] |= {"merges": kept, "vocab": vocabulary}
    for special in saved["added_tokens"]:
        special["id"] = new_ids[special["id"]]
    saved["added_tokens"].sort(key=lambda special: special["id"])
    file.write_text(json.dumps(saved), "utf-8")
    weight = lm.get_input_embeddings().weight.detach()[torch.from_numpy(order)]
    lm.set_input_embeddings(nn.Embedding.from_pretrained(weight, freeze=False))
    lm.lm_head = nn.Linear(weight.shape[1], len(weight), bias=False)
    lm.config.vocab_size = len(weight)
    lm.tie_weights()
    for config in (lm.config, lm.generation_config):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if (old := getattr(config, key, None)) is not None:
                setattr(config, key, new_ids[old])
    lm.save_pretrained(target)
    lm.generation_config.save_pretrained(target)
    print(f"{target}: {len(weight):,} of {len(ids):,} tokens, in another order")


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
