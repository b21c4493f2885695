"""Functions that the model may call."""

from datasets import Dataset

from grpo.language import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b


dataset = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": "What is 3 multiplied by 4?"}], "answer": "12"},
        {"prompt": [{"role": "user", "content": "What is 5 plus 7?"}], "answer": "12"},
    ]
)


def accuracy(completions, answer, **kwargs):
    return [
        1.0 if a in str(completion[-1]["content"]) else 0.0 for completion, a in zip(completions, answer, strict=True)
    ]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=accuracy,
    tools=[multiply, async_add],
    args=GRPOConfig(
        output_dir="tools",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=400,
        max_tool_calling_iterations=3,
        chat_template_kwargs={"enable_thinking": False},
        max_steps=1,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=dataset,
)
trainer.train()
