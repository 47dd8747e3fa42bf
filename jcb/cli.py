"""The command line: one class a subcommand, parsed by tyro; its fields are the flags, `run` does the work.

Nothing heavy is imported before a subcommand runs, so every `--help` is quick. A setting comes from, in rising
order of strength: its default, the TOML file of `--config`, `--set`, its own flag.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, Positional, UseAppendAction, arg

from jcb import __version__, config_file
from jcb.cli_bench import BENCHES
from jcb.cli_experiment import Experiment
from jcb.cli_options import EngineOptions, setting
from jcb.cli_plan import Buckets, Plan
from jcb.cli_simulate import Replay, Simulate

_DESCRIPTION = "Serve language models with continuous batching, on CPUs, NVIDIA GPUs and TPUs."


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    max_tokens: Annotated[int, arg(help="most tokens of an answer")] = 256
    temperature: Annotated[float, arg(help="0 takes the most likely token")] = 0.0
    top_p: Annotated[float, arg(help="share of probability to choose from")] = 1.0
    top_k: Annotated[int, arg(help="number of tokens to choose from; 0 is all")] = 0

    def sampling_params(self) -> Any:
        """The SamplingParams these options describe."""
        from jcb.types import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k
        )


@dataclass(frozen=True, kw_only=True)
class Serve(EngineOptions):
    """Serve a model over HTTP with OpenAI's API."""

    host: Annotated[str | None, setting("host", "address to listen on", metavar="ADDRESS")] = None
    port: Annotated[int | None, setting("port", "port to listen on; 0 is any free one", metavar="INT")] = None
    served_model_name: Annotated[
        str | None, setting("served_model_name", "name in the API", "the model's own", metavar="NAME")
    ] = None
    api_key_file: Annotated[
        str | None, setting("api_key_file", "file of API keys, one a line", "none", metavar="FILE")
    ] = None
    admin_key_file: Annotated[
        str | None, setting("admin_key_file", "file of keys for routes that change the server", "none", metavar="FILE")
    ] = None
    cors_origins: Annotated[
        str | None,
        setting("cors_origins", "web origins that may read answers, commas between", "none", metavar="URLS"),
    ] = None
    otlp_endpoint: Annotated[
        str | None, setting("otlp_endpoint", "where traces of requests go, over HTTP", "none", metavar="URL")
    ] = None
    profile_folder: Annotated[
        str | None, setting("profile_folder", "where POST /start_profile writes", "no such route", metavar="FOLDER")
    ] = None
    record: Annotated[
        str | None, setting("record", "file for arrivals, plans and step times, without texts", "none", metavar="FILE")
    ] = None
    record_token_ids: Annotated[
        bool, FlagCreatePairsOff, arg(help="write token ids too, from which texts can be read", help_behavior_hint="")
    ] = False
    insecure: Annotated[
        bool, FlagCreatePairsOff, arg(help="listen beyond loopback without an API key", help_behavior_hint="")
    ] = False
    strict_fields: Annotated[
        bool, FlagCreatePairsOff, arg(help="refuse unknown fields in requests", help_behavior_hint="")
    ] = False
    no_playground: Annotated[
        bool, FlagCreatePairsOff, arg(help="serve neither the page at / nor the events it shows", help_behavior_hint="")
    ] = False
    live_knobs: Annotated[
        bool,
        FlagCreatePairsOff,
        arg(help="let admins change batch size, token budget and policy while it runs", help_behavior_hint=""),
    ] = False
    print_config: Annotated[
        bool, FlagCreatePairsOff, arg(help="print the whole configuration as TOML and end", help_behavior_hint="")
    ] = False

    def run(self) -> int:
        """Serves until SIGTERM or Ctrl-C."""
        config = self.serve_config()
        if self.print_config:
            print(config_file.dump(config), end="")
            return 0
        import serve

        return serve.run(config)


@dataclass(frozen=True, kw_only=True)
class Generate(SamplingOptions, EngineOptions):
    """Continue texts, without a server."""

    prompts: Annotated[
        Positional[tuple[str, ...]], arg(help="texts to continue", metavar="PROMPT...", help_behavior_hint="")
    ]

    def run(self) -> int:
        """Prints what the model writes after each prompt."""
        if not self.prompts:
            raise ValueError('give a text to continue, for example: jcb generate "The capital of France is"')
        from jcb import terminal

        return terminal.generate(self.serve_config(), self.prompts, self.sampling_params())


