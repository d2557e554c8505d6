"""Fine-tunes a model by transformers' Trainer."""

from tiny import collator, make_model, samples
from transformers import TrainingArguments

from asyncpipe.integrations.transformers import PipelineTrainer


def main(folder: str = "runs/trainer", steps: int = 30) -> list[float]:
    """The loss of each update; the model is written to ``folder``."""
    args = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = PipelineTrainer(
        model=make_model(),
        args=args,
        train_dataset=samples(),
        data_collator=collator(),
        pipeline={"devices": ["cpu:0", "cpu:1"], "microbatches": 4},
    )
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main()[-1])
