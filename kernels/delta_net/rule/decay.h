// The log decays of Kimi Delta Attention, as reference.log_decays defines them.
#pragma once

#include "runtime/cpp/numbers.h"

namespace baton {

// Return A·softplus(x), or lower_bound·σ(−A·x) if lower_bound is below 0.
inline floats log_decays(floats x, float A, float lower_bound) {
    return lower_bound < 0.0f ? lower_bound * sigmoid(-A * x) : A * softplus(x);
}

}  // namespace baton
