"""TRL's DistillationTrainer on the CPU: samples and response tokens per second of on-policy distillation.

Every update samples one completion for each of `--batch` prompts from the student, at temperature 1, and
takes one AdamW step on the full-vocabulary reverse KL to the teacher, in float32 or with `--bfloat16`. The clock covers
the updates after those of the warm-up, to the end of the last; imports and model loading are outside it.

Run it by the Python of an environment of TRL's own (torch 2.13.0, trl 1.16.0, transformers 5.23.0):

    python benchmarks/peers_trl.py --student DIR --teacher DIR --prompts FILE.jsonl --updates 20 --threads 1

The prompts are rows of {"prompt": text}; other columns are ignored. The last line printed is the result, in
JSON; its updates, samples and seconds are the timed ones, and its losses are those of every update.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--student", required=True)
parser.add_argument("--teacher", required=True)
parser.add_argument("--prompts", required=True)
parser.add_argument("--updates", type=int, default=20, help="with those of the warm-up (default: 20)")
parser.add_argument("--warm-up", type=int, default=3)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--max-tokens", type=int, default=80)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--chat", action="store_true", help="prompts are messages of a user")
parser.add_argument("--bfloat16", action="store_true", help="autocast, and a teacher in bfloat16")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--compile", action="store_true", help="torch.compile both models; costs a warm-up of 20 s")
args = parser.parse_args()
if args.updates <= args.warm_up:
    parser.error(f"--updates must be more than the {args.warm_up} of the warm-up")

os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read once, when torch is loaded

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402

torch.set_num_threads(args.threads)
transformers.utils.logging.disable_progress_bar()


class Clock(transformers.TrainerCallback):
    def __init__(self):
        self.begun, self.ended, self.cpu = [], [], []

    def on_step_begin(self, *_, **__):
        self.begun.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def on_step_end(self, *_, **__):
        self.ended.append(time.perf_counter())
        self.last_cpu = time.process_time()


def load(path, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if args.compile:
        # TRL's loss calls the model below the head, past what its option torch_compile compiles.
        model.model.compile(dynamic=True)
    return model


prompts = [json.loads(line)["prompt"] for line in Path(args.prompts).read_text().splitlines()]
if args.chat:
    prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
clock = Clock()
with tempfile.TemporaryDirectory() as output_dir:
    trainer = trl.DistillationTrainer(
        model=load(args.student),
        teacher_model=load(args.teacher, torch.bfloat16 if args.bfloat16 else torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(args.student, padding_side="left"),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[clock],
        args=trl.DistillationConfig(
            output_dir=output_dir,
            max_steps=args.updates,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=1,
            max_completion_length=args.max_tokens,
            beta=1.0,  # reverse KL
            temperature=1.0,
            optim="adamw_torch_fused",
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            # TRL's defaults suit large models on a GPU: recomputed activations and bfloat16.
            gradient_checkpointing=False,
            bf16=args.bfloat16,
            use_cpu=True,
            logging_steps=1,  # losses and token counts are read from the log; this costs no measurable time
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=args.seed,
        ),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()

log = [row for row in trainer.state.log_history if "loss" in row]
samples = (args.updates - args.warm_up) * args.batch
tokens = args.batch * sum(row["completions/mean_length"] for row in log[args.warm_up :])
seconds = clock.ended[-1] - clock.begun[args.warm_up]
result = {
    "system": "trl",
    "version": trl.__version__,
    "threads": args.threads,
    "compile": args.compile,
    "updates": args.updates - args.warm_up,
    "samples": samples,
    "seconds": seconds,
    "samples_per_s": samples / seconds,
    "tokens_per_s": tokens / seconds,
    "cpu_ms": 1000 * (clock.last_cpu - clock.cpu[args.warm_up]) / samples,
    "loss": [row["loss"] for row in log],
}
print(json.dumps(result))
