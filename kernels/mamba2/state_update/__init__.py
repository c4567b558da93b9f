"""One token of Mamba-2's recurrence for each row: updates states in place, or stores the inputs for a later replay."""

from baton.kernels.mamba2.state_update import cpu, reference, replay
from baton.kernels.mamba2.state_update.replay import InputRing
from baton.kernels.runtime.dispatch import dispatch, on_cpu

__all__ = ["InputRing", "flush", "replay_state_update", "selective_state_update"]

REPLAY = "baton.kernels.mamba2.state_update.triton_replay"

selective_state_update = dispatch(
    reference.selective_state_update,
    (on_cpu, cpu.selective_state_update),
    triton="baton.kernels.mamba2.state_update.triton",
)
replay_state_update = dispatch(replay.replay_state_update, triton=REPLAY)
flush = dispatch(replay.flush, triton=REPLAY)
