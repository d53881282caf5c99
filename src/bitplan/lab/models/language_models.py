"""Language models: a decoder in the shape of GPT-2 (Radford et al. 2019), Llama blocks, and an LSTM."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention: Q, K and V of all heads by one linear layer."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """Attention, then an MLP four times as wide, each after a layer norm and added to its input."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attention = Attention(features, heads)
        self.norm2 = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        perceived: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + perceived


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, tokens). The token embedding is also the output's weight."""

    def __init__(self, tokens: int, length: int, layers: int, heads: int, features: int) -> None:
        super().__init__()
        if features % heads:
            raise ValueError(f"{features} features cannot be shared out among {heads} heads.")
        self.token_embedding = nn.Embedding(tokens, features)
        self.place_embedding = nn.Embedding(length, features)
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, tokens, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's initialisation: normal weights of 0.02, smaller at the end of a residual branch."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_a_branch = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends_a_branch else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.place_embedding(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt2_small() -> GPT:
    """The smallest GPT-2: 124M parameters."""
    return GPT(tokens=50257, length=1024, layers=12, heads=12, features=768)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every token given those before it; `tokens` are the targets of the logits."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


# --- Decoder blocks in the shape of Llama (Touvron et al. 2023, arXiv 2302.13971), for speed measurements


class LlamaBlock(nn.Module):
    """Causal attention, then a SwiGLU MLP, each after an RMS norm and added to its input."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        parts = (layer(normed).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        perceived: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + perceived


class LlamaBlocks(nn.Module):
    """Several blocks: (batch, tokens, width) to the same."""

    def __init__(self, width: int, layers: int, hidden: int, heads: int | None = None) -> None:
        super().__init__()
        count = max(1, width // 128) if heads is None else heads
        if width % count:
            raise ValueError(f"width {width} is not a multiple of {count} heads.")
        self.blocks = nn.ModuleList(LlamaBlock(width, hidden, count) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def random_states(batch: int, tokens: int, width: int) -> Tensor:
    """A loss for speed measurements of blocks."""
    return torch.randn(batch, tokens, width)


# --- A word-level language model: embedding, LSTM layers, decoder (Zaremba et al. 2014, arXiv 1409.2329)


class LSTMModel(nn.Module):
    """Words (length, batch) to logits (length, batch, words); dropout before and after every LSTM layer."""

    def __init__(self, vocabulary_size: int, features: int, layers: int = 1, dropout: float = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, features)
        # nn.LSTM has dropout between its layers, and warns if there is only one layer.
        self.lstm = nn.LSTM(features, features, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(features, vocabulary_size)
        self.dropout = dropout
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        x, _ = self.lstm(x)
        logits: Tensor = self.decoder(F.dropout(x, self.dropout, self.training))
        return logits
