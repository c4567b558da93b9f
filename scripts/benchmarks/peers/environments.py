"""Virtual environments of the peers in .venv-peers, one for each peer, because their dependencies conflict."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.launch import ROOT

FOLDER = ROOT / ".venv-peers"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Recipe:
    """How to install a peer."""

    packages: tuple[str, ...]
    options: tuple[str, ...] = ()  # options of `pip install`
    variables: dict[str, str] = field(default_factory=dict)  # environment variables of pip
    removed: tuple[str, ...] = ()  # dependencies to uninstall after the installation
    minutes: float = 1.0  # time of the installation on 2 cores


RECIPES = {
    "llama.cpp": Recipe(
        ("llama-cpp-python[server]==0.3.36", "gguf==0.19.0", "safetensors==0.8.0", TORCH),
        options=("--no-binary", "llama-cpp-python"),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        minutes=5.0,
    ),
    "openvino": Recipe(
        (
            TORCH,
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
        ),
        # pip picks torchvision's CUDA build, which torch for CPUs cannot load: importing transformers would then fail.
        removed=("torchvision",),
    ),
    "transformers": Recipe((TORCH, "transformers==5.23.0")),
    "guidellm": Recipe((TORCH, "guidellm==0.8.1")),
}


def python_of(peer: str) -> str | None:
    """Return the interpreter that can import a peer, or None. transformers may also be in the current environment."""
    if (FOLDER / peer / "installed").exists():
        return str(FOLDER / peer / "bin" / "python")
    if peer == "transformers" and importlib.util.find_spec("transformers") is not None:
        return sys.executable
    return None


def how_to_install(peer: str) -> str:
    return f"{peer} is not installed (scripts/bench peers --install {peer}), and is left out"


def install(peers: Sequence[str]) -> None:
    """Install the named peers that are missing. Raises CalledProcessError if pip fails."""
    for peer in peers:
        recipe, folder = RECIPES[peer], FOLDER / peer
        if (folder / "installed").exists():
            continue
        print(f"{peer}: {', '.join(recipe.packages)} (about {recipe.minutes:g} minutes)", flush=True)
        python = str(folder / "bin" / "python")
        if not Path(python).exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        environment = {**os.environ, **recipe.variables}
        subprocess.run([*pip, "install", *recipe.options, *recipe.packages], check=True, env=environment)
        if recipe.removed:
            subprocess.run([*pip, "uninstall", "--yes", *recipe.removed], check=True)
        (folder / "installed").touch()


def show() -> None:
    """Print the interpreter of each peer, or that the peer is not installed."""
    for peer in RECIPES:
        print(f"{peer:<14}{python_of(peer) or 'not installed'}")
