"""Three ways to run an operation: compiled C++, Triton, and CPU graphs."""
