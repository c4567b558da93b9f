"""What carries the actors: mailboxes, moves of leases, supervision, tracing, timings, and the sizes of the pools."""
