"""Held-out prompts, evaluated while a run goes on and once more behind it."""

from datasets import load_dataset
from transformers import TrainerCallback

from grpo.language import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.heard.append((state.global_step, sorted(metrics)))


def reward_func(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train").train_test_split(test_size=4, seed=42)
watch = Watch()
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward_func,
    args=GRPOConfig(
        output_dir="evaluation",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=4,
        num_generations_eval=2,
        max_completion_length=12,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=dataset["train"],
    eval_dataset={"data1": dataset["test"], "data2": dataset["test"].select([0, 1])},
    callbacks=[watch],
)
trainer.train()
metrics = trainer.evaluate(dataset["test"])
