"""A word-level language model: embedding, LSTM layers, decoder (Zaremba et al. 2014, arXiv 1409.2329)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class LSTMModel(nn.Module):
    """Words (length, batch) to logits (length, batch, words); dropout before and after every LSTM layer."""

    def __init__(self, words: int, features: int, layers: int = 1, dropout: float = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, features)
        # nn.LSTM puts dropout between its layers, and warns where one layer leaves no between.
        self.lstm = nn.LSTM(features, features, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(features, words)
        self.dropout = dropout
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor) -> Tensor:
        x = F.dropout(self.embedding(words), self.dropout, self.training)
        x, _ = self.lstm(x)
        logits: Tensor = self.decoder(F.dropout(x, self.dropout, self.training))
        return logits
