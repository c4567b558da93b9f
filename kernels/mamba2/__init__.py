"""The Mamba-2 mixer: its decode and prefill steps, the scan of a prompt and the update of one token."""
