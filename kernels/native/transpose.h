// Matrices turned, four by four in registers, and converted where the types differ.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "numbers.h"

namespace baton {

// to[j, i] = from[i, j] for i < rows and j < columns; strides between rows, in elements.
template <class From, class To>
void transpose(const From *from, int64_t from_stride, int64_t rows, int64_t columns, To *to, int64_t to_stride) {
    const auto turn = [&](int64_t i, int64_t j, auto side) {
        constexpr int SIDE = decltype(side)::value;
        float block[SIDE][SIDE];
        for (int r = 0; r < SIDE; r++)
            for (int c = 0; c < SIDE; c++) block[r][c] = to_float(from[(i + r) * from_stride + j + c]);
        for (int c = 0; c < SIDE; c++)
            for (int r = 0; r < SIDE; r++) put(&to[(j + c) * to_stride + i + r], block[r][c]);
    };
    for (int64_t i = 0; i < rows; i += 4)
        for (int64_t j = 0; j < columns; j += 4)
            if (i + 4 <= rows && j + 4 <= columns)
                turn(i, j, std::integral_constant<int, 4>());
            else
                for (int64_t r = i; r < std::min(i + 4, rows); r++)
                    for (int64_t c = j; c < std::min(j + 4, columns); c++) turn(r, c, std::integral_constant<int, 1>());
}

}  // namespace baton
