"""Flags that several commands share: the settings of the engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from jcb import config_file
from jcb.config import Activations, Dtype, SchedulingPolicy, ServeConfig, Weights

_SETTINGS = {field.path.rpartition(".")[2]: field for field in config_file.fields().values()}


def setting(name: str, text: str, shown: str = "", metavar: str | None = None) -> Any:
    """Help of a flag that stands for one setting of ServeConfig, with that setting's default."""
    default = shown or _SETTINGS[name].default
    return arg(help=text, help_behavior_hint=f"(default: {default})", metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of the engine. Those without a flag are reached by --set; `jcb serve --print-config` lists all."""

    config: Annotated[
        Path | None, arg(help="TOML file of settings, see configs/", metavar="FILE", help_behavior_hint="")
    ] = None
    set: Annotated[
        tuple[str, ...], UseAppendAction, arg(help="one setting, as in --set cache.page_size=32", metavar="KEY=VALUE")
    ] = ()
    model: Annotated[
        str | None, setting("model", 'a GGUF file, a Hugging Face folder, or "default"', metavar="PATH")
    ] = None
    dtype: Annotated[Dtype | None, setting("dtype", "what the model computes in")] = None
    weights: Annotated[Weights | None, setting("weights", "packed in memory as in the file, or as dtype")] = None
    activations: Annotated[
        Activations | None, setting("activations", "what meets packed 4-bit weights: as computed, or in 8 bits")
    ] = None
    max_model_len: Annotated[
        int | None, setting("max_model_len", "most tokens of one sequence", "the model's own", metavar="INT")
    ] = None
    max_num_seqs: Annotated[int | None, setting("max_num_seqs", "most sequences in one step", metavar="INT")] = None
    max_num_batched_tokens: Annotated[
        int | None, setting("max_num_batched_tokens", "most tokens in one step", metavar="INT")
    ] = None
    kv_cache_memory: Annotated[
        str | None, setting("memory_gib", "memory for the KV cache: GiB, or like 512M", "planned", metavar="SIZE")
    ] = None
    kv_dtype: Annotated[Dtype | None, setting("kv_dtype", "what keys and values are kept in")] = None
    seed: Annotated[int | None, setting("seed", "makes requests without a seed repeatable", "none", metavar="INT")] = (
        None
    )
    no_enable_prefix_caching: Annotated[
        bool, FlagCreatePairsOff, arg(help="never reuse the pages of equal prefixes", help_behavior_hint="")
    ] = False
    scheduling_policy: Annotated[SchedulingPolicy | None, setting("policy", "who runs first")] = None
    chat_template: Annotated[
        str | None, setting("chat_template", "a Jinja file", "the model's own", metavar="FILE")
    ] = None

    def serve_config(self) -> ServeConfig:
        """The configuration these options describe; ValueError names what is wrong."""
        return config_file.override(self.file_config(), self.settings())

    def file_config(self) -> ServeConfig:
        """What the file of --config says, or the defaults."""
        return ServeConfig() if self.config is None else config_file.load(self.config)

    def settings(self) -> dict[str, object]:
        """What --set and the flags say, by full path; a flag wins."""
        return config_file.parse_settings(self.set) | self._flags()

    def _flags(self) -> dict[str, object]:
        """The flags that were given, by the full path of their setting."""
        flags: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or value is False:
                continue
            if field.name == "kv_cache_memory":
                flags["cache.memory_gib"] = config_file.parse_gib(value)
            elif field.name == "no_enable_prefix_caching":
                flags["cache.enable_prefix_caching"] = False
            elif field.name == "no_playground":
                flags["server.playground"] = False
            elif field.name == "scheduling_policy":
                flags["scheduler.policy"] = value
            elif field.name in _SETTINGS:
                flags[_SETTINGS[field.name].path] = value
        return flags
