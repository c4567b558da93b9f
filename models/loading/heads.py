"""Checks of a checkpoint's head for multi-token prediction, without reading its weights."""

import torch
from torch import nn

from baton.models.config import ModelConfig, ModelError
from baton.models.family import Family, is_of_head
from baton.models.loading.matching import match
from baton.models.loading.shards import StoredTensor


class NoHeadError(ModelError):
    """The files hold no head for multi-token prediction."""


def with_head(stored: list[StoredTensor], config: ModelConfig, family: Family) -> ModelConfig:
    """Return the config of the model with its head.

    Raises NoHeadError if the files hold no head, and ModelError if they hold one that Baton cannot compute.

    stored: the tensors of the checkpoint.
    """
    of_head = [tensor for tensor in stored if is_of_head(tensor.name)]
    if not (family.can_have_head and of_head):
        raise NoHeadError("the files hold no head for multi-token prediction (mtp.*)")
    with_it = config.with_head()
    with torch.device("meta"):
        model = family.build(with_it, torch.float32, torch.float32)
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    match(of_head, {name: each for name, each in parameters.items() if is_of_head(name)}, family, with_it)
    return with_it
