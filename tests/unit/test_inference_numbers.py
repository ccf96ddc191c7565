"""What is sent of a batch: from its numbers, other processes have the same batch."""

import random

from slipstream.inference.core import Batch, Chunk, Request, SamplingParams, batch_of, numbers_of


def some_chunk(rng: random.Random) -> Chunk:
    """Of a prompt, with or without its log-probabilities; or of an answer, with drafts."""
    prompt, scored = rng.randint(1, 40), rng.random() < 0.3
    params = SamplingParams(prompt_logprobs=1 if scored else None)
    request = Request(id="", tokens=[rng.randrange(1, 99) for _ in range(prompt)], params=params)
    request.tokens += [7] * rng.randint(0, 5)
    start = rng.randrange(len(request.tokens))
    stop = rng.randint(start + 1, len(request.tokens))
    draft = tuple(rng.randrange(99) for _ in range(rng.randint(0, 4))) if stop == len(request.tokens) else ()
    request.blocks = rng.sample(range(500), -(-(stop + len(draft)) // 4) + rng.randint(0, 2))
    return Chunk(request, start, stop, draft)


def test_numbers_are_those_of_the_batch_that_is_made_of_them() -> None:
    rng = random.Random(0)
    for _ in range(300):
        batch = Batch(tuple(some_chunk(rng) for _ in range(rng.randint(1, 6))), ((1, 2), (3, 4)))
        numbers = numbers_of(batch, int, 4)
        made = batch_of(batch.copies, numbers)
        assert numbers_of(made, int, 4) == numbers and made.copies == batch.copies
        for one, other in zip(made.chunks, batch.chunks, strict=True):
            assert (one.start, one.stop, one.draft, one.num_rows) == (other.start, other.stop, other.draft, other.num_rows)
            assert one.request.tokens[one.start : one.stop] == other.request.tokens[other.start : other.stop]
            assert len(one.request.tokens) == len(other.request.tokens)
