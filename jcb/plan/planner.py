"""What a model will take and give on a chip, from its shape alone: memory, pages, sequences, programs, speed.

Bytes are counted by the functions with which the server itself plans; speed comes from the roofline (the floor) and
from the production scheduler on a simulated device (the forecast).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jcb.axes import check_split
from jcb.chips import Chip
from jcb.config import ModelConfig, ServeConfig, replace
from jcb.engine.memory import RESERVED_FOR_TEMPORARIES, Device
from jcb.engine.resolve import page_bytes, plan_memory
from jcb.models.specs import leaves, param_specs
from jcb.plan.buckets import programs_of
from jcb.simulate.fit import Calibration
from jcb.simulate.setup import Engine, make_engine, timed_engine
from jcb.simulate.shape import ModelShape
from jcb.simulate.simulation import Simulation
from jcb.simulate.workloads import Synthetic

_MOST_DEVICES = 512
_ROUNDS = 5  # requests of each client in a forecast


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of each device. reserve: kept for programs' temporaries; what they need is known when they are compiled.

    page: one page of all layers; kv_token: one token in it. budget: what weights, reserve and pages may take of memory.
    """

    memory: int
    budget: int
    weights: int
    reserve: int
    pages: int
    page: int
    kv_token: float
    page_size: int
    num_pages: int

    @property
    def usable_pages(self) -> int:
        """Pages that sequences can have: all but the dummy page."""
        return self.num_pages - 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Sequences that run at once. tokens: of each; pages: that each holds; by_pages: as many as the cache holds."""

    tokens: float
    pages: float
    by_pages: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds, and tokens a second of all devices of one replica, with `clients` that ask one request after another."""

    clients: int
    ttft: float
    tpot: float
    output_rate: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known before anything is loaded.

    worst: every sequence as long as max_model_len. sustained: sequences whose prompts the token budget keeps up with.
    limit: what stops one more sequence first. bound: what a decode step is spent on.
    """

    model: str
    chip: str
    platform: str
    devices: int
    replicas: int
    dtype: str
    parameters: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    input_len: int
    output_len: int
    memory: Memory
    worst: Fit
    longest: Fit  # every sequence with its whole answer
    average: Fit  # sequences in every stage of their answers
    decode_programs: tuple[int, ...]
    prefill_programs: tuple[tuple[int, int], ...]
    programs: int  # all that are compiled
    sustained: int
    limit: str
    bound: str
    floor_alone: Speed
    floor_full: Speed
    alone: Speed
    full: Speed
    preemptions: int
    is_fitted: bool


def make_plan(
    config: ServeConfig, model: ModelConfig, chip: Chip, *, devices: int = 1, replicas: int = 1, input_len: int = 0,
    output_len: int = 0, fitted: Calibration | None = None,
) -> Plan:  # fmt: skip
    """The plan of `config` on `replicas` groups of `devices` chips.

    input_len, output_len: of the requests to plan for; 0 takes 1,024 and 256, or what a short max_model_len leaves.
    fitted: step times for the forecast, instead of the chip's roofline. Raises ValueError, with the numbers, where the
    model cannot be split or does not fit.
    """
    engine = fitting_engine(config, model, chip, devices, fitted)
    config, limits = engine.config, engine.spec.limits
    input_len = input_len or max(min(1024, limits.max_model_len // 2), 1)
    output_len = output_len or max(min(256, limits.max_model_len // 4), 1)
    if input_len + output_len > limits.max_model_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} are more than max_model_len={limits.max_model_len}"
        )
    memory = memory_of(engine)
    slots = config.scheduler.max_num_seqs
    fits = [_fit(tokens, pages, memory.usable_pages, slots) for tokens, pages in _uses(engine, input_len, output_len)]
    budget = config.scheduler.max_num_batched_tokens
    sustained = _sustained(budget, input_len, output_len)
    clients = min(fits[2].sequences, sustained)
    full, preemptions = _simulated(engine, clients, input_len, output_len)
    return Plan(
        model=config.model,
        chip=chip.title,
        platform=chip.platform,
        devices=devices,
        replicas=replicas,
        dtype=config.dtype,
        parameters=sum(spec.size for spec in leaves(param_specs(model))),
        max_model_len=limits.max_model_len,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        input_len=input_len,
        output_len=output_len,
        memory=memory,
        worst=fits[0],
        longest=fits[1],
        average=fits[2],
        decode_programs=tuple(shape.num_rows for shape in engine.spec.shapes.decode),
        prefill_programs=tuple((shape.num_tokens, shape.num_rows) for shape in engine.spec.shapes.prefill),
        programs=programs_of(engine.spec.shapes),
        sustained=sustained,
        limit=_limit(fits, slots, sustained, budget),
        bound=_bound(engine, clients, input_len + output_len / 2),
        floor_alone=floor(engine, 1, input_len, output_len),
        floor_full=floor(engine, clients, input_len, output_len),
        alone=_simulated(engine, 1, input_len, output_len)[0],
        full=full,
        preemptions=preemptions,
        is_fitted=fitted is not None,
    )


def fitting_engine(
    config: ServeConfig, model: ModelConfig, chip: Chip, devices: int, fitted: Calibration | None = None
) -> Engine:
    """The engine to simulate, its configuration resolved; ValueError says what would fit when it does not."""
    check_split(model, devices)
    config = replace(config, "mesh", tensor_parallel=devices)
    try:
        return timed_engine(model, chip, config, fitted)
    except ValueError as error:
        enough = _enough_devices(config, model, chip, devices)
        hint = f"; it fits from --tp {enough}" if enough else ""
        raise ValueError(f"{chip.title} x {devices}: {error}{hint}") from error


def _enough_devices(config: ServeConfig, model: ModelConfig, chip: Chip, devices: int) -> int:
    """The fewest devices above `devices` that hold the model, by powers of two; 0 when none do."""
    count = devices * 2
    while count <= _MOST_DEVICES:
        try:
            check_split(model, count)
            make_engine(model, chip, replace(config, "mesh", tensor_parallel=count))
        except ValueError:
            count *= 2
        else:
            return count
    return 0


def memory_of(engine: Engine) -> Memory:
    """Where the bytes of each device go."""
    config, chip, devices = engine.config, engine.chip, engine.config.mesh.tensor_parallel
    device = Device(chip.platform, chip.memory)
    plan = plan_memory(config, engine.model, RESERVED_FOR_TEMPORARIES, device, devices)
    page = page_bytes(config, engine.model, chip.platform, devices)
    return Memory(
        memory=chip.memory,
        budget=plan.budget,
        weights=plan.weights,
        reserve=plan.temporaries,
        pages=plan.pages,
        page=page,
        kv_token=page / config.cache.page_size,
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
    )


def _uses(engine: Engine, input_len: int, output_len: int) -> list[tuple[float, float]]:
    """(tokens, pages) of a sequence: the longest possible, with its whole answer, on average over its answer.

    The last token of an answer is never computed on, so it needs no place.
    """
    limits = engine.spec.limits
    stages = range(input_len, input_len + output_len)
    last = input_len + output_len - 1
    mean = sum(map(limits.pages_for, stages)) / output_len
    return [
        (limits.max_model_len, limits.pages_for(limits.max_model_len)),
        (last, limits.pages_for(last)),
        (sum(stages) / output_len, mean),
    ]


def _fit(tokens: float, pages: float, usable: int, slots: int) -> Fit:
    count = math.floor(usable / pages)
    return Fit(tokens=tokens, pages=pages, by_pages=count, sequences=max(min(count, slots), 1))


def _sustained(budget: int, input_len: int, output_len: int) -> int:
    """Sequences that can go on without prompts piling up: each takes one token a step, and its successor's prompt
    must be through when it ends.
    """
    return max(int(budget / (1 + input_len / output_len)), 1)


def _limit(fits: list[Fit], slots: int, sustained: int, budget: int) -> str:
    """Which limit stops one more sequence first, as requests pile up."""
    worst, longest, average = fits
    least = min(slots, sustained, average.by_pages)
    if average.by_pages == least < slots:
        return f"pages: they hold {least} sequences of these lengths on average, max_num_seqs allows {slots}"
    if sustained == least < slots:
        return (
            f"max_num_batched_tokens={budget}: beyond {least} sequences of these lengths prompts come faster than "
            f"steps take them in, max_num_seqs allows {slots}"
        )
    if longest.by_pages < slots:
        return (
            f"max_num_seqs={slots}; but pages hold only {longest.by_pages} sequences with their whole answers, so that "
            "some may be preempted"
        )
    if worst.by_pages < slots:
        return f"max_num_seqs={slots} at these lengths; pages at {worst.by_pages} sequences of max_model_len"
    return f"max_num_seqs={slots}; pages hold {worst.by_pages} sequences of max_model_len"


def _parts(engine: Engine, rows: int, context: float) -> dict[str, float]:
    """Seconds that a decode step cannot do without, by what takes them."""
    shape, chip = ModelShape.of(engine.model), engine.chip
    devices = engine.config.mesh.tensor_parallel
    numbers = 2 * rows * (shape.step_parameters + context * shape.attention_flops / 2)
    kv = shape.kv_bytes(engine.config.cache.kv_dtype)
    return {
        "reading the weights": shape.step_bytes(engine.config.dtype) / chip.bandwidth / devices,
        "reading keys and values": rows * context * kv / chip.bandwidth / devices,
        "arithmetic": numbers / chip.flops / devices,
    }


def _bound(engine: Engine, rows: int, context: float) -> str:
    """What most of a full decode step is spent on."""
    parts = _parts(engine, rows, context)
    name = max(parts, key=lambda part: parts[part])
    times = ", ".join(f"{part} {value * 1e3:.3g} ms" for part, value in parts.items())
    return f"{name} (at {rows} rows of {context:,.0f} tokens: {times})"


def floor(engine: Engine, rows: int, input_len: int, output_len: int) -> Speed:
    """What no implementation can beat with these weights and this cache: the chip's bandwidth and peak, no overhead.

    TTFT: the prompt in one step on an idle device. TPOT: a decode step of `rows` rows at the mean context; weights and
    live keys and values are read once, or the arithmetic takes longer. output_rate: of requests one after another in
    all rows: all bytes or all operations of their whole life, prompts included, whichever takes longer.
    """
    shape, chip = ModelShape.of(engine.model), engine.chip
    devices = engine.config.mesh.tensor_parallel
    bandwidth, flops, kv = chip.bandwidth * devices, chip.flops * devices, shape.kv_bytes(engine.config.cache.kv_dtype)
    weights, context = shape.step_bytes(engine.config.dtype), input_len + output_len / 2
    prompt = 2 * (input_len * shape.layer_parameters + shape.head_parameters)
    prompt += input_len * (input_len + 1) / 2 * shape.attention_flops
    token = 2 * shape.step_parameters + context * shape.attention_flops
    tpot = max((weights + rows * context * kv) / bandwidth, rows * token / flops)
    steps = output_len if rows > 1 else output_len - 1
    moved = (steps * (weights + rows * context * kv) + (weights if rows == 1 else 0)) / bandwidth
    life = max(moved, rows * (prompt + (output_len - 1) * token) / flops)
    return Speed(
        clients=rows,
        ttft=max(weights / bandwidth, prompt / flops),
        tpot=tpot,
        output_rate=rows * output_len / life,
    )


def _simulated(engine: Engine, clients: int, input_len: int, output_len: int) -> tuple[Speed, int]:
    """The forecast: the production scheduler on the simulated device, and how often it preempted.

    Several clients ask for answers of all lengths up to twice the mean: equal ones would all begin and end together.
    """
    patient = dataclasses.replace(engine.spec.scheduler, queue_timeout=math.inf, run_timeout=math.inf)
    workload = Synthetic(
        pattern="closed",
        users=clients,
        requests=_ROUNDS * clients,
        prompt=str(input_len),
        output=str(output_len) if clients == 1 else f"uniform(1,{2 * output_len})",
        max_model_len=engine.spec.limits.max_model_len,
    )
    stats = Simulation(dataclasses.replace(engine.spec, scheduler=patient), workload).run()
    speed = Speed(
        clients=clients,
        ttft=stats.ttft.quantile(0.5),
        tpot=stats.tpot.quantile(0.5),
        output_rate=stats.per_second(stats.output_tokens),
    )
    return speed, stats.preemptions
