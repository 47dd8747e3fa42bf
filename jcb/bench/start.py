"""How long a server takes to be ready: with an empty compile cache, and again with what the first start left there.

python -m jcb.bench.start [serve flags]
"""

from __future__ import annotations

import sys
import tempfile
import time

from jcb.bench.server_process import serving


def seconds_to_ready(arguments: list[str]) -> float:
    """Wall seconds from starting the process to /ready answering 200."""
    start = time.perf_counter()
    with serving(arguments):
        return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Print both times and their ratio."""
    flags = sys.argv[1:] if arguments is None else arguments
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--set", f"engine.compile_cache={folder}"]
        print("first start, empty compile cache ...", flush=True)
        cold = seconds_to_ready(flags)
        print(f"  ready after {cold:.1f} s\nsecond start ...", flush=True)
        warm = seconds_to_ready(flags)
    print(f"  ready after {warm:.1f} s\nthe second start is {cold / warm:.2f} x faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
