"""Write a checkpoint with random weights for the config.json in a folder.

It uses transformers, which knows the tensor names of all families.

write_checkpoint.py FOLDER SEED
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


def write(folder: Path, seed: int) -> None:
    """Write the weights. save_pretrained also overwrites config.json, so its old text is restored."""
    transformers.logging.disable_progress_bar()
    text = (folder / "config.json").read_text()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
