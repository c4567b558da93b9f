"""`baton inspect`: what a checkpoint contains, how much memory it needs here, and why `serve` would refuse it."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from torch import nn

from baton.actors.forward.streams import CpuStream
from baton.actors.runtime.sizing import DEFAULT_MEMORY_FRACTION, count_active_parameters, count_parameters, weight_bytes
from baton.api.config import Config
from baton.api.generation.fields import check_defaults
from baton.api.machine.batch import batch_limits, explain_headless, wants_head
from baton.api.machine.device import gpu_share, pick_device, ring_bytes
from baton.api.machine.memory import bytes_of, check_room, free_memory
from baton.api.serve import StartError
from baton.api.terminal.console import escaped
from baton.api.wiring import AS_IN_FILE, BITS, DTYPES, STATE_DTYPES, bundled_model, model_length, size
from baton.models.batch import Model, predictor_of
from baton.models.config import ModelConfig, ModelError
from baton.models.loading.checkpoint import build_model, find_family
from baton.models.loading.dtype import dtype_of
from baton.models.loading.filling import parts_of
from baton.models.loading.formats.composed import Composed
from baton.models.loading.heads import with_head
from baton.models.loading.integers import bytes_saved
from baton.models.loading.kept import bytes_saved_by_keeping
from baton.models.loading.matching import match
from baton.models.loading.quantization import compose, read_quantization
from baton.models.loading.shards import StoredTensor, find_shards, read_headers
from baton.models.loading.source import check_source, read_source_config
from baton.models.text.tokenizer import load_template, load_text

# Prefix of the Python modules that define layers, and the modules whose classes are not counted, as parts of layers.
LAYERS, PLAIN = (
    "baton.models.layers.",
    ("baton.models.layers.linear", "baton.models.layers.norm", "baton.models.layers.rope"),
)
# Names of weight files in formats that the server refuses.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
# Each of these files shows that a folder should contain a tokenizer.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")
MOST_RUNNING = 4096  # the maximum of --max-running


class Room(msgspec.Struct, kw_only=True):
    """The memory for states and pages that this machine has next to the weights, and how many requests fit."""

    free: int  # free bytes before the weights are loaded
    pools: int  # bytes for the pools of states and pages
    length: int  # maximum tokens of a sequence
    slots: int
    pages: int
    running: int  # requests that run at once, limited by --max-running
    most_running: int  # requests that would run at once with the highest --max-running
    contexts: float | None  # number of sequences with `length` tokens that fit into the pages; None without attention
    why: list[str]  # sentences that explain the sizes


class Inspection(msgspec.Struct, kw_only=True):
    """Facts about a checkpoint that can be found without its weights; None where unknown. Sizes are in bytes."""

    folder: str  # or the name of a model on the hub
    download: int | None = None  # bytes that `baton serve` would fetch from the hub; None for a folder
    family: str | None = None
    layers: dict[str, int] = {}  # number of layers by class
    parameters: int | None = None
    active_parameters: int | None = None  # parameters used for one token; a mixture of experts uses only some
    vocabulary: int | None = None
    positions: int | None = None  # maximum length of a sequence that the model supports
    quantization: str | None = None  # quantization of the files, by its name in config.json
    quantized: dict[str, int] = {}  # number of quantized weights by format
    unquantized: dict[str, int] = {}  # of a quantized checkpoint: number of other matrices by name, layers as *
    files: int = 0  # number of safetensors files
    weights_on_disk: dict[str, int] = {}  # bytes by dtype
    weights_in_memory: dict[str, int] = {}  # bytes, by dtype or quantization to load the weights as
    loaded_as: str | None = None  # dtype or quantization that the options choose for the weights
    state: int | None = None  # bytes of one sequence's recurrent state
    thousand_tokens: int | None = None  # bytes of the keys and values of 1,000 tokens
    room: Room | None = None
    tokenizer: bool = False
    chat_template: bool = False
    notes: list[str] = []  # what the server would go without, and why
    missing: list[str] = []  # "weights" and "tokenizer", if not downloaded yet
    refused: list[str] = []  # every reason why the server would not start


def inspect(config: Config, as_json: bool) -> int:
    """Print the facts about the checkpoint. Return the exit code: 1 if `baton serve` would refuse the checkpoint."""
    return show(examine(config), as_json)


def show(found: Inspection, as_json: bool) -> int:
    """Print an inspection. Return the exit code."""
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(f"{name:<15} {escaped(text)}" for name, text in lines(found)))
    return 1 if found.refused else 0


def examine(config: Config, elsewhere: Collection[str] = ()) -> Inspection:
    """Examine the checkpoint that the options name, without loading its weights.

    elsewhere: names of tokenizer files that belong to the checkpoint, but are not in its folder
    """
    path = Path(config.model) if config.model else bundled_model()
    found = Inspection(folder=str(path))
    values = None
    with noting(found.refused):
        check_source(path)
        values = read_source_config(path)
    if values is None:
        return found
    stored = examine_files(found, path)
    examine_text(found, path, elsewhere)
    stored = examine_quantization(found, path, values, stored)
    model = examine_model(found, values, config, stored)
    if model is not None:
        examine_room(found, model, config)
    return found


@contextmanager
def noting(reasons: list[str]) -> Iterator[None]:
    """Catch exceptions that would keep the server from starting, and append their messages to `reasons`."""
    try:
        yield
    except (ValueError, OSError, StartError) as error:
        reasons.append(escaped(str(error)))


def examine_files(found: Inspection, path: Path) -> list[StoredTensor]:
    """Read the headers of the weight files. A folder without any weights is not refused; its weights are missing."""
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in ("*.safetensors", *OTHER_WEIGHTS)):
        found.missing.append("weights")
        return []
    stored: list[StoredTensor] = []
    with noting(found.refused):
        files = find_shards(path)
        found.files = len(files)
        stored = read_headers(files)
    sizes = defaultdict[str, int](int)
    for tensor in stored:
        sizes[tensor.dtype] += tensor.stop - tensor.start
    found.weights_on_disk = dict(sizes)
    return stored


def examine_text(found: Inspection, path: Path, elsewhere: Collection[str]) -> None:
    """Load the tokenizer. A missing tokenizer is a reason for refusal, unless the weights are missing too."""
    if any(name in elsewhere for name in TOKENIZER):
        with noting(found.refused):
            found.tokenizer, found.chat_template = True, load_template(path) is not None
        return
    if "weights" in found.missing and not any((path / name).exists() for name in TOKENIZER):
        found.missing.append("tokenizer")
        return
    with noting(found.refused):
        text = load_text(path)
        found.tokenizer, found.chat_template = True, text.has_chat_template
        check_defaults(text.generation_defaults)


def examine_quantization(
    found: Inspection, path: Path, values: ModelConfig, stored: list[StoredTensor]
) -> list[StoredTensor]:
    """Return the weights that the stored tensors compose. Record which ones are quantized, by their headers."""
    with noting(found.refused):
        quantization = read_quantization(path, values)
        weights = compose(stored, quantization)
        quantized = [weight for weight in weights if isinstance(weight, Composed)]
        if quantization is not None and (quantized or not stored):
            found.quantization = quantization.method
            found.quantized = dict(Counter(weight.dtype for weight in quantized))
            floats = [weight.name for weight in weights if not isinstance(weight, Composed) and is_matrix(weight)]
            found.unquantized = dict(Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in floats))
        return weights
    return []


def is_matrix(weight: StoredTensor) -> bool:
    """Return whether a tensor is a matrix or a stack of matrices, and not a convolution's weight or a vector."""
    return len(weight.shape) > 1 and min(weight.shape) > 1


