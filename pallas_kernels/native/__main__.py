"""`python -m pallas_kernels.native`: builds the C++ kernels and says what it did. Exit status 1 where it could not."""

from __future__ import annotations

import argparse
import sys
import time

from pallas_kernels.native import build


def main() -> int:
    """Builds the library unless it is there and fits."""
    parser = argparse.ArgumentParser(prog=build.COMMAND, description=__doc__)
    parser.add_argument("--force", action="store_true", help="build even if the library fits the sources")
    force = parser.parse_args().force
    started = time.perf_counter()
    try:
        if not force and build.library_path().exists():
            print(f"C++ kernels: {build.library_path().name} fits the sources")
            return 0
        path = build.build()
    except build.NotBuiltError as reason:
        print(f"C++ kernels: not built, XLA does their work: {reason}")
        return 1
    print(f"C++ kernels: built {path.name} in {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
