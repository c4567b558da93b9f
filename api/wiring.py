"""The steps from options to a runnable ring: the model, its tokenizer and formats, the pools, and the relay."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import structlog
import torch
from torch import nn

from baton.actors.cache.below.limits import TierLimits
from baton.actors.forward.contained import ContainedDevice
from baton.actors.forward.streams import Stream
from baton.actors.forward.torch_device import TorchDevice, survives
from baton.actors.lease import Move, Violation
from baton.actors.requests import BY_NGRAMS
from baton.actors.results.constraint import constrained_by
from baton.actors.results.drafters import draft
from baton.actors.results.interfaces import no_drafts, refuse_grammars
from baton.actors.runtime.relay import Relay, RelayConfig
from baton.actors.runtime.sizing import PoolSizes, costs_of, count_parameters, size_pools, weight_bytes
from baton.actors.scheduler.state import Limits
from baton.actors.storage.arena import Arena
from baton.actors.storage.files import StateFiles
from baton.actors.storage.host_memory import HostStates
from baton.api.config import Config
from baton.api.generation.chat_prompt import TEMPLATE_LIMIT_S
from baton.api.generation.fields import check_defaults
from baton.api.generation.gateway import Gateway
from baton.api.generation.offload import OutOfTime, limited
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import GrammarCompiler
from baton.api.generation.tool_choice import limit_of
from baton.api.machine.batch import BatchLimits, batch_limits, explain_headless, wants_head
from baton.api.machine.device import allocate_pools, enter_device, make_device, pool_memory, stream_of
from baton.api.machine.host_arena import ArenaStart, host_bytes, mapped_arena
from baton.api.machine.memory import check_room, free_memory
from baton.api.machine.native import NO_INTEGERS, start_native
from baton.api.machine.threads import default_threads
from baton.api.peering.links import Peering
from baton.api.serve import LoadedModel, Progress, StartError
from baton.api.telemetry.trace_file import TraceFile
from baton.kernels.linear.quantized import keeps
from baton.kernels.runtime.cpp import use_threads
from baton.kernels.runtime.triton import use_tf32
from baton.models.batch import Model, predictor_of
from baton.models.config import ModelConfig, ModelError
from baton.models.loading.checkpoint import find_family, load_model, may_keep_integers, saved_by_file
from baton.models.loading.dtype import checkpoint_dtype
from baton.models.loading.fingerprint import fingerprint
from baton.models.loading.integers import QUANTIZED, bytes_saved, has_integers, round_inputs
from baton.models.loading.pooling import read_recipe
from baton.models.loading.source import check_source, read_source_config
from baton.models.recorded import recording
from baton.models.text.formats.picking import OutputFormats, output_formats
from baton.models.text.tokenizer import ModelText, load_text

# Meaning of the values of --dtype, --state-dtype and --quantize. None: as in the files, or not quantized.
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BITS = {"none": None, "int8": 8, "int4": 4}
EXAMPLE_MODEL = "no MODEL was named, so this is the bundled example model"
AS_IN_FILE = "as in the file"  # name of the quantization of weights whose integers are those of the file
FORGETS = "--preserve-reasoning has no effect: the chat template leaves out the reasoning of earlier turns"
DEFAULT_MAX_MODEL_LEN = 131_072  # default of --max-model-len, unless the model's own limit is lower


def load(config: Config, on_progress: Progress) -> LoadedModel:
    """Load the model, size and allocate the pools. Raises StartError with a message for the user."""
    trace = open_trace_file(config.trace_file)
    path = Path(config.model) if config.model else bundled_model()
    if not config.model:
        structlog.get_logger().info(EXAMPLE_MODEL, folder=str(path), others="baton serve MODEL")
    try:
        device = enter_device(config.device)
        check_source(path)
        values = read_source_config(path)
        find_family(values)
        text = load_text(path)
        render_probes(text)
        check_defaults(text.generation_defaults)
        formats = pick_formats(config, values, text)
        embedding = read_recipe(path, config.pooling), values.integer("hidden_size", default=1)
        use_tf32(config.tf32)
        arena = start_arena(config, device)
        model, headless = read_model(config, path, device, on_progress, arena)
        use_threads(config.threads or default_threads(count_parameters(model), torch.get_num_threads()))
        max_model_len = model_length(config, model)
        stream = stream_of(device, model)
        host = HostStates(arena.finish() if arena is not None else cpu_arena(config, model))
        batch = batch_limits(config, device.type == "cuda", free_memory(device), predictor_of(model) is not None)
        sizes = size(config, batch, model, max_model_len, stream, host)
        numbers = sizes.slots, sizes.pages, sizes.page_size
        pools = allocate_pools(model, *numbers, device, stream, sizes.max_running, batch.drafts)
        name = name_states(config, model, path)
        tiers = build_lower_tiers(config, model, sizes, name, host)
        runs = recording(model, pools, sizes.max_running, pools.pages_for(max_model_len + 1))
        lengths = sizes.max_running, max_model_len
        computes = make_device(runs, pools, *lengths, host, stream, batch.step_tokens)
    except (ValueError, OSError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise StartError(str(error)) from error
    info = {
        "family": values.values["model_type"],
        "device": str(device),
        "quantize": name_quantization(config, model),
        "weight_bytes": weight_bytes(model),
        "slots": sizes.slots,
        "pages": sizes.pages,
        "max_running": sizes.max_running,
        "step_tokens": batch.step_tokens,
        "tool_parser": formats.tools.name if formats.tools is not None else None,
        "reasoning_parser": formats.reasoning.name if formats.reasoning is not None else None,
    }
    grammars = grammar_compiler(text, model.vocab_size)
    budget = config.reasoning_budget
    limits = sizes.max_running, budget, config.preserve_reasoning
    served = ServedModel(text, model.vocab_size, max_model_len, info, formats, grammars, *limits, *embedding, name)
    if budget is not None and limit_of(served, budget) is None:
        raise StartError("--reasoning-budget: the model does not reason between two tokens that mark it")
    peering = None
    if config.peer or config.peer_listen is not None:
        try:
            peering = Peering(config, name, dtype_name(config, path), sizes, tiers.host, served)
        except OSError as error:
            raise StartError(f"cannot listen for peers on {config.peer_listen}: {error.strerror or error}") from error
    return LoadedModel(
        served,
        [
            f"weights of {weight_bytes(model) / 2**20:.1f} MiB (quantize: {name_quantization(config, model)})",
            *headless,
            *[FORGETS] * (config.preserve_reasoning and text.kept_reasoning is None),
            *notes(config, sizes, batch),
        ],
        lambda gateway: build_relay(
            config, batch, model, computes, tiers, sizes, text, grammars, gateway, trace, peering
        ),
        trace.close if trace is not None else None,
        peering,
    )


def render_probes(text: ModelText) -> None:
    """Find out how the chat template shows chats, before the first one comes. Raises StartError if it does not end."""
    try:
        limited(TEMPLATE_LIMIT_S, lambda: (text.between_parts, text.kept_reasoning))
    except OutOfTime:
        raise StartError(f"the chat template did not finish within {TEMPLATE_LIMIT_S:g} s") from None


def start_arena(config: Config, device: torch.device) -> ArenaStart | None:
    """Return the start of the arena for host copies; None on a CPU, where no memory is locked."""
    is_gpu = device.type == "cuda"
    return ArenaStart(host_bytes(config, is_gpu), config.page_size, device) if is_gpu else None


def cpu_arena(config: Config, model: Model) -> Arena:
    try:
        return mapped_arena(model, host_bytes(config, is_gpu=False), config.page_size)
    except OSError as error:
        raise StartError(f"--host-memory: {error.strerror}") from error


def read_model(
    config: Config, path: Path, device: torch.device, on_progress: Progress, arena: ArenaStart | None
) -> tuple[Model, list[str]]:
    """Load the model. Reading the weights may take minutes, so make all checks that do not need them first.

    Returns the model, and notes if its head for multi-token prediction could not be loaded.
    """
    bits, headless = BITS[config.quantize], list[str]()
    native = start_native(config, device, bits is not None or may_keep_integers(path, device))
    unpacked = spared = 0  # bytes of the weights if no integers of the files stay integers; what these save

    def on_headless(why: ModelError) -> None:
        headless.extend(explain_headless(config, why))

    def check(model: Model) -> None:
        nonlocal unpacked, spared
        unpacked, spared = weight_bytes(model), saved(model, path, bits, native is not None)
        check_room(unpacked - spared, device)
        model_length(config, model)
        if native:
            native.begin(model)
        if arena:
            arena.begin(model)

    def prepare() -> None:
        if native:
            native.finish()
        if spared and bits is None and not keeps(weight_dtype(config, path), device):
            check_room(unpacked, device)

    try:
        model = load_model(
            path,
            DTYPES[config.dtype],
            device,
            on_progress,
            check,
            prepare,
            STATE_DTYPES[config.state_dtype],
            bits,
            on_headless if wants_head(config, device.type == "cuda") else None,
        )
    except BaseException:
        if arena:
            arena.cancel()
        raise
    if config.activation_dtype == "int8" and not round_inputs(model):
        raise ValueError(NO_INTEGERS)
    return model, headless


def saved(model: Model, path: Path, bits: int | None, is_native: bool) -> int:
    """Return how many bytes weights of integers take less than the model's parameters.

    bits: see load_model. is_native: whether native code computes, for which the integers of files stay integers.
    """
    if not isinstance(model, nn.Module):
        return 0
    if bits is not None:
        return bytes_saved(model, bits)
    return saved_by_file(path, model) if is_native and may_keep_integers(path, torch.device("cpu")) else 0


def name_quantization(config: Config, model: Model) -> str:
    """Return the name of what the weights are: a value of --quantize, or that their integers are those of the file.

    Rounded activations are named too.
    """
    name = AS_IN_FILE if config.quantize == "none" and has_integers(model) else config.quantize
    return name if config.activation_dtype == "auto" else f"{name}, {config.activation_dtype} activations"


def grammar_compiler(text: ModelText, vocab_size: int) -> GrammarCompiler:
    """Return the compiler of grammars. It refuses every grammar if the tokenizer does not support grammars."""
    try:
        return GrammarCompiler(text.grammars(vocab_size))
    except ValueError as error:
        return GrammarCompiler(None, f"grammars are not supported with this model's tokenizer ({error})")


def open_trace_file(name: str | None) -> TraceFile | None:
    """Open the trace file, or return None without --trace-file. Raises StartError if the file cannot be opened."""
    try:
        return TraceFile(Path(name)) if name is not None else None
    except OSError as error:
        raise StartError(f"--trace-file: {error}") from error


def bundled_model() -> Path:
    """Return the folder of the bundled model."""
    return Path(str(files("baton.models") / "bundled"))


def pick_formats(config: Config, values: ModelConfig, text: ModelText) -> OutputFormats:
    """Return the formats of reasoning and tool calls, and make the tokenizer decode their markers as text."""
    family = str(values.values.get("model_type"))
    formats = output_formats(family, text.templates.values(), config.tool_parser, config.reasoning_parser)
    text.show(formats.markers)
    return formats


def model_length(config: Config, model: Model) -> int:
    """Return the maximum tokens of a sequence: --max-model-len, or by default the model's limit, but at most 131072.

    Raises StartError if the option exceeds the model's limit.
    """
    if config.max_model_len is None:
        return min(model.max_position, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > model.max_position:
        raise StartError(f"--max-model-len: the model has only {model.max_position} positions")
    return config.max_model_len


def size(
    config: Config,
    batch: BatchLimits,
    model: Model,
    max_model_len: int,
    stream: Stream,
    host: HostStates | None = None,
) -> PoolSizes:
    """Return the sizes of the pools, given --memory or the free memory. Raises ValueError if no request fits.

    host: the store for copies in host memory; the trial steps, whose memory is measured, run with it
    """
    memory = config.memory
    if memory is None:
        lengths = max_model_len, config.page_size, batch.step_tokens
        memory = pool_memory(model, batch.max_running, *lengths, stream, host, batch.drafts)
    return size_pools(
        model,
        memory,
        batch.max_running,
        max_model_len,
        config.page_size,
        slots=config.state_slots,
        pages=config.kv_pages,
        tree_slots=config.tree_slots,
        strategy=config.state_strategy,
        overlap=not config.no_overlap,
        cached_states=batch.cached_states,
    )


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """The tiers below the pool: storage for copies of states in host memory and on disk."""

    limits: TierLimits
    host: HostStates
    disk: StateFiles | None  # the state files; None without --session-dir


def build_lower_tiers(config: Config, model: Model, sizes: PoolSizes, name: str, host: HostStates) -> LowerTiers:
    """Make the tiers below the pool, and scan the state files in --session-dir.

    name: the fingerprint of the model's states
    host: with an arena, which is all of host memory that copies may take
    """
    arena = host.arena
    assert arena is not None
    limits = TierLimits(
        host_bytes=arena.nbytes,
        disk_bytes=config.state_disk if config.session_dir is not None else 0,
        state_bytes=sizes.slot_bytes,
        token_bytes=sizes.page_bytes // sizes.page_size if sizes.pages else 0,
        session_slots=config.session_slots,
        page_size=sizes.page_size,
        lines=arena.lines,
    )
    if config.session_dir is None:
        return LowerTiers(limits, host, None)
    files = StateFiles(Path(config.session_dir) / "states", name, host)
    files.scan()
    return LowerTiers(limits, host, files)


def name_states(config: Config, model: Model, path: Path) -> str:
    """Return the fingerprint of the model's states. Only state files with the same fingerprint are used.

    It includes the dtype of the weights, because a float32 state may have been computed with bfloat16 weights, and what
    is quantized, which differs between versions of Baton.
    """
    rule = "" if config.quantize == "none" else f" {QUANTIZED}"
    quantized = name_quantization(config, model) + rule
    return fingerprint(path, model.state_specs(), model.kv_specs(), weight_dtype(config, path), quantized)


def weight_dtype(config: Config, path: Path) -> torch.dtype:
    """Return the dtype of the weights: --dtype, or that of the files."""
    return DTYPES[config.dtype] or checkpoint_dtype(path, read_source_config(path))


def dtype_name(config: Config, path: Path) -> str:
    """Return the name of the weights' dtype, as in --dtype."""
    return str(weight_dtype(config, path)).removeprefix("torch.")