def examine_model(found: Inspection, values: ModelConfig, config: Config, stored: list[StoredTensor]) -> Model | None:
    """Build the model without weights and describe it. Return None if its config.json is refused."""
    with noting(found.refused):
        family = find_family(values)
        if wants_head(config, pick_device(config.device).type == "cuda"):
            try:
                values = with_head(stored, values, family)
            except ModelError as why:
                with noting(found.refused):
                    found.notes = explain_headless(config, why)
        states = STATE_DTYPES[config.state_dtype]
        models = {name: build_model(family, values, dtype, states) for name, dtype in DTYPES.items() if dtype}
        plain = config.dtype if config.dtype in models else str(dtype_of(values, stored)).removeprefix("torch.")
        model = models[plain]
        found.family, found.loaded_as = str(values.values["model_type"]), plain
        describe(found, model)
        if isinstance(model, nn.Module):
            found.layers = dict(layers_of(model))
            found.weights_in_memory = {name: weight_bytes(built) for name, built in models.items()}
            for name, bits in BITS.items():
                if bits is not None:
                    found.weights_in_memory[name] = found.weights_in_memory[plain] - bytes_saved(model, bits)
            found.loaded_as = plain if config.quantize == "none" else config.quantize
            with noting(found.refused):
                if stored:
                    fillings, _ = match(stored, dict(model.named_parameters()), family, values)
                    saved = bytes_saved_by_keeping(model, parts_of(fillings))
                    examine_integers(found, found.weights_in_memory[plain] - saved, saved, config)
        return model
    return None


def examine_integers(found: Inspection, size: int, saved: int, config: Config) -> None:
    """Record the size of weights of which the integers of a file stay integers, and the bytes that this saves."""
    if not saved:
        return
    found.weights_in_memory[AS_IN_FILE] = size
    if config.quantize == "none" and config.kernels == "native" and pick_device(config.device).type == "cpu":
        found.loaded_as = AS_IN_FILE


