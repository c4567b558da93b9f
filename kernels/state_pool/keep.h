// How a decoded state is kept in its pool.
#pragma once

#include "runtime/cpp/numbers.h"

namespace baton {

// float32 as it is, bfloat16 by chance, of which the place is the source: rounding.py.
template <class V, class P> void keep(float *target, V x, P) { put(target, x); }
template <class V, class P> void keep(bfloat16 *target, V x, P place) { put_by_chance(target, x, mix(place) >> 16); }

}  // namespace baton
