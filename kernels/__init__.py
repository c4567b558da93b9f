"""Operations, one folder each: reference.py defines it in torch, `__init__` picks the form that runs."""
