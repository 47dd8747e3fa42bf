"""jcb beside other engines on this machine: the same prompts and weights, interleaved, each in its own environment.

`python -m jcb.bench.peers`, or `make bench-peers`; `make install-peers` makes the environments.
"""
