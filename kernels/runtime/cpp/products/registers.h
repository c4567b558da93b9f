// The tile registers of AMX, and how a thread sets them up and gives them back.
#pragma once

#if defined(__AMX_BF16__)
#include <cstdint>

#if defined(BATON_EMULATE_AMX)
#include "emulated.h"
#else
#include "instructions.h"
#endif

namespace baton {

constexpr int64_t TILE_HEIGHT = 16;  // Maximum rows of a tile.
constexpr int64_t TILE_INPUTS = 32;  // Inputs of a tile.
constexpr int64_t TILE_STEPS = 16;  // Pairs of inputs of a tile.

// While an object lives, its thread's tile registers may be set up; then they are released, because the system would
// save 8 KiB of them whenever it switches threads.
class TileRegisters {
    int64_t height = 0;

public:
    TileRegisters() = default;
    TileRegisters(const TileRegisters &) = delete;
    ~TileRegisters() {
        if (height) release_tiles();
    }

    // Set up registers 0 to 5 with `rows` rows, and 6 and 7 with 16, all of 64 bytes.
    void set_height(int64_t rows) {
        if (rows == height) return;
        height = rows;
        const auto few = static_cast<uint8_t>(rows);
        set_up_tiles({few, few, few, few, few, few, TILE_STEPS, TILE_STEPS});
    }
};

}  // namespace baton
#else
namespace baton {

constexpr int64_t TILE_HEIGHT = 1;

struct TileRegisters {  // A stand-in for targets without tile registers.
    void set_height(int64_t) {}
};

}  // namespace baton
#endif
