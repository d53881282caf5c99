"""A pretrained BERT from a transformers folder: JSON, safetensors and a vocabulary. No file is executed."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import TaskError
from bitplan.files import parse_json
from bitplan.lab.sources.files import read_text
from bitplan.lab.tasks.tokens import TextEncoder

# --- Weights of pretrained backbones, from safetensors files, which hold numbers only


def read_backbone(path: Path, backbone: nn.Module, depth: int = 18) -> None:
    """Load the weights of a ResNet into `backbone`, by bitplan's names or by torchvision's.

    A classifier's weights are ignored; everything else must match.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise TaskError(f"there is no file {path}: set weights= to a safetensors file of a ResNet-{depth}.")
    try:
        stored = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise TaskError(
            f"{path} is not a safetensors file, or is damaged: convert the weights with safetensors.torch.save_file."
        ) from error
    weights = {_own_name(name): tensor for name, tensor in stored.items() if not name.startswith("fc.")}
    expected: dict[str, Tensor] = backbone.state_dict()
    # Older files lack the counters of batch norms, which have no effect.
    lacking = [name for name in expected if name not in weights and not name.endswith("num_batches_tracked")]
    foreign = [name for name in weights if name not in expected]
    other = [name for name in weights if name in expected and weights[name].shape != expected[name].shape]
    for what, names in (("lacks", lacking), ("has in another shape", other), ("has besides", foreign)):
        if names:
            raise TaskError(f"{path} {what} {names[0]}: set weights= to a file of a ResNet-{depth}.")
    backbone.load_state_dict(weights, strict=False)


def _own_name(name: str) -> str:
    return name.replace(".downsample.", ".shortcut.")


#: Weights that fine-tuning initialises, so that a folder may lack them.
_FRESH = ("classifier.", "bert.pooler.")
#: Old names of a norm's two tensors.
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


class PretrainedFolder:
    """The folder of one model."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise TaskError(
                f"there is no folder {path}: set pretrained= to one with config.json, model.safetensors, and vocab.txt "
                f"or tokenizer.json."
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration."""
        content = self._json("config.json")
        if content.get("model_type") != "bert":
            raise TaskError(
                f"{self.path} holds a model of type {content.get('model_type')!r}, and only BERT's can be loaded: name "
                f"another folder."
            )
        return content

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            raise TaskError(f"{self.path} has no {name}, which says what the model is: name transformers' own folder.")
        text = read_text(file)
        try:
            content = parse_json(text)
        except ValueError as error:
            raise TaskError(f"{file} is not JSON ({error}): get it again.") from error
        if not isinstance(content, dict):
            raise TaskError(f"{file} is not a JSON object: get it again.")
        return content

    def require(self, length: int) -> None:
        """Raise if rows of `length` tokens are longer than the model's positions."""
        most = self.config.get("max_position_embeddings", 512)
        if length > most:
            raise TaskError(f"length is {length}, and the model in {self.path} knows {most} places: set length={most}.")

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Every tensor under its current name."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self.path / "model.safetensors"
        if not file.is_file():
            others = sorted(path.name for path in self.path.glob("*.bin"))
            why = f" ({others[0]} would execute what it says: convert it)" if others else ""
            raise TaskError(f"{self.path} has no model.safetensors{why}: name a folder that has one.")
        try:
            weights = load_file(file)
        except (OSError, SafetensorError) as error:
            raise TaskError(f"{file} cannot be read ({error}): get it again.") from error
        return {_name_today(name): tensor for name, tensor in weights.items()}

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into transformers' BERT for sequence classification; its head is left unchanged."""
        expected = model.state_dict()
        fitting = {}
        for name, tensor in expected.items():
            weight = self.weights.get(name)
            if weight is None:
                if name.startswith(_FRESH) or name.endswith("_ids"):
                    continue
                raise TaskError(f"{self.path} lacks {name}: it does not hold the whole of a BERT.")
            if name.startswith("classifier."):
                continue  # another task's classes
            if weight.shape != tensor.shape:
                raise TaskError(
                    f"{name} is {[*weight.shape]} in {self.path}, and its config.json says {[*tensor.shape]}: the two "
                    f"do not belong together."
                )
            fitting[name] = weight
        model.load_state_dict(fitting, strict=False)

    def encoder(self) -> TextEncoder:
        """The model's tokenizer."""
        return FolderEncoder(self)


def _name_today(name: str) -> str:
    *path, last = name.split(".")
    today = ".".join([*path, _OLD_NAMES.get(last, last) if "LayerNorm" in path else last])
    is_encoder = today.startswith(("embeddings.", "encoder.", "pooler."))
    return f"bert.{today}" if is_encoder else today


class FolderEncoder(TextEncoder):
    """Word pieces of the folder's tokenizer.json, or of its vocab.txt."""

    def __init__(self, folder: PretrainedFolder) -> None:
        self._tokenizer = _tokenizer(folder)
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if size > folder.config.get("vocab_size", size):
            raise TaskError(
                f"the tokenizer in {folder.path} has {size} tokens, and the model knows {folder.config['vocab_size']}: "
                f"the two do not belong together."
            )
        self.pad, self.start, self.end = (self._number(folder, token) for token in ("[PAD]", "[CLS]", "[SEP]"))

    def _number(self, folder: PretrainedFolder, token: str) -> int:
        number: int | None = self._tokenizer.token_to_id(token)
        if number is None:
            raise TaskError(f"the tokenizer in {folder.path} has no {token}, which BERT needs: name another folder.")
        return number

    def tokens(self, text: str) -> list[int]:
        numbers: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return list(numbers)


def _tokenizer(folder: PretrainedFolder) -> Any:
    try:
        from tokenizers import BertWordPieceTokenizer, Tokenizer
    except ModuleNotFoundError as error:
        raise TaskError(
            "pretrained models need the package tokenizers, which is not installed: run 'pip install transformers'."
        ) from error
    whole, vocabulary = folder.path / "tokenizer.json", folder.path / "vocab.txt"
    try:
        if whole.is_file():
            tokenizer = Tokenizer.from_file(str(whole))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer
        if vocabulary.is_file():
            settings = folder.path / "tokenizer_config.json"
            lowers = parse_json(read_text(settings)).get("do_lower_case", True) if settings.is_file() else True
            return BertWordPieceTokenizer(str(vocabulary), lowercase=bool(lowers))
    except TaskError:
        raise
    except Exception as error:  # the library raises plain exceptions for damaged files
        raise TaskError(f"the tokenizer in {folder.path} cannot be read ({error}): get it again.") from error
    raise TaskError(f"{folder.path} has neither tokenizer.json nor vocab.txt: name a folder that has one of them.")


def no_weights(model: nn.Module) -> bool:
    """Whether the model has shapes only, no data."""
    return any(parameter.device == torch.device("meta") for parameter in model.parameters())
