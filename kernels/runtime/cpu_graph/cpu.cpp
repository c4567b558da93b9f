#include "call.h"

// y[i] += factor * x[i]: a function that only the check of recordings uses.
static void add_scaled(int64_t n, const float *x, float factor, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] += factor * x[i];
}
extern "C" void baton_add_scaled(int64_t n, const float *x, float factor, float *y) { add_scaled(n, x, factor, y); }
BATON_RECORDABLE(baton_add_scaled)

// Call functions[i](words[i]) for each i in [0, calls), in order.
extern "C" void baton_replay(int64_t calls, void (*const *functions)(const int64_t *), const int64_t *const *words) {
    for (int64_t i = 0; i < calls; i++) functions[i](words[i]);
}
