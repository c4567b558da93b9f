"""The families of models: one file each, which builds a model and says what each tensor of its files fills."""
