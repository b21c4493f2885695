"""Several tasks in one data set, each with a reward of its own: None where a reward has nothing to say."""

from datasets import Dataset

from grpo.language import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list(
    [
        {"prompt": "What is 2+2?", "task": "math"},
        {"prompt": "Write a function that returns the sum of two numbers.", "task": "code"},
        {"prompt": "What is 3*4?", "task": "math"},
        {"prompt": "Write a function that returns the product of two numbers.", "task": "code"},
    ]
)


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for completion, t in zip(completions, task, strict=True):
        if t == "math":
            rewards.append(float(sum(letter.isdigit() for letter in completion)))
        else:
            rewards.append(None)
    return rewards


def coding_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for completion, t in zip(completions, task, strict=True):
        if t == "code":
            rewards.append(float(sum(letter.isalpha() for letter in completion)))
        else:
            rewards.append(None)
    return rewards


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[math_reward_func, coding_reward_func],
    args=GRPOConfig(
        output_dir="multi-task",
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=12,
        scale_rewards="batch",
        loss_type="dr_grpo",
        max_steps=1,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=dataset,
)
trainer.train()
