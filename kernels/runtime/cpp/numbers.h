// Vectors as wide as the target's registers, loaded from and stored to float32 and bfloat16, and functions of them.
// The vector types are the compiler's own, which work for every instruction set. Intrinsics and inline assembly are
// used only where compilers generate slow code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <xmmintrin.h>  // not immintrin.h, which would take a fifth of a file's compile time
#endif

namespace baton {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

// Locality arguments of __builtin_prefetch, for the L1 cache and for the L2 cache only. More fetches can be in flight to
// L2 than to L1, which matters when data comes from memory.
constexpr int FIRST_CACHE = 3, SECOND_CACHE = 2;

// Bytes of a page of memory. Where lines are prefetched into the second cache, one of each page goes into the first one
// too, which is faster on Zen 4.
constexpr int64_t PAGE = 4096;

// Return whether `at` is the first address in its page, among addresses that are `bytes` apart.
inline bool is_first_in_page(const void *at, int64_t bytes) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) % PAGE) < bytes;
}

struct bfloat16 {
    uint16_t bits;
};

inline floats splat(float x) { return x - floats{}; }

// Single numbers.

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

inline void put(float *target, float x) { *target = x; }

// Store as bfloat16, rounded to the nearest, ties to even. A NaN stays a NaN.
inline void put(bfloat16 *target, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    target->bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : rounded);
}

// Vectors of LANES numbers, aligned or not. `get` loads a vector or a single number, by its result type.

inline floats load(const float *source) {
    floats x;
    std::memcpy(&x, source, sizeof x);
    return x;
}

inline floats load(const bfloat16 *source) {
    halves x;
    std::memcpy(&x, source, sizeof x);
#if defined(__AVX2__)
    words wide;
    asm("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(x));  // GCC 12 would generate four instructions.
    return (floats)(wide << 16);
#else
    return (floats)(__builtin_convertvector(x, words) << 16);
#endif
}

inline void put(float *target, floats x) { std::memcpy(target, &x, sizeof x); }

inline void put(bfloat16 *target, floats x) {
#if defined(__AVX512BF16__)
    halves rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
    std::memcpy(target, &rounded, sizeof rounded);
#else
    const words bits = (words)x;
    const words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const halves y = __builtin_convertvector(x != x ? (bits >> 16) | 0x40 : rounded, halves);
    std::memcpy(target, &y, sizeof y);
#endif
}

// Hash 32-bit words, as kernels/state_pool/rounding.py does; the upper bits are mixed best.
template <class V> V mix(V x) {
    x *= 0x7feb352du;
    return (x ^ (x >> 15)) * 0x846ca68bu;
}

// Store as bfloat16 with stochastic rounding: add the lower 16 bits of `chance` to the number's bits, then cut off the
// lower 16. Every NaN becomes 0x7fc0: with `chance` added, the bits 0x7fffffff of a NaN would become -0.
inline void put_stochastically(bfloat16 *target, float x, uint32_t chance) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    target->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + (chance & 0xffff)) >> 16);
}

inline void put_stochastically(bfloat16 *target, floats x, words chance) {
    const words rounded = ((words)x + (chance & 0xffff)) >> 16;
    const halves y = __builtin_convertvector(x != x ? words{} + 0x7fc0 : rounded, halves);
    std::memcpy(target, &y, sizeof y);
}

template <class V, class T>
V get(const T *source) {
    if constexpr (sizeof(V) == sizeof(floats))
        return load(source);
    else
        return to_float(*source);
}

// Loads and stores at the end of rows whose length is no multiple of LANES.

inline int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Load the first min(count, LANES) numbers; the other lanes are 0.
template <class T> floats load(const T *source, int64_t count) {
    if (count >= LANES) return load(source);
    T numbers[LANES] = {};
    std::memcpy(numbers, source, count * sizeof(T));
    return load(numbers);
}

