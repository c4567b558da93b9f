"""A pretended accelerator, on a CPU, that shows faults which on a real one appear only now and then.

    with LateDevice(seed=3) as late:
        stream = late.stream()                      # an actors.forward.streams.Stream
        late.to(model)                              # parameters move at once
        with late.setup():                          # during setup anything may be read and uploaded
            pools = allocate(model, 4, 0, 1, torch.device("meta"))
        with stream.active():                       # as on a GPU: operations are enqueued, and nothing may be read
            hidden = model.forward(batch, pools)
        assert late.count("upload") <= 2
        expected = late.read(hidden)                # everything is executed, and copied to the host

The code under test runs unchanged, with torch.device("meta"). Tensors are LateTensors, whose layout is known at once.
Their values are computed later: each operation waits in its stream's queue, and runs on a CPU when an event is waited
for, or earlier if the seed says so. Triton's kernels run in its interpreter. late.log lists, in program order:
launches, uploads, downloads, replays, waits for events, and faults. A fault is an error unless the device was made with
raises=False:

- host read: the host depends on values (item, tolist, bool, copies other than Stream.download), or a shape does
  (nonzero, boolean masks, repeat_interleave by a tensor).
- implicit upload: a host tensor is an operand or is copied, other than by Stream.upload; numbers are allowed.
- host buffer: a buffer was written before the copy from or to it was done. Until then the buffer of a download is
  filled with 0xA5.
- pageable: a copy from or to host memory that is no host_buffer's.
- unwritten: values are used before they are computed: no event orders the two streams, or a captured operation was not
  replayed.
- misaligned: a kernel's tensor does not begin at a multiple of 16 bytes.

Memory that the program drops is spoiled (NaN, numbers that are no index) at that place of the stream that allocated it,
because a real device may allocate it again there. Empty tensors are spoiled too. A seed also draws the order in which
streams advance, as far as events leave it open, so a missing wait shows under some seeds. The launches and copies of a
captured step are in the log when it is captured; each replay is one entry.

Not simulated: running out of memory, bandwidth, and the effect of a GPU's order of additions on the last bits.
"""

from baton.kernels.runtime.triton.selection import HAS_TRITON
from tests.late.device import LateDevice
from tests.late.log import Fault

if HAS_TRITON:
    import tests.kernels.gpu.interpreter  # noqa: F401

__all__ = ["Fault", "LateDevice"]
