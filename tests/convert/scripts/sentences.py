"""Fine-tunes a small BERT made from a configuration, by hand."""

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification


class Sentences(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 60, (n, 12), generator=g)
        self.labels = (self.ids.float().mean(1) > 32).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {
            "input_ids": self.ids[i],
            "attention_mask": torch.ones(12, dtype=torch.long),
            "labels": self.labels[i],
        }


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    model.to(device)
    optim = AdamW(model.parameters(), lr=5e-4)
    train_loader = DataLoader(Sentences(128), batch_size=16, shuffle=True)
    model.train()
    for epoch in range(2):
        total = 0.0
        for batch in train_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            optim.zero_grad()
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optim.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(train_loader):.6f}")
    model.save_pretrained("bert-out")


if __name__ == "__main__":
    main()