@dataclass(frozen=True, kw_only=True)
class Chat(SamplingOptions, EngineOptions):
    """Chat with a model in the terminal."""

    system: Annotated[str, arg(help="system message", help_behavior_hint="(default: the template's own)")] = ""

    def run(self) -> int:
        """Reads a line, streams the answer, until end of input."""
        from jcb import terminal

        return terminal.chat(self.serve_config(), self.sampling_params(), system=self.system)


@dataclass(frozen=True, kw_only=True)
class Aot(EngineOptions):
    """Compile every program for a chip that is not here: what it needs, whether it fits, how far from the floor."""

    topology: Annotated[str, arg(help="v5e:2x2, v6e:2x4, v5p:2x2x1, tpu7x:2x2x1, a100, h200:8, b200", metavar="CHIPS")]
    model: Annotated[
        str | None,
        setting("model", 'a folder with a config.json, a GGUF file, or "preset:llama-3.1-8b"', metavar="PATH"),
    ] = None
    only: Annotated[
        tuple[str, ...],
        UseAppendAction,
        arg(help="programs whose name contains this text", metavar="TEXT", help_behavior_hint="(default: all)"),
    ] = ()
    json: Annotated[bool, FlagCreatePairsOff, arg(help="print JSON instead of a table", help_behavior_hint="")] = False

    def run(self) -> int:
        """Prints the report; status 1 when something would fail on the chip."""
        from jcb import terminal
        from jcb.chips import parse_topology

        topology = parse_topology(self.topology)
        return terminal.preflight(self.serve_config(), topology, only=self.only, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what this machine has and which kernels will be used."""

    def run(self) -> int:
        """Prints the report."""
        from jcb import doctor

        return doctor.run()


@dataclass(frozen=True, kw_only=True)
class ExportTokenizer:
    """Write a model's tokenizer as a Hugging Face folder, for benchmark clients."""

    model: Annotated[Positional[str], arg(help='a GGUF file, a Hugging Face folder, or "default"', metavar="MODEL")]
    folder: Annotated[Positional[Path], arg(help="folder to write, made if it is not there", metavar="FOLDER")]

    def run(self) -> int:
        """Writes tokenizer.json and its companions."""
        from jcb.checkpoint.default_model import default_model_path
        from jcb.checkpoint.reader import open_checkpoint
        from jcb.text.export import export_tokenizer

        path = default_model_path() if self.model == "default" else self.model
        export_tokenizer(open_checkpoint(path), self.folder)
        print(f"wrote {self.folder}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Benchmarks of a server, of the engine and of the kernels: `jcb bench --help`."""

    def run(self) -> int:
        """Never called: `main` hands what follows `bench` to the commands in `BENCHES`."""
        raise AssertionError("main did not take the subcommand")


COMMANDS: dict[str, Any] = {
    "serve": Serve,
    "generate": Generate,
    "chat": Chat,
    "aot": Aot,
    "bench": Bench,
    "buckets": Buckets,
    "plan": Plan,
    "simulate": Simulate,
    "replay": Replay,
    "experiment": Experiment,
    "doctor": Doctor,
    "export-tokenizer": ExportTokenizer,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status: 2 for bad settings, 1 for what then failed."""
    args = sys.argv[1:] if args is None else list(args)
    if args in (["--version"], ["version"]):
        print(f"jcb {__version__}")
        return 0
    commands, prog, description = COMMANDS, "jcb", _DESCRIPTION
    if args[:1] == ["bench"]:
        commands, prog, description = BENCHES, "jcb bench", "Measure a server, the engine or the kernels."
        args = args[1:]
    command = tyro.extras.subcommand_cli_from_dict(
        commands, prog=prog, description=description, args=args, config=(DisallowNone,)
    )
    return report_errors(command.run)


def serve_main(args: Sequence[str] | None = None) -> int:
    """`python serve.py` with the flags of `jcb serve`."""
    return report_errors(tyro.cli(Serve, prog="serve.py", args=args, config=(DisallowNone,)).run)


def report_errors(run: Callable[[], int]) -> int:
    """Runs `run`; what the user can mend becomes one line on stderr, with a traceback only under JCB_DEBUG=1."""
    from jcb.checkpoint.errors import ModelLoadError
    from jcb.types import RequestError

    try:
        return run()
    except (ValueError, ModelLoadError, RequestError, OSError) as error:
        if os.environ.get("JCB_DEBUG"):
            raise
        print(f"jcb: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except MemoryError:
        print("jcb: this machine has too little memory for that", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
