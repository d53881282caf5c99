"""Models of transformers, timm and torchvision with random weights, as targets of bitplan's commands.

    bitplan auto benchmarks/foreign_models.py:llama_2048 --device cuda

Weights and images are BF16; a step is the forward and backward pass. Sizes are those of published models, or of blocks
that other FP8 libraries are measured with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.real_data import TextStream, stream_for
from bitplan.analysis.targets import Target
from bitplan.planners.auto import Problem

DTYPE = torch.bfloat16


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _of_transformers(kind: str, config: Any, batch: Callable[[], dict[str, Tensor]]) -> Target:
    """A model of transformers, which computes its loss itself; its code has too few types to be checked."""
    import transformers

    torch.manual_seed(0)
    with torch.device(_device()):
        model = getattr(transformers, kind)(config).to(DTYPE)
        return Target(model, batch(), _loss)


def _causal(samples: int, tokens: int, **settings: Any) -> Target:
    """A Llama."""
    from transformers import LlamaConfig

    config = LlamaConfig(max_position_embeddings=tokens, use_cache=False, **settings)
    return _of_transformers("LlamaForCausalLM", config, lambda: _labelled(config.vocab_size, samples, tokens))


def _labelled(vocabulary: int, samples: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (samples, tokens))
    return {"input_ids": ids, "labels": ids}


def llama_2048() -> Target:
    """8 layers of width 2048 with a vocabulary of bytes, 8 x 2048 tokens."""
    return _causal(
        *(8, 2048),
        vocab_size=256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
    )


def llama_4096() -> Target:
    """4 layers of width 4096 with the shapes of Llama 3 8B and a vocabulary of bytes, 4 x 4096 tokens."""
    return _causal(
        *(4, 4096),
        vocab_size=256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def llama_1b() -> Target:
    """The shape of Llama 3.2 1B, 4 x 4096 tokens."""
    return _causal(
        *(4, 4096),
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )


def gpt2() -> Target:
    """GPT-2 (124 million parameters), 16 x 1024 tokens."""
    from transformers import GPT2Config

    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _of_transformers("GPT2LMHeadModel", config, lambda: _labelled(config.vocab_size, 16, 1024))


def bert_base() -> Target:
    """BERT-base with its masked-language-modelling head, 64 x 512 tokens."""
    from transformers import BertConfig

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _of_transformers("BertForMaskedLM", config, lambda: _labelled(config.vocab_size, 64, 512))


def t5_small() -> Target:
    """T5-small, 64 x 512 tokens in, 64 x 128 out."""
    from transformers import T5Config

    config = T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8, dropout_rate=0.0, use_cache=False)
    config.decoder_start_token_id = 0

    def batch() -> dict[str, Tensor]:
        ids, labels = torch.randint(config.vocab_size, (64, 512)), torch.randint(config.vocab_size, (64, 128))
        return {"input_ids": ids, "labels": labels}

    return _of_transformers("T5ForConditionalGeneration", config, batch)


def whisper_tiny() -> Target:
    """Whisper-tiny, 32 spectrograms of 30 seconds."""
    from transformers import WhisperConfig

    def batch() -> dict[str, Tensor]:
        return {"input_features": torch.randn(32, 80, 3000, dtype=DTYPE), "labels": torch.randint(50000, (32, 128))}

    return _of_transformers("WhisperForConditionalGeneration", WhisperConfig(use_cache=False), batch)


def _images(make: Callable[[], nn.Module], samples: int) -> Target:
    torch.manual_seed(0)
    layout = torch.channels_last if torch.cuda.is_available() else torch.contiguous_format
    model = make().to(_device(), DTYPE).to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(samples, 3, 224, 224, device=_device(), dtype=DTYPE).to(memory_format=layout)
    return Target(model, (images, torch.randint(1000, (samples,), device=_device())), functional.cross_entropy)


def _timm(name: str, samples: int) -> Target:
    import timm

    return _images(lambda: timm.create_model(name), samples)


def vit_b() -> Target:
    """timm's ViT-B/16, 128 images."""
    return _timm("vit_base_patch16_224", 128)


def convnext_t() -> Target:
    """timm's ConvNeXt-T, 128 images."""
    return _timm("convnext_tiny", 128)


def swin_t() -> Target:
    """timm's Swin-T, 128 images."""
    return _timm("swin_tiny_patch4_window7_224", 128)


def efficientnet_b0() -> Target:
    """timm's EfficientNet-B0, 256 images."""
    return _timm("efficientnet_b0", 256)


def resnet50() -> Target:
    """torchvision's ResNet-50, 256 images."""
    from torchvision.models import resnet50 as make

    return _images(make, 256)


def mobilenet_v2() -> Target:
    """torchvision's MobileNet-v2, 256 images."""
    from torchvision.models import mobilenet_v2 as make

    return _images(make, 256)


MODELS: dict[str, Callable[[], Target]] = {
    function.__name__: function
    for function in (
        *(llama_2048, llama_4096, llama_1b, vit_b, convnext_t, resnet50, mobilenet_v2),
        *(gpt2, bert_base, t5_small, whisper_tiny, swin_t, efficientnet_b0),
    )
}


def load_problem(name: str) -> Problem:
    """The forward and backward pass of a model, compiled, and real data in its shape where there is any.

    Networks with batch norm are verified with SGD, as they are trained in practice, others with AdamW.
    """
    target = MODELS[name]()
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in target.model.modules())
    return Problem(target, data=data_for(target), compile=True, verified_with=_sgd if has_batch_norm else "adamw")


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data_for(target: Target) -> Callable[[int], Any] | None:
    """Real data in the shape of the target's batch: a function of the step; None where there is none."""
    batch = target.batch
    if not isinstance(batch, dict):
        images = stream_for(target)
        return None if images is None else images.batch
    if set(batch) != {"input_ids", "labels"} or batch["input_ids"].shape != batch["labels"].shape:
        return None
    text = TextStream(batch["input_ids"], seed=0)

    def tokens_of(step: int) -> dict[str, Tensor]:
        tokens, _ = text.batch(step)
        return {"input_ids": tokens, "labels": tokens}

    return tokens_of
