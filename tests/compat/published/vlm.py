"""An image-text model: rows have their images in a column, prompts are the conversations."""

import torch
from datasets import load_dataset
from peft import LoraConfig

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.rewards import think_format_reward

SYSTEM_PROMPT = "The assistant first thinks about the reasoning process, then provides the answer."

dataset = load_dataset("lmms-lab/multimodal-open-r1-8k-verified", split="train")
dataset = dataset.train_test_split(test_size=2, seed=42)


def make_conversation(example):
    prompt = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": example["problem"]},
    ]
    return {"prompt": prompt}


dataset = dataset.map(make_conversation)
dataset = dataset.filter(lambda example: example["image"].size[0] < 512 and example["image"].size[1] < 512)
dataset = dataset.map(lambda example: {"image": example["image"].convert("RGB")})
train_dataset, eval_dataset = dataset["train"].remove_columns("problem"), dataset["test"].remove_columns("problem")


def reward_letters(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(sum(letter in s for letter in c)) for c, s in zip(contents, solution, strict=True)]


training_args = GRPOConfig(
    output_dir="grpo-vlm",
    model_init_kwargs={"dtype": torch.float32},
    learning_rate=1e-5,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=12,
    log_completions=True,
    max_steps=1,
    logging_steps=1,
    report_to="none",
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    args=training_args,
    reward_funcs=[think_format_reward, reward_letters],
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
