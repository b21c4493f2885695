"""An adapter, and a KL to the model without it."""

from datasets import load_dataset
from peft import LoraConfig

from grpo.language import GRPOConfig, GRPOTrainer


def reward_num_unique_chars(completions, **kwargs):
    return [len(set(completion[0]["content"])) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward_num_unique_chars,
    args=GRPOConfig(
        output_dir="peft-lora",
        learning_rate=1e-4,
        beta=0.04,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=2,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=load_dataset("trl-lib/ultrafeedback-prompt", split="train"),
    peft_config=LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    ),
)
trainer.train()
trainer.save_model("peft-lora/adapter")
