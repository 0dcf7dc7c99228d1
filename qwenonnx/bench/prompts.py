"""Prompts for measuring: ordinary text of any length."""

from __future__ import annotations

import random

SEED = 7


def token_ids(count: int, vocabulary: int, seed: int = SEED) -> list[int]:
    """`count` token ids that no prefix cache has seen together; speed does not depend on what they say."""
    generator = random.Random(seed)
    return [generator.randrange(min(vocabulary, 100_000)) for _ in range(count)]
