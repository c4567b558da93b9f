// Delta net layers between their input and output projections, over packed segments, as reference.py defines them.
#include <type_traits>

#include "by_channel.h"
#include "by_head.h"
#include "runtime/cpu_graph/call.h"

// Parameters of both functions; net.h describes constants and pools, conv1d/packed.h the plan:
// type, state_type: values of the enum Type in numbers.h; `type` is the type of the projections and of y [T, inner].
// Each stride counts elements from row to row of a projection, or from slot to slot of a pool.

// Compute reference.delta_prefill: one decay per head, and SiLU of the gate.
// projected: [T, inner + channels + 2·heads], with the columns gate [inner], inputs [channels], betas [heads] and
// forget [heads]. key_heads divides heads.
extern "C" void baton_delta_prefill(int type, const void *projected, int64_t stride, const float *taps,
                                    const float *conv_bias, const float *dt_bias, const float *A, const float *norm,
                                    float eps, float beta_scale, float *conv_pool, int64_t conv_stride, int state_type,
                                    void *state_pool, int64_t state_stride, int64_t segments, int64_t chunks, const int64_t *slots,
                                    const int64_t *first, const int64_t *starts, const int64_t *saves,
                                    const int64_t *saved, void *y, int64_t heads, int64_t width, int64_t key_heads,
                                    int64_t size, int64_t kernel) {
    with_type(type, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const Shape shape{heads, width, key_heads, size, kernel};
        const T *const at = static_cast<const T *>(projected), *const inputs = at + shape.inner();
        const T *const betas = inputs + shape.channels();
        ByHead<T>(shape, {taps, conv_bias, dt_bias, A, norm, eps, beta_scale, 0},
                  {segments, chunks, slots, first, starts, saves, saved},
                  {conv_pool, state_type, state_pool, conv_stride, state_stride},
                  {{inputs, stride}, {betas, stride}, {betas + heads, stride}, {at, stride}}, static_cast<T *>(y))
            .run();
    });
}

// Compute reference.kda_prefill: one decay per channel of the keys, and a sigmoid of the gate.
// projected: [T, channels + heads], with the columns inputs [channels] and betas [heads]. forget: [T, heads·size].
// gate: [T, heads·width]. dt_bias: [heads·size].
extern "C" void baton_kda_prefill(int type, const void *projected, int64_t stride, const void *forget,
                                  int64_t forget_stride, const void *gate, int64_t gate_stride, const float *taps,
                                  const float *dt_bias, const float *A, const float *norm, float eps, float lower_bound,
                                  float *conv_pool, int64_t conv_stride, int state_type, void *state_pool, int64_t state_stride,
                                  int64_t segments, int64_t chunks, const int64_t *slots, const int64_t *first,
                                  const int64_t *starts, const int64_t *saves, const int64_t *saved, void *y,
                                  int64_t heads, int64_t width, int64_t size, int64_t kernel) {
    with_type(type, [&](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const Shape shape{heads, width, heads, size, kernel};
        const T *const inputs = static_cast<const T *>(projected);
        ByChannel<T>(shape, {taps, nullptr, dt_bias, A, norm, eps, 1, lower_bound},
                     {segments, chunks, slots, first, starts, saves, saved},
                     {conv_pool, state_type, state_pool, conv_stride, state_stride},
                     {{inputs, stride},
                      {inputs + shape.channels(), stride},
                      {static_cast<const T *>(forget), forget_stride},
                      {static_cast<const T *>(gate), gate_stride}},
                     static_cast<T *>(y))
            .run();
    });
}

BATON_RECORDABLE(baton_delta_prefill)
BATON_RECORDABLE(baton_kda_prefill)
