// A call as a row of words, so that many can be made one after another without Python between them.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace baton {

// A pointer or an integer is a word; a float the first half of one.
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

// The same function, with its arguments in a row: kernels/runtime/cpu_graph/ finds it by its name.
#define BATON_RECORDABLE(function) \
    extern "C" void function##_of_words(const int64_t *words) { baton::call(function, words); }
