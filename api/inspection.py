"""`baton inspect`: what a checkpoint folder holds, what it would take here, and why it would be refused."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from torch import nn

from baton.actors.forward.streams import CpuStream
from baton.actors.runtime.sizing import DEFAULT_MEMORY_FRACTION, count_active_parameters, count_parameters, weight_bytes
from baton.api.config import Config
from baton.api.generation.fields import check_defaults
from baton.api.machine.device import GPU_FRACTION, pick_device
from baton.api.machine.memory import bytes_of, check_room, free_memory
from baton.api.serve import StartError
from baton.api.wiring import BITS, DTYPES, STATE_DTYPES, bundled_model, model_length, size
from baton.models.batch import Model
from baton.models.config import ModelConfig, read_config
from baton.models.loading.checkpoint import build_model, check_folder, find_family
from baton.models.loading.dtype import dtype_of
from baton.models.loading.integers import bytes_saved
from baton.models.loading.matching import match
from baton.models.loading.quantization import Scaled, pair_scales, read_quantization
from baton.models.loading.shards import StoredTensor, find_shards, read_headers
from baton.models.text.tokenizer import load_text

LAYERS, PLAIN = (
    "baton.models.layers.",
    ("baton.models.layers.linear", "baton.models.layers.norm", "baton.models.layers.rope"),
)
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")
MOST_RUNNING = 4096


class Room(msgspec.Struct, kw_only=True):
    """Bytes and counts on this machine, beside the weights in memory; the reasons in words.

    running: requests at once under --max-running; most_running: with no such limit. contexts: how many of `length`
    tokens the pages hold; None without attention.
    """

    free: int
    pools: int
    length: int
    slots: int
    pages: int
    running: int
    most_running: int
    contexts: float | None
    why: list[str]


class Inspection(msgspec.Struct, kw_only=True):
    """All that can be told without the weights; None where it cannot. Sizes are bytes.

    weights: by their type: those in the files, and what they take in memory. active_parameters: those that a token has
    to do with. refused: every reason that was found.
    """

    folder: str
    family: str | None = None
    layers: dict[str, int] = {}
    parameters: int | None = None
    active_parameters: int | None = None
    vocabulary: int | None = None
    positions: int | None = None
    quantization: str | None = None
    files: int = 0
    weights_on_disk: dict[str, int] = {}
    weights_in_memory: dict[str, int] = {}
    loaded_as: str | None = None
    state: int | None = None
    thousand_tokens: int | None = None
    room: Room | None = None
    tokenizer: bool = False
    chat_template: bool = False
    missing: list[str] = []
    refused: list[str] = []


def inspect(config: Config, as_json: bool) -> int:
    """Prints what is found; 1 if `baton serve` would refuse it."""
    found = examine(config)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(f"{name:<15} {text}" for name, text in told(found)))
    return 1 if found.refused else 0


def examine(config: Config) -> Inspection:
    path = Path(config.model) if config.model else bundled_model()
    found = Inspection(folder=str(path))
    values = None
    with noting(found.refused):
        check_folder(path)
        values = read_config(path)
    if values is None:
        return found
    stored = examine_files(found, path)
    examine_text(found, path)
    stored, scaled = examine_quantization(found, path, values, stored)
    model = examine_model(found, values, config, stored, scaled)
    if model is not None:
        examine_room(found, model, config)
    return found


@contextmanager
def noting(reasons: list[str]) -> Iterator[None]:
    """What would keep the server from starting becomes a reason."""
    try:
        yield
    except (ValueError, OSError, StartError) as error:
        reasons.append(str(error))


def examine_files(found: Inspection, path: Path) -> list[StoredTensor]:
    """Only headers are read. A folder that has no weights yet lacks them, but is not refused for it."""
    if not any(any(path.glob(pattern)) for pattern in ("*.safetensors", *OTHER_WEIGHTS)):
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


def examine_text(found: Inspection, path: Path) -> None:
    """Beside weights a tokenizer is not missing yet, it is refused."""
    if "weights" in found.missing and not any((path / name).exists() for name in TOKENIZER):
        found.missing.append("tokenizer")
        return
    with noting(found.refused):
        text = load_text(path)
        found.tokenizer, found.chat_template = True, text.has_chat_template
        check_defaults(text.generation_defaults)


def examine_quantization(
    found: Inspection, path: Path, values: ModelConfig, stored: list[StoredTensor]
) -> tuple[list[StoredTensor], dict[str, Scaled]]:
    """The tensors that are no scales, and the scales of those that have one."""
    with noting(found.refused):
        quantization = read_quantization(path, values)
        weights, scaled = pair_scales(stored, quantization)
        if quantization is not None and (scaled or not stored):
            found.quantization = f"FP8 ({quantization.method})"
        return weights, scaled
    return [], {}


def examine_model(
    found: Inspection, values: ModelConfig, config: Config, stored: list[StoredTensor], scaled: dict[str, Scaled]
) -> Model | None:
    """The model without weights; None if its config.json is refused."""
    with noting(found.refused):
        family = find_family(values)
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
                    match(stored, dict(model.named_parameters()), family, values, scaled)
        return model
    return None


def describe(found: Inspection, model: Model) -> None:
    found.vocabulary, found.positions = model.vocab_size, model.max_position
    found.parameters, found.active_parameters = count_parameters(model), count_active_parameters(model)
    found.state = sum(spec.nbytes for spec in model.state_specs())
    found.thousand_tokens = 1000 * sum(spec.nbytes for spec in model.kv_specs())


def layers_of(model: nn.Module) -> Counter[str]:
    """Mixers, MLPs and the like by their class, those within others left out."""
    counts = Counter[str]()
    for child in model.children():
        place = type(child).__module__
        if place.startswith(LAYERS) and place not in PLAIN:
            counts[type(child).__name__] += 1
        elif place not in PLAIN:
            counts += layers_of(child)
    return counts


def examine_room(found: Inspection, model: Model, config: Config) -> None:
    """As the server would size its pools after it has loaded the weights; on a GPU before it measures its steps."""
    with noting(found.refused):
        device = pick_device(config.device)
        free, weights = free_memory(device), found.weights_in_memory.get(found.loaded_as or "", 0)
        fraction = GPU_FRACTION if device.type == "cuda" else DEFAULT_MEMORY_FRACTION
        pools = config.memory if config.memory is not None else int(max(free - weights, 0) * fraction)
        check_room(model, BITS[config.quantize], device)
        length = model_length(config, model)
        limited = msgspec.structs.replace(config, memory=max(pools, 1))
        sizes = size(limited, model, length, CpuStream())
        most = size(msgspec.structs.replace(limited, max_running=MOST_RUNNING), model, length, CpuStream())
        found.room = Room(
            free=free, pools=pools, length=length, slots=sizes.slots, pages=sizes.pages, running=sizes.max_running,
            most_running=most.max_running, contexts=sizes.pages * sizes.page_size / length if sizes.pages else None,
            why=sizes.why,
        )  # fmt: skip


def told(found: Inspection) -> Iterator[tuple[str, str]]:
    """What is found, in lines."""
    yield "folder", found.folder
    if found.family is not None:
        yield "family", found.family
        yield "layers", ", ".join(f"{count} {name}" for name, count in found.layers.items()) or "none"
        active = f", {found.active_parameters:,} for a token" * (found.active_parameters != found.parameters)
        yield "parameters", f"{found.parameters:,}{active}"
        yield "vocabulary", f"{found.vocabulary:,}"
        yield "positions", f"{found.positions:,}"
    if found.quantization is not None:
        yield "quantization", f"{found.quantization}, dequantized as it is read"
    if found.files:
        yield "on disk", f"{by_type(found.weights_on_disk)}; {found.files} file{'s' * (found.files > 1)}"
    if found.weights_in_memory:
        yield "in memory", f"{by_type(found.weights_in_memory)}; loaded as {found.loaded_as}"
    if found.state is not None and found.thousand_tokens is not None:
        yield "state", f"{bytes_of(found.state)} a sequence"
        yield "keys and values", f"{bytes_of(found.thousand_tokens)} for a thousand tokens"
    if (room := found.room) is not None:
        yield "memory", f"{bytes_of(room.free)} free here, {bytes_of(room.pools)} for states and pages"
        pages = "" if room.contexts is None else f", pages for {room.contexts:.1f} contexts of {room.length:,} tokens"
        yield "fits", f"{room.slots} slots{pages}; {room.running} requests at once (at most {room.most_running})"
    template = "with a chat template" if found.chat_template else "no chat template"
    yield "tokenizer", template if found.tokenizer else "none"
    if found.missing:
        yield "not here", ", ".join(found.missing)
    for reason in found.refused or ["nothing"]:
        yield "refused", reason


def by_type(sizes: dict[str, int]) -> str:
    return ", ".join(f"{bytes_of(count)} {name}" for name, count in sizes.items())
