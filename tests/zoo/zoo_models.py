"""Models of other libraries, by small configurations: what the checks of the zoo run on.

Every model has one or two layers of width 32 to 64 and random weights of a fixed seed; nothing is downloaded. Weights
are larger than the libraries initialise them, so that attention is far from uniform and a mask that goes wrong shows.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "ZooModel", "find_models"]

VOCABULARY = 96
TOKENS = 12
WIDTH = 64
Batch = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class ZooModel:
    """A model, a batch and a loss."""

    name: str
    library: str
    #: Builds the model; keyword arguments are those of :attr:`attentions`, or none.
    build: Callable[..., nn.Module] = field(repr=False)
    #: The batch, positional (a tuple) or by keywords (a mapping).
    batch: Callable[[], Batch] = field(repr=False)
    #: The scalar loss of what the model returns.
    loss: Callable[[Any], Tensor] = field(repr=False)
    #: The main output, whose values are compared: logits or features.
    output: Callable[[Any], Tensor] = field(repr=False)
    #: Values of transformers' ``attn_implementation`` that the model has.
    attentions: tuple[str, ...] = ()
    #: The batch has an ``attention_mask``, and rows do not depend on each other.
    takes_padding: bool = False
    #: A fused recurrent layer multiplies inside; rules for classes of tensors do not reach these products.
    is_recurrent: bool = False
    #: By how much the output may differ from the one without a plan, relative to its norm. More than half where batch
    #: norm over a few images amplifies rounding errors, and where the output is a few numbers near 0.
    output_tolerance: float = 0.5

    def make(self, **options: Any) -> nn.Module:
        """The model in training mode; the same weights each time."""
        torch.manual_seed(0)
        return self.build(**options).train()

    def make_batch(self) -> Batch:
        torch.manual_seed(1)
        return self.batch()

    def run(self, model: nn.Module, batch: Batch | None = None) -> Any:
        """What the model returns for a batch."""
        torch.manual_seed(2)
        batch = self.make_batch() if batch is None else batch
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)


# --- torchvision, which timm and transformers import ---

_TORCHVISION: list[torch.library.Library] = []


def import_torchvision() -> None:
    """Import torchvision where it is installed.

    One that was built for another torch does not load its compiled operators, and then fails to import because it
    describes two of them. No model here calls these: naming them is enough.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        _TORCHVISION.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            _TORCHVISION[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


# --- transformers ---


def _tokens(rows: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(4, VOCABULARY, (rows, tokens))


def _text_batch() -> dict[str, Any]:
    ids = _tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _causal_batch() -> dict[str, Any]:
    return {**_text_batch(), "use_cache": False}


def _sequence_batch() -> dict[str, Any]:
    return {**_text_batch(), "labels": torch.tensor([0, 1])}


def _encoder_decoder_batch() -> dict[str, Any]:
    return {**_text_batch(), "decoder_input_ids": _tokens(), "use_cache": False}


def _image_batch(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def _clip_batch() -> dict[str, Any]:
    return {
        "input_ids": _tokens(),
        "attention_mask": torch.ones(2, TOKENS, dtype=torch.long),
        "pixel_values": torch.randn(2, 3, 32, 32),
        "return_loss": True,
    }


def _whisper_batch() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 16, 32), "labels": _tokens(), "use_cache": False}


def _speech_batch() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400), "labels": _tokens(2, 3)}


def _build_transformer(model_class: str, settings: Mapping[str, Any], **options: Any) -> nn.Module:
    """A model of transformers by its class; the configuration is the class's own."""
    import_torchvision()
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, model_class)
    config = kind.config_class(**{**settings, **options})
    return kind(config)


def _loss_of(output: Any) -> Tensor:
    return output.loss


def _logits_of(output: Any) -> Tensor:
    return output.logits


#: Names of the same sizes in transformers' configurations.
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "dropout": 0.0,
    "init_std": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_VISION: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}
_SPEECH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "feat_quantizer_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "initializer_range": 0.1,
}

_BOTH = ("eager", "sdpa")


