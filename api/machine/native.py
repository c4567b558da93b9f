"""Native code at the server's start, which is found or compiled while weights load, and reported in the log."""

import threading
from importlib.metadata import version

import structlog
import torch

from baton.api.config import Config
from baton.api.machine.gpu import broken_triton
from baton.kernels.linear import int8_activations
from baton.kernels.runtime import cpp, triton
from baton.kernels.runtime.cpp.prepare import Prepared
from baton.models.batch import Model
from baton.models.layers.operations import operations

# Log texts: the consequences of no native code on a CPU, and of no Triton on a GPU.
COST = "torch computes instead: same results, about half the speed for decoding and prompts"
# Errors of --activation-dtype.
NO_INTEGERS = (
    "--activation-dtype int8: no projection has weights of integers; --quantize int8 or int4 makes them, and the files "
    "of some models have them"
)
NO_NATIVE = "--activation-dtype int8 needs --device cpu and --kernels native: only native code rounds activations"
NO_PRODUCTS = (
    "--activation-dtype int8 needs native code for a CPU that multiplies integers of 8 bits (VNNI, or dot products on "
    "ARM); see baton doctor"
)
COST_WITHOUT_TRITON = "torch computes instead: same results, many times slower, and steps are not captured"


class NativeStart:
    """The native library of a model, which a thread finds in the wheel or the cache, or compiles."""

    def __init__(self, is_quantized: bool, rounds_inputs: bool) -> None:
        """is_quantized, rounds_inputs: whether the model may have weights of integers, and rounds their inputs."""
        self._is_quantized, self._rounds_inputs = is_quantized, rounds_inputs
        self._log = structlog.get_logger()
        self._prepared = Prepared()
        self._thread = threading.Thread(target=self._find, name="native", daemon=True)

    def begin(self, model: Model) -> None:
        """Start to find or compile the library for a model. Its weights need not be loaded yet."""
        self._prepared.operations = operations(model, self._is_quantized, self._rounds_inputs)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the library, install it, and log which native functions run.

        Raises ValueError if inputs are to be rounded, and the library has no function for it.
        """
        self._thread.join()
        prepared = self._prepared
        prepared.install(torch.get_num_threads())
        if prepared.problem:
            self._log.warning("no native code", why=prepared.problem, cost=COST)
            self._check_rounding()
            return
        for name, fault in prepared.left_out.items():
            self._log.error("a native function differs from its reference, which runs instead", name=name, how=fault)
        if prepared.cache_problem:
            self._log.warning("native code will be compiled at each start", why=prepared.cache_problem)
        assert prepared.target is not None
        self._log.info(
            "native code",
            target=prepared.target.name,
            functions=len(cpp.declared(prepared.operations)) - len(prepared.left_out),
            prebuilt=prepared.prebuilt,
            compiled=prepared.compiled,
            seconds=round(prepared.seconds, 2),
        )
        self._check_rounding()

    def _check_rounding(self) -> None:
        if self._rounds_inputs and not int8_activations.pays():
            raise ValueError(NO_PRODUCTS)

    def _find(self) -> None:
        self._prepared.find(self._log_compiling)

    def _log_compiling(self, prepared: Prepared) -> None:
        assert prepared.compiler is not None and prepared.target is not None
        self._log.info("compiling native code", compiler=prepared.compiler.version, target=prepared.target.name)


def check_triton(device: torch.device) -> None:
    """Raise ValueError if Triton cannot launch kernels on a GPU, with what to install."""
    if device.type == "cuda" and (why := broken_triton(device)):
        raise ValueError(f"Triton is installed, but cannot launch a kernel: {why}; or --kernels torch, which is slow")


def start_native(config: Config, device: torch.device, is_quantized: bool) -> NativeStart | None:
    """Return the library to prepare, or None if no C++ is needed. Log whether Triton computes.

    Raises ValueError if Triton should compute and cannot, or if --activation-dtype int8 cannot be followed.
    """
    if config.kernels == "torch":
        triton.leave_to_torch()
    if triton.computes_on(device):
        check_triton(device)
        structlog.get_logger().info("Triton", version=version("triton"), interpreted=device.type == "cpu")
    elif device.type != "cpu":
        structlog.get_logger().warning("no Triton", cost=COST_WITHOUT_TRITON)
    is_native, rounds_inputs = config.kernels == "native" and device.type == "cpu", config.activation_dtype == "int8"
    if rounds_inputs and not is_native:
        raise ValueError(NO_NATIVE)
    if rounds_inputs and not is_quantized:
        raise ValueError(NO_INTEGERS)
    return NativeStart(is_quantized, rounds_inputs) if is_native else None
