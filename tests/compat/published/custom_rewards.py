"""Reward functions of one's own: of texts, of token ids, of a column, and what they log beside it."""

import re

from datasets import Dataset

from grpo.language import GRPOConfig, GRPOTrainer

dataset = Dataset.from_dict(
    {
        "prompt": ["The sky is", "The sun is", "Roses are", "Violets are"],
        "ground_truth": ["blue", "in the sky", "red", "blue"],
    }
)


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def reward_tokens(completion_ids, **kwargs):
    return [float(len(set(ids))) for ids in completion_ids]


def reward_func(prompts, completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    found = [re.search(r"[aeiou]+", completion) for completion in completions]
    if log_extra:
        log_extra("found", [match.group(0) if match else "[none]" for match in found])
    if log_metric:
        log_metric("share_found", sum(match is not None for match in found) / len(found))
    return [1.0 if match and match.group(0) in truth else 0.0 for match, truth in zip(found, ground_truth, strict=True)]


training_args = GRPOConfig(
    output_dir="custom-rewards",
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=12,
    reward_weights=[0.5, 0.1, 1.0],
    learning_rate=1e-5,
    beta=0.04,
    logging_steps=1,
    max_steps=2,
    report_to="none",
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[reward_len, reward_tokens, reward_func],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
