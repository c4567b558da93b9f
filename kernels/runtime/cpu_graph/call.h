// Calls of functions with their arguments in an array of 64-bit words, so that many calls can be replayed in a row
// without Python in between.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace baton {

// Return the argument that a word holds: a pointer or an integer takes the whole word, a float the lower half.
template <class T> T from_word(int64_t word) {
    if constexpr (sizeof(T) < sizeof word) {
        T value;
        const auto half = static_cast<uint32_t>(word);
        static_assert(sizeof half == sizeof value);
        std::memcpy(&value, &half, sizeof value);
        return value;
    } else {
        return (T)word;
    }
}

template <class... A, size_t... I>
void call(void (*function)(A...), const int64_t *words, std::index_sequence<I...>) {
    function(from_word<A>(words[I])...);
}

template <class... A> void call(void (*function)(A...), const int64_t *words) {
    call(function, words, std::index_sequence_for<A...>());
}

}  // namespace baton

// Define the variant of a function that takes its arguments as words. kernels/runtime/cpu_graph/ finds the variant by
// its name.
#define BATON_RECORDABLE(function) \
    extern "C" void function##_of_words(const int64_t *words) { baton::call(function, words); }
