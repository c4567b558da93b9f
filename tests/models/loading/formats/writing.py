"""Writers of quantized safetensors by the definitions of their formats, and the weights that they stand for.

Each writer takes a weight [outputs, inputs] and returns its tensors, by the ends of their names after the layer's, and
the weight that they stand for, float32.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROJECTION = re.compile(r".*(_proj(_[a-z]+)?|_linear|\.w[123])(\.\d)?\.weight")
Written = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """A tool's quantization_config, and its writer of weights, which returns None to leave a weight as it is."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written | None]


def words(codes: Tensor, bits: int, places: list[int] | None = None) -> Tensor:
    """Pack the last dimension into words of 32 bits: int32. places: the place of each code of a word."""
    count = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    shifts = torch.tensor(places or list(range(count))) * bits
    total = (padded << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def by_group(weight: Tensor, group: int) -> Tensor:
    return weight.double().unflatten(1, (-1, group))


def integers(weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return codes from 0 up [outputs, inputs], zeros and scales [outputs, groups], and the weight, float32."""
    groups, largest = by_group(weight, group), 2**bits - 1
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low) / largest).to(dtype)
    zeros = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / scales.double()).round().clamp(0, largest)
    codes = ((groups / scales.double()[..., None]).round() + zeros[..., None]).clamp(0, largest)
    values = (codes - zeros[..., None]) * scales.double()[..., None]
    return codes.flatten(1).long(), zeros.long(), scales, values.flatten(1).float()


def awq(group: int) -> Way:
    def write(weight: Tensor) -> Written | None:
        outputs, inputs = weight.shape
        size = group if group > 0 else inputs
        if outputs % 8 or inputs % size:
            return None
        codes, zeros, scales, values = integers(weight, 4, size, False, torch.float16)
        places = [0, 4, 1, 5, 2, 6, 3, 7]  # Nibble i has output 0, 2, 4, 6, 1, 3, 5, 7 for i = 0 .. 7.
        return {
            "qweight": words(codes.t(), 4, places), "qzeros": words(zeros.t(), 4, places), "scales": scales.t(),
        }, values  # fmt: skip

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Way(config, write)


def gptq(bits: int, group: int, symmetric: bool, ordered: bool = False, version: int = 1, **more: Any) -> Way:
    def write(weight: Tensor) -> Written | None:
        outputs, inputs = weight.shape
        size = group if group > 0 else inputs
        if (outputs * bits) % 32 or inputs % size or (inputs * bits) % 32:
            return None
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0)) if ordered else torch.arange(inputs)
        codes, zeros, scales, values = integers(
            weight[:, order], bits, size, symmetric, more.get("dtype", torch.float16)
        )
        back = order.argsort()
        packed = words(zeros.t(), bits).long()
        if version == 1:  # A word of ones is subtracted, as a word: zeros of 0 borrow from their neighbours.
            packed -= sum(1 << shift for shift in range(0, 32, bits))
            packed = torch.where(packed < -(2**31), packed + 2**32, packed)
        return {
            "qweight": words(codes[:, back], bits).t(), "qzeros": packed.to(torch.int32), "scales": scales.t(),
            "g_idx": (back // size).to(torch.int32),
        }, values[:, back]  # fmt: skip

    layout = "gptq" if version == 1 else "gptq_v2"
    return Way(
        {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered,
         "checkpoint_format": layout},
        write,
    )  # fmt: skip


def settings(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def packed(bits: int, group: int | None, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Way:
    def write(weight: Tensor) -> Written | None:
        inputs = weight.shape[1]
        size = group or inputs
        if inputs % size or (inputs * bits) % 32:
            return None
        codes, zeros, scales, values = integers(weight, bits, size, symmetric, dtype)
        tensors = {
            "weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        return tensors | ({} if symmetric else {"weight_zero_point": words(zeros.t(), bits).t()}), values

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return Way(settings("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy), write)


def int8(symmetric: bool) -> Way:
    def write(weight: Tensor) -> Written:
        codes, zeros, scales, values = integers(weight, 8, weight.shape[1], symmetric, torch.bfloat16)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        return tensors | ({} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}), values

    return Way(settings("int-quantized", num_bits=8, symmetric=symmetric, strategy="channel"), write)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def four_bit_floats(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest numbers of e2m1, and the numbers. groups: [outputs, groups, inputs]."""
    codes = (groups.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return codes + 8 * (groups < 0), E2M1[codes] * groups.sign()


def pairs(codes: Tensor, low_first: bool = True) -> Tensor:
    """Pack two codes into a byte, along the last dimension."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return (first | second << 4 if low_first else first << 4 | second).to(torch.uint8)


def nvfp4(divides: bool, config: dict[str, Any]) -> Way:
    def write(weight: Tensor) -> Written | None:
        if weight.shape[1] % 16:
            return None
        groups = weight.float().unflatten(1, (-1, 16))
        shared = (weight.abs().max() / (6 * 448)).float()
        shared = 1 / shared if divides else shared
        scales = groups.abs().amax(2) / 6
        scales = (scales * shared if divides else scales / shared).to(torch.float8_e4m3fn)
        each = scales.float() / shared if divides else scales.float() * shared
        codes, numbers = four_bit_floats(groups / each.clamp(min=1e-30)[..., None])
        values = (numbers * each[..., None]).flatten(1)
        if divides:
            return {"weight_packed": pairs(codes.flatten(1)), "weight_scale": scales,
                    "weight_global_scale": shared.reshape(1), "input_global_scale": torch.ones(1)}, values  # fmt: skip
        return {"weight": pairs(codes.flatten(1)), "weight_scale": scales, "weight_scale_2": shared,
                "input_scale": torch.tensor(0.5)}, values  # fmt: skip

    return Way(config, write)


def powers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return MXFP4's codes [.., outputs, inputs / 32, 32], exponents, uint8 [.., outputs, inputs / 32], and values."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-126)
    codes, numbers = four_bit_floats(groups / exponents.exp2()[..., None])
    return codes, (exponents + 127).to(torch.uint8), (numbers * exponents.exp2()[..., None]).flatten(-2)


def mxfp4_compressed() -> Way:
    def write(weight: Tensor) -> Written | None:
        if weight.shape[1] % 32:
            return None
        codes, exponents, values = powers(weight)
        return {"weight_packed": pairs(codes.flatten(1)), "weight_scale": exponents}, values

    config = settings("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)
    config["config_groups"]["group_0"]["weights"]["type"] = "float"
    return Way(config, write)


def mxfp4_blocks() -> Way:
    """Also of stacks of experts, [experts, outputs, inputs]."""

    def write(weight: Tensor) -> Written | None:
        if weight.shape[-1] % 32:
            return None
        codes, exponents, values = powers(weight)
        return {"weight_blocks": pairs(codes), "weight_scales": exponents}, values

    return Way({"quant_method": "mxfp4", "modules_to_not_convert": []}, write)


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]


def bitsandbytes(kind: str, nested: bool) -> Way:
    table = torch.tensor(NF4) if kind == "nf4" else torch.tensor(FP4) / 12

    def write(weight: Tensor) -> Written | None:
        flat = weight.float().flatten()
        if len(flat) % 64:
            return None
        sizes = flat.view(-1, 64).abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
        tensors = {"weight.quant_map": table.clone(), "weight.absmax": sizes}
        if nested:
            offset, linear = sizes.mean(), torch.linspace(-1, 1, 256)
            rest = torch.nn.functional.pad(sizes - offset, (0, -len(sizes) % 256)).view(-1, 256)
            largest = rest.abs().amax(1)
            codes = ((rest / largest[:, None]).unsqueeze(-1) - linear).abs().argmin(-1).flatten()[: len(sizes)]
            sizes = linear[codes] * largest.repeat_interleave(256)[: len(sizes)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            tensors |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": largest,
                        "weight.nested_quant_map": linear}  # fmt: skip
        codes = ((flat.view(-1, 64) / sizes[:, None]).unsqueeze(-1) - table).abs().argmin(-1)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors |= {f"weight.quant_state.bitsandbytes__{kind}": text}
        tensors |= {"weight": pairs(codes.flatten(), low_first=False).unsqueeze(1)}
        return tensors, (table[codes] * sizes[:, None]).view(weight.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Way(config, write)


NVFP4 = settings("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16, type="float")
WAYS = {
    "awq": awq(32),
    "awq in one group": awq(-1),
    "gptq": gptq(4, 32, symmetric=True),
    "gptq, asymmetric": gptq(4, 32, symmetric=False),
    "gptq_v2, asymmetric": gptq(4, 32, symmetric=False, version=2),
    "gptq, ordered": gptq(4, 32, symmetric=True, ordered=True),
    "gptq, 8 bits": gptq(8, -1, symmetric=False),
    "packed": packed(4, 32, symmetric=True),
    "packed, asymmetric": packed(4, 32, symmetric=False),
    "packed by channel": packed(4, None, symmetric=False),
    "packed, 8 bits": packed(8, 32, symmetric=True),
    "int8": int8(symmetric=True),
    "int8, asymmetric": int8(symmetric=False),
    "nvfp4 of compressed-tensors": nvfp4(divides=True, config=NVFP4),
    "nvfp4 of modelopt": nvfp4(divides=False, config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4 of compressed-tensors": mxfp4_compressed(),
    "mxfp4": mxfp4_blocks(),
    "nf4": bitsandbytes("nf4", nested=False),
    "nf4, nested": bitsandbytes("nf4", nested=True),
    "fp4": bitsandbytes("fp4", nested=False),
}


def quantize(path: Path, way: Way) -> dict[str, Tensor]:
    """Quantize a checkpoint's projections; return all tensors as they should be read."""
    tensors, meant = load_file(path / "model.safetensors"), dict[str, Tensor]()
    count = 0
    for name, weight in tensors.copy().items():
        meant[name] = weight
        if not PROJECTION.fullmatch(name) or weight.ndim < 2 or (weight.ndim > 2 and way is not WAYS["mxfp4"]):
            continue
        if (written := way.write(weight)) is not None:
            del tensors[name]
            tensors |= {name.removesuffix("weight") + end: each.contiguous() for end, each in written[0].items()}
            meant[name] = written[1].contiguous()
            assert (meant[name] - weight).abs().max() < 0.5 * weight.abs().max(), name
            count += 1
    assert count > 1
    save_file(tensors, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "quantization_config": way.config}))
    return meant
