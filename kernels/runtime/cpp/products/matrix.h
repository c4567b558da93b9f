// A view of a matrix in memory.
#pragma once

#include <cstdint>

namespace baton {

// A matrix whose rows are `stride` elements apart.
template <class T> struct Matrix {
    T *at;
    int64_t stride;
};

}  // namespace baton