def _transformer(
    name: str,
    model_class: str,
    settings: Mapping[str, Any],
    batch: Callable[[], Batch] = _causal_batch,
    *,
    attentions: tuple[str, ...] = _BOTH,
    takes_padding: bool = True,
    output: Callable[[Any], Tensor] = _logits_of,
    output_tolerance: float = 0.5,
) -> ZooModel:
    return ZooModel(
        name,
        "transformers",
        partial(_build_transformer, model_class, settings),
        batch,
        _loss_of,
        output,
        attentions,
        takes_padding,
        output_tolerance=output_tolerance,
    )


def _image_model(name: str, model_class: str, settings: Mapping[str, Any], **options: Any) -> ZooModel:
    return _transformer(name, model_class, settings, _image_batch, takes_padding=False, **options)


TRANSFORMERS = [
    _transformer("llama", "LlamaForCausalLM", _LLAMA),
    _transformer("mistral", "MistralForCausalLM", {**_LLAMA, "sliding_window": 8}),
    _transformer("qwen2", "Qwen2ForCausalLM", _LLAMA),
    _transformer("qwen3", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 16}),
    _transformer("qwen3_moe", "Qwen3MoeForCausalLM", {**_LLAMA, **_EXPERTS, "head_dim": 16}),
    _transformer(
        "llama4", "Llama4ForCausalLM", {**_LLAMA, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}
    ),
    _transformer("mixtral", "MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4, "sliding_window": None}),
    _transformer("gemma", "GemmaForCausalLM", {**_LLAMA, "head_dim": 16}),
    _transformer("gemma2", "Gemma2ForCausalLM", {**_LLAMA, "head_dim": 16, "sliding_window": 8}, attentions=("eager",)),
    _transformer("gemma3", "Gemma3ForCausalLM", {**_LLAMA, "head_dim": 16, "sliding_window": 8}),
    _transformer("phi", "PhiForCausalLM", {**_LLAMA, "num_key_value_heads": 4}),
    _transformer("phi3", "Phi3ForCausalLM", _LLAMA),
    _transformer("olmo", "OlmoForCausalLM", _LLAMA),
    _transformer("cohere", "CohereForCausalLM", _LLAMA),
    _transformer("stablelm", "StableLmForCausalLM", _LLAMA),
    _transformer(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **_LLAMA,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    _transformer("gpt2", "GPT2LMHeadModel", _GPT2),
    _transformer("gptj", "GPTJForCausalLM", {**_GPT2, "rotary_dim": 8}, attentions=("eager",)),
    _transformer(
        "gpt_neo",
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 4,
            "window_size": 8,
            "max_position_embeddings": 64,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
            "initializer_range": 0.1,
        },
        attentions=("eager",),
    ),
    _transformer("gpt_neox", "GPTNeoXForCausalLM", {**_LLAMA, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    _transformer(
        "opt",
        "OPTForCausalLM",
        {**_LLAMA, "ffn_dim": 96, "word_embed_proj_dim": WIDTH, "dropout": 0.0, "init_std": 0.1},
    ),
    _transformer(
        "bloom",
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "initializer_range": 0.1},
        attentions=(),
    ),
    _transformer("falcon", "FalconForCausalLM", {**_LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2}),
    _transformer(
        "mamba",
        "MambaForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "state_size": 8,
            "num_hidden_layers": 2,
            "initializer_range": 0.1,
        },
        attentions=(),
    ),
    _transformer(
        "mamba2",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "state_size": 8,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_heads": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "initializer_range": 0.1,
        },
        attentions=(),
    ),
    _transformer(
        "rwkv",
        "RwkvForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": 32},
        attentions=(),
        takes_padding=False,
    ),
    _transformer("bert", "BertForMaskedLM", _BERT, _text_batch),
    _transformer("roberta", "RobertaForMaskedLM", _BERT, _text_batch),
    _transformer(
        "distilbert",
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "hidden_dim": 96,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "initializer_range": 0.1,
        },
        _text_batch,
    ),
    _transformer("albert", "AlbertForMaskedLM", {**_BERT, "embedding_size": 32}, _text_batch),
    _transformer("electra", "ElectraForMaskedLM", {**_BERT, "embedding_size": 32}, _text_batch),
    _transformer(
        "deberta_v2",
        "DebertaV2ForSequenceClassification",
        {
            **_BERT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "max_relative_positions": 16,
            "pooler_hidden_size": WIDTH,
            "pooler_dropout": 0.0,
        },
        _sequence_batch,
        attentions=(),
    ),
    _transformer(
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 1,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            # Fused attention with a bias that is trained multiplies inside, where rules for classes do not reach.
            "attn_implementation": "eager",
        },
        _encoder_decoder_batch,
    ),
    _transformer(
        "bart",
        "BartForConditionalGeneration",
        {**_ENCODER_DECODER, "max_position_embeddings": 64},
        _encoder_decoder_batch,
    ),
    _transformer(
        "whisper",
        "WhisperForConditionalGeneration",
        {**_ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32},
        _whisper_batch,
        takes_padding=False,
    ),
    _transformer("wav2vec2", "Wav2Vec2ForCTC", _SPEECH, _speech_batch, takes_padding=False),
    _image_model("hf_vit", "ViTForImageClassification", _VISION),
    _image_model(
        "hf_swin",
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "num_labels": 4,
            "initializer_range": 0.1,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
            "attn_implementation": "eager",  # as in T5: the bias is trained
        },
    ),
    _transformer(
        "clip",
        "CLIPModel",
        {
            "text_config": {**_BERT, "eos_token_id": 2, "bos_token_id": 1, "projection_dim": 32},
            "vision_config": {**_VISION, "projection_dim": 32},
            "projection_dim": 32,
        },
        _clip_batch,
        takes_padding=False,
        output=lambda output: output.logits_per_text,
        output_tolerance=0.8,
    ),
]


