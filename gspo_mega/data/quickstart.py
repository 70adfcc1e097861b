"""The quickstart's task, adding two numbers on paper, column by column; and the tokenizer of its tiny models.

A row is

    {"prompt": "4719+2386=", "answer": "7105", "response": "9+6=15,1+8+1=10,7+3+1=11,4+2+1=7#7105"}

The solution works from the ones column to the left and carries a 1 where needed, so the final number after `#` can
hardly be right unless the steps before it are. This file has the problems, their worked solutions, and the split into
train and held-out. (A reward function judges responses: `rewards/`.)

The tokenizer is byte-level, so that any text goes through it, and has 512 tokens: 3 control tokens, 256 bytes, some
merges. Every digit is a token of its own, as columns of an addition need it. The merges are learnt from a few lines
below; they shorten English prompts to about half of their bytes, and touch no digit and no sign. The chat template
makes each message a turn of its own; the calculator's template begins with another turn.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Split = Literal["train", "heldout"]
NUM_DIGITS = 4
# The lengths in a mixed set. Longer problems are harder, which a critic can see before the first token of an answer.
MIXED_DIGITS = (3, 4, 5, 6)
# One in this many problems belongs to the held-out split.
HELDOUT_EVERY = 16
VOCAB_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# What the merges are learnt from: the chat roles, and the words that sums in prose are made of.
_TEXT = """\
system user assistant user assistant user assistant user assistant
How many apples does she have in all? How much money did he spend on the books at the store?
There are twice as many boys as girls in the class. If each of the children has three pencils and they lose half
of them every week, how many pencils are left at the end of the month?
The answer is the total of the two numbers. First add the ones, then carry to the tens and the hundreds.
She sells the eggs for two dollars per dozen at the market every day. How much does she make in a week?
A train travels sixty miles per hour for three hours and then stops for thirty minutes. What distance is left?
He bought a shirt that cost twenty dollars with a discount of ten percent. What was the price that he paid?
They need more than five hours to finish the work. Together they would take less time than one of them alone.
Because some of the people could not come to the party, there was enough cake for everyone to get another piece.
His brother is four years older than his sister. After eight years, what will be the sum of their ages?
We want to know the number of days it takes to read the whole book when reading fifteen pages each night.
Let us think about it step by step and write down the final answer after the solution.
"""


def row_of(a: int, b: int) -> dict[str, str]:
    """The JSONL row of one problem: `prompt`, `answer` and the demonstration `response`."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b), "response": solve(a, b)}


def solve(a: int, b: int) -> str:
    """The worked addition of two non-negative numbers: one `digit+digit[+1]=sum` per column, `#`, the result."""
    columns: list[str] = []
    carry = 0
    left, right = a, b
    while not columns or left or right:
        left, digit_a = divmod(left, 10)
        right, digit_b = divmod(right, 10)
        total = digit_a + digit_b + carry
        columns.append(f"{digit_a}+{digit_b}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ",".join(columns) + f"#{a + b}"


def split_of(a: int, b: int) -> Split:
    """The split that the problem a + b (the same problem as b + a) belongs to.

    It depends only on the pair, not on a seed or an order, so no held-out problem is in any train set that is ever
    generated.
    """
    pair = f"{min(a, b)}+{max(a, b)}".encode()
    digest = hashlib.blake2b(pair, digest_size=8, person=b"gspo_mega split").digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_EVERY == 0 else "train"


def problems(split: Split, num_problems: int, seed: int, num_digits: int = NUM_DIGITS) -> Iterator[tuple[int, int]]:
    """Yield `num_problems` different problems of one split, in an order that `seed` decides.

    Both numbers have exactly `num_digits` digits; a + b and b + a count as one problem.

    Raises:
        ValueError: the split has too few such problems (more than half of about
            9 * 10^(num_digits-1) squared / 2 of them are asked for).
    """
    low, high = 10 ** (num_digits - 1), 10**num_digits - 1
    size = high - low + 1
    num_pairs = size * (size + 1) // 2
    share = num_pairs // HELDOUT_EVERY if split == "heldout" else num_pairs - num_pairs // HELDOUT_EVERY
    if num_problems > share // 2:
        raise ValueError(
            f"{num_problems} {split} problems of {num_digits} digits requested; at most {share // 2} can be drawn"
            " without repeating one: ask for fewer, or for more digits"
        )
    rng = random.Random(f"arithmetic/{split}/{num_digits}/{seed}")
    seen: set[tuple[int, int]] = set()
    while len(seen) < num_problems:
        a, b = rng.randint(low, high), rng.randint(low, high)
        pair = (min(a, b), max(a, b))
        if pair in seen or split_of(a, b) != split:
            continue
        seen.add(pair)
        yield a, b


def mixed_problems(split: Split, num_problems: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield `num_problems` as `problems` does, with each number of digits of `MIXED_DIGITS` in turn."""
    each = -(-num_problems // len(MIXED_DIGITS))
    streams = [problems(split, each, seed, num_digits) for num_digits in MIXED_DIGITS]
    for number in range(num_problems):
        yield next(streams[number % len(streams)])


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer, which is the same in every process and has exactly `VOCAB_SIZE` tokens."""
    # Imported late: episodes that compute with the calculator start without it.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer


def write_tokenizer(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into a folder, for AutoTokenizer.
    Returns the tokenizer.
    """
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # transformers 4 and 5 both load this class. Version 5 itself would write another name.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return tokenizer
