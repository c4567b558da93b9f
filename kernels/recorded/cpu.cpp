#include "call.h"

// functions[i] with the words from words[i] on, one after another.
extern "C" void baton_replay(int64_t calls, void (*const *functions)(const int64_t *), const int64_t *const *words) {
    for (int64_t i = 0; i < calls; i++) functions[i](words[i]);
}
