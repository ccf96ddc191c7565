"""What a forward reads of a batch, in this process and in others."""

import random

from slipstream.inference.core import Batch, Chunk, Request, SamplingParams, numbers_of, numbers_of_texts


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


def test_numbers_say_all_of_a_batch() -> None:
    rng = random.Random(0)
    for _ in range(300):
        batch = Batch(tuple(some_chunk(rng) for _ in range(rng.randint(1, 6))), ((1, 2), (3, 4)))
        numbers = numbers_of(batch, 4)
        assert numbers.pairs == [*batch.copies] and not numbers.types
        for span, chunk in zip(numbers.spans(), batch.chunks, strict=True):
            request = chunk.request
            assert (span.start, span.stop, span.length) == (chunk.start, chunk.stop + len(chunk.draft), len(request.tokens))
            assert [*numbers.ids[span.begin : span.end]] == [*request.tokens[chunk.start : chunk.stop], *chunk.draft]
            assert [*span.blocks] == request.blocks[: -(-span.stop // 4)]
            rows = [row for row in numbers.logit_rows if span.begin <= row < span.end]
            assert rows == [*range(span.end - chunk.num_rows, span.end)]


def test_numbers_of_texts_are_those_of_a_batch_of_them() -> None:
    texts, blocks, chunks = [[5, 6, 7], [8], [1, 2, 3, 4, 5]], iter(range(9)), []
    for text in texts:
        request = Request(id="", tokens=text, params=SamplingParams(prompt_logprobs=0))
        request.blocks = [next(blocks) for _ in range(-(-len(text) // 2))]
        chunks.append(Chunk(request, 0, len(text)))
    assert numbers_of_texts(texts, 2) == numbers_of(Batch(tuple(chunks), ()), 2)
    assert [*numbers_of_texts(texts, 2, [[0] * len(text) for text in texts]).types] == [0] * 9
