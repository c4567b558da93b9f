// AMX's instructions. The compilers' intrinsics do not declare that they read memory, so GCC 12 may move writes of
// that memory to after the instruction. Strides are between rows, in bytes.
#pragma once

#include <cstdint>

namespace baton {

// Number of rows of each register.
struct TileRows {
    uint8_t of[8];
};

// Set up the registers of this thread, with rows of 64 bytes.
inline void set_up_tiles(const TileRows &rows) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes[tile] = 64;
        shapes.rows[tile] = rows.of[tile];
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
}

inline void release_tiles() { asm volatile("tilerelease"); }

#if defined(__SANITIZE_ADDRESS__)
// Read the first and the last byte of each row of a tile in memory: sanitizers do not see what assembly accesses.
template <int TILE> inline void touch(const void *at, int64_t stride) {
    uint8_t shapes[64];
    asm volatile("sttilecfg %0" : "=m"(shapes));
    for (int row = 0; row < shapes[48 + TILE]; row++)
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

}  // namespace baton
