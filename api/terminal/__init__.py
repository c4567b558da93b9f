"""`baton chat`, and the progress bar of `baton serve`."""
