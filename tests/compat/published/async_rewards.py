"""Rewards that wait for somebody else: all completions of a batch are asked about at the same time."""

import asyncio

from datasets import load_dataset

from grpo.language import GRPOConfig, GRPOTrainer


async def judge(text):
    await asyncio.sleep(0.001)
    return float(text.count("e"))


async def async_reward_func(prompts, completions, **kwargs):
    return await asyncio.gather(*(judge(completion[0]["content"]) for completion in completions))


def sync_reward_func(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[async_reward_func, sync_reward_func],
    args=GRPOConfig(
        output_dir="async-rewards",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=12,
        max_steps=1,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=load_dataset("trl-lib/ultrafeedback-prompt", split="train"),
)
trainer.train()