# --- timm ---


def _build_timm(model_name: str, settings: Mapping[str, Any]) -> nn.Module:
    import_torchvision()
    timm = importlib.import_module("timm")
    return _without_zeros(timm.create_model(model_name, pretrained=False, num_classes=4, **settings))


def _without_zeros(model: nn.Module) -> nn.Module:
    """timm starts the last factor of a branch at zero, so that all gradients behind it are zero as well."""
    for name, parameter in model.named_parameters():
        if name.endswith(("weight", "gain")) and not parameter.any():
            nn.init.normal_(parameter, mean=0.5 if parameter.dim() < 2 else 0.0, std=0.1)
    return model


def _build_mixer() -> nn.Module:
    import_torchvision()
    mixer = importlib.import_module("timm.models.mlp_mixer")
    return _without_zeros(mixer.MlpMixer(num_classes=4, img_size=32, patch_size=8, num_blocks=2, embed_dim=64))


def _build_regnet() -> nn.Module:
    import_torchvision()
    regnet = importlib.import_module("timm.models.regnet")
    config = regnet.RegNetCfg(depth=6, w0=16, wa=20.0, wm=2.2, group_size=8, se_ratio=0.25)
    return _without_zeros(regnet.RegNet(config, num_classes=4))


def _pixels(size: int) -> tuple[Tensor]:
    return (torch.randn(4, 3, size, size),)


def _class_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[-1])


def _same(output: Tensor) -> Tensor:
    return output


def _timm(name: str, model_name: str, size: int = 32, output_tolerance: float = 0.5, **settings: Any) -> ZooModel:
    return ZooModel(
        name,
        "timm",
        partial(_build_timm, model_name, settings),
        partial(_pixels, size),
        _class_loss,
        _same,
        output_tolerance=output_tolerance,
    )


TIMM = [
    _timm("resnet", "test_resnet", output_tolerance=0.8),
    _timm("mobilenetv3", "mobilenetv3_small_050", 64, output_tolerance=0.8),
    _timm("efficientnet", "test_efficientnet", 64),
    _timm("convnext", "test_convnext", 64),
    _timm("vit", "test_vit", img_size=64, size=64, output_tolerance=0.8),
    _timm(
        "swin",
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=32,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
    ),
    ZooModel("mixer", "timm", _build_mixer, partial(_pixels, 32), _class_loss, _same),
    ZooModel("regnet", "timm", _build_regnet, partial(_pixels, 32), _class_loss, _same),
    _timm("nfnet", "test_nfnet", 64, output_tolerance=0.8),
    _timm("byobnet", "test_byobnet", 64),
]


# --- torch_geometric ---

NODES = 24


def _graph_batch() -> tuple[Tensor, Tensor]:
    edges = torch.randint(NODES, (2, 80))
    return torch.randn(NODES, 16), edges


def _build_graph_network(model_class: str, settings: Mapping[str, Any]) -> nn.Module:
    networks = importlib.import_module("torch_geometric.nn.models")
    return getattr(networks, model_class)(16, 32, num_layers=2, out_channels=4, **settings)


