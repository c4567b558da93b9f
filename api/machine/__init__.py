"""What this machine computes with: native code, threads, and what `baton doctor` tells of them."""
