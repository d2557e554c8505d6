"""Fine-tunes a model by TRL's SFTTrainer."""

from datasets import Dataset
from tiny import make_model, texts, tokenizer
from trl import SFTConfig

from asyncpipe.integrations.trl import PipelineSFTTrainer


def main(folder: str = "runs/sft", steps: int = 30) -> list[float]:
    """The loss of each update; the model is written to ``folder``."""
    args = SFTConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        max_length=64,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = PipelineSFTTrainer(
        model=make_model(),
        args=args,
        train_dataset=Dataset.from_list([{"text": text} for text in texts()]),
        processing_class=tokenizer,
        pipeline={"devices": ["cpu:0", "cpu:1"], "microbatches": 4},
    )
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main()[-1])
