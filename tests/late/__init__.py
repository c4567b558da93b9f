"""A pretended accelerator, on which shows what otherwise only goes wrong on a real one.

    with LateDevice(seed=3) as late:
        stream = late.stream()                      # an actors.forward.streams.Stream
        late.to(model)                              # parameters move at once
        with late.setup():                          # meanwhile anything may be read and uploaded
            pools = allocate(model, 4, 0, 1, torch.device("meta"))
        with stream.active():                       # as on a GPU: nothing is done yet, and nothing may be read
            hidden = model.forward(batch, pools)
        assert late.count("upload") <= 2
        expected = late.read(hidden)                # everything is done, and copied to the host

The code runs unchanged, with torch.device("meta"). Tensors are LateTensors, whose layout is known at once; what
computes their values waits in the stream's queue, and runs on a CPU when an event is waited for or, by the seed, at
some time before. Triton's kernels run in its interpreter. late.log has, in the order of the program: launches,
uploads, downloads, replays, waits for events, and faults, which are errors unless LateDevice(raises=False):

- host read: something on the host depends on values (item, tolist, bool, copies other than Stream.download), or a
  shape does (nonzero, boolean masks, repeat_interleave by a tensor).
- implicit upload: a host's tensor is an operand or copied, other than by Stream.upload; numbers may be.
- host buffer: one was written before the copy from or to it was done. What a download will fill is 0xA5 until then.
- pageable: a copy from or to host memory that is no host_buffer's.
- unwritten: values are used before they are computed: streams in an order that no event forbids, or a captured
  operation that was not replayed.
- misaligned: a kernel's tensor does not begin at a multiple of 16 bytes.

Memory that the program drops is spoiled (NaN, numbers that are no index) at that place of the stream that allocated
it, where a real device gives it out anew; empty tensors are spoiled too. A seed also draws in which order streams go on
as far as events leave that open: a wait that is missing shows under some seeds. The launches and copies of a captured
step are in the log when it is captured; each replay is one entry.

Not here: out of memory, bandwidth, and what a GPU's own order of additions does to the last bits.
"""

from baton.kernels.runtime.triton.selection import HAS_TRITON
from tests.late.device import LateDevice
from tests.late.log import Fault

if HAS_TRITON:
    import tests.kernels.gpu.interpreter  # noqa: F401

__all__ = ["Fault", "LateDevice"]
