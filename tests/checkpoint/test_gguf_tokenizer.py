import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import (
    chat_template,
    special_ids,
    tiny_bpe,
    tiny_config,
    tokenizer_config,
    tokenizer_json,
    write_tiny_gguf,
)

from qwenonnx.checkpoint.gguf_file import GgufFile
from qwenonnx.checkpoint.gguf_tokenizer import GgufTokenizer
from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.config import ModelConfig
from qwenonnx.errors import CheckpointError

TEXTS = (
    "The quick brown fox doesn't jump; it's 3.14 o'clock — we'll see, they've said I'm late.",
    "Größe, Übermut und Straßenbahn: der Fuß misst 30,5 cm.",
    "L'été dernier, où êtes-vous allés ? Ça coûte 1 234 € à l'œil.",
    "El niño comió piñas; ¿cuántas? ¡Doscientas!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "敏捷的棕色狐狸跳过了懒狗。价格是12345元。",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナ、ｶﾀｶﾅ、ひらがな。",
    "다람쥐 헌 쳇바퀴에 타고파. 가격은 3만원입니다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ١٢٣",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "Ye\u0302\u0301u to\u0302i vie\u0323\u0302t tie\u0302\u0301ng Vie\u0323\u0302t ye\u0301u",
    "def fib(n: int) -> int:\n\treturn n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\n    # done  \r\n",
    "#include <stdio.h>\nint main(void) {\n    printf(\"%d\\n\", 0x7fff);   return 0;\n}\n",
    "SELECT a, b FROM t WHERE x >= 10 AND y LIKE '%z_';  -- 100%",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\u00a0\u3000 \x00\x7f ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "  leading, trailing  \n\n \t mixed \n  ",
    "",
    " ",
    "<|im_start|>system\nYou are "
    "Qwen.<|im_end|>\n<|im_start|>user\n<tool_call>\n{}\n</tool_call><|endoftext|>",
    "1234567890 12,345.67 ½ Ⅷ ²",
    "DON'T WE'LL I'M IT'S ſ's",
)  # fmt: skip


def reference_tokenizer(folder: Path, tokens: Sequence[str], merges: Sequence[str], config: dict[str, Any]) -> Any:
    """A BPE in Python (transformers' slow tokenizer), which shares nothing with the tokenizers library."""
    from transformers import AddedToken, Qwen2Tokenizer

    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    added = {int(i): AddedToken(**flags) for i, flags in config["added_tokens_decoder"].items()}
    return Qwen2Tokenizer(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        added_tokens_decoder=added,
        eos_token="<|im_end|>",
    )


def test_rebuilt_files_equal_the_original_ones(tmp_path: Path) -> None:
    open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf")).write_tokenizer(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8")) == tokenizer_json()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")) == tokenizer_config()


def test_ids_equal_those_of_an_independent_implementation(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf")).write_tokenizer(tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens, merges = tiny_bpe()
    reference = reference_tokenizer(tmp_path, tokens, merges, tokenizer_config())
    for text in TEXTS:
        assert ours.encode(text).ids == reference(text)["input_ids"], text


def test_transformers_reads_the_folder_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf"))
    checkpoint.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.hf_config))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == special_ids()["<|im_end|>"]
    assert tokenizer.pad_token_id == special_ids()["<|endoftext|>"]
    ids = tokenizer("<|im_start|><tool_call>x")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x"


def test_padding_tokens_are_dropped(tmp_path: Path) -> None:
    open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf")).write_tokenizer(tmp_path)
    assert "[PAD" not in (tmp_path / "tokenizer.json").read_text(encoding="utf-8")


def test_both_ends_of_text_stop_generation(tmp_path: Path) -> None:
    ids = special_ids()
    for eos in ("<|im_end|>", "<|endoftext|>"):
        path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"tokenizer.ggml.eos_token_id": ids[eos]})
        ends = open_checkpoint(path).generation_config["eos_token_id"]
        assert ends[0] == ids[eos]
        assert set(ends) == {ids["<|im_end|>"], ids["<|endoftext|>"]}


def test_file_without_template_gives_none(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"tokenizer.chat_template": None})
    open_checkpoint(path).write_tokenizer(tmp_path)
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("tokenizer.ggml.model", "llama", "'llama'"),
        ("tokenizer.ggml.pre", "deepseek-llm", "'deepseek-llm'"),
        ("tokenizer.ggml.eos_token_id", 100_000, "tokenizer.ggml.eos_token_id"),
        ("tokenizer.ggml.eos_token_id", None, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, key: str, value: str | int | None, part: str) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={key: value})
    with pytest.raises(CheckpointError, match=part):
        open_checkpoint(path)


@pytest.mark.model
def test_real_vocabulary_in_many_languages(model_checkpoint: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    open_checkpoint(model_checkpoint).write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    metadata = GgufFile(model_checkpoint).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"][:151_643], metadata["tokenizer.ggml.merges"]
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference = reference_tokenizer(tmp_path, tokens, merges, config)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == reference(text)["input_ids"], text
    assert ours.encode("<|im_end|>").ids == [151_645]
    assert ours.get_vocab_size() == 151_665


@pytest.mark.model
def test_real_added_tokens_have_the_published_flags(model_checkpoint: Path, tmp_path: Path) -> None:
    open_checkpoint(model_checkpoint).write_tokenizer(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    assert sorted(added) == list(range(151_643, 151_665))
    assert [i for i, token in sorted(added.items()) if not token["special"]] == list(range(151_657, 151_665))
    assert not any(token["normalized"] or token["lstrip"] or token["rstrip"] for token in added.values())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == chat_template()
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(("first", "second"), [(5, 7), (5, 380), (378, 380)])
def test_a_token_that_is_there_twice_is_refused(first: int, second: int, tmp_path: Path) -> None:
    metadata = GgufFile(write_tiny_gguf(tmp_path / "x.gguf")).metadata
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[second] = tokens[first]
    with pytest.raises(CheckpointError, match=r"^x: the token .* is listed twice"):
        GgufTokenizer({**metadata, "tokenizer.ggml.tokens": tokens}, ModelConfig.from_hf(tiny_config(), "c"), "x")


def test_an_ordinary_token_does_not_end_texts(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", metadata={"tokenizer.ggml.eos_token_id": 11})
    with pytest.raises(CheckpointError, match="eos_token_id is 11, which is ',', an ordinary token"):
        open_checkpoint(path)
