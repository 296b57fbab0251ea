"""TRL's DistillationTrainer on given samples: seconds, memory, losses and gradient norms of its step alone.

`benchmarks/learner.py` runs it, by the Python of an environment of TRL's own (torch 2.13.0, trl 1.16.0). Only
generation is replaced, by samples from a file; padding, loss, clipping and AdamW are TRL's. The clock covers a training
step, from `on_step_begin` to `on_step_end`, and inside of it the teacher's forward pass. The last line printed is the
result, in JSON.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from head import resident


class Saved:
    """Bytes that the last forward pass of a module keeps for its backward pass, its weights aside."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.sizes: dict[int, int] = {}
        self.hooks: Any = None
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def begin(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.sizes = {}
            self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
            self.hooks.__enter__()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def end(self, *_: Any) -> None:
        if self.hooks is not None:
            self.hooks.__exit__(None, None, None)
            self.hooks = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scratch", type=Path, required=True, help="where case.json and samples.json are")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--beta", type=float, default=1.0, help="0: forward KL, 1: reverse KL")
    parser.add_argument("--micro", type=int, required=True, help="samples of a micro-batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile both backbones; costs a warm-up")
    args = parser.parse_args()

    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    case = json.loads((args.scratch / "case.json").read_text())
    samples = json.loads((args.scratch / "samples.json").read_text())
    found: dict[str, Any] = {name: [] for name in ("seconds", "cpu", "teacher", "teacher_cpu", "resident", "peak")}

    class Given(trl.DistillationTrainer):
        """Its completions are those of the file; all else is TRL's own, with a clock around the teacher's backbone."""

        teacher = teacher_cpu = 0.0

        def _tokenize_prompts(self, prompts):
            return [sample["prompt"] for sample in samples], None, {}

        def _generate_single_turn(self, *_, **__):
            return [sample["response"] for sample in samples]

        def _get_last_hidden_state(self, model, *inputs, **options):
            began, cpu_began = time.perf_counter(), time.process_time()
            hidden = super()._get_last_hidden_state(model, *inputs, **options)
            if not torch.is_grad_enabled():
                self.teacher += time.perf_counter() - began
                self.teacher_cpu += time.process_time() - cpu_began
            return hidden

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            trainer.teacher = trainer.teacher_cpu = 0.0
            found["resident"].append(resident("VmRSS"))
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.began, self.cpu_began = time.perf_counter(), time.process_time()

        def on_step_end(self, *_, **__):
            found["seconds"].append(time.perf_counter() - self.began)
            found["cpu"].append(time.process_time() - self.cpu_began)
            found["teacher"].append(trainer.teacher)
            found["teacher_cpu"].append(trainer.teacher_cpu)
            found["peak"].append(resident("VmHWM"))

    def load(path: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if args.compile:
            model.model.compile(dynamic=False)  # TRL calls the model below the head, and all shapes are the same
        return model

    before = resident("VmRSS")
    student = load(case["student"])
    begun = torch.cat([p.detach().flatten() for p in student.parameters()])
    saved = Saved(student.base_model) if case["memory"] else None
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = Given(
            model=student,
            teacher_model=load(case["teacher"]),
            processing_class=transformers.AutoTokenizer.from_pretrained(case["tokenizer"], padding_side="left"),
            train_dataset=Dataset.from_dict({"prompt": ["1"] * len(samples)}),
            callbacks=[Clock()],
            args=trl.DistillationConfig(
                output_dir=output_dir,
                max_steps=args.updates,
                per_device_train_batch_size=args.micro,
                gradient_accumulation_steps=len(samples) // args.micro,
                max_completion_length=max(len(sample["response"]) for sample in samples),
                beta=args.beta,
                temperature=1.0,
                optim="adamw_torch_fused",
                learning_rate=case["lr"],
                lr_scheduler_type="constant",
                adam_beta1=0.9,
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                # TRL's defaults suit large models on a GPU: recomputed activations and bfloat16.
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1,  # outside of the clock
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()

    change = torch.cat([p.detach().flatten() for p in student.parameters()]) - begun
    torch.save(change, args.scratch / "change-trl.pt")
    log = [row for row in trainer.state.log_history if "loss" in row]
    found |= {name: [row[name] for row in log] for name in ("loss", "grad_norm")}
    found |= {"before": before, "saved": saved.bytes if saved else 0}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
