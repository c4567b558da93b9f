// AMX's instructions (instructions.h) in AVX-512, for tests on CPUs without AMX. They end the process where the CPU
// would refuse an instruction: a register that is not set up, or shapes that do not fit. Denormals are treated as the
// thread's settings say; AMX always takes them for zero.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/cpp/numbers.h"

namespace baton {

struct TileRows {
    uint8_t of[8];
};

struct EmulatedRegisters {
    TileRows rows;  // 0: not set up
    alignas(64) uint32_t tiles[8][16][LANES];
};

inline EmulatedRegisters &emulated_registers() {
    static __thread EmulatedRegisters registers;
    return registers;
}

inline void set_up_tiles(const TileRows &rows) {
    std::memset(&emulated_registers(), 0, sizeof(EmulatedRegisters));
    emulated_registers().rows = rows;
}

inline void release_tiles() { set_up_tiles({}); }

// Return the rows of a register.
template <int TILE> inline int64_t rows_of_tile() {
    const int64_t rows = emulated_registers().rows.of[TILE];
    if (rows < 1 || rows > 16) __builtin_trap();
    return rows;
}

template <int TILE> inline void load_tile(const void *from, int64_t stride) {
    for (int64_t row = 0; row < rows_of_tile<TILE>(); row++)
        std::memcpy(emulated_registers().tiles[TILE][row], static_cast<const char *>(from) + row * stride, 64);
}

template <int TILE> inline void store_tile(void *to, int64_t stride) {
    for (int64_t row = 0; row < rows_of_tile<TILE>(); row++)
        std::memcpy(static_cast<char *>(to) + row * stride, emulated_registers().tiles[TILE][row], 64);
}

template <int TILE> inline void clear_tile() {
    std::memset(emulated_registers().tiles[TILE], 0, rows_of_tile<TILE>() * 64);
}

template <int SUMS, int ROWS, int WEIGHTS> __attribute__((noinline)) void multiply_add() {
    if (rows_of_tile<SUMS>() != rows_of_tile<ROWS>() || rows_of_tile<WEIGHTS>() != 16) __builtin_trap();
    auto &tiles = emulated_registers().tiles;
    for (int64_t row = 0; row < rows_of_tile<ROWS>(); row++) {
        floats even = {}, odd = {};
        for (int pair = 0; pair < 16; pair++) {
            words weights;
            std::memcpy(&weights, tiles[WEIGHTS][pair], sizeof weights);
            const words x = words{} + tiles[ROWS][row][pair];
            even += (floats)(x << 16) * (floats)(weights << 16);
            odd += (floats)(x & 0xffff0000u) * (floats)(weights & 0xffff0000u);
        }
        floats sums;
        std::memcpy(&sums, tiles[SUMS][row], sizeof sums);
        sums += even + odd;
        std::memcpy(tiles[SUMS][row], &sums, sizeof sums);
    }
}

}  // namespace baton
