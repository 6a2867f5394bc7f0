"""A prompt is a text, a chat or token ids, and the answer has its text."""

from pathlib import Path

import pytest

from moa_data import Target, generate, load_drafter
from moa_data.moa.targets.chat_tokens import prompt_tokens


def test_texts_chats_and_tokens_give_one_answer(room: Path) -> None:
    target, drafter = Target.load(str(room / "model"), device="cpu"), load_drafter(str(room / "drafter"))
    chat = [{"role": "user", "content": "What is 1 plus 1?"}]
    by_text = generate(target, drafter, "What is 1 plus 1?", max_new_tokens=5)
    by_chat = generate(target, drafter, chat, max_new_tokens=5)
    by_tokens = generate(target, drafter, prompt_tokens(target.tokenizer, chat), max_new_tokens=5)
    assert by_text.tokens == by_chat.tokens == by_tokens.tokens
    assert by_text.text == target.tokenizer.decode(by_text.tokens, skip_special_tokens=True)
    with pytest.raises(TypeError):
        generate(target, drafter, [chat], max_new_tokens=5)  # type: ignore[arg-type]
