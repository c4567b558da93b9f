// The tile registers of AMX: instructions, and how a thread sets registers up and gives them back.
#pragma once

#if defined(__AMX_BF16__)
#include <cstdint>

namespace baton {

constexpr int64_t TILE_HEIGHT = 16;  // Maximum rows of a tile.
constexpr int64_t TILE_INPUTS = 32;  // Inputs of a tile.
constexpr int64_t TILE_STEPS = 16;  // Pairs of inputs of a tile.

// The instructions. The compilers' own functions do not say that they read memory, so GCC 12 may write it only
// afterwards. Strides are between rows, in bytes.

#if defined(__SANITIZE_ADDRESS__)
// Read the first and the last byte of each row of a tile in memory: sanitizers do not see what assembly accesses.
template <int TILE> inline void touch(const void *at, int64_t stride) {
    uint8_t shape[64];
    asm volatile("sttilecfg %0" : "=m"(shape));
    for (int row = 0; row < shape[48 + TILE]; row++)
        for (int byte = 0; byte < 64; byte += 63) *(static_cast<const volatile char *>(at) + row * stride + byte);
}
#else
template <int TILE> inline void touch(const void *, int64_t) {}
#endif

template <int TILE> inline void load_tile(const void *from, int64_t stride) {
    touch<TILE>(from, stride);
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE> inline void store_tile(void *to, int64_t stride) {
    touch<TILE>(to, stride);
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE> inline void clear_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }

// sums [height, 16] += rows [height, 32] · weights [16 pairs, 16, 2], of bfloat16. For each number the even and the odd
// inputs are added up apart, in ascending order; then their sum is added.
template <int SUMS, int ROWS, int WEIGHTS> inline void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

// While an object lives, its thread's tile registers may be set up; then they are released, because the system would
// save 8 KiB of them whenever it switches threads.
class TileRegisters {
    int64_t height = 0;

public:
    TileRegisters() = default;
    TileRegisters(const TileRegisters &) = delete;
    ~TileRegisters() {
        if (height) asm volatile("tilerelease");
    }

    // Set up registers 0 to 5 with `rows` rows, and 6 and 7 with 16, all of 64 bytes.
    void set_height(int64_t rows) {
        if (rows == height) return;
        height = rows;
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; tile++) {
            shape.bytes[tile] = 64;
            shape.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : TILE_STEPS);
        }
        asm volatile("ldtilecfg %0" : : "m"(shape));
    }
};

}  // namespace baton
#else
namespace baton {

constexpr int64_t TILE_HEIGHT = 1;

struct TileRegisters {  // There are none.
    void set_height(int64_t) {}
};

}  // namespace baton
#endif
