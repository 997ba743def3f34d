/* gather.c - prompts on their way to what learns a calibration for the next run (../gather.h): rows and queries of long batches, which
 * are in no captured graph, are copied to the computer's memory until there are enough. */
#include "gpu.h"

#include <kvant/executor.h>

#include "../buffer.h"
#include "../gather.h"
#include "../ggml_api.h"

#define MOST_THREADS 8u

static bool have_memory(struct kvp_gpu_fetched *fetched, size_t bytes)
{
    void *memory = NULL;

    if (bytes <= fetched->bytes)
        return true;
    if (!kvp_cu_ok(kvp_cu.host_memory_new(&memory, bytes, CU_HOST_PORTABLE_MAPPED), "memory"))
        return false;
    if (fetched->at != NULL)
        kvp_cu.host_memory_free(fetched->at);
    *fetched = (struct kvp_gpu_fetched){ memory, bytes };
    return true;
}

bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched place, const abi_tensor *from, abi_tensor *to)
{
    const size_t bytes = kvp_api.nbytes(from);

    if (!have_memory(&b->fetched[place], bytes))
        return false;
    *to = *from;
    to->data = b->fetched[place].at;
    return kvp_cu_ok(kvp_cu.copy_out(to->data, (cu_address)(uintptr_t)from->data, bytes, b->stream), "copying") &&
           kvp_cu_ok(kvp_cu.stream_finish(b->stream), "copying");
}

/* Threads of a loop over kv heads: a program on a GPU has none to lend. */

struct share {
    kvant_executor_work work;
    void *loop;
};

static void *run_share(void *user)
{
    const struct share *share = user;

    share->work(share->loop, 0);
    return NULL;
}

static void run(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    struct share share = { work, loop };
    pthread_t threads[MOST_THREADS];
    uint32_t n = 0;

    (void)context;
    while (n + 1 < n_workers && n < MOST_THREADS && pthread_create(&threads[n], NULL, run_share, &share) == 0)
        n++;
    while (n > 0)
        pthread_join(threads[--n], NULL);
}

static const kvant_executor executor = { run, NULL };

void kvp_gpu_gather_rows(kvp_gpu_backend *b, const abi_tensor *keys, const abi_tensor *values)
{
    const abi_tensor *nodes[2] = { keys, values };
    const size_t n = (size_t)keys->src[0]->ne[1];
    kvp_gather *gather = kvp_kv_gather(kvp_kv_of(keys));
    const bool wants = kvp_gather_wants(gather, n);
    const kvant_executor *former;
    kvp_rows rows[2];

    for (int i = 0; i < 2; i++) {
        abi_tensor copy = { 0 };
        if (gather == NULL || (wants && !kvp_gpu_fetch(b, (kvp_fetched)i, nodes[i]->src[0], &copy)))
            return;
        rows[i] = (kvp_rows){ kvp_kv_of(nodes[i]), copy.data, nodes[i]->src[0]->nb[1] / sizeof(float) };
    }
    former = kvant_use_executor(&executor);
    kvp_gather_rows(gather, &rows[0], &rows[1], n);
    kvant_use_executor(former);
}

void kvp_gpu_gather_queries(kvp_gpu_backend *b, const abi_tensor *node)
{
    const kvp_kv *keys = kvp_kv_of(node->src[1]);
    kvp_gather *gather = kvp_kv_gather(keys);
    const kvant_executor *former;
    abi_tensor copy = { 0 };

    if (!kvp_gather_wants(gather, (size_t)(node->src[0]->ne[1] * node->src[0]->ne[3])) ||
        !kvp_gpu_fetch(b, KVP_FETCHED_QUERIES, node->src[0], &copy))
        return;
    former = kvant_use_executor(&executor);
    kvp_gather_queries(gather, keys, &copy);
    kvant_use_executor(former);
}
