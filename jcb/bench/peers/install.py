"""`python -m jcb.bench.peers.install [NAME ...]`: an environment for each peer, under peers/ in jcb's own.

Flags of pip may be given after `--`, for example a find-links folder with CPU wheels of torch. An environment that is
whole is left alone; a peer that cannot be installed is named with pip's last word, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from jcb.bench.peers.catalogue import PACKAGES, environment

_MARK = ".installed"
_TORCH_PYTHON = "python3.11"  # the oldest that these peers run on, and the likeliest to have wheels


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when any peer could not be installed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m jcb.bench.peers.install", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"peers to install (all): {', '.join(PACKAGES)}")
    parser.add_argument("--torch-python", default="", help=f"interpreter for torch ({_TORCH_PYTHON} if there is one)")
    options = parser.parse_args(words[:at])
    for name in options.names:
        if name not in PACKAGES:
            parser.error(f"{name!r} is not one of {', '.join(PACKAGES)}")
    failed = []
    for name in options.names or PACKAGES:
        if (environment(name) / _MARK).exists():
            continue
        print(f"installing {', '.join(PACKAGES[name].packages)} (minutes) ...", flush=True)
        if error := install(name, options.torch_python, words[at + 1 :]):
            print(f"  {name} could not be installed: {error}", flush=True)
            failed.append(name)
    return 1 if failed else 0


def install(name: str, torch_python: str, pip_flags: Sequence[str]) -> str:
    """Make the environment of a peer; "" or what went wrong."""
    package, folder = PACKAGES[name], environment(name)
    python = sys.executable
    if package.wants_torch:
        python = torch_python or shutil.which(_TORCH_PYTHON) or sys.executable
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    commands = [[python, "-m", "venv", "--clear", str(folder)], [*pip, "install", "-q", *pip_flags, *package.packages]]
    if package.unwanted:
        commands.append([*pip, "uninstall", "-q", "-y", *package.unwanted])
    for command in commands:
        done = subprocess.run(command, env=os.environ | dict(package.env), stderr=subprocess.PIPE, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return lines[-1] if lines else f"{command[0]} ended with status {done.returncode}"
    (folder / _MARK).touch()
    return ""


if __name__ == "__main__":
    sys.exit(main())
