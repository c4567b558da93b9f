// Vectors at the end of a row that is no multiple of their width.
#pragma once

#include "numbers.h"

namespace baton {

inline int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The first `count` numbers; the other lanes are 0.
template <class T> floats load(const T *source, int64_t count) {
    if (count >= LANES) return load(source);
    T numbers[LANES] = {};
    std::memcpy(numbers, source, count * sizeof(T));
    return load(numbers);
}

template <class T> void put(T *target, floats x, int64_t count) {
    if (count >= LANES) return put(target, x);
    T numbers[LANES];
    put(numbers, x);
    std::memcpy(target, numbers, count * sizeof(T));
}

}  // namespace baton
