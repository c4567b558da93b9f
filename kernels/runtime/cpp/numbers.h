// Vectors as wide as the target's registers, of float32 and of bfloat16 turned into it, and what kernels compute with
// them. The compiler's own vector types serve every instruction set; intrinsics stand where it needs help.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <xmmintrin.h>  // And not immintrin.h, which takes a fifth of what a file takes to compile.
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

// Where __builtin_prefetch puts what memory is slow to give: more may be on its way there than to the first cache.
constexpr int SECOND_CACHE = 2;

struct bfloat16 {
    uint16_t bits;
};

inline floats splat(float x) { return x - floats{}; }

// One number.

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

inline void put(float *target, float x) { *target = x; }

// To the nearest, ties to even; a NaN stays one.
inline void put(bfloat16 *target, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    target->bits = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : rounded);
}

// LANES numbers, aligned or not; `get` also takes them one by one, where fewer are left.

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
    asm("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(x));  // GCC 12 takes four instructions.
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

// 32 bits from 32, the upper ones the better, as kernels/state_pool/rounding.py has them.
template <class V> V mix(V x) {
    x *= 0x7feb352du;
    return (x ^ (x >> 15)) * 0x846ca68bu;
}

// To one of the two nearest, up where the 16 bits that go and 16 of `chance` reach a whole. A NaN stays one if it has
// zeros there, as those of arithmetic do: asking would take half as long again as all the rest.
inline void put_by_chance(bfloat16 *target, float x, uint32_t chance) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    target->bits = static_cast<uint16_t>((bits + (chance & 0xffff)) >> 16);
}

inline void put_by_chance(bfloat16 *target, floats x, words chance) {
    const halves y = __builtin_convertvector(((words)x + (chance & 0xffff)) >> 16, halves);
    std::memcpy(target, &y, sizeof y);
}

template <class V, class T>
V get(const T *source) {
    if constexpr (sizeof(V) == sizeof(floats))
        return load(source);
    else
        return to_float(*source);
}

// At the end of a row that is no multiple of LANES.

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

// Calls f(i, V{}) for i in [0, n): V is floats while LANES are left, then float.
template <class F>
void over(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, floats{});
    for (; i < n; i++) f(i, 0.0f);
}

// The sum of all lanes, by halves.
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

// The highest of all lanes, by halves.
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

// e^x to about 2 units in the last place, for x held within [-87.3, 88.3]: 2^n times a polynomial of the rest, as in
// Cephes' expf.
inline floats exp(floats x) {
    x = x > 88.3f ? splat(88.3f) : x;
    x = x < -87.3f ? splat(-87.3f) : x;
    const floats shifter = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer, in the lowest bits.
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

// As torch has it: the identity above 20.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// log(1 + e^x) = max(x, 0) + log1p(u) with u = e^−|x|, and log1p(u) = 2·artanh(u / (2 + u)), argument at most 1/3.
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

// While it lives, this thread takes denormals for zero: decayed states hold many, and a CPU is slow on them.
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

// Types as kernels/runtime/cpp/types.py numbers them.
enum Type : int { FLOAT32 = 0, BFLOAT16 = 1 };

// Calls f with a null pointer of the type.
template <class F>
void with_type(int type, F f) {
    if (type == BFLOAT16) return f(static_cast<bfloat16 *>(nullptr));
    f(static_cast<float *>(nullptr));
}

}  // namespace baton
