// Runs loops on a pool whose number of threads changes, also from two threads at once, and ends with 1 if an index was
// not done exactly once when its loop returned. With an argument, the system lets it start no thread.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>

#include "runtime/cpp/parallel.h"

namespace {

constexpr int MOST = 4000;

struct Caller {
    unsigned random;
    int loops;
    bool failed = false;
    int done[MOST];

    unsigned draw(unsigned end) {
        random = random * 1664525u + 1013904223u;
        return (random >> 8) % end;
    }

    void run() {
        for (int loop = 0; loop < loops && !failed; loop++) {
            const auto n = static_cast<int64_t>(draw(MOST));
            const bool is_slow = draw(100) == 0;  // so that the caller sleeps until a worker has finished, or workers do
            for (int64_t i = 0; i < n; i++) done[i] = 0;
            baton::parallel_for(n, 1 + draw(9), [&](int64_t begin, int64_t end) {
                if (is_slow && begin % 3) usleep(150);
                for (int64_t i = begin; i < end; i++) done[i]++;
            });
            for (int64_t i = 0; i < n; i++) failed |= done[i] != 1;
            if (is_slow) usleep(50);
        }
    }
};

void *run(void *caller) {
    static_cast<Caller *>(caller)->run();
    return nullptr;
}

}  // namespace

int main(int arguments, char **) {
    static Caller one, two;
    if (arguments > 1) {
        const rlimit nothing{0, 0};
        if (setrlimit(RLIMIT_AS, &nothing)) return 2;  // so there is no memory for another thread's stack
        baton::pool.use(3);
        one.loops = 100, one.random = 1;
        one.run();
        return one.failed || !baton::pool.loops();
    }
    for (unsigned round = 0; round < 40; round++) {
        baton::pool.use(1 + static_cast<int>(one.draw(5)));
        one.loops = 400, two.loops = round % 2 ? 400 : 0, one.random = round, two.random = ~round;
        pthread_t thread;
        if (pthread_create(&thread, nullptr, run, &two)) return 2;
        one.run();
        pthread_join(thread, nullptr);
        if (one.failed || two.failed) {
            std::printf("round %u\n", round);
            return 1;
        }
    }
    return 0;
}
