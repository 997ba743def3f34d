#!/usr/bin/env python3
r"""InnerQ's Table 4 on a CPU: attention of one decoded token on InnerQ's codecs and on KIVI, by the
tokens in the cache, in CPU time. So other programs on the machine do not count.

    KVANT_RUNTIME=$(scripts/fetch.py runtime) bench/record.py --append \
        bench/results/papers_attention.csv -- bench/papers_depth.py --json

It is `kvant bench attention` on one thread with another clock, in the shape of an 8B model's layer.
Further options go to it. There is no line of f16: its time is the memory's, which other programs
share. InnerQ's values have groups of channels, KIVI's have groups of tokens."""

import sys
import time

from kvant.commands import attention

CODECS = ("kivi-2", "innerq-base", "innerq-hybrid", "innerq-small")
WORDS = "-d 128 -g 4 --kv-heads 8 -q 1 -t 1 -r 9 -n 512,2048,8192,32768 --stock none".split()


def main():
    time.perf_counter = time.process_time
    pairs = [word for codec in CODECS for word in ("-k", codec)]
    pairs += ["-k", "turboquant-4", "-v", "turboquant-3"]
    return attention.main([*pairs, *WORDS, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
