"""The block pool of the paged KV cache: reference counts, prefix lookup and eviction. No torch.

A block holds the keys and values of `block_size` consecutive positions, in every layer. A request's *table* lists its blocks: entry
b holds the positions from b * block_size on. Tables may share blocks; a block's reference count is the number of tables it is in.
Every block is in one of three states:

  blank  in no table, without known content
  used   in at least one table
  idle   in no table, but its content is cached until the space is needed; evicted in LRU order

[Note: Finding a prefix]
Once all positions of a block are computed, it is *published*: it can be looked up by (previous block, its tokens). The previous
block is published too and stands for the whole prefix, so equal keys mean equal prefixes. The dict compares whole keys, so a hash
collision cannot return wrong content. The key of a first block has a salt in place of a previous block: prefixes are found only
under their own salt, so that clients cannot learn what others have asked. A key has at most one block: a request that computes the
same content again frees its copy and uses the published block. Therefore a table holds the predecessors of each of its published
blocks. `free` drops the last block first, so an idle block is always older than its predecessor. So the oldest idle block has no
successor, and evicting it leaves no key without its previous block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int | str, tuple[int, ...]]  # the previous block, or the salt if it is the first; and the tokens


class BlockPool:
    """Allocates and frees blocks. Every operation takes O(1) per block that it names."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks ({num_blocks}) and block_size ({block_size}) must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._refs = [0] * num_blocks
        self._blank = list(reversed(range(num_blocks)))  # a stack
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._published: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # the inverse of _published

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank ones, and idle ones, which lose their content."""
        return len(self._blank) + len(self._idle)

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return the published blocks of the longest cached prefix of `tokens`. The last token is never part of the prefix: its
        logits are needed, so it must be computed. Changes nothing; `fork` makes a table of the blocks."""
        size, blocks = self.block_size, list[int]()
        previous: int | str = salt
        for begin in range(0, len(tokens) - size, size):
            block = self._published.get((previous, tuple(tokens[begin : begin + size])))
            if block is None:
                break
            blocks.append(block)
            previous = block
        return blocks

    def fork(self, table: Sequence[int]) -> list[int]:
        """Return a second table of the same blocks."""
        for block in table:
            self._hold(block)
        return list(table)

    def num_lacking(self, table: Sequence[int], start: int, stop: int) -> int:
        """The number of blocks that `reserve` would allocate."""
        first, end = start // self.block_size, self.num_needed(stop)
        return max(0, end - len(table)) + sum(self._refs[block] > 1 for block in table[first:end])

    def reserve(self, table: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        """Make positions [start, stop) of the table writable: allocate missing blocks and replace shared ones. Earlier positions
        stay unchanged. Requires num_lacking <= num_free. Returns the copies (from, to) that must be made before any write."""
        copies = []
        for index in range(start // self.block_size, self.num_needed(stop)):
            if index == len(table):
                table.append(self._take())
            elif self._refs[shared := table[index]] > 1:
                table[index] = self._take()
                self._drop(shared)
                copies.append((shared, table[index]))
        return copies

    def publish(self, table: list[int], tokens: Sequence[int], start: int, stop: int, salt: str = "") -> None:
        """Publish the blocks that are complete once positions [0, stop) are computed, of which [start, stop) are new. May replace a
        block of the table by a published block of equal content ([Note: Finding a prefix])."""
        if not self.prefix_caching:
            return
        size = self.block_size
        for index in range(start // size, stop // size):
            key = (table[index - 1] if index else salt, tuple(tokens[index * size : (index + 1) * size]))
            block = table[index]
            table[index] = self._published.setdefault(key, block)
            if table[index] == block:
                self._keys[block] = key
            else:
                self._hold(table[index])
                self._drop(block)

    def free(self, table: list[int]) -> None:
        """Drop all blocks of the table and empty it."""
        while table:
            self._drop(table.pop())

    def forget(self) -> None:
        """Clear the prefix cache, because the weights on which its content depends have changed. No block may be in use."""
        assert self.num_free == self.num_blocks, f"forget() with {self.num_blocks - self.num_free} blocks in use"
        self._blank += self._idle
        for index in (self._idle, self._published, self._keys):
            index.clear()

    def _take(self) -> int:
        assert self.num_free, f"all {self.num_blocks} blocks are in use: check num_free before reserve()"
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._published[self._keys.pop(block)]
        self._refs[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._idle[block]
        self._refs[block] += 1

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._keys:
                self._idle[block] = None
            else:
                self._blank.append(block)
