"""Texts of ten scripts, and small tokenizers that cut their characters as those of models do."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXTS = {
    "latin": "The quick brown fox — naïve, façade: jumps over the lazy dog. It is done, ok?\n",
    "cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю. ",
    "arabic": "صِف خَلقَ خَودٍ كَمِثلِ الشَمسِ إِذ بَزَغَت يَحظى الضَجيعُ بِها. ",
    "hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה. ",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश। ",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่ากว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "japanese": "いろはにほへと散りぬるを、我が世誰ぞ常ならむ。東京は夜です。",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. ",
    "emoji": "family 👨‍👩‍👧‍👦 and flag 🏳️‍🌈, thumbs 👍🏽👍🏿; 🇩🇪🇫🇷 ok 🤷🏻‍♀️🤷🏻‍♀️",
    "code": 'def f(x):\n    return {"a": [x, "é\\n"]}  # ∑ → 中文注释\n\n\tprint(f(1))\n',
}
END = "<|end|>"
_KEPT_LETTERS = 60


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer with one special token, ``END``: ``byte_level``, ``llama`` or ``unigram``."""
    tokenizer = {"byte_level": _byte_level, "llama": _llama, "unigram": _unigram}[kind]()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    return tokenizer


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _llama() -> Tokenizer:
    """Pieces of letters, and bytes for the letters that are not in the vocabulary."""
    spaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = spaced
    trainer = trainers.BpeTrainer(vocab_size=200, limit_alphabet=_KEPT_LETTERS, show_progress=False)
    trained.train_from_iterator(TEXTS.values(), trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = {"<unk>": 0, **{piece: num for num, piece in enumerate(_bytes(), 1)}}
    for piece in model["vocab"]:
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(one) for one in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = spaced
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    joined = "".join(TEXTS.values()).replace(" ", "▁")
    letters = sorted(set(joined), key=joined.count, reverse=True)[:_KEPT_LETTERS]
    pairs = {joined[at : at + 2] for at in range(0, len(joined), 3)}
    known = [pair for pair in sorted(pairs) if set(pair) <= set(letters)]
    pieces = [("<unk>", 0.0), *((byte, -20.0) for byte in _bytes())]
    pieces += [(piece, -5.0 - len(piece) / 9) for piece in ["▁", *letters, *known] if piece]
    unique = list(dict(pieces).items())
    tokenizer = Tokenizer(models.Unigram(unique, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
