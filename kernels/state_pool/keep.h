// Storing decoded states in their pool.
#pragma once

#include "runtime/cpp/numbers.h"

namespace baton {

// Store x: as it is in a float32 pool, with stochastic rounding in a bfloat16 pool. place: the element's index in the
// state plus the hash of the position; the hash of `place` gives the random bits, as in rounding.py.
template <class V, class P> void keep(float *target, V x, P) { put(target, x); }
template <class V, class P> void keep(bfloat16 *target, V x, P place) {
    put_stochastically(target, x, mix(place) >> 16);
}

}  // namespace baton
