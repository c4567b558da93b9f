"""Quantize a GGUF file of floats as llama.cpp does. Runs in llama.cpp's environment.

    quantize_gguf.py FLOATS FILE q4_k|q5_k|q6_k

All matrices get the type, the embedding too; those whose rows do not fit its blocks get the nearest type that does.
"""

import sys

import llama_cpp

TYPES = {
    "q4_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "q5_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}


def main(floats: str, file: str, kind: str) -> None:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.pure = TYPES[kind], True
    if code := llama_cpp.llama_model_quantize(floats.encode(), file.encode(), settings):
        raise RuntimeError(f"llama_model_quantize: {code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
