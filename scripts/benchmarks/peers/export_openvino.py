"""Export a checkpoint for OpenVINO.

    export_openvino.py CHECKPOINT FOLDER

Writes FOLDER/plain with the unchanged weights (by optimum-intel) and FOLDER/int8 with 8-bit weights and one scale per
row (by nncf).
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import nncf
import openvino
from optimum.intel import OVModelForCausalLM

# Types of layers: transformers' name, then the name that optimum-intel expects.
RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}
MODEL = "openvino_model.xml"


def main(checkpoint: Path, folder: Path) -> None:
    if not (folder / "plain" / MODEL).exists():
        export(checkpoint, folder / "plain")
    compress(folder / "plain", folder / "int8")


def export(checkpoint: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        renamed = Path(name)
        shutil.copy(checkpoint / "model.safetensors", renamed)
        config = json.loads((checkpoint / "config.json").read_text())
        config["layer_types"] = [RENAMED.get(layer, layer) for layer in config["layer_types"]]
        (renamed / "config.json").write_text(json.dumps(config))
        model = OVModelForCausalLM.from_pretrained(renamed, export=True, compile=False, load_in_8bit=False)
        model.save_pretrained(folder)


def compress(plain: Path, folder: Path) -> None:
    model = openvino.Core().read_model(plain / MODEL)
    folder.mkdir(exist_ok=True)
    openvino.save_model(nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM), folder / MODEL)
    for file in plain.glob("*.json"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
