"""A run that is ended, and taken up again from its last checkpoint by the same script."""

from datasets import load_dataset

from grpo.language import GRPOConfig, GRPOTrainer


def reward_func(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def make_trainer(max_steps):
    return GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=reward_func,
        args=GRPOConfig(
            output_dir="resume",
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=12,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=1,
            max_steps=max_steps,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=load_dataset("trl-lib/ultrafeedback-prompt", split="train"),
    )


make_trainer(1).train()
trainer = make_trainer(3)
trainer.train(resume_from_checkpoint=True)
trainer.save_state()