def _graph(name: str, model_class: str, **settings: Any) -> ZooModel:
    build = partial(_build_graph_network, model_class, settings)
    return ZooModel(name, "torch_geometric", build, _graph_batch, _class_loss, _same)


GRAPHS = [
    _graph("gcn", "GCN"),
    _graph("gat", "GAT", heads=2),
    _graph("gatv2", "GAT", heads=2, v2=True),
    _graph("graphsage", "GraphSAGE"),
    _graph("gin", "GIN"),
]


# --- torch, and models as people write them ---


class TransformerWithMask(nn.Module):
    """nn.Transformer with a causal mask, a padding mask and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape[:2], dtype=torch.bool)
        padding[0, -3:] = True
        return self.head(self.transformer(source, target, tgt_mask=mask, src_key_padding_mask=padding))


class AttentionWithWeights(nn.Module):
    """nn.MultiheadAttention that returns its weights, as it does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        nn.init.normal_(self.attention.in_proj_weight, std=0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed, _ = self.attention(x, x, x, attn_mask=mask, need_weights=True)
        return self.head(x + mixed)


class Recurrent(nn.Module):
    """A language model with a recurrent layer of torch."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.recurrent = layer(32, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(ids))[0])


class CausalAttention(nn.Module):
    """Attention as nanoGPT and minGPT write it: a buffer of ones, and masked_fill with minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("allowed", torch.ones(TOKENS, TOKENS).tril().view(1, 1, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, 4, width // 4).transpose(1, 2) for part in self.projections(x).split(width, dim=2)
        )
        scores = (query @ key.transpose(-2, -1)) * (1.0 / (width // 4) ** 0.5)
        scores = scores.masked_fill(self.allowed[:, :, :tokens, :tokens] == 0, float("-inf"))
        mixed = F.softmax(scores, dim=-1) @ value
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, tokens, width))


class NanoGPT(nn.Module):
    """Two blocks of nanoGPT with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.attentions = nn.ModuleList(CausalAttention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for number, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * number](x))
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.head(x)


class EinsumAttention(nn.Module):
    """Attention by einsum on weights of three dimensions, with a projection by a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(WIDTH, 4, 16) * 0.15) for _ in range(3))
        self.output = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (torch.einsum("btd,dhk->bhtk", x, w) for w in (self.query, self.key, self.value))
        weights = torch.einsum("bhtk,bhsk->bhts", query, key).div(4.0).softmax(-1)
        mixed = torch.einsum("bhts,bhsk->bthk", weights, value).flatten(2)
        return self.head(x + mixed @ self.output.T)


def _token_loss(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, torch.arange(len(flat)) * 7 % flat.shape[-1])


def _ids() -> tuple[Tensor]:
    return (_tokens(),)


def _vectors(count: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, TOKENS, WIDTH) for _ in range(count))


TORCH = [
    ZooModel("transformer_mask", "torch", TransformerWithMask, partial(_vectors, 2), _token_loss, _same),
    ZooModel("mha_weights", "torch", AttentionWithWeights, partial(_vectors, 1), _token_loss, _same),
    ZooModel("lstm", "torch", partial(Recurrent, nn.LSTM), _ids, _token_loss, _same, is_recurrent=True),
    ZooModel("gru", "torch", partial(Recurrent, nn.GRU), _ids, _token_loss, _same, is_recurrent=True),
    ZooModel("nanogpt", "own code", NanoGPT, _ids, _token_loss, _same),
    ZooModel("einsum_attention", "own code", EinsumAttention, partial(_vectors, 1), _token_loss, _same),
]

MODELS: dict[str, ZooModel] = {model.name: model for model in [*TRANSFORMERS, *TIMM, *GRAPHS, *TORCH]}


def find_models(names: list[str]) -> list[ZooModel]:
    """The models of these names, or of a library's name; all without a name."""
    if not names:
        return [*MODELS.values()]
    unknown = [name for name in names if name not in MODELS and all(m.library != name for m in MODELS.values())]
    if unknown:
        raise SystemExit(f"no model {', '.join(unknown)}: there are {', '.join(MODELS)}.")
    return [model for model in MODELS.values() if model.name in names or model.library in names]
