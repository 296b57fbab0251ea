"""TRL's DistillationTrainer on the real pair, with its student saved every few updates; for `real_clock.py`.

The last line printed is JSON: the seconds of training at each saved update, without the time of saving.
"""

import argparse
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("student", "teacher", "prompts", "output"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--updates", type=int, required=True)
parser.add_argument("--every", type=int, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--max-tokens", type=int, required=True)
parser.add_argument("--temperature", type=float, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--threads", type=int, required=True)
parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
args = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read once, when torch is loaded

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402

torch.set_num_threads(args.threads)
transformers.utils.logging.disable_progress_bar()
HALF = args.dtype == "bfloat16"


class Clock(transformers.TrainerCallback):
    """Counts the seconds of updates, and saves the student between them."""

    def __init__(self):
        self.seconds, self.cpu, self.at = 0.0, 0.0, []

    def on_step_begin(self, *_, **__):
        self.begun, self.begun_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, _, state, control, model=None, **__):
        self.seconds += time.perf_counter() - self.begun
        self.cpu += time.process_time() - self.begun_cpu
        if state.global_step % args.every == 0:
            self.at.append((state.global_step, self.seconds, self.cpu))
            model.save_pretrained(Path(args.output) / str(state.global_step))


def load(path, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


rows = [json.loads(line)["prompt"] for line in Path(args.prompts).read_text().splitlines()]
clock = Clock()
trainer = trl.DistillationTrainer(
    model=load(args.student, torch.float32),
    teacher_model=load(args.teacher, torch.bfloat16 if HALF else torch.float32),
    processing_class=transformers.AutoTokenizer.from_pretrained(args.student, padding_side="left"),
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": row}] for row in rows]}),
    callbacks=[clock],
    args=trl.DistillationConfig(
        output_dir=args.output,
        max_steps=args.updates,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=1,
        max_completion_length=args.max_tokens,
        beta=1.0,  # reverse KL
        temperature=args.temperature,
        optim="adamw_torch_fused",
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        # TRL's defaults suit large models on a GPU: recomputed activations
        gradient_checkpointing=False,
        bf16=HALF,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    ),
)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
print(json.dumps(clock.at))