// Store the first min(count, LANES) lanes.
template <class T> void put(T *target, floats x, int64_t count) {
    if (count >= LANES) return put(target, x);
    T numbers[LANES];
    put(numbers, x);
    std::memcpy(target, numbers, count * sizeof(T));
}

// Call f(i, V{}) for i in [0, n): with V = floats and steps of LANES while at least LANES are left, then with V =
// float.
template <class F>
void over(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, floats{});
    for (; i < n; i++) f(i, 0.0f);
}

// The sum of COUNT lanes: add the upper half of the lanes to the lower half, recursively.
template <int COUNT, class V>
float sum_of(V x) {
    if constexpr (COUNT == 4) {
        return (x[0] + x[2]) + (x[1] + x[3]);
    } else {
        typedef float Half __attribute__((vector_size(2 * COUNT)));
        Half parts[2];
        std::memcpy(parts, &x, sizeof x);
        return sum_of<COUNT / 2>(parts[0] + parts[1]);
    }
}

inline float sum(floats x) { return sum_of<LANES>(x); }

// The greatest of COUNT lanes: compare the upper half of the lanes with the lower half, recursively.
template <int COUNT, class V>
float highest_of(V x) {
    if constexpr (COUNT == 4) {
        const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
        return even > odd ? even : odd;
    } else {
        typedef float Half __attribute__((vector_size(2 * COUNT)));
        Half parts[2];
        std::memcpy(parts, &x, sizeof x);
        return highest_of<COUNT / 2>(parts[0] > parts[1] ? parts[0] : parts[1]);
    }
}

inline float highest(floats x) { return highest_of<LANES>(x); }

// e^x, exact to about 2 units in the last place, with x clamped to [-87.3, 88.3]. Computed like expf of the Cephes
// library: e^x = 2^n · e^r with |r| ≤ ln(2) / 2, and a polynomial for e^r.
inline floats exp(floats x) {
    x = x > 88.3f ? splat(88.3f) : x;
    x = x < -87.3f ? splat(-87.3f) : x;
    const floats shifter = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer in the lowest bits.
    const floats shifted = x * 1.44269504f + shifter;
    const floats n = shifted - shifter;
    const floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (floats)(((words)shifted + 127) << 23);
}

inline floats silu(floats x) { return x / (1.0f + exp(-x)); }

inline float silu(float x) { return silu(splat(x))[0]; }

inline floats sigmoid(floats x) { return 1.0f / (1.0f + exp(-x)); }

inline float sigmoid(float x) { return sigmoid(splat(x))[0]; }

// log(1 + e^x), as torch computes it: x itself above 20.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// log(1 + e^x) = max(x, 0) + log1p(u) with u = e^−|x|, and log1p(u) = 2·artanh(u / (2 + u)). The argument of artanh is
// at most 1/3, so that few terms of its series are enough.
inline floats softplus(floats x) {
    const floats u = exp(x > 0.0f ? -x : x), s = u / (2.0f + u), square = s * s;
    floats p = square * (1.0f / 15) + 1.0f / 13;
    p = p * square + 1.0f / 11;
    p = p * square + 1.0f / 9;
    p = p * square + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    p = p * square + 1.0f;
    return (x > 0.0f ? x : floats{}) + 2.0f * s * p;
}

// While an object of this class lives, its thread treats denormals as zero. Decayed states contain many of them, and
// CPUs compute slowly with them.
class FlushDenormals {
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr();

public:
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;

public:
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"(before | (uint64_t{1} << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#else
public:
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
};

// Dtypes, numbered as in kernels/runtime/cpp/types.py.
enum Type : int { FLOAT32 = 0, BFLOAT16 = 1 };

// Call f with a null pointer to the C++ type of this dtype, from which f deduces the type.
template <class F>
void with_type(int type, F f) {
    if (type == BFLOAT16) return f(static_cast<bfloat16 *>(nullptr));
    f(static_cast<float *>(nullptr));
}

}  // namespace baton
