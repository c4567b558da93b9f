"""A program that prints the arithmetic of compiled state updates, with drafts and without, as JSON.

For each layer and dtype of states it prints for each kernel the layouts of its tensors, and how often each instruction
on float32 numbers occurs. The sums of two kernels have the same order only if their layouts are equal.
"""

import json
import re
from collections import Counter, defaultdict

from tests.kernels.gpu.compile_shapes import launches
from tests.kernels.gpu.compiling import Variant, compile_for, variant_of

TARGET = "90"
CASES = "^(mixer_decode|delta|kda): decode(_drafts)? (mamba2-2.7b|qwen3-next-80b|kimi-linear-48b) torch.bfloat16"
INSTRUCTION = re.compile(r"\b((?:add|sub|mul|fma|div|max|min|ex2|rsqrt|neg|abs)\.[\w.]*f32)\b")


def main() -> None:
    found = defaultdict[str, dict[str, object]](dict)
    for case, launch in launches(CASES, TARGET):
        variant = variant_of(launch)
        if variant.name.rpartition(".")[2].startswith("_step"):
            layer, states = case.partition(":")[0], case.rpartition(" ")[2]
            found[f"{layer}, {states}"][variant.name] = arithmetic(variant)
    print(json.dumps(found))


def arithmetic(variant: Variant) -> object:
    made = compile_for(variant, TARGET)
    layouts = re.findall(r"= (#ttg\.blocked<.*>)", made.asm["ttgir"])
    return sorted(set(layouts)), sorted(Counter(INSTRUCTION.findall(made.asm["ptx"])).items())


if __name__ == "__main__":
    main()
