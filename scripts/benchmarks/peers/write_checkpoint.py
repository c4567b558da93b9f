"""A checkpoint as a family's files are, with random weights: by transformers, which knows all their names.

write_checkpoint.py FOLDER SEED: of the config.json in the folder.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


def write(folder: Path, seed: int) -> None:
    """config.json stays as it is."""
    transformers.logging.disable_progress_bar()
    text = (folder / "config.json").read_text()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
