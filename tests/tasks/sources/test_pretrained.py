"""A folder as transformers writes it: the very numbers of the model come out, and what does not fit is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.sources.pretrained import PretrainedFolder
from bitplan.lab.targets import load_target
from bitplan.lab.tasks.registry import find_task

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fine", "film", "##s", "dull", "!"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=20, **SIZES)
    transformers.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    place = tmp_path / "texts"
    place.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (place / name).write_text("sentence\tlabel\nA fine film!\t1\ndull films\t0\n")
    return place


def task_of(folder: Path, texts: Path, *more: str) -> Any:
    return find_task("sst2", [f"data={texts}", f"pretrained={folder}", "length=12", "batch=2", *more])


def test_the_encoder_is_the_pretrained_one_and_the_head_is_fresh(folder: Path, texts: Path) -> None:
    task = task_of(folder, texts)
    (tokens, kinds), _ = task.batch(0)
    reference = transformers.BertModel.from_pretrained(folder).eval()
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(task.model().eval())
    with torch.no_grad():
        expected = reference(input_ids=tokens, token_type_ids=kinds, attention_mask=(tokens != 0).long()).pooler_output
        pooled = [
            model.model.bert(input_ids=tokens, attention_mask=(tokens != 0).long()).pooler_output for model in models
        ]
    assert all(torch.equal(item, expected) for item in pooled)
    assert not torch.equal(*(model.model.classifier.weight for model in models))


def test_tokens_are_those_of_the_folder(folder: Path, texts: Path) -> None:
    tokens, _, _ = task_of(folder, texts).training
    text = [[WORDS[number] for number in row] for row in tokens.tolist()]
    assert text[0][:7] == ["[CLS]", "a", "fine", "film", "!", "[SEP]", "[PAD]"]
    assert text[1][:6] == ["[CLS]", "dull", "film", "##s", "[SEP]", "[PAD]"]


def test_tokenizer_json_comes_first_and_neither_cuts_nor_fills(folder: Path, texts: Path) -> None:
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(str(folder / "vocab.txt"))
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    by_words = task_of(folder, texts).training[0]
    (folder / "vocab.txt").unlink()
    assert torch.equal(task_of(folder, texts).training[0], by_words)


def test_cased_vocabularies_stay_so(folder: Path, texts: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert WORDS[int(task_of(folder, texts).training[0][0, 1])] == "[UNK]"  # an upper-case A


def test_old_names_of_norms_and_other_heads_are_understood(folder: Path, texts: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
        if not name.startswith("pooler")
    }
    expected = task_of(folder, texts).model()
    save_file({**old, "cls.predictions.bias": torch.zeros(3)}, folder / "model.safetensors")
    model = task_of(folder, texts).model()
    for name, tensor in model.model.bert.state_dict().items():
        if not name.startswith("pooler"):
            assert torch.equal(tensor, expected.model.bert.state_dict()[name]), name


def test_shapes_are_known_without_reading_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    target = load_target("sst2", shapes_only=True, settings=[f"pretrained={folder}", "length=12"])
    assert {parameter.device.type for parameter in target.model.parameters()} == {"meta"}


def test_weights_that_execute_are_refused(folder: Path, texts: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(TaskError, match=r"has no model\.safetensors \(pytorch_model\.bin would execute what it says"):
        task_of(folder, texts).model()


def changed(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def test_what_does_not_fit_is_one_sentence(folder: Path, texts: Path) -> None:
    with pytest.raises(TaskError, match=r"length is 40, and the model in .* knows 20 places: set length=20\."):
        find_task("sst2", [f"data={texts}", f"pretrained={folder}", "length=40"]).model()
    changed(folder, hidden_size=64)
    with pytest.raises(TaskError, match=r"is \[\d+, 32\] in .*, and its config\.json says \[\d+, 64\]: the two do not"):
        task_of(folder, texts).model()
    changed(folder, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(TaskError, match=r"lacks bert\.encoder\.layer\.1\.\S+: it does not hold the whole of a BERT\."):
        task_of(folder, texts).model()
    changed(folder, vocab_size=5)
    with pytest.raises(TaskError, match=r"has 11 tokens, and the model knows 5"):
        task_of(folder, texts).model()
    changed(folder, model_type="gpt2")
    with pytest.raises(TaskError, match=r"of type 'gpt2', and only BERT's can be loaded"):
        task_of(folder, texts).model()


def test_damaged_folders_are_told_of(folder: Path, texts: Path) -> None:
    (folder / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(TaskError, match=r"has no \[PAD\]|cannot be read"):
        task_of(folder, texts).batch(0)
    (folder / "vocab.txt").unlink()
    with pytest.raises(TaskError, match=r"has neither tokenizer\.json nor vocab\.txt"):
        task_of(folder, texts).batch(0)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TaskError, match=r"the tokenizer in .* cannot be read"):
        task_of(folder, texts).batch(0)
    (folder / "model.safetensors").write_bytes(b"none")
    with pytest.raises(TaskError, match=r"model\.safetensors cannot be read"):
        PretrainedFolder(str(folder)).weights  # noqa: B018
    (folder / "config.json").write_text("[]")
    with pytest.raises(TaskError, match=r"config\.json is not a JSON object"):
        PretrainedFolder(str(folder)).config  # noqa: B018
    (folder / "config.json").write_text("{")
    with pytest.raises(TaskError, match=r"config\.json is not JSON"):
        PretrainedFolder(str(folder)).config  # noqa: B018
    (folder / "config.json").unlink()
    with pytest.raises(TaskError, match=r"has no config\.json"):
        PretrainedFolder(str(folder)).config  # noqa: B018
    with pytest.raises(TaskError, match=r"there is no folder absent: set pretrained= to one with config\.json"):
        PretrainedFolder("absent")