def describe(found: Inspection, model: Model) -> None:
    """Record the sizes that can be computed without weights."""
    found.vocabulary, found.positions = model.vocab_size, model.max_position
    found.parameters, found.active_parameters = count_parameters(model), count_active_parameters(model)
    found.state = sum(spec.nbytes for spec in model.state_specs())
    found.thousand_tokens = 1000 * sum(spec.nbytes for spec in model.kv_specs())


def layers_of(model: nn.Module) -> Counter[str]:
    """Count layers such as mixers and MLPs by class, without layers inside other layers."""
    counts = Counter[str]()
    for child in model.children():
        place = type(child).__module__
        if place.startswith(LAYERS) and place not in PLAIN:
            counts[type(child).__name__] += 1
        elif place not in PLAIN:
            counts += layers_of(child)
    return counts


def examine_room(found: Inspection, model: Model, config: Config) -> None:
    """Compute the sizes of the pools as the server would after loading the weights.

    On a GPU the server also measures the memory of its steps, so its pools will be somewhat smaller.
    """
    with noting(found.refused):
        device = pick_device(config.device)
        free, weights = free_memory(device), found.weights_in_memory.get(found.loaded_as or "", 0)
        is_gpu, left = device.type == "cuda", max(free - weights, 0)
        has_head = predictor_of(model) is not None
        batch = batch_limits(config, is_gpu, left, has_head)
        share = gpu_share(left) if is_gpu else int(left * DEFAULT_MEMORY_FRACTION)
        share -= ring_bytes(model, batch.max_running, batch.drafts)
        pools = config.memory if config.memory is not None else share
        check_room(weights, device)
        length = model_length(config, model)
        limited = msgspec.structs.replace(config, memory=max(pools, 1))
        sizes = size(limited, batch, model, length, CpuStream())
        widest = batch_limits(msgspec.structs.replace(config, max_running=MOST_RUNNING), is_gpu, left, has_head)
        most = size(limited, widest, model, length, CpuStream())
        found.room = Room(
            free=free, pools=pools, length=length, slots=sizes.slots, pages=sizes.pages, running=sizes.max_running,
            most_running=most.max_running, contexts=sizes.pages * sizes.page_size / length if sizes.pages else None,
            why=sizes.why,
        )  # fmt: skip


def lines(found: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report for people, each as a label and a text."""
    yield "folder" if found.download is None else "model", found.folder
    if found.download is not None:
        yield "to fetch", bytes_of(found.download)
    if found.family is not None:
        yield "family", found.family
        yield "layers", ", ".join(f"{count} {name}" for name, count in found.layers.items()) or "none"
        active = f", {found.active_parameters:,} per token" * (found.active_parameters != found.parameters)
        yield "parameters", f"{found.parameters:,}{active}"
        yield "vocabulary", f"{found.vocabulary:,}"
        yield "positions", f"{found.positions:,}"
    if found.quantization is not None:
        counts = ", ".join(f"{count} {name}" for name, count in found.quantized.items())
        how = "integers stay where they can" if found.loaded_as == AS_IN_FILE else "dequantized on reading"
        yield "quantization", f"{found.quantization}: {counts or 'no'} weights, {how}"
        if found.unquantized:
            yield "not quantized", ", ".join(f"{count} {name}" for name, count in found.unquantized.items())
    if found.files:
        yield "on disk", f"{by_type(found.weights_on_disk)}; {found.files} file{'s' * (found.files > 1)}"
    if found.weights_in_memory:
        named = "as " * (found.loaded_as != AS_IN_FILE)
        yield "in memory", f"{by_type(found.weights_in_memory)}; loaded {named}{found.loaded_as}"
    if found.state is not None and found.thousand_tokens is not None:
        yield "state", f"{bytes_of(found.state)} per sequence"
        yield "keys and values", f"{bytes_of(found.thousand_tokens)} per 1,000 tokens"
    if (room := found.room) is not None:
        yield "memory", f"{bytes_of(room.free)} free, {bytes_of(room.pools)} for states and pages"
        pages = "" if room.contexts is None else f", pages for {room.contexts:.1f} contexts of {room.length:,} tokens"
        yield (
            "fits",
            f"{room.slots} slots{pages}; {room.running} requests at once (--max-running up to {room.most_running})",
        )
    template = "with a chat template" if found.chat_template else "no chat template"
    yield "tokenizer", template if found.tokenizer else "none"
    for note in found.notes:
        yield "note", note
    if found.missing:
        yield "missing", ", ".join(found.missing)
    for reason in found.refused or ["nothing"]:
        yield "refused", reason


def by_type(sizes: dict[str, int]) -> str:
    """Return sizes in readable units, each with its dtype or quantization."""
    return ", ".join(f"{bytes_of(count)} {name}" for name, count in sizes.items())
