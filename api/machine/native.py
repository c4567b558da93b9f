"""Native code when the server starts: looked for beside the loading of the weights, and told of in the log."""

import threading
from importlib.metadata import version

import structlog
import torch

from baton.api.config import Config
from baton.kernels.runtime import cpp, triton
from baton.kernels.runtime.cpp.prepare import Prepared
from baton.models.batch import Model
from baton.models.layers.operations import operations

COST = "torch computes the same, decoding and prompts at about half the speed"
COST_WITHOUT_TRITON = "torch computes the same, many times slower, and no step is captured"


class NativeStart:
    """A library for a model, found or compiled in a thread of its own. bits: as in load_model."""

    def __init__(self, bits: int | None) -> None:
        self._bits = bits
        self._log = structlog.get_logger()
        self._prepared = Prepared()
        self._thread = threading.Thread(target=self._find, name="native", daemon=True)

    def begin(self, model: Model) -> None:
        """Look for it, or compile it: the model is known, its weights need not be there."""
        self._prepared.operations = operations(model, self._bits)
        self._thread.start()

    def finish(self) -> None:
        """Wait for it, and install it."""
        self._thread.join()
        prepared = self._prepared
        prepared.install(torch.get_num_threads())
        if prepared.problem:
            self._log.warning("no native code", why=prepared.problem, cost=COST)
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
            compiled=prepared.compiled,
            seconds=round(prepared.seconds, 2),
        )

    def _find(self) -> None:
        self._prepared.find(self._tell)

    def _tell(self, prepared: Prepared) -> None:
        assert prepared.compiler is not None and prepared.target is not None
        self._log.info("compiling native code", compiler=prepared.compiler.version, target=prepared.target.name)


def start_native(config: Config, device: torch.device, bits: int | None) -> NativeStart | None:
    """None where no C++ is to compute. The log says where Triton does, or does not though it could."""
    if config.kernels == "torch":
        triton.leave_to_torch()
    if triton.computes_on(device):
        structlog.get_logger().info("Triton", version=version("triton"), interpreted=device.type == "cpu")
    elif device.type != "cpu":
        structlog.get_logger().warning("no Triton", cost=COST_WITHOUT_TRITON)
    return NativeStart(bits) if config.kernels == "native" and device.type == "cpu" else None
