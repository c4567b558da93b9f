#include "parallel.h"

namespace baton {
Pool pool;
}

// Set the pool; called before any operation. If gomp_parallel is null, everything runs in the calling thread.
extern "C" void baton_use_pool(void *gomp_parallel, int threads) {
    baton::pool.run = reinterpret_cast<baton::Pool::Run>(gomp_parallel);
    baton::pool.threads = gomp_parallel ? threads : 1;
}
