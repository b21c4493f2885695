"""An environment for every conversation: its public methods are tools, and it keeps what happened."""

from datasets import Dataset

from grpo.language import GRPOConfig, GRPOTrainer

dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Increment the counter by 1."}]] * 4})


class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return "The counter is at 0."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def reward_func(environments, **kwargs):
    return [environment.counter for environment in environments]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=reward_func,
    environment_factory=IncrementEnv,
    args=GRPOConfig(
        output_dir="environments",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=400,
        chat_template_kwargs={"enable_thinking": False},
        max_steps=1,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=dataset,
)
trainer.train()
