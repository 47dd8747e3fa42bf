"""One engine a module, run in that engine's own environment: `python -m jcb.bench.peers.runners.NAME`.

They speak `jcb.bench.peers.runners.protocol`, need nothing of jcb but this package, and run on Python 3.11.
"""
