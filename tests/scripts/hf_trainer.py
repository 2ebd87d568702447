"""A text classifier of mean embeddings, trained by the `Trainer` of transformers; nothing is downloaded."""

import argparse
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    def __init__(self, count, empty=None):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, 50, (count, 8), generator=generator)
        self.lengths = torch.randint(3, 9, (count,), generator=generator)
        self.labels = self.ids[:, 0] % 3
        if empty is not None:
            self.lengths[empty] = 0

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = (torch.arange(8) < self.lengths[index]).long()
        return {"input_ids": self.ids[index] * mask, "attention_mask": mask, "labels": self.labels[index]}


class MeanClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            attn_implementation="eager",
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        logits = self.head(pooled)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="model.pt")
    parser.add_argument("--plant", type=int, default=None, help="number of the sentence that has no words")
    args = parser.parse_args()
    set_seed(0)
    model = MeanClassifier()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=2,
            max_grad_norm=1.0,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=False,
            seed=0,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Sentences(64, empty=args.plant),
            eval_dataset=Sentences(16),
        )
        trainer.train()
        print([(e["step"], e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e])
        print(trainer.evaluate()["eval_loss"])
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
