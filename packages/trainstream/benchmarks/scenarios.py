"""What `compare.py` trains on: named scenarios, and their token ids, the same in every engine."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["SCENARIOS", "Rows", "Scenario", "draw"]

SHORTEST = 64  # tokens of a document; the longest fills a row


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One named scenario.

    Attributes:
        shape: A name of `engines.SHAPES`.
        kind: "lora" or "full".
        batch: Rows of a micro-batch.
        tokens: Tokens of a row.
        cap: GiB that PyTorch's allocator may take while training, or 0.
        accumulate: Micro-batches of a step.
        documents: Rows are filled with documents of 64 tokens to a whole row, each seeing itself alone.
    """

    shape: str
    kind: str
    batch: int
    tokens: int
    cap: float = 0.0
    accumulate: int = 1
    documents: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Of all micro-batches."""
        return self.batch * self.tokens * self.accumulate


TWELVE = 11.4  # GiB: a 12 GiB card less 0.6 for context and libraries
SCENARIOS = {
    "tiny": Scenario("tiny", "lora", 1, 64),
    "tiny-full": Scenario("tiny", "full", 2, 64),
    "tiny-var": Scenario("tiny-llama", "lora", 2, 256, accumulate=2, documents=True),
    "lora7b": Scenario("7b", "lora", 1, 512),
    "lora7b_12gb": Scenario("7b", "lora", 1, 512, TWELVE),
    "lora8b_llama": Scenario("8b-llama", "lora", 1, 512),
    "lora8b_qwen3": Scenario("8b-qwen3", "lora", 2, 2048, accumulate=4),
    "lora14b": Scenario("14b", "lora", 1, 512),
    "lora14b_2k": Scenario("14b", "lora", 1, 2048),
    "lora14b_12gb": Scenario("14b", "lora", 1, 512, TWELVE),
    "lora14b_var": Scenario("14b", "lora", 2, 2048, documents=True),
    "full0.5b": Scenario("0.5b", "full", 4, 512),
    "full1.5b": Scenario("1.5b", "full", 4, 512),
}


@dataclasses.dataclass
class Rows:
    """One micro-batch.

    Attributes:
        ids: Token ids, int64 of shape (rows, tokens).
        positions: Of each token in its document, alike, or None where a row is one document.
        labels: The ids with -100 where a document begins: its first token follows from nothing.
    """

    ids: Any
    positions: Any = None
    labels: Any = None

    def to(self, device: str) -> Rows:
        """The same on a device."""
        moved = (
            None if each is None else each.to(device) for each in (self.ids, self.positions, self.labels)
        )
        return Rows(*moved)


def draw(scenario: Scenario, vocabulary: int, generator: Any) -> Rows:
    """Random tokens of a micro-batch.

    Args:
        scenario: Says how many, and whether they are documents.
        vocabulary: Number of different tokens.
        generator: A torch generator of the CPU.
    """
    import torch

    size = (scenario.batch, scenario.tokens)
    ids = torch.randint(0, vocabulary, size, generator=generator)
    if not scenario.documents:
        return Rows(ids, labels=ids)
    positions = torch.empty_like(ids)
    for row in positions:
        filled = 0
        while filled < scenario.tokens:
            length = int(torch.randint(SHORTEST, scenario.tokens + 1, (), generator=generator))
            part = row[filled : filled + length]
            part.copy_(torch.arange(len(part)))
            filled += length
    return Rows(ids, positions, ids.masked_fill(positions == 0, -100))
