#include "parallel.h"

namespace baton {
Pool pool;
}

// Called once, before any operation. Null pointers: everything runs in the calling thread.
extern "C" void baton_use_pool(void *gomp_parallel, void *omp_get_thread_num, void *omp_get_num_threads, int threads) {
    baton::pool.run = reinterpret_cast<baton::Pool::Run>(gomp_parallel);
    baton::pool.thread = reinterpret_cast<baton::Pool::Number>(omp_get_thread_num);
    baton::pool.team = reinterpret_cast<baton::Pool::Number>(omp_get_num_threads);
    baton::pool.threads = gomp_parallel ? threads : 1;
}
