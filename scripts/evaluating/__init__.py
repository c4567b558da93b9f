"""What scripts/evaluate asks a server, and how it tells what came of that."""
