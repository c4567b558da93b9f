"""The runtime that carries the actors: mailboxes, lease moves, supervision, tracing, timings, and pool sizes."""
