"""vLLM's own event publisher, without an engine behind it.

    publisher.py EVENTS-PORT REPLAY-PORT BUFFER-STEPS CACHE-BLOCKS

Each line of standard input is a number of batches to publish, as fast as it
goes; a line with the next sequence number answers. A batch stores two chained
blocks of 16 tokens and removes what does not fit any more, oldest first. It
ends with its standard input.
"""

import collections
import sys
import time

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher


def main() -> None:
    events, replay, steps, blocks = sys.argv[1:]
    publisher = ZmqEventPublisher(
        0, endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}", buffer_steps=int(steps)
    )
    held: collections.deque[int] = collections.deque()
    seq = 0
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            hashes = [2 * seq + 1, 2 * seq + 2]
            tokens = [(seq * 7 + i) % 50000 for i in range(32)]
            tokens[0], tokens[1] = seq % 50000, seq // 50000
            publisher.publish(KVEventBatch(ts=time.time(), events=evict(held, hashes, int(blocks)) + [stored(hashes, tokens)]))
            seq += 1
        while publisher._event_queue.unfinished_tasks:
            time.sleep(0.001)
        print(seq, flush=True)
    publisher.shutdown()


def stored(hashes: list[int], tokens: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=hashes, parent_block_hash=None, token_ids=tokens, block_size=16, lora_id=None, medium="GPU",
        lora_name=None, extra_keys=[None, None], group_idx=0, kv_cache_spec_kind="full_attention",
    )


def evict(held: collections.deque[int], more: list[int], blocks: int) -> list[BlockRemoved]:
    held.extend(more)
    out = []
    while len(held) > blocks:
        out.append(BlockRemoved(block_hashes=[held.popleft()], medium="GPU", group_idx=0))
    return out


main()