def notes(config: Config, sizes: PoolSizes, batch: BatchLimits) -> list[str]:
    """Return lines for the log with the sizes of the pools and of steps, and the reasons for these sizes."""
    slots = f"{sizes.slots} state slots of {sizes.slot_bytes / 2**10:.1f} KiB"
    pages = f"{sizes.pages} KV pages of {sizes.page_size} tokens and {sizes.page_bytes / 2**10:.1f} KiB"
    steps = f"{sizes.max_running} requests run at once, in steps of up to {batch.step_tokens} tokens"
    sources = ["its own text"] * (config.speculation in BY_NGRAMS) + ["the model's head"] * bool(batch.predictions)
    drafts = f"up to {batch.drafts} drafts of a request in a step, from {' or '.join(sources)}"
    lines = [f"{slots}; {pages if sizes.pages else 'no KV pages'}", steps, *sizes.why]
    return [*lines, drafts] if batch.drafts else lines


def build_relay(
    config: Config,
    batch: BatchLimits,
    model: Model,
    computes: TorchDevice,
    tiers: LowerTiers,
    sizes: PoolSizes,
    text: ModelText,
    grammars: GrammarCompiler,
    gateway: Gateway,
    trace: TraceFile | None = None,
    peering: Peering | None = None,
) -> Relay:
    """Make the relay of the ring's actors for the model's device. Call this inside the event loop."""
    limits = Limits(
        max_running=sizes.max_running,
        max_queue=config.max_queue,
        step_tokens=batch.step_tokens,
        step_time=config.step_time,
        page_size=sizes.page_size if sizes.pages else 0,
        track_interval=config.track_interval,
        depth=1 if config.no_overlap else 2,
        strategy=config.state_strategy,
        drafts=batch.drafts,
        predictions=batch.predictions,
    )
    log = structlog.get_logger()
    if trace is not None:
        gateway.on_end = trace.record_end

    def on_move(move: Move) -> None:
        log.debug(
            "lease", slot=move.slot, generation=move.generation, place=str(move.place), holder=move.holder, how=move.how
        )

    def on_violation(violation: Violation) -> None:
        about = log.bind(trace_id=relay.trace) if relay.trace else log
        about.error("lease violation", slot=violation.slot, known=violation.known, claimed=violation.claimed)

    def on_restart(broken: Exception) -> None:
        log.error("the engine is restarted", exc_info=broken)

    relay = Relay(
        RelayConfig(
            sizes.slots,
            sizes.pages,
            limits,
            tiers.limits,
            config.codec_check,
            config.poison_freed,
            restarts=config.restarts,
            cache_policy=config.cache_policy,
            costs=costs_of(model),
        ),
        ContainedDevice(computes, survives),
        text,
        gateway.bind,
        on_move if config.log_level == "debug" else None,
        on_violation,
        on_restart,
        trace.record if trace is not None else None,
        disk=tiers.disk,
        peers=peering.connect(gateway) if peering is not None else None,
        constrain=constrained_by(grammars.grammars.matcher) if grammars.grammars is not None else refuse_grammars,
        draft=draft(config.speculation) if batch.drafts else no_drafts,
    )
    if peering is not None:
        peering.watch(relay)
    gateway.hold_grammar = grammars.hold
    return relay
