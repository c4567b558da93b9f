"""Operations, one folder each: reference.py defines the operation in torch, `__init__` chooses the form that runs."""
