"""What Triton computes, at sizes that models have: see operation.Operation."""
