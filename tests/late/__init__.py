"""An emulated accelerator on a CPU. It exposes faults that a real accelerator shows only now and then.

    with LateDevice(seed=3) as late:
        stream = late.stream()                      # an actors.forward.streams.Stream
        late.to(model)                              # parameters move at once
        with late.setup():                          # during setup anything may be read and uploaded
            pools = allocate(model, 4, 0, 1, torch.device("meta"))
        with stream.active():                       # as on a GPU: operations are enqueued, and nothing may be read
            hidden = model.forward(batch, pools)
        assert late.count("upload") <= 2
        expected = late.read(hidden)                # everything is executed, and copied to the host

The code under test runs unchanged, with torch.device("meta"). Its tensors are LateTensors: shape, strides and dtype
(the layout) are known at once, values are computed later. Each operation waits in the queue of its stream, and runs on
a CPU when the host waits for an event, or earlier if the seed says so. Triton's kernels run in its interpreter.
late.log lists, in program order: launches, uploads, downloads, replays, waits for events, and faults. A fault raises an
error unless the device was made with raises=False. The faults are:

- host read: the host depends on values (item, tolist, bool, copies other than Stream.download), or a shape depends on
  them (nonzero, boolean masks, repeat_interleave by a tensor).
- implicit upload: a host tensor is an operand or is copied, other than by Stream.upload; numbers are allowed.
- page lock: a host buffer of more than MOST_LOCKED bytes was allocated after the setup. Locking its pages takes long.
- host buffer: a buffer was written before the copy from or to it was done. Until then the buffer of a download is
  filled with 0xA5.
- pageable: a copy from or to host memory that was not allocated by Stream.host_buffer.
- unwritten: values are used before they are computed, because no event orders the two streams, or because a captured
  operation was not replayed.
- misaligned: a kernel's tensor does not begin at a multiple of 16 bytes.

Memory that the program drops is overwritten (with NaN, or with integers that are no valid index) at the current point
of the stream that allocated it, because a real device may allocate it again from there on. The same holds for tensors
that torch.empty makes. A seed also draws the order in which streams advance, within the limits of events: a missing
wait therefore shows under some seeds. The launches and copies of a captured step are logged once, at the capture. Each
replay is one entry.

Not emulated: running out of memory, bandwidth, and the effect of a GPU's order of additions on the last bits.
"""

from baton.kernels.runtime.triton.selection import HAS_TRITON
from tests.late.device import LateDevice
from tests.late.log import Fault

if HAS_TRITON:
    import tests.kernels.gpu.interpreter  # noqa: F401

__all__ = ["Fault", "LateDevice"]
