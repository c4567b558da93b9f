"""What runs operations: compiled C++, Triton, and CPU graphs."""
